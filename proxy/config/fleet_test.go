package config

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestFleetAndSharedRates loads configurations of an edge, with a key file of some mode beside them.
func TestFleetAndSharedRates(t *testing.T) {
	const listeners = "listeners: [{name: a, mode: mixed, address: \"127.0.0.1:1080\"}]\n"
	const on = "fleet: {listen: \"10.0.0.1:7946\", name: a, key_file: key, join: [\"edge.example:7946\"]}\n"
	const key = "AQgPFh0kKzI5QEdOVVxjanF4f4aNlJuiqbC3vsXM09o=\n"
	for _, row := range []struct {
		name, text, key string
		mode            os.FileMode
		want            string // part of the error; empty: none
	}{
		{"a shared rate", on + "defaults: {max_rate: 20mbit, shared: true}\n", key, 0o600, ""},
		{"of one direction of a rule", on + "rules: [{name: r, max_rate: 9mbit, down: {shared: true}}]\n", key, 0o600, ""},
		{
			"a rule that shares none", on + "defaults: {max_rate: 20mbit, shared: true}\nrules: [{name: r, shared: false}]\n",
			key, 0o600, "",
		},
		{
			"no fleet to share with", "defaults: {max_rate: 20mbit, shared: true}\n", key, 0o600,
			"defaults.shared: there are no other edges",
		},
		{"nothing to share", on + "rules: [{name: r, shared: true}]\n", key, 0o600, "rules[0].shared: there is no max_rate"},
		{"a key that others can read", on, key, 0o644, "chmod 0600"},
		{"a weak key", on, strings.Repeat("A", 43) + "=\n", 0o600, "too regular"},
		{"a short key", on, "c2hvcnQ=\n", 0o600, "32 bytes"},
		{"no key", "fleet: {listen: \"10.0.0.1:7946\", name: a}\n", key, 0o600, "fleet.key_file: missing"},
	} {
		t.Run(row.name, func(t *testing.T) {
			dir := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), []byte(row.key), row.mode))
			path := filepath.Join(dir, "penstock.yaml")
			require.NoError(t, os.WriteFile(path, []byte(listeners+row.text), 0o600))
			c, err := Load(path)
			if row.want != "" {
				require.ErrorContains(t, err, row.want)
				assert.NotContains(t, err.Error(), strings.TrimSpace(row.key), "secrets stay out of errors")
				return
			}
			require.NoError(t, err)
			p, err := c.Policy()
			require.NoError(t, err)
			v := p.Verdicts()[0]
			assert.Equal(t, row.name != "a rule that shares none", v.Down.Shared)
			assert.False(t, v.FromServer.Shared || v.FromClient.Shared, "windows of senders have no maximum rate")
			next := c
			next.Fleet.Key, next.Fleet.Join = "", []string{"edge-2.example:7946"}
			require.NoError(t, c.CheckReload(next), "keys and members change while it runs")
			next.Fleet.Name = "b"
			require.ErrorContains(t, c.CheckReload(next), "fleet.name")
		})
	}
}

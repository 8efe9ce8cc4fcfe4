package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/config/configtest"
)

// What check refuses run refuses, with the same words; what check takes opens.
func TestCheckAndRunAgree(t *testing.T) {
	encoded, err := json.Marshal(config.Schema())
	require.NoError(t, err)
	var schema map[string]any
	require.NoError(t, json.Unmarshal(encoded, &schema))
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	refused, taken, opened := 0, 0, 0
	for seed := range uint64(500) {
		doc := configtest.Document(schema, seed)
		require.NoError(t, os.WriteFile(path, doc, 0o600))
		code, _, told := run(t, "check", path)
		if code == cli.ExitConfig {
			refused++
			code, _, toldByRun := run(t, "run", "--config", path)
			assert.Equal(t, cli.ExitConfig, code, "seed %d: %s", seed, doc)
			assert.Equal(t, told, toldByRun, "seed %d: %s", seed, doc)
			continue
		}
		taken++
		require.Equal(t, cli.ExitOK, code, "seed %d: %s\n%s", seed, told, doc)
		f := runFlags{config: path}
		cfg, err := f.loadConfig(pflag.NewFlagSet("run", pflag.ContinueOnError))
		require.NoError(t, err, "seed %d: %s", seed, doc)
		if opened < 20 && unprivileged(&cfg) {
			opened++
			p, err := proxy.Open(t.Context(), cfg, nil, &flow.Manager{}, monotonicTime, nil)
			require.NoError(t, err, "seed %d: %s", seed, doc)
			require.NoError(t, p.Close())
		}
	}
	t.Logf("of 500 documents both refuse %d and take %d, of which %d were opened", refused, taken, opened)
	assert.Greater(t, refused, 200)
	assert.Greater(t, taken, 40)
	assert.Greater(t, opened, 10)
}

// unprivileged moves what a configuration opens to free ports and reports whether
// anybody may open it.
func unprivileged(cfg *config.Config) bool {
	for i := range cfg.Listeners {
		l := &cfg.Listeners[i]
		if l.Mode != "mixed" && l.Mode != "forward" {
			return false
		}
		l.Address = "127.0.0.1:0"
	}
	cfg.Envelope = "reno" // which every kernel has
	return cfg.Agents == nil
}

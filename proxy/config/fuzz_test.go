package config_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// twoMistakes end any mapping, so that mistakes of the fuzzer's are compared with others: which of
// them may follow from another.
const twoMistakes = "\ndefaults: {algorithm: nosuch}\n.frob: 1\n"

// Whatever the file holds: a configuration that works, or one line that says
// what is wrong, and none says that Penstock failed.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte(lan))
	f.Add([]byte(vpn))
	f.Add([]byte(".common: &x {}\nlisteners: []\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		examineParsed(t, data)
		examineParsed(t, append(data[:len(data):len(data)], twoMistakes...))
	})
}

// examineParsed parses data and checks what comes of it.
func examineParsed(t *testing.T, data []byte) {
	t.Helper()
	cfg, err := config.Parse(data)
	if err != nil {
		var ce *config.Error
		require.ErrorAs(t, err, &ce)
		assert.NotEmpty(t, ce.Message)
		for _, line := range append([]string{err.Error()}, config.Rest(err)...) {
			assert.False(t, strings.Contains(line, "\n"), "one line: %q", line)
			assert.NotContains(t, line, "a defect of Penstock's")
		}
		return
	}
	require.NoError(t, cfg.Validate(), "what was parsed is valid")
	require.NoError(t, cfg.CheckReload(cfg), "nothing changes")
	routes, err := cfg.Routes()
	require.NoError(t, err)
	assert.Len(t, routes, len(cfg.Rules)+1)
	cfg.Warnings()
}

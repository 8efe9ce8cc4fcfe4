package config_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// Whatever the file holds: a configuration that works, or one line that says
// what is wrong.
func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(whole))
	f.Add([]byte(lan))
	f.Add([]byte(vpn))
	f.Fuzz(func(t *testing.T, data []byte) {
		cfg, err := config.Parse(data)
		if err != nil {
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.NotEmpty(t, ce.Message)
			assert.False(t, strings.ContainsAny(err.Error(), "\n"), "one line: %q", err)
			return
		}
		routes, err := cfg.Routes()
		require.NoError(t, err)
		assert.Len(t, routes, len(cfg.Rules)+1)
		cfg.Warnings()
	})
}

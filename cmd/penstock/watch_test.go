package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
)

// A file with a secret is refused while others may read it, until chmod, which writes nothing.
func TestAFileThatIsClosedToOthersHasChanged(t *testing.T) {
	h := &service{}
	h.flags.config = filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(h.flags.config, nil, 0o600))
	now := func() map[string]stamp {
		now, _ := h.stamps()
		return now
	}
	closed := now()
	require.NoError(t, os.Chmod(h.flags.config, 0o644)) //nolint:gosec // it has no secret
	assert.NotEqual(t, closed, now())
	require.NoError(t, os.Chmod(h.flags.config, 0o600))
	assert.Equal(t, closed, now())
}

// A ConfigMap may come before the Secret that it names a file of: what is missing is waited for, whether a
// reload misses it or the start.
func TestAFileThatComesAfterTheOneThatNamesItIsReread(t *testing.T) {
	good := filepath.Join(t.TempDir(), "good")
	names := strings.Replace(runConfig, `"127.0.0.1:0"}`+"\n", `"127.0.0.1:0", change_token_file: token}`+"\n", 1)
	in := startRun(t, runConfig, "--watch", "--last-good", good)
	in.rewrite(names)
	in.log.has(t, `"configuration not reloaded","by":"file"`)
	token := filepath.Join(filepath.Dir(in.config), "token")
	require.NoError(t, os.WriteFile(token, []byte("0123456789abcdef"), 0o600))
	in.log.has(t, `"configuration reloaded","by":"file"`)
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code)

	in.rewrite(strings.Replace(names, "token}", "token2}", 1))
	again := startRunWithout(t, "--config", in.config, "--watch", "--last-good", good)
	again.log.line(t, "the configuration has a mistake; the last good one is in force until it is mended and reloaded")
	require.NoError(t, os.Rename(token, token+"2"))
	again.log.has(t, `"configuration reloaded","by":"file"`)
	again.signal()
	assert.Equal(t, cli.ExitOK, <-again.code)
}

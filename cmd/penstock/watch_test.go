package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
)

// A file with a secret is refused while others may read it, until chmod, which writes nothing.
func TestAFileThatIsClosedToOthersHasChanged(t *testing.T) {
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	now := func() map[string]stamp { return stampsNow(map[string]stamp{path: {}}) }
	closed := now()
	require.NoError(t, os.Chmod(path, 0o644)) //nolint:gosec // it has no secret
	assert.NotEqual(t, closed, now())
	require.NoError(t, os.Chmod(path, 0o600))
	assert.Equal(t, closed, now())
}

// Whatever becomes of a file after it was read or missed, and before the watcher looks for the first time, is a
// change. Nothing is read a second time without one.
func TestAChangeBeforeTheFirstLookIsSeen(t *testing.T) {
	const names = "listeners: [{name: a, mode: mixed, address: ':1'}]\ntelemetry: {change_token_file: token}\n"
	write := func(name, content string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name+".new"), []byte(content), 0o600))
			require.NoError(t, os.Rename(filepath.Join(dir, name+".new"), filepath.Join(dir, name)))
		}
	}
	remove := func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "token"))) }
	token := write("token", "0123456789abcdef")
	link := func(t *testing.T, dir string) {
		require.NoError(t, os.Symlink("..data", filepath.Join(dir, "token")))
	}
	again := func(t *testing.T, dir string) {
		remove(t, dir)
		token(t, dir)
	}
	missing := func(t *testing.T, dir string) { require.NoError(t, os.Remove(filepath.Join(dir, "c.yaml"))) }
	for name, c := range map[string]struct {
		before, after func(t *testing.T, dir string) // the reading
		reloads       int
	}{
		"a file that was missing comes":  {nil, token, 1},
		"a file that was missing stays":  {nil, nil, 0},
		"a file that was there goes":     {token, remove, 1},
		"a file that was there stays":    {token, nil, 0},
		"a file is replaced":             {token, token, 1},
		"what a link leads to comes":     {link, write("..data", "0123456789abcdef"), 1},
		"a directory is replaced":        {makeDir("token"), again, 1},
		"the configuration itself comes": {missing, write("c.yaml", names), 1},
		"the configuration is replaced":  {write("c.yaml", names+"mark: x"), write("c.yaml", names), 1},
		"a name that looks like a secret comes": {
			write("c.yaml", names[:len(names)-len("token}\n")]+"aB3dE5fG7hJ9kL1mN3pQ5r}\n"), write("aB3dE5fG7hJ9kL1mN3pQ5r",
				"0123456789abcdef"), 1,
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write("c.yaml", names)(t, dir)
			if c.before != nil {
				c.before(t, dir)
			}
			var r reloader
			read := func() {
				loaded, _ := config.LoadFiles(filepath.Join(dir, "c.yaml"))
				r.setSeen(loaded)
			}
			read()
			if c.after != nil {
				c.after(t, dir)
			}
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*watchPeriod+watchPeriod/2)
				defer cancel()
				reloads := 0
				watchStamps(ctx, r.currentStamps, func() { reloads++; read() })
				assert.Equal(t, c.reloads, reloads)
			})
		})
	}
}

// A file that something touches again and again is read all the same.
func TestFilesThatNeverRestAreRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*watchUnrest*watchPeriod+watchPeriod/2)
		defer cancel()
		size, reloads := int64(0), 0
		touch := func() map[string]stamp { // before each look
			size++
			assert.NoError(t, os.Truncate(path, size))
			return map[string]stamp{path: {}}
		}
		watchStamps(ctx, touch, func() { reloads++ })
		assert.Equal(t, 2, reloads)
	})
}

func makeDir(name string) func(t *testing.T, dir string) {
	return func(t *testing.T, dir string) { require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700)) }
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

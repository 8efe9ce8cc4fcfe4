package config_test

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// The parser's time and memory grow with the square of all of these.
func TestWhatWouldKeepTheParserBusyIsRefused(t *testing.T) {
	const many = 100_000
	for name, c := range map[string]struct{ config, says string }{
		"brackets": {
			"listeners: " + strings.Repeat("[", many),
			"1:43: more than 32 lists and keys within each other",
		},
		"braces":              {strings.Repeat("{", many), "more than 32"},
		"keys in braces":      {strings.Repeat("{a: ", many), "more than 32"},
		"dashes":              {strings.Repeat("- ", many), "more than 32"},
		"dashes and keys":     {strings.Repeat("- a: ", many), "more than 32"},
		"keys":                {strings.Repeat("a: ", many), "more than 32"},
		"question marks":      {strings.Repeat("? ", many), "more than 32"},
		"indented keys":       {indented(100), "more than 32"},
		"many keys":           {strings.Repeat("a: 1\n", many), "more than 1024 entries"},
		"many keys in braces": {"{" + strings.Repeat("a: 1, ", many) + "}", "more than 1024 entries"},
		"many dashes":         {strings.Repeat("-\n", many), "more than 65536 entries"},
		"many items":          {"a: [" + strings.Repeat("1,", many) + "]", "more than 65536 entries"},
		"directives":          {strings.Repeat("%", many), "directives are not supported"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte(c.config))
			assert.ErrorContains(t, err, c.says)
		})
	}
}

func indented(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(strings.Repeat(" ", i) + "a:\n")
	}
	return b.String()
}

// What a configuration needs is far within the bounds.
func TestALongConfigurationIsRead(t *testing.T) {
	rule := "- {name: r%, match: {destination: [203.0.113.0/24], ports: [443, 8000-8100]}, down: {algorithm: copa, " +
		"params: {delta: 1}}}\n"
	var rules strings.Builder
	for i := range 2000 {
		rules.WriteString(strings.Replace(rule, "%", strconv.Itoa(i), 1))
	}
	cfg, err := config.Parse([]byte(lan + "rules:\n" + rules.String()))
	require.NoError(t, err)
	assert.Len(t, cfg.Rules, 2000)
}

// What is no file is neither waited for nor read without end.
func TestOddFilesAreRefusedAtOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "c.yaml")
	for name, c := range map[string]struct {
		make func() error
		says string
	}{
		"a device that never ends": {
			func() error { return os.Symlink("/dev/zero", path) },
			"it is a device; name a regular file",
		},
		"a file that the kernel makes": {
			func() error { return os.Symlink("/proc/self/status", path) },
			"it is a file of the kernel's (proc); name a regular file",
		},
		"a directory": {
			func() error { return os.Mkdir(path, 0o700) },
			"it is a directory; name a regular file",
		},
		"a FIFO that nobody writes to": {func() error { return syscall.Mkfifo(path, 0o600) }, "at least one listener"},
		"a file that is too long": {
			func() error { return os.WriteFile(path, make([]byte, 20<<20), 0o600) },
			"has more than 1048576 bytes",
		},
		"a file that is not there": {func() error { return nil }, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, c.make())
			defer os.Remove(path) //nolint:errcheck // the next one finds it
			_, err := config.Load(path)
			require.ErrorContains(t, err, c.says)
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.Equal(t, path, ce.File)
		})
	}
	require.NoError(t, os.WriteFile(path, []byte("listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', users: "+
		"[{name: x, password_file: /dev/zero}]}]"), 0o600))
	_, err := config.Load(path)
	assert.ErrorContains(t, err, "users[0].password_file: /dev/zero: it is a device")
}

// A pipe is read to its end, as the shell's <(command) needs.
func TestAPipeIsRead(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close() //nolint:errcheck // read only
	_, err = w.WriteString(lan)
	require.NoError(t, err)
	require.NoError(t, w.Close())
	_, err = config.Load("/dev/fd/" + strconv.Itoa(int(r.Fd())))
	assert.NoError(t, err)
}

// Of 32 bits a machine would see no more than zeros, and 0 is no bound.
func TestANumberIsNotCutToWhatTheMachineCountsWith(t *testing.T) {
	for _, n := range []string{"4294967296", "-4294967296", "18446744073709551616"} {
		if n[0] != '-' && strconv.IntSize == 64 && len(n) < 20 {
			continue // it fits
		}
		_, err := config.Parse([]byte("listeners: [{name: a, mode: mixed, address: '127.0.0.1:1'}]\n" +
			"limits: {connections: " + n + "}\n"))
		assert.ErrorContains(t, err, "2:23", n)
	}
}

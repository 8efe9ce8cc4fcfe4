package config

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A process that is killed while it saves leaves a file with private keys.
func TestSavingRemovesWhatKilledProcessesLeft(t *testing.T) {
	dir := t.TempDir()
	write := func(name string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("secret"), 0o600))
	}
	for _, name := range []string{".last-good.1", ".last-good.4294967295", ".last-good.notes", ".other.1"} {
		write(name)
	}
	path := filepath.Join(dir, "last-good")
	busy, err := CreateTemporary(path) // of another process
	require.NoError(t, err)
	defer busy.Close() //nolint:errcheck // nothing is in it
	require.NoError(t, Loaded{files: newFiles("c.yaml")}.Save(path))

	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	assert.ElementsMatch(t, []string{".last-good.notes", ".other.1", filepath.Base(busy.Name()), "last-good"}, names)
}

func TestOnlyRegularFilesAreOpened(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	for _, path := range []string{dir, pipe, os.DevNull, filepath.Join(dir, "nothing")} {
		_, _, err := OpenRegular(path)
		assert.ErrorContains(t, err, path)
	}
}

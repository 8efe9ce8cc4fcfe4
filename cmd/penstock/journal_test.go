package main

import (
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// What goes to the journal has its priority, and no second time.
func TestTheJournalGetsPriorities(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	info, err := w.Stat()
	require.NoError(t, err)
	s, ok := info.Sys().(*syscall.Stat_t)
	require.True(t, ok)
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", s.Dev, s.Ino))

	var level slog.LevelVar
	level.Set(slog.LevelDebug)
	log := newLogger(w, "auto", &level)
	log.Error("one", "err", "x")
	log.With("listener", "lan").Warn("two")
	log.WithGroup("g").Info("three", "time", "kept")
	log.Debug("four")
	level.Set(slog.LevelWarn)
	log.Info("not logged")
	newLogger(w, "text", &level).Warn("five")
	fmt.Fprintf(errorWriter(w), "six\nseven\n")
	require.NoError(t, w.Close())
	text, err := io.ReadAll(r)
	require.NoError(t, err)
	assert.Equal(t, []string{
		`<3>{"level":"ERROR","msg":"one","err":"x"}`,
		`<4>{"level":"WARN","msg":"two","listener":"lan"}`,
		`<6>{"level":"INFO","msg":"three","g":{"time":"kept"}}`,
		`<7>{"level":"DEBUG","msg":"four"}`,
		`<4>level=WARN msg=five`,
		`<3>six`, `<3>seven`,
	}, strings.Split(strings.TrimSpace(string(text)), "\n"))

	t.Setenv("JOURNAL_STREAM", "1:1")
	assert.False(t, isJournal(w), "a stream of somebody else's")
}

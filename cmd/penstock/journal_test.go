package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"

	journald "github.com/coreos/go-systemd/v22/journal"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/logqueue"
)

// What goes to the journal has its priority, and no second time.
func TestTheJournalGetsPriorities(t *testing.T) {
	var out bytes.Buffer
	var level slog.LevelVar
	level.Set(slog.LevelDebug)
	log := slog.New(newJournalHandler(&out, lineHandler{level: &level}))
	log.Error("one", "err", "x")
	log.With("listener", "lan").Warn("two")
	log.WithGroup("g").Info("three", "time", "kept")
	log.Debug("four")
	level.Set(slog.LevelWarn)
	log.Info("not logged")
	slog.New(newJournalHandler(&out, lineHandler{text: true, level: &level})).Warn("five")
	fmt.Fprintf(&prioritized{w: &out, priority: journald.PriErr}, "six\nseven\n")
	assert.Equal(t, []string{
		`<3>{"level":"ERROR","msg":"one","err":"x"}`,
		`<4>{"level":"WARN","msg":"two","listener":"lan"}`,
		`<6>{"level":"INFO","msg":"three","g":{"time":"kept"}}`,
		`<7>{"level":"DEBUG","msg":"four"}`,
		`<4>level=WARN msg=five`,
		`<3>six`, `<3>seven`,
	}, strings.Split(strings.TrimSpace(out.String()), "\n"))
}

func TestTheJournalIsFound(t *testing.T) {
	info, err := os.Stderr.Stat()
	require.NoError(t, err)
	at, ok := info.Sys().(*syscall.Stat_t)
	require.True(t, ok)
	t.Setenv("JOURNAL_STREAM", fmt.Sprintf("%d:%d", at.Dev, at.Ino))
	queue := &logqueue.Writer{To: os.Stderr}
	assert.True(t, isJournal(os.Stderr))
	assert.True(t, isJournal(queue))
	assert.IsType(t, journalHandler{}, newLogger(os.Stderr, "auto", slog.LevelInfo).Handler())
	assert.IsType(t, &prioritized{}, errorWriter(queue))
	assert.False(t, isJournal(&bytes.Buffer{}))
	t.Setenv("JOURNAL_STREAM", "1:1")
	assert.False(t, isJournal(os.Stderr), "it is another program's")
}

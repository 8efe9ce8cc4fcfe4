package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"syscall"
)

// Priorities of the journal (sd-daemon(3)).
const (
	priorityError   = 3
	priorityWarning = 4
	priorityInfo    = 6
	priorityDebug   = 7
)

// isJournal reports whether what is written goes to systemd's journal, which
// says so in $JOURNAL_STREAM (systemd.exec(5)).
func isJournal(w io.Writer) bool {
	info, err := fileOf(w).Stat() // an error for none
	if err != nil {
		return false
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	return ok && os.Getenv("JOURNAL_STREAM") == fmt.Sprintf("%d:%d", s.Dev, s.Ino)
}

// journalHandler begins each line with its priority, and leaves out the time,
// which the journal has itself.
type journalHandler struct {
	byPriority map[int]slog.Handler
}

func newJournalHandler(w io.Writer, of func(io.Writer, func([]string,
	slog.Attr) slog.Attr) slog.Handler,
) journalHandler {
	withoutTime := func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	h := journalHandler{map[int]slog.Handler{}}
	for _, p := range []int{priorityError, priorityWarning, priorityInfo, priorityDebug} {
		h.byPriority[p] = of(prioritized{w, p}, withoutTime)
	}
	return h
}

// journalPriority is the journal's for a level of slog.
func journalPriority(l slog.Level) int {
	switch {
	case l >= slog.LevelError:
		return priorityError
	case l >= slog.LevelWarn:
		return priorityWarning
	case l >= slog.LevelInfo:
		return priorityInfo
	}
	return priorityDebug
}

// Enabled implements slog.Handler.
func (h journalHandler) Enabled(ctx context.Context, l slog.Level) bool {
	return h.byPriority[priorityInfo].Enabled(ctx, l)
}

// Handle implements slog.Handler.
func (h journalHandler) Handle(ctx context.Context, r slog.Record) error {
	return h.byPriority[journalPriority(r.Level)].Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return h.withEach(func(of slog.Handler) slog.Handler { return of.WithAttrs(attrs) })
}

// WithGroup implements slog.Handler.
func (h journalHandler) WithGroup(name string) slog.Handler {
	return h.withEach(func(of slog.Handler) slog.Handler { return of.WithGroup(name) })
}

func (h journalHandler) withEach(change func(slog.Handler) slog.Handler) slog.Handler {
	out := journalHandler{map[int]slog.Handler{}}
	for p, of := range h.byPriority {
		out.byPriority[p] = change(of)
	}
	return out
}

// prioritized writes lines to the journal with a priority.
type prioritized struct {
	w        io.Writer
	priority int
}

// Write implements io.Writer for whole lines, in one write.
func (p prioritized) Write(text []byte) (int, error) {
	var out bytes.Buffer
	for line := range strings.Lines(string(text)) {
		fmt.Fprintf(&out, "<%d>%s", p.priority, line)
	}
	if _, err := p.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(text), nil
}

// errorWriter is where errors outside the log are told.
func errorWriter(w io.Writer) io.Writer {
	if isJournal(w) {
		return prioritized{w, priorityError}
	}
	return w
}

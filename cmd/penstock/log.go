package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"strings"
	"sync"

	journald "github.com/coreos/go-systemd/v22/journal"
	"golang.org/x/term"

	"github.com/penstock-net/penstock/internal/logqueue"
	"github.com/penstock-net/penstock/proxy/config"
)

// newLogger returns a logger of that format; auto is text on a terminal and JSON elsewhere. It detaches a
// logqueue.Writer, so that no reader of the log delays the proxy from now on.
func newLogger(w io.Writer, format config.LogFormat, level slog.Leveler) *slog.Logger {
	if queue, ok := w.(*logqueue.Writer); ok {
		direct := newLogger(queue.To, format, level)
		queue.Detach(func(lost int) {
			direct.Error("lines of the log are missing here: whoever reads it was too slow", "lines", lost)
		})
	}
	file := fileOf(w)
	lines := lineHandler{format == "text" || format == "auto" && file != nil && isTerminal(file), level}
	if isJournal(w) {
		return slog.New(newJournalHandler(w, lines))
	}
	return slog.New(lines.newHandler(w, nil))
}

// lineHandler makes handlers that write one record a line.
type lineHandler struct {
	text  bool // else JSON, with durations in seconds
	level slog.Leveler
}

// newHandler returns a handler that writes to w. replace is as in slog.HandlerOptions; nil: it changes nothing.
func (l lineHandler) newHandler(w io.Writer, replace func([]string, slog.Attr) slog.Attr) slog.Handler {
	if l.text {
		return slog.NewTextHandler(w, &slog.HandlerOptions{Level: l.level, ReplaceAttr: replace})
	}
	return slog.NewJSONHandler(w, &slog.HandlerOptions{
		Level: l.level,
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if replace != nil {
				a = replace(groups, a)
			}
			return durationInSeconds(groups, a)
		},
	})
}

// redirectStandardLog sends to our log what libraries write to package log. They would write to standard error, and
// wait for its reader.
func redirectStandardLog(to *slog.Logger) {
	log.SetFlags(0)
	log.SetOutput(slog.NewLogLogger(to.Handler(), slog.LevelDebug).Writer())
}

// durationInSeconds writes a duration in seconds and names the unit, because JSON would show nanoseconds without a
// unit.
func durationInSeconds(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.Float64(a.Key+"_seconds", a.Value.Duration().Seconds())
	}
	return a
}

// fileOf returns the file that w writes to, directly or through a queue; nil: it is no file.
func fileOf(w io.Writer) *os.File {
	if queue, ok := w.(*logqueue.Writer); ok {
		w = queue.To
	}
	file, _ := w.(*os.File)
	return file
}

// isTerminal reports whether f is a terminal.
func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// isJournal reports whether w is standard error and goes to systemd's journal (systemd.exec(5), JOURNAL_STREAM).
func isJournal(w io.Writer) bool {
	if fileOf(w) != os.Stderr {
		return false
	}
	is, err := journald.StderrIsJournalStream()
	return err == nil && is
}

// journalHandler begins each line with its priority (sd-daemon(3)). It writes to standard error and not to the
// journal's socket, because the journal then keeps the order of lines and knows their unit, and because lines may go
// through a queue.
type journalHandler struct {
	slog.Handler // writes whole lines to "to"
	to           *prioritized
}

// newJournalHandler returns a handler that writes lines without the time, which the journal adds.
func newJournalHandler(w io.Writer, lines lineHandler) journalHandler {
	to := &prioritized{w: w}
	return journalHandler{lines.newHandler(to, func(groups []string, a slog.Attr) slog.Attr {
		if len(groups) == 0 && a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}), to}
}

// journalPriority returns the journal's priority for a level of slog.
func journalPriority(l slog.Level) journald.Priority {
	switch {
	case l >= slog.LevelError:
		return journald.PriErr
	case l >= slog.LevelWarn:
		return journald.PriWarning
	case l >= slog.LevelInfo:
		return journald.PriInfo
	}
	return journald.PriDebug
}

// Handle implements slog.Handler.
func (h journalHandler) Handle(ctx context.Context, r slog.Record) error {
	h.to.mu.Lock()
	defer h.to.mu.Unlock()
	h.to.priority = journalPriority(r.Level)
	return h.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (h journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return journalHandler{h.Handler.WithAttrs(attrs), h.to}
}

// WithGroup implements slog.Handler.
func (h journalHandler) WithGroup(name string) slog.Handler {
	return journalHandler{h.Handler.WithGroup(name), h.to}
}

// prioritized writes lines to the journal with a priority.
type prioritized struct {
	w        io.Writer
	mu       sync.Mutex // held by a handler from setting priority until the line is written
	priority journald.Priority
}

// Write implements io.Writer for whole lines, in one write.
func (p *prioritized) Write(text []byte) (int, error) {
	var out bytes.Buffer
	for line := range strings.Lines(string(text)) {
		fmt.Fprintf(&out, "<%d>%s", p.priority, line)
	}
	if _, err := p.w.Write(out.Bytes()); err != nil {
		return 0, err
	}
	return len(text), nil
}

// errorWriter returns the writer for errors outside the log.
func errorWriter(w io.Writer) io.Writer {
	if isJournal(w) {
		return &prioritized{w: w, priority: journald.PriErr}
	}
	return w
}

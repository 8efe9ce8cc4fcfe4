package page

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	maxEvents    = 128
	maxEventText = 400 // bytes
	// repeatWithin is the time within which an event and its repetition count as one.
	repeatWithin = time.Minute
)

// quietMessages are not shown as events, because connections have rows and counters, and the start logs each rule.
var quietMessages = []string{"flow closed", "flow refused", "rule"}

// Events has the newest events: records of the log, and what counters show. The zero value is ready.
type Events struct {
	mu   sync.Mutex
	seq  uint64
	ring []Event // oldest first, at most maxEvents
}

// addEvent adds an event. If the same text comes again within repeatWithin, it raises the count of the first.
func (e *Events) addEvent(at float64, level slog.Level, text string, count int) {
	text = cutText(text)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.seq++
	same := func(x Event) bool {
		return x.Text == text && x.Level == level.String() && at-x.At < repeatWithin.Seconds()
	}
	if i := slices.IndexFunc(e.ring, same); i >= 0 {
		count += e.ring[i].Count
		e.ring = slices.Delete(e.ring, i, i+1)
	}
	if len(e.ring) == maxEvents {
		e.ring = slices.Delete(e.ring, 0, 1)
	}
	e.ring = append(e.ring, Event{At: at, Level: level.String(), Text: text, Count: count})
}

// cutText bounds a text, at the end of a character.
func cutText(text string) string {
	if len(text) <= maxEventText {
		return text
	}
	end := maxEventText
	for !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}

// eventsSince returns all events, newest first, if there is one after seq.
func (e *Events) eventsSince(seq uint64) ([]Event, uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if seq == e.seq {
		return nil, e.seq
	}
	out := slices.Clone(e.ring)
	slices.Reverse(out)
	return out, e.seq
}

// Handler returns a handler that passes records to next, and adds those of level info and above to e, also if next
// does not write them.
func (e *Events) Handler(next slog.Handler) slog.Handler { return recorder{e, next, ""} }

// recorder is the slog.Handler of Events.Handler.
type recorder struct {
	events *Events
	next   slog.Handler
	attrs  string
}

// Enabled implements slog.Handler.
func (n recorder) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelInfo || n.next.Enabled(ctx, l)
}

// Handle implements slog.Handler.
func (n recorder) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo && !slices.Contains(quietMessages, r.Message) {
		var b strings.Builder
		b.WriteString(r.Message)
		b.WriteString(n.attrs)
		r.Attrs(func(a slog.Attr) bool {
			b.WriteString(" " + a.String())
			return b.Len() < maxEventText
		})
		n.events.addEvent(float64(r.Time.UnixMilli())/1e3, r.Level, b.String(), 1)
	}
	if !n.next.Enabled(ctx, r.Level) {
		return nil
	}
	return n.next.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (n recorder) WithAttrs(attrs []slog.Attr) slog.Handler {
	words := n.attrs
	for _, a := range attrs {
		words += " " + a.String()
	}
	return recorder{n.events, n.next.WithAttrs(attrs), words}
}

// WithGroup implements slog.Handler.
func (n recorder) WithGroup(name string) slog.Handler {
	return recorder{n.events, n.next.WithGroup(name), n.attrs}
}

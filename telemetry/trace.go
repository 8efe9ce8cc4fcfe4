package telemetry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

const (
	// traceBacklog is how many events may wait for the writer: at 10,000
	// acknowledgements a second, a disk may stall for 0.8 s.
	traceBacklog = 8192
	// traceFlush is how long an event may stay in our buffer.
	traceFlush = time.Second
	// traceBlock is how many bytes are written at once. Only whole lines are, so that who moves the file away, or ends
	// the process, cuts none in two.
	traceBlock = 64 << 10
)

// ErrTraceClosed is what a second Close returns.
var ErrTraceClosed = errors.New("telemetry: trace is closed")

// Trace writes what the algorithms see and answer as JSON lines. It never makes
// them wait: when the writer cannot keep up, events are dropped and counted.
type Trace struct {
	events  chan flow.Event
	dropped atomic.Uint64
	done    chan struct{}

	mu     sync.RWMutex // Event holds it for reading, so that Close does not close events under it
	closed bool
	err    error // the first failed write; read after done
}

// NewTrace starts writing to w, until Close.
func NewTrace(w io.Writer) *Trace {
	t := &Trace{events: make(chan flow.Event, traceBacklog), done: make(chan struct{})}
	go t.writeLoop(w)
	return t
}

// Event queues one event for the writer. It fits flow.Manager.Trace.
func (t *Trace) Event(e flow.Event) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	if t.closed {
		return
	}
	select {
	case t.events <- e:
	default:
		t.dropped.Add(1)
	}
}

// Dropped returns how many events were lost so far: to a full backlog, or to a
// file that took no more.
func (t *Trace) Dropped() uint64 { return t.dropped.Load() }

// Close writes what is left and returns the first error of all writes. It does
// not close the writer.
func (t *Trace) Close() error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return ErrTraceClosed
	}
	t.closed = true
	close(t.events)
	t.mu.Unlock()
	<-t.done
	return t.err
}

// writeLoop writes events in blocks until the channel closes. After the first error it only counts what comes, so that
// the channel never fills.
func (t *Trace) writeLoop(w io.Writer) {
	defer close(t.done)
	ticks := time.NewTicker(traceFlush)
	defer ticks.Stop()
	var line []byte
	block, lines := make([]byte, 0, traceBlock), 0
	flush := func() {
		n, err := w.Write(block)
		if err != nil {
			t.err = fmt.Errorf("telemetry: write trace: %w", err)
			t.dropped.Add(uint64(lines - bytes.Count(block[:n], []byte("\n"))))
		}
		block, lines = block[:0], 0
	}
	for {
		select {
		case e, more := <-t.events:
			if !more {
				if lines > 0 {
					flush()
				}
				return
			}
			line = appendEvent(line[:0], e)
			if lines > 0 && len(block)+len(line) > traceBlock {
				flush()
			}
			if t.err != nil {
				t.dropped.Add(1)
				continue
			}
			block = append(block, line...)
			lines++
		case <-ticks.C:
			if lines > 0 {
				flush()
			}
		}
	}
}

// appendEvent writes e as one line. It uses no reflection, because encoding/json takes longer than processing the
// acknowledgement.
func appendEvent(b []byte, e flow.Event) []byte {
	b = append(b, `{"t_seconds":`...)
	b = appendSeconds(b, time.Duration(e.State.Now))
	b = append(b, `,"event":"`...)
	b = append(b, e.Kind...)
	b = append(b, `","flow":`...)
	b = strconv.AppendUint(b, e.Flow, 10)
	b = append(b, `,"group":`...)
	b = appendString(b, e.Group)
	b = append(b, `,"algorithm":"`...)
	b = append(b, e.Algorithm...)
	b = append(b, '"')
	for _, n := range [...]struct {
		key string
		v   cc.Bytes
	}{
		{"bytes", e.Bytes},
		{"inflight_bytes", e.State.Inflight},
		{"delivered_bytes", e.State.Delivered},
		{"cwnd_bytes", e.Control.Cwnd},
	} {
		b = appendKey(b, n.key)
		b = strconv.AppendInt(b, int64(n.v), 10)
	}
	b = appendKey(b, "pacing_bits_per_second")
	b = strconv.AppendInt(b, int64(e.Control.PacingRate), 10)
	for _, d := range [...]struct {
		key string
		v   time.Duration
	}{
		{"rtt_seconds", e.RTT},
		{"reverse_queue_seconds", e.Reverse},
		{"srtt_seconds", e.State.SRTT},
		{"min_rtt_seconds", e.State.MinRTT},
	} {
		b = appendKey(b, d.key)
		b = appendSeconds(b, d.v)
	}
	b = appendInternals(b, e)
	b = appendKey(b, "cwnd_limited")
	b = strconv.AppendBool(b, e.State.CwndLimited)
	b = appendKey(b, "one_way")
	b = strconv.AppendBool(b, e.State.OneWay)
	b = append(b, `,"phase":"`...)
	b = append(b, e.Control.Phase...)
	return append(b, "\"}\n"...)
}

// appendInternals writes the internal values of the algorithm, by the names in its Spec. It writes nothing if there
// are none.
func appendInternals(b []byte, e flow.Event) []byte {
	spec, err := cc.Lookup(e.Algorithm)
	if err != nil || len(spec.Internals) == 0 {
		return b
	}
	b = append(b, `,"internals":{`...)
	for i, show := range spec.Internals {
		b = appendInternal(b, i, show.Name, e.Internals[i])
	}
	return append(b, '}')
}

// appendKey appends the name of a member after the first. Names need no escapes.
func appendKey(b []byte, key string) []byte {
	b = append(b, `,"`...)
	b = append(b, key...)
	return append(b, `":`...)
}

// appendString writes s as JSON. Plain ASCII, as in most names of groups, is copied.
func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			quoted, _ := json.Marshal(s) // does not fail for a string
			return append(b, quoted...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}

// appendSeconds writes d exactly, to the nanosecond: a float would lose digits after some days.
func appendSeconds(b []byte, d time.Duration) []byte {
	if d < 0 {
		b = append(b, '-')
		d = -d
	}
	b = strconv.AppendInt(b, int64(d/time.Second), 10)
	frac := int64(d % time.Second)
	if frac == 0 {
		return b
	}
	b = append(b, '.')
	for unit := int64(time.Second / 10); frac > 0; unit /= 10 {
		b = append(b, byte('0'+frac/unit))
		frac %= unit
	}
	return b
}

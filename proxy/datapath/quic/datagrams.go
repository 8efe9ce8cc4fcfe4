package quic

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlog"
	"github.com/quic-go/quic-go/qlogwriter"
)

// QUIC keeps 128 of a connection's datagrams until HTTP/3 takes them (maxDatagramRcvQueueLen
// of quic-go), and handles up to 256 packets in a row. Where more than manyDatagrams are
// there it waits until HTTP/3 has left fewDatagrams, but no longer than takenWithin; what
// comes then is lost. takenWithin is more than a goroutine waits for a processor of a busy
// machine, and less than an acknowledgement may take (max_ack_delay, 25 ms of quic-go).
const (
	manyDatagrams = 96
	fewDatagrams  = 48
	takenWithin   = 20 * time.Millisecond
)

// keptDatagrams is how many of a stream's datagrams HTTP/3 keeps until they are received
// (streamDatagramQueueLen of quic-go's http3); it loses others without a word.
const keptDatagrams = 32

// Datagrams receives a stream's datagrams, and has HTTP/3 wait rather than lose what it
// has no room for. It says what it has read before it puts it there (h3log.DatagramParsed),
// and does not go on before it has been heard. What comes then waits in QUIC, which keeps
// 128 of a connection's (Trace.came).
type Datagrams struct {
	trace   *Trace
	id      quic.StreamID
	receive func(context.Context) ([]byte, error)

	mu      sync.Mutex
	room    sync.Cond
	waiting int // in HTTP/3, or about to be
	closed  bool
}

// ReceiveDatagrams returns what receives a stream's datagrams by receive, which nobody else
// may call. trace is what the stream's connection has for QlogTrace: Tracer made it. Close it.
func ReceiveDatagrams(
	trace qlogwriter.Trace, id quic.StreamID, receive func(context.Context) ([]byte, error),
) (*Datagrams, error) {
	t, ok := trace.(*Trace)
	if !ok {
		return nil, errors.New("quic: receive datagrams: nobody hears of them: set Config.Tracer to Tracer")
	}
	d := &Datagrams{trace: t, id: id, receive: receive}
	d.room.L = &d.mu
	t.inboxes.Store(id, d)
	return d, nil
}

// Receive waits for a datagram and returns it with those that are here already, as far as
// batch has room for them; an error tells that there are none.
func (d *Datagrams) Receive(ctx context.Context, batch [][]byte) ([][]byte, error) {
	batch = batch[:0]
	for {
		b, err := d.receive(ctx)
		if err != nil {
			if len(batch) > 0 {
				err = nil
			}
			return batch, err
		}
		batch = append(batch, b)
		if !d.took() || len(batch) == cap(batch) {
			return batch, nil
		}
	}
}

// took notes that one has been received, and tells whether there are more. Those that came
// before there was somebody to receive them are not counted.
func (d *Datagrams) took() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting = max(0, d.waiting-1)
	d.room.Signal()
	return d.waiting > 0
}

// comes waits until there is room for one more.
func (d *Datagrams) comes() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.waiting >= keptDatagrams && !d.closed {
		d.room.Wait()
	}
	d.waiting++
}

// came notes datagrams in a packet that QUIC has received, and waits where there are many:
// once, if nobody takes them.
func (t *Trace) came(frames []qlog.Frame) {
	n := int64(0)
	for _, f := range frames {
		if _, ok := f.Frame.(*qlog.DatagramFrame); ok {
			n++
		}
	}
	there := t.datagrams.Add(n)
	if there <= fewDatagrams {
		t.left = false
	}
	if there <= manyDatagrams || t.left {
		return
	}
	select {
	case <-t.few: // of an earlier time
	default:
	}
	if t.datagrams.Load() <= fewDatagrams {
		return
	}
	timer := time.NewTimer(takenWithin)
	defer timer.Stop()
	select {
	case <-t.few:
	case <-timer.C:
		t.left = true
	}
}

// taken notes that HTTP/3 has taken a datagram, or that QUIC has lost it.
func (t *Trace) taken() {
	if t.datagrams.Add(-1) == fewDatagrams {
		select {
		case t.few <- struct{}{}:
		default:
		}
	}
}

// Close lets others go on; what comes then is lost.
func (d *Datagrams) Close() {
	d.trace.inboxes.CompareAndDelete(d.id, d)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.room.Broadcast()
}

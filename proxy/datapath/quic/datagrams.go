package quic

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/qlogwriter"
)

// QUIC queues up to 128 datagrams of a connection until HTTP/3 takes them (maxDatagramRcvQueueLen
// of quic-go), and handles up to 256 packets in a row. When more than manyDatagrams are queued, it
// waits until only fewDatagrams are, but no longer than maxTakeWait. Datagrams after that may be
// lost. maxTakeWait is longer than a goroutine waits for a processor on a busy machine, and shorter
// than an acknowledgement may be delayed (max_ack_delay, 25 ms of quic-go).
const (
	manyDatagrams = 96
	fewDatagrams  = 48
	maxTakeWait   = 20 * time.Millisecond
)

// http3Queue is how many of a stream's datagrams HTTP/3 queues until they are received
// (streamDatagramQueueLen of quic-go's http3). It drops further ones silently.
const http3Queue = 32

// AckRequest asks for the acknowledgement of a datagram. The zero value asks for none.
type AckRequest struct {
	Owner    AckReceiver // sends the datagram; nil: the acknowledgement is not asked for
	Sequence uint16      // the owner's number of the datagram
}

// AckReceiver receives the acknowledgements of datagrams.
type AckReceiver interface {
	// ReceiveAck is called once for each QUIC packet that acknowledges datagrams. newest is the sequence number of the
	// newest, n how many there are, and delay how long the peer kept the acknowledgement (RFC 9000 §19.3). It runs on
	// QUIC's goroutine, so it must not block.
	ReceiveAck(newest uint16, n int, delay time.Duration)
}

// Datagrams receives a stream's datagrams. While HTTP/3's queue is full, it makes HTTP/3 wait, which
// would drop them otherwise: HTTP/3 logs each datagram before it queues it (h3log.DatagramParsed),
// and the log call returns only once there is room. In the meantime datagrams wait in QUIC's queue
// of 128 for the connection (Trace.noteDatagrams). One goroutine calls Receive, HTTP/3's calls
// waitForRoom. mu guards the fields that they share.
type Datagrams struct {
	trace   *Trace
	id      quic.StreamID
	receive func(context.Context) ([]byte, error)

	mu      sync.Mutex
	room    sync.Cond
	waiting int // datagrams in HTTP/3's queue, or about to enter it
	closed  bool
}

// ReceiveDatagrams returns a Datagrams for a stream's datagrams. It calls receive, which nothing
// else may call. trace is the connection's QlogTrace, made by Tracer. The caller closes it.
func ReceiveDatagrams(
	trace qlogwriter.Trace, id quic.StreamID, receive func(context.Context) ([]byte, error),
) (*Datagrams, error) {
	t, ok := trace.(*Trace)
	if !ok {
		return nil, errors.New("quic: receive datagrams: nothing traces them: set Config.Tracer to Tracer")
	}
	d := &Datagrams{trace: t, id: id, receive: receive}
	d.room.L = &d.mu
	t.inboxes.Store(id, d)
	return d, nil
}

// Receive waits for a datagram and returns it with those that are queued already, up to
// cap(batch). It returns an error only if there are none.
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
		if !d.noteTaken() || len(batch) == cap(batch) {
			return batch, nil
		}
	}
}

// noteTaken notes that a datagram has been received, and reports whether more are queued. Datagrams
// that came before ReceiveDatagrams are not counted.
func (d *Datagrams) noteTaken() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.waiting = max(0, d.waiting-1)
	d.room.Signal()
	return d.waiting > 0
}

// waitForRoom waits until there is room for one more.
func (d *Datagrams) waitForRoom() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for d.waiting >= http3Queue && !d.closed {
		d.room.Wait()
	}
	d.waiting++
}

// Send sends a datagram by send, and has its acknowledgement reported as ack asks. All datagrams of a connection must
// be sent by Send, because QUIC's events do not say which one a packet carries: they leave in the order of these
// calls.
func (d *Datagrams) Send(b []byte, send func([]byte) error, ack AckRequest) error {
	t := d.trace
	t.sending.Lock()
	defer t.sending.Unlock()
	t.mu.Lock()
	t.unsent = append(t.unsent, ack) // before send, since the packet may leave before send returns
	t.mu.Unlock()
	err := send(b)
	if err != nil {
		t.mu.Lock()
		t.unsent = t.unsent[:max(0, len(t.unsent)-1)]
		t.mu.Unlock()
	}
	return err
}

// Close ends the wait of HTTP/3 for this stream. Datagrams beyond its queue are lost from then on.
func (d *Datagrams) Close() {
	d.trace.inboxes.CompareAndDelete(d.id, d)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.closed = true
	d.room.Broadcast()
}

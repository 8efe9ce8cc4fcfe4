package quic

import (
	"context"
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quic-go/quic-go"
	h3log "github.com/quic-go/quic-go/http3/qlog"
	"github.com/quic-go/quic-go/qlog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// box is HTTP/3's place for a stream's datagrams: it tells of each, then loses it or
// keeps it.
type box struct {
	trace *Trace
	kept  chan []byte
	lost  int
}

func newBox() *box {
	tracer := Tracer(func() cc.Time { return 1 }, nil)
	trace := tracer(nil, false, quic.ConnectionID{}).(*Trace) //nolint:staticcheck // the context is not used
	return &box{trace: trace, kept: make(chan []byte, http3Queue)}
}

func (b *box) comes(id quic.StreamID, datagram []byte) {
	b.trace.RecordEvent(h3log.DatagramParsed{QuarterStreamID: uint64(id / 4)})
	select {
	case b.kept <- datagram:
	default:
		b.lost++
	}
}

func (b *box) receive(ctx context.Context) ([]byte, error) {
	select {
	case d := <-b.kept:
		return d, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// However slowly datagrams are received: all come, in order.
func TestDatagramsWaitForWhoReceivesThem(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		before := rapid.IntRange(0, http3Queue/4).Draw(r, "before")
		all := before + rapid.IntRange(1, 200).Draw(r, "after")
		late := rapid.SliceOfN(rapid.IntRange(0, 2), all, all).Draw(r, "late")
		room := rapid.SliceOfN(rapid.IntRange(1, 64), all, all).Draw(r, "room")
		synctest.Test(t, func(t *testing.T) {
			const id = 8
			b := newBox()
			datagram := func(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }
			for i := range before {
				b.comes(id, datagram(i))
			}
			d, err := ReceiveDatagrams(b.trace, id, b.receive)
			require.NoError(t, err)
			defer d.Close()
			for range before { // what came before there was somebody to receive it
				_, err := d.Receive(context.Background(), make([][]byte, 0, 1))
				require.NoError(t, err)
			}
			go func() {
				for i := before; i < all; i++ {
					b.comes(id, datagram(i))
				}
			}()
			for next := before; next < all; {
				time.Sleep(time.Duration(late[next]) * time.Millisecond)
				batch, err := d.Receive(context.Background(), make([][]byte, 0, room[next]))
				require.NoError(t, err)
				for _, got := range batch {
					require.Equal(t, datagram(next), got)
					next++
				}
			}
			require.Zero(t, b.lost)
		})
	})
}

// Once nobody receives, nothing waits: other streams of the connection go on.
func TestNothingWaitsForDatagramsThatNobodyReceives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const id = 4
		b := newBox()
		d, err := ReceiveDatagrams(b.trace, id, b.receive)
		require.NoError(t, err)
		came := make(chan bool)
		go func() {
			for range 2 * http3Queue {
				b.comes(id, nil)
			}
			close(came)
		}()
		synctest.Wait()
		select {
		case <-came:
			t.Fatal("nothing waited")
		default:
		}
		d.Close()
		<-came
		assert.Equal(t, http3Queue, b.lost)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		for range http3Queue {
			<-b.kept
		}
		_, err = d.Receive(ctx, make([][]byte, 0, 8))
		assert.ErrorIs(t, err, context.Canceled)
	})
}

var packetOfDatagram = qlog.PacketReceived{
	Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT}, Frames: []qlog.Frame{{Frame: &qlog.DatagramFrame{}}},
}

// QUIC's goroutine goes through a train of packets without HTTP/3 missing any of their
// datagrams, though it has no processor now and then.
func TestATrainOfPacketsWaitsForHTTP3(t *testing.T) {
	const kept, train = 128, 1024 // of QUIC's
	const away = 10 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		b := newBox()
		queue, lost, over := make(chan bool, kept), 0, make(chan bool)
		go func() {
			defer close(over)
			for i := 0; ; i++ {
				if i%kept == 0 {
					time.Sleep(away)
				}
				if _, more := <-queue; !more {
					return
				}
				b.trace.RecordEvent(h3log.DatagramParsed{})
			}
		}()
		for range train {
			b.trace.RecordEvent(packetOfDatagram)
			select {
			case queue <- true:
			default:
				b.trace.RecordEvent(qlog.DatagramDropped{Direction: qlog.DirectionReceiving})
				lost++
			}
		}
		close(queue)
		<-over
		assert.Zero(t, lost)
		assert.Zero(t, b.trace.datagrams.Load())
	})
}

// Where HTTP/3 takes none, QUIC waits once, and again only after it has taken some.
func TestQUICWaitsOnceWhereNobodyTakesDatagrams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, start := newBox(), time.Now()
		waited := func() time.Duration { return time.Since(start) }
		for range 2 * manyDatagrams {
			b.trace.RecordEvent(packetOfDatagram)
		}
		assert.Equal(t, maxTakeWait, waited())
		for range 2 * manyDatagrams {
			b.trace.RecordEvent(h3log.DatagramParsed{})
		}
		for range 2 * manyDatagrams {
			b.trace.RecordEvent(packetOfDatagram)
		}
		assert.Equal(t, 2*maxTakeWait, waited())
	})
}

func TestDatagramsNeedATracer(t *testing.T) {
	_, err := ReceiveDatagrams(nil, 0, nil)
	assert.ErrorContains(t, err, "set Config.Tracer")
}

// HTTP/3 of quic-go tells of a datagram before it puts it where it may be lost, and goes
// on only then: a burst larger than what it keeps comes through.
func TestBurstsOfDatagramsComeThrough(t *testing.T) {
	w := newWireWith(t, 0, true)
	s, err := w.client.OpenRequestStream(context.Background())
	require.NoError(t, err)
	require.NoError(t, s.SendRequestHeader(connectRequest()))
	answer, err := s.ReadResponse() //nolint:bodyclose // the body is the stream, which the leg closes
	require.NoError(t, err)
	require.Equal(t, 200, answer.StatusCode)
	server := <-w.accepted
	stream := server.stream.(interface {
		ReceiveDatagram(context.Context) ([]byte, error)
	})
	d, err := ReceiveDatagrams(w.trace(), s.StreamID(), stream.ReceiveDatagram)
	require.NoError(t, err)
	defer d.Close()
	const burst = 3 * http3Queue
	for i := range burst {
		require.NoError(t, s.SendDatagram([]byte{byte(i)}))
	}
	waiting := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.waiting
	}
	require.Eventually(t, func() bool { return waiting() == http3Queue }, time.Minute, time.Millisecond)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for next := 0; next < burst; {
		batch, err := d.Receive(ctx, make([][]byte, 0, burst))
		require.NoError(t, err)
		for _, got := range batch {
			require.Equal(t, []byte{byte(next)}, got)
			next++
		}
	}
	require.NoError(t, server.Close())
	s.CancelRead(0)
	require.NoError(t, s.Close())
}

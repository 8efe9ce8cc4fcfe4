package quic

import (
	"maps"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	h3log "github.com/quic-go/quic-go/http3/qlog"
	"github.com/quic-go/quic-go/qlog"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// model is a stream by its bytes: which are payload, which have been sent, lost
// or acknowledged.
type model struct {
	id      quic.StreamID
	payload []bool
	sent    []bool
	acked   []bool
	last    flow.Report
}

func count(which []bool, of []bool) (n cc.Bytes) {
	for i := range of {
		if of[i] && which[i] {
			n++
		}
	}
	return n
}

// sentPacket is what a model of quic-go has underway.
type sentPacket struct {
	of       *model
	from, to int
}

// Whatever is lost, sent again, cut anew, acknowledged late or not at all: a
// stream's reports are what became of its payload, byte by byte.
func TestReportsAreWhatBecameOfEachByte(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := cc.Time(1)
		trace := Tracer(func() cc.Time { now++; return now }, nil)(nil, false, quic.ConnectionID{}).(*Trace) //nolint:staticcheck // the context is not used
		streams := []*model{{id: 0}, {id: 4}}
		frame := func(m *model, header, payload int) {
			e := h3log.FrameCreated{StreamID: m.id, Raw: h3log.RawInfo{
				Length:        header + payload,
				PayloadLength: payload,
			}}
			e.Frame.Frame = h3log.DataFrame{}
			if payload == 0 {
				e.Frame.Frame = h3log.HeadersFrame{}
			}
			trace.RecordEvent(e)
			for i := range header + payload {
				m.payload, m.sent, m.acked = append(m.payload, i >= header), append(m.sent, false), append(m.acked,
					false)
			}
		}
		for _, m := range streams {
			frame(m, rapid.IntRange(1, 60).Draw(t, "answer"), 0)
			s := trace.signalsOf(m.id)
			s.setObserver(func(r flow.Report) { m.last = r })
		}
		underway := map[int64]sentPacket{}
		var lost []sentPacket
		pn := int64(rapid.IntRange(0, 1000).Draw(t, "first"))
		send := func(m *model, from, to int) {
			pn += int64(rapid.IntRange(1, 3).Draw(t, "skipped"))
			underway[pn] = sentPacket{m, from, to}
			for i := from; i < to; i++ {
				m.sent[i] = true
			}
			trace.RecordEvent(qlog.PacketSent{
				Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT, PacketNumber: qlog.PacketNumber(pn)},
				Frames: []qlog.Frame{{Frame: &qlog.StreamFrame{
					StreamID: m.id, Offset: int64(from),
					Length: int64(to - from),
				}}},
			})
		}
		for range rapid.IntRange(1, 200).Draw(t, "steps") {
			m := streams[rapid.IntRange(0, 1).Draw(t, "stream")]
			next := len(m.sent)
			for next > 0 && !m.sent[next-1] {
				next--
			}
			switch rapid.IntRange(0, 4).Draw(t, "what") {
			case 0:
				frame(m, rapid.IntRange(1, 9).Draw(t, "header"), rapid.IntRange(0, 50).Draw(t, "payload"))
			case 1:
				if next < len(m.sent) {
					send(m, next, rapid.IntRange(next+1, len(m.sent)).Draw(t, "to"))
				}
			case 2:
				if len(lost) > 0 { // again, whole or cut
					p := lost[0]
					cut := rapid.IntRange(p.from+1, p.to).Draw(t, "cut")
					send(p.of, p.from, cut)
					if lost = lost[1:]; cut < p.to {
						lost = append(lost, sentPacket{p.of, cut, p.to})
					}
				}
			case 3:
				if len(underway) > 0 {
					n := slices.Min(slices.Collect(maps.Keys(underway)))
					lost = append(lost, underway[n])
					delete(underway, n)
					trace.RecordEvent(qlog.PacketLost{Header: qlog.PacketHeader{
						PacketType:   qlog.PacketType1RTT,
						PacketNumber: qlog.PacketNumber(n),
					}})
				}
			case 4:
				from := pn - int64(rapid.IntRange(0, 20).Draw(t, "least"))
				to := min(pn, from+int64(rapid.IntRange(0, 10).Draw(t, "acknowledged")))
				if from < 0 {
					continue
				}
				for n := from; n <= to; n++ {
					if p, ok := underway[n]; ok {
						delete(underway, n)
						for i := p.from; i < p.to; i++ {
							p.of.acked[i] = true
						}
					}
				}
				trace.RecordEvent(qlog.PacketReceived{
					Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT},
					Frames: []qlog.Frame{{Frame: &qlog.AckFrame{AckRanges: []qlog.AckRange{{Smallest: qlog.PacketNumber(from), Largest: qlog.PacketNumber(to)}}}}},
				})
			}
			for _, m := range streams {
				s := trace.streams[m.id]
				trace.mu.Lock()
				before := m.last
				s.sendReport(trace.clock(), 0)
				trace.mu.Unlock()
				r := m.last
				all := make([]bool, len(m.payload))
				for i := range all {
					all[i] = true
				}
				require.Equal(t, count(all, m.payload), r.Written)
				require.Equal(t, count(m.acked, m.payload), r.Acked)
				require.Equal(t, r.Written-count(m.sent, m.payload), r.Unsent)
				require.GreaterOrEqual(t, r.Acked, before.Acked)
				require.GreaterOrEqual(t, r.Lost, before.Lost)
				require.LessOrEqual(t, r.Pipe, r.Written-r.Unsent-r.Acked)
				require.GreaterOrEqual(t, r.Pipe, cc.Bytes(0))
				if r.Newest != 0 {
					require.GreaterOrEqual(t, r.Newest, r.Acked)
				}
			}
		}
	})
}

func TestAFlowControlLimitShowsUntilItIsLifted(t *testing.T) {
	trace := Tracer(func() cc.Time { return 1 }, nil)(t.Context(), false, quic.ConnectionID{}).(*Trace)
	var last flow.Report
	trace.RecordEvent(h3log.FrameCreated{
		StreamID: 0, Raw: h3log.RawInfo{Length: 100, PayloadLength: 98},
		Frame: h3log.Frame{Frame: h3log.DataFrame{}},
	})
	s := trace.signalsOf(0)
	s.observedFrom, s.observer = 0, func(r flow.Report) { last = r }
	sent := func(pn int64, frames ...any) {
		e := qlog.PacketSent{Header: qlog.PacketHeader{
			PacketType:   qlog.PacketType1RTT,
			PacketNumber: qlog.PacketNumber(pn),
		}}
		for _, f := range frames {
			e.Frames = append(e.Frames, qlog.Frame{Frame: f})
		}
		trace.RecordEvent(e)
	}
	received := func(frames ...any) {
		e := qlog.PacketReceived{Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT}}
		for _, f := range frames {
			e.Frames = append(e.Frames, qlog.Frame{Frame: f})
		}
		trace.RecordEvent(e)
	}
	ack := func(n int64) *qlog.AckFrame {
		return &qlog.AckFrame{AckRanges: []qlog.AckRange{{Smallest: 0, Largest: qlog.PacketNumber(n)}}}
	}
	sent(1, &qlog.StreamFrame{Length: 50}, &qlog.StreamDataBlockedFrame{MaximumStreamData: 50})
	assert.True(t, last.RwndFull)
	received(ack(1))
	assert.True(t, last.RwndFull, "what has arrived opens no window")
	received(&qlog.MaxStreamDataFrame{MaximumStreamData: 80})
	sent(2, &qlog.StreamFrame{Offset: 50, Length: 20})
	received(ack(2))
	assert.False(t, last.RwndFull)
	sent(3, &qlog.StreamFrame{Offset: 70, Length: 10}, &qlog.DataBlockedFrame{})
	assert.True(t, last.RwndFull, "the connection's window")
	received(&qlog.MaxDataFrame{}, ack(3))
	assert.False(t, last.RwndFull)
	assert.Equal(t, cc.Bytes(78), last.Acked)
	assert.Equal(t, cc.Bytes(20), last.Unsent)
}

func TestAcknowledgementsGiveRoundTripsWithoutThePeersDelay(t *testing.T) {
	now := cc.Time(1)
	trace := Tracer(func() cc.Time { return now }, nil)(t.Context(), false, quic.ConnectionID{}).(*Trace)
	var last flow.Report
	trace.RecordEvent(h3log.FrameCreated{
		StreamID: 0, Raw: h3log.RawInfo{Length: 100, PayloadLength: 98},
		Frame: h3log.Frame{Frame: h3log.DataFrame{}},
	})
	trace.signalsOf(0).observer = func(r flow.Report) { last = r }
	trace.RecordEvent(qlog.MetricsUpdated{MinRTT: 40, SmoothedRTT: 50, CongestionWindow: 12_000})
	trace.RecordEvent(qlog.PacketSent{
		Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT, PacketNumber: 5},
		Frames: []qlog.Frame{{Frame: &qlog.StreamFrame{Length: 60}}},
	})
	now += 70
	trace.RecordEvent(qlog.PacketReceived{
		Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT},
		Frames: []qlog.Frame{{Frame: &qlog.AckFrame{
			AckRanges: []qlog.AckRange{{Smallest: 5, Largest: 5}},
			DelayTime: 25, ECNCE: 1,
		}}},
	})
	assert.EqualValues(t, 45, last.RTT)
	assert.Equal(t, last.Acked, last.Marked)
	trace.RecordEvent(qlog.PTOCountUpdated{PTOCount: 1})
	assert.Zero(t, last.Timeouts)
}

func TestStreamsThatAreNoLegsAreForgotten(t *testing.T) {
	trace := Tracer(func() cc.Time { return 1 }, nil)(t.Context(), false, quic.ConnectionID{}).(*Trace)
	for id := quic.StreamID(0); id < 400; id += 4 {
		trace.RecordEvent(h3log.FrameCreated{
			StreamID: id, Raw: h3log.RawInfo{Length: 10},
			Frame: h3log.Frame{Frame: h3log.HeadersFrame{}},
		})
		var end any = &qlog.StreamFrame{StreamID: id, Length: 10, Fin: true}
		if id%8 == 0 {
			end = &qlog.ResetStreamFrame{StreamID: id, ErrorCode: quic.StreamErrorCode(http3.ErrCodeRequestCanceled)}
		}
		trace.RecordEvent(qlog.PacketSent{
			Header: qlog.PacketHeader{
				PacketType:   qlog.PacketType1RTT,
				PacketNumber: qlog.PacketNumber(id),
			}, Frames: []qlog.Frame{{Frame: end}},
		})
	}
	assert.Empty(t, trace.streams)
}

func TestOnlyCertificatesAreARefusal(t *testing.T) {
	refused := 0
	trace := Tracer(nil, func() { refused++ })(t.Context(), false, quic.ConnectionID{}).(*Trace)
	for code, want := range map[qlog.TransportErrorCode]int{
		0x100 + 42: 1, 0x100 + 48: 1, 0x100 + 116: 1,
		0x100 + 120: 0, 0: 0, 42: 0,
	} {
		refused = 0
		trace.RecordEvent(qlog.ConnectionClosed{ConnectionError: &code})
		assert.Equal(t, want, refused, "%#x", uint64(code))
	}
}

func TestTheEndOfAStreamIsUndeliveredUntilItHasArrivedOrTheStreamIsReset(t *testing.T) {
	header := func(pn int) qlog.PacketHeader {
		return qlog.PacketHeader{PacketType: qlog.PacketType1RTT, PacketNumber: qlog.PacketNumber(pn)}
	}
	for name, c := range map[string]struct {
		last  any // frame of packet 3, after packet 2 with the end was lost
		acked bool
	}{
		"it is sent again": {&qlog.StreamFrame{Offset: 110, Fin: true}, true},
		"it is reset":      {&qlog.ResetStreamFrame{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			trace := Tracer(func() cc.Time { return 1 }, nil)(t.Context(), false, quic.ConnectionID{}).(*Trace)
			s := trace.signalsOf(0)
			send := func(pn int, frame any) {
				trace.RecordEvent(qlog.PacketSent{Header: header(pn), Frames: []qlog.Frame{{Frame: frame}}})
			}
			ack := func(pn qlog.PacketNumber) {
				trace.RecordEvent(qlog.PacketReceived{Header: header(0), Frames: []qlog.Frame{
					{Frame: &qlog.AckFrame{AckRanges: []qlog.AckRange{{Smallest: pn, Largest: pn}}}},
				}})
			}
			trace.RecordEvent(h3log.FrameCreated{
				Raw: h3log.RawInfo{Length: 110, PayloadLength: 100}, Frame: h3log.Frame{Frame: h3log.DataFrame{}},
			})
			assert.EqualValues(t, 100, s.undeliveredBytes())
			s.noteFIN()
			assert.EqualValues(t, 101, s.undeliveredBytes())
			send(1, &qlog.StreamFrame{Length: 110})
			send(2, &qlog.StreamFrame{Offset: 110, Fin: true})
			ack(1)
			assert.EqualValues(t, 1, s.undeliveredBytes())
			trace.RecordEvent(qlog.PacketLost{Header: header(2)})
			send(3, c.last)
			if c.acked {
				assert.EqualValues(t, 1, s.undeliveredBytes())
				ack(3)
			}
			assert.Zero(t, s.undeliveredBytes())
		})
	}
}

// answers are what the owner of datagrams is told.
type answers []answer

type answer struct {
	newest uint16
	n      int
	delay  time.Duration
}

func (a *answers) ReceiveAck(newest uint16, n int, delay time.Duration) {
	*a = append(*a, answer{newest, n, delay})
}

// TestDatagramsAreAcknowledgedWithTheirPackets has QUIC send, drop and lose datagrams.
func TestDatagramsAreAcknowledgedWithTheirPackets(t *testing.T) {
	now := cc.Time(1)
	trace := Tracer(func() cc.Time { now++; return now }, nil)(t.Context(), false, quic.ConnectionID{}).(*Trace)
	d, err := ReceiveDatagrams(trace, 0, nil)
	require.NoError(t, err)
	var owner, other answers
	queue := func(asked ...AckRequest) {
		for _, a := range asked {
			require.NoError(t, d.Send(nil, func([]byte) error { return nil }, a))
		}
	}
	sent := func(pn int64, datagrams int) {
		frames := []qlog.Frame{{Frame: &qlog.PingFrame{}}}
		for range datagrams {
			frames = append(frames, qlog.Frame{Frame: &qlog.DatagramFrame{Length: 1000}})
		}
		header := qlog.PacketHeader{PacketType: qlog.PacketType1RTT, PacketNumber: qlog.PacketNumber(pn)}
		trace.RecordEvent(qlog.PacketSent{Header: header, Frames: frames})
	}
	acked := func(delay time.Duration, ranges ...qlog.AckRange) {
		trace.RecordEvent(qlog.PacketReceived{
			Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT},
			Frames: []qlog.Frame{{Frame: &qlog.AckFrame{AckRanges: ranges, DelayTime: delay}}},
		})
	}
	mine := func(sequence uint16) AckRequest { return AckRequest{&owner, sequence} }

	queue(mine(1), AckRequest{}, mine(2), mine(3), mine(4), mine(5))
	require.ErrorIs(t, d.Send(nil, func([]byte) error { return net.ErrClosed }, mine(6)), net.ErrClosed)
	sent(1, 1)
	sent(2, 1) // nobody waits for it
	sent(3, 2)
	sent(4, 0)
	trace.RecordEvent(qlog.DatagramDropped{Direction: qlog.DirectionSending})
	sent(5, 1)
	acked(7, qlog.AckRange{Smallest: 2, Largest: 2}, qlog.AckRange{Smallest: 4, Largest: 4})
	assert.Empty(t, owner)
	acked(7, qlog.AckRange{Smallest: 5, Largest: 5}, qlog.AckRange{Smallest: 1, Largest: 3})
	acked(7, qlog.AckRange{Smallest: 1, Largest: 5})
	assert.Equal(t, answers{{5, 4, 7}}, owner, "each once, of two ranges; the fourth was dropped")

	queue(mine(6), mine(7), AckRequest{&other, 1}, mine(8))
	sent(6, 1)
	sent(7, 2)
	sent(8, 1)
	trace.RecordEvent(qlog.PacketLost{
		Header: qlog.PacketHeader{PacketType: qlog.PacketType1RTT, PacketNumber: 6},
	})
	acked(0, qlog.AckRange{Smallest: 6, Largest: 7})
	acked(0, qlog.AckRange{Smallest: 6, Largest: 8})
	assert.Equal(t, answers{{5, 4, 7}, {8, 1, 0}}, owner)
	assert.Equal(t, answers{{1, 1, 0}}, other, "the newest of a packet has an owner")
	assert.Empty(t, trace.unsent)
	assert.Empty(t, trace.packets.packets)
}

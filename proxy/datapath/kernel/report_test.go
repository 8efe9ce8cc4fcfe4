//go:build linux

package kernel

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

const (
	mss     = 1000
	wideWnd = 1 << 30
	now     = cc.Time(7e9)
)

// readingOf is a TCP_INFO as it reads with the given state; segments are full.
func readingOf(change func(*unix.TCPInfo)) *unix.TCPInfo {
	i := &unix.TCPInfo{State: 1, Snd_mss: mss, Snd_wnd: wideWnd}
	if change != nil {
		change(i)
	}
	return i
}

// sent is a socket that sent n segments of which the first acked are acknowledged.
func sent(n, acked int, change func(*unix.TCPInfo)) *unix.TCPInfo {
	return readingOf(func(i *unix.TCPInfo) {
		i.Bytes_sent = uint64(n * mss)
		i.Bytes_acked = uint64(acked * mss)
		i.Unacked = uint32(n - acked)
		if change != nil {
			change(i)
		}
	})
}

func observed(t *testing.T, first *unix.TCPInfo, dialled bool) *infoReporter {
	t.Helper()
	a := &infoReporter{infoSize: wholeTCPInfo}
	a.findSYNOffset(first, dialled)
	a.startCounting(first)
	r := a.makeReport(first, now)
	require.Zero(t, r.Written, "counters start at zero")
	require.Zero(t, r.Acked, "counters start at zero")
	return a
}

func TestOneReadingBecomesAReport(t *testing.T) {
	for name, row := range map[string]struct {
		first *unix.TCPInfo // nil: a fresh socket
		then  *unix.TCPInfo
		want  flow.Report
	}{
		"nothing written": {
			then: readingOf(nil),
		},
		"ten segments sent, four acknowledged, and 500 bytes still unsent": {
			then: sent(10, 4, func(i *unix.TCPInfo) { i.Notsent_bytes = 500 }),
			want: flow.Report{Written: 10_500, Acked: 4_000, Pipe: 6_000, Unsent: 500},
		},
		"a hole of one segment with three acknowledged behind it": {
			then: sent(10, 4, func(i *unix.TCPInfo) { i.Sacked, i.Lost, i.Ca_state = 3, 1, 3 }),
			want: flow.Report{Written: 10_000, Acked: 7_000, Sacked: 3_000, Newest: 8_000, Pipe: 2_000},
		},
		"the hole is repaired but not acknowledged yet": {
			then: sent(10, 4, func(i *unix.TCPInfo) {
				i.Sacked, i.Lost, i.Retrans, i.Ca_state = 3, 1, 1, 3
				i.Bytes_sent += mss
				i.Bytes_retrans, i.Total_retrans = mss, 1
			}),
			want: flow.Report{Written: 10_000, Acked: 7_000, Sacked: 3_000, Newest: 8_000, Pipe: 3_000, Lost: 1_000},
		},
		"after a timeout everything is marked lost, and nothing is known to have arrived": {
			then: sent(10, 4, func(i *unix.TCPInfo) {
				i.Sacked, i.Lost, i.Retrans, i.Ca_state, i.Total_rto = 2, 4, 1, tcpCALoss, 1
				i.Bytes_sent += mss
				i.Bytes_retrans = mss
			}),
			want: flow.Report{Written: 10_000, Acked: 6_000, Sacked: 2_000, Pipe: 1_000, Lost: 1_000, Timeouts: 1},
		},
		"a tail probe repeats a segment that is not lost": {
			then: sent(2, 0, func(i *unix.TCPInfo) {
				i.Retrans = 1
				i.Bytes_sent += mss
				i.Bytes_retrans = mss
			}),
			want: flow.Report{Written: 2_000, Pipe: 3_000, Lost: 1_000},
		},
		"small writes count at their own size": {
			then: readingOf(func(i *unix.TCPInfo) {
				i.Bytes_sent, i.Unacked, i.Sacked, i.Lost = 400, 4, 2, 1
			}),
			want: flow.Report{Written: 400, Acked: 200, Sacked: 200, Newest: 300, Pipe: 100},
		},
		"the SYN of a dialled connection is no byte": {
			first: readingOf(func(i *unix.TCPInfo) { i.Bytes_acked = 1 }),
			then:  sent(3, 3, func(i *unix.TCPInfo) { i.Bytes_acked++ }),
			want:  flow.Report{Written: 3_000, Acked: 3_000},
		},
		"the SYN with a segment in flight": {
			first: readingOf(func(i *unix.TCPInfo) { i.Bytes_acked = 1 }),
			then:  sent(3, 2, func(i *unix.TCPInfo) { i.Bytes_acked++ }),
			want:  flow.Report{Written: 3_000, Acked: 2_000, Pipe: 1_000},
		},
		"a FIN waits behind unsent bytes": {
			then: sent(3, 3, func(i *unix.TCPInfo) { i.State, i.Notsent_bytes = tcpFinWait1, 501 }),
			want: flow.Report{Written: 3_500, Acked: 3_000, Unsent: 500},
		},
		"a FIN is in flight": {
			then: sent(3, 3, func(i *unix.TCPInfo) { i.State, i.Unacked = tcpFinWait1, 1 }),
			want: flow.Report{Written: 3_000, Acked: 3_000},
		},
		"an acknowledged FIN is no byte": {
			then: sent(3, 3, func(i *unix.TCPInfo) { i.State = tcpFinWait2; i.Bytes_acked++ }),
			want: flow.Report{Written: 3_000, Acked: 3_000},
		},
		"what was written before observation is in the gauges only": {
			first: sent(2, 0, nil),
			then:  sent(5, 1, nil),
			want:  flow.Report{Written: 3_000, Pipe: 4_000},
		},
		"and its acknowledgement is not reported": {
			first: sent(2, 0, func(i *unix.TCPInfo) { i.Delivered_ce, i.Total_rto, i.Bytes_retrans = 5, 2, 0 }),
			then:  sent(5, 3, func(i *unix.TCPInfo) { i.Delivered_ce, i.Total_rto = 6, 2 }),
			want:  flow.Report{Written: 3_000, Acked: 1_000, Pipe: 2_000, Marked: 1_000},
		},
		"the 32-bit count of marks wraps": {
			first: readingOf(func(i *unix.TCPInfo) { i.Delivered_ce = math.MaxUint32 }),
			then:  sent(3, 3, func(i *unix.TCPInfo) { i.Delivered_ce = 1 }),
			want:  flow.Report{Written: 3_000, Acked: 3_000, Marked: 2_000},
		},
		"the 16-bit count of timeouts wraps": {
			first: readingOf(func(i *unix.TCPInfo) { i.Total_rto = math.MaxUint16 }),
			then:  readingOf(func(i *unix.TCPInfo) { i.Total_rto = 2 }),
			want:  flow.Report{Timeouts: 3},
		},
		"what a local queue refused is counted twice by the kernel and once here": {
			then: sent(10, 4, func(i *unix.TCPInfo) { i.Bytes_sent += 2 * mss }),
			want: flow.Report{Written: 10_000, Acked: 4_000, Pipe: 6_000},
		},
		"a retransmission that never left is not in bytes_sent": {
			then: sent(3, 3, func(i *unix.TCPInfo) { i.Bytes_retrans = mss }),
			want: flow.Report{Written: 3_000, Acked: 3_000, Lost: 1_000},
		},
		"the receive window counts from the first hole": {
			then: sent(10, 4, func(i *unix.TCPInfo) { i.Snd_wnd, i.Notsent_bytes = 6_500, 1 }),
			want: flow.Report{Written: 10_001, Acked: 4_000, Unsent: 1, Pipe: 6_000, RwndFull: true},
		},
		"the kernel was held by the receive window since the last reading": {
			then: sent(1, 1, func(i *unix.TCPInfo) { i.Rwnd_limited, i.Notsent_bytes = 4000, 1 }),
			want: flow.Report{Written: 1_001, Acked: 1_000, Unsent: 1, RwndFull: true},
		},
		"a full receive window holds nobody who has nothing more to send": {
			then: sent(10, 4, func(i *unix.TCPInfo) { i.Snd_wnd, i.Rwnd_limited = 6_000, 4000 }),
			want: flow.Report{Written: 10_000, Acked: 4_000, Pipe: 6_000},
		},
	} {
		t.Run(name, func(t *testing.T) {
			first := row.first
			if first == nil {
				first = readingOf(nil)
			}
			a := observed(t, first, false)
			row.want.At, row.want.MSS = now.Add(5), mss
			assert.Equal(t, row.want, a.makeReport(row.then, now.Add(5)))
		})
	}
}

func TestCountersNeverFallBack(t *testing.T) {
	a := observed(t, readingOf(nil), false)
	holes := sent(10, 0, func(i *unix.TCPInfo) { i.Sacked, i.Lost = 5, 2 })
	require.Equal(t, flow.Report{
		At: now, MSS: mss, Written: 10_000, Acked: 5_000, Sacked: 5_000, Newest: 7_000, Pipe: 3_000,
	}, a.makeReport(holes, now))

	t.Run("when the receiver takes a selective acknowledgement back", func(t *testing.T) {
		r := a.makeReport(sent(10, 1, func(i *unix.TCPInfo) { i.Sacked = 1 }), now)
		assert.Equal(t, cc.Bytes(5_000), r.Acked)
		assert.Equal(t, cc.Bytes(7_000), r.Newest)
	})
	t.Run("when the last hole closes", func(t *testing.T) {
		r := a.makeReport(sent(10, 8, nil), now)
		assert.Equal(t, cc.Bytes(8_000), r.Acked)
		assert.Zero(t, r.Newest, "no holes: Acked says it")
	})
	t.Run("when the connection is aborted", func(t *testing.T) {
		r := a.makeReport(sent(10, 8, func(i *unix.TCPInfo) { i.State, i.Unacked = tcpClose, 0 }), now)
		assert.Equal(t, cc.Bytes(8_000), r.Acked, "what was in flight has not arrived")
		assert.Equal(t, cc.Bytes(10_000), r.Written)
		assert.Zero(t, r.Pipe)
	})
}

func TestTheStateMayLagBehindTheNumbers(t *testing.T) {
	established := func(change func(*unix.TCPInfo)) *unix.TCPInfo { return sent(3, 3, change) }
	for name, row := range map[string]struct {
		then    *unix.TCPInfo
		written cc.Bytes
	}{
		"a FIN is acknowledged": {established(func(i *unix.TCPInfo) { i.Bytes_acked++ }), 3_000},
		"a FIN is unsent":       {established(func(i *unix.TCPInfo) { i.Notsent_bytes = 501 }), 3_500},
	} {
		t.Run(name, func(t *testing.T) {
			a := observed(t, readingOf(nil), false)
			a.finQueued = true
			r := a.makeReport(row.then, now)
			assert.Equal(t, row.written, r.Written)
			assert.Equal(t, cc.Bytes(3_000), r.Acked)
		})
	}
}

func TestALateCalibrationTrustsTheCaller(t *testing.T) {
	inFlight := sent(2, 0, func(i *unix.TCPInfo) { i.Bytes_acked = 1 })
	a := observed(t, inFlight, true)
	r := a.makeReport(sent(4, 4, func(i *unix.TCPInfo) { i.Bytes_acked++ }), now)
	assert.Equal(t, cc.Bytes(2_000), r.Written)
	assert.Equal(t, cc.Bytes(2_000), r.Acked)
}

// Before Linux 6.7 TCP_INFO has no total_rto.
func TestTimeoutsAreInferredFromTheRecoveryState(t *testing.T) {
	in := func(state, backoff uint8) *unix.TCPInfo {
		return sent(2, 0, func(i *unix.TCPInfo) { i.Ca_state, i.Backoff = state, backoff })
	}
	a := &infoReporter{infoSize: uptoSndWnd}
	a.startCounting(readingOf(nil))
	var r flow.Report
	for _, i := range []*unix.TCPInfo{in(tcpCALoss, 1), in(tcpCALoss, 1), in(tcpCALoss, 2), in(0, 0), in(tcpCALoss, 1)} {
		r = a.makeReport(i, now)
	}
	assert.Equal(t, 3, r.Timeouts)
}

func TestKernelsThatAreTooOldAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		size    uintptr
		missing int
		err     string
	}{
		"all of it":          {wholeTCPInfo, 0, ""},
		"Linux 5.4 to 6.6":   {uptoSndWnd, 1, ""},
		"before Linux 5.4":   {uptoSndWnd - 4, 0, "this kernel is Linux 4.19.0, and Linux 5.4 or later is needed"},
		"an emulated kernel": {0, 0, "Linux 5.4 or later is needed (TCP_INFO has 0 of"},
	} {
		t.Run(name, func(t *testing.T) {
			missing, err := missingFields(c.size, "4.19.0")
			assert.Len(t, missing, c.missing)
			if c.err == "" {
				assert.NoError(t, err)
			} else {
				assert.ErrorContains(t, err, c.err)
			}
		})
	}
}

// simSender is a model of the kernel's send side: segments in order, each of them
// on the wire, selectively acknowledged, or lost.
type simSender struct {
	info     unix.TCPInfo
	segments []segment
	stream   int64 // bytes handed over so far
	sentAll  int64
	una      int64
}

type segment struct {
	size          int64
	sacked, lost  bool
	retransmitted bool
}

func (s *simSender) reading() *unix.TCPInfo {
	i := &s.info
	i.Unacked, i.Sacked, i.Lost, i.Retrans = uint32(len(s.segments)), 0, 0, 0
	for _, seg := range s.segments {
		switch {
		case seg.sacked:
			i.Sacked++
		case seg.lost:
			i.Lost++
		}
		if seg.retransmitted && !seg.sacked {
			i.Retrans++
		}
	}
	i.Notsent_bytes = uint32(s.stream - s.sentAll)
	return i
}

// TestReportsOfAnySenderAddUp drives the model at random. Whatever happens,
// reports are exact where the kernel is, and never contradict each other.
func TestReportsOfAnySenderAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &simSender{info: unix.TCPInfo{State: 1, Snd_mss: mss, Snd_wnd: wideWnd}}
		syn := uint64(rapid.IntRange(0, 1).Draw(t, "syn"))
		s.info.Bytes_acked = syn
		a := &infoReporter{infoSize: wholeTCPInfo}
		a.findSYNOffset(s.reading(), syn == 1)
		a.startCounting(s.reading())

		before := a.makeReport(s.reading(), now)
		pick := func() int { return rapid.IntRange(0, len(s.segments)-1).Draw(t, "segment") }
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch op := rapid.IntRange(0, 6).Draw(t, "operation"); {
			case op == 0:
				s.stream += rapid.Int64Range(1, 20*mss).Draw(t, "write")
			case op == 1 && s.stream > s.sentAll:
				size := min(s.stream-s.sentAll, rapid.Int64Range(1, mss).Draw(t, "size"))
				s.sentAll += size
				s.info.Bytes_sent += uint64(size)
				s.segments = append(s.segments, segment{size: size})
			case len(s.segments) == 0:
			case op == 2:
				for range pick() + 1 {
					s.info.Bytes_acked += uint64(s.segments[0].size)
					s.una += s.segments[0].size
					s.segments = s.segments[1:]
				}
			case op == 3:
				s.segments[pick()].sacked = true
			case op == 4:
				seg := &s.segments[pick()]
				seg.lost = !seg.sacked
			case op == 5:
				seg := &s.segments[pick()]
				if seg.lost && !seg.sacked {
					seg.retransmitted = true
					s.info.Bytes_sent += uint64(seg.size)
					s.info.Bytes_retrans += uint64(seg.size)
				}
			case op == 6:
				s.info.Ca_state = uint8(rapid.IntRange(0, tcpCALoss).Draw(t, "ca_state"))
			}

			r := a.makeReport(s.reading(), before.At.Add(1))
			require.Equal(t, cc.Bytes(s.stream), r.Written)
			require.Equal(t, cc.Bytes(s.stream-s.sentAll), r.Unsent)
			require.Equal(t, cc.Bytes(s.info.Bytes_retrans), r.Lost)
			require.GreaterOrEqual(t, r.Acked, cc.Bytes(s.una))
			require.GreaterOrEqual(t, r.Acked, before.Acked)
			require.LessOrEqual(t, r.Acked, cc.Bytes(s.sentAll))
			require.LessOrEqual(t, r.Newest, cc.Bytes(s.sentAll))
			require.GreaterOrEqual(t, r.Pipe, cc.Bytes(0))
			if r.Newest != 0 {
				require.GreaterOrEqual(t, r.Newest, r.Acked)
			}
			if len(s.segments) == 0 {
				require.Zero(t, r.Pipe)
				require.Equal(t, cc.Bytes(s.sentAll), r.Acked)
			}
			before = r
		}
	})
}

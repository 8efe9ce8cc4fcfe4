//go:build linux

package kernel

import (
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

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

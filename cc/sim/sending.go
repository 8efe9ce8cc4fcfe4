package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// sending is the part that senders of streams and of datagrams share: it sends packets and counts their fates.
type sending struct {
	FlowResult // so far
	w          *world
	cfg        FlowConfig
	number     uint32       // of the flow, from 0
	host       int          // number of the host, from 0; of an upload, where it comes from
	hold       *holdingEdge // holds the packets of a server's own transport; nil: none does
	src        source
	closed     bool
	until      cc.Time // it closed; else the run's end

	from             cc.Time // counting begins
	queueing, oneWay []time.Duration
	waited           time.Duration // sum over all packets in the queue, of the time that counts
	carried, arrived cc.Bytes
	perSecond        []cc.Bytes
}

// newSending returns the shared part of the sender of flow number i.
func newSending(w *world, cfg FlowConfig, i int) sending {
	from := w.origin.Add(max(cfg.Start, w.scenario.Warmup))
	return sending{
		FlowResult: FlowResult{Name: cfg.Name, Algorithm: cfg.Algorithm, From: from.Sub(w.origin)},
		w:          w, cfg: cfg, number: uint32(i), host: cfg.Host - 1, until: w.end, from: from,
		src:       newSource(cfg, i, w.origin.Add(cfg.Start), w.scenario.Seed),
		perSecond: make([]cc.Bytes, (w.scenario.Duration+time.Second-1)/time.Second),
	}
}

func (s *sending) measured() *sending { return s }

// launch sends a packet of size bytes, and calls arrive when it reaches the other end, if it does.
func (s *sending) launch(size cc.Bytes, ecn Codepoint, arrive func(marked bool)) {
	now := s.w.now
	s.waited += s.w.end.Sub(max(now, s.from)) // until it leaves
	s.count(&s.Packets)
	settled := func(left cc.Time, v Verdict) {
		s.settle(left, size, s.cfg.Delay+left.Sub(now), v)
		if v.Dropped == DropNone {
			s.w.at(v.Arrives.Add(s.cfg.Delay), func() { arrive(v.Marked) })
		}
	}
	if s.hold != nil {
		s.hold.pass(heldPacket{flow: s.number, size: size, ecn: ecn, settled: settled})
	} else {
		s.w.carry(s.cfg.Upload, s.host, size, s.number, ecn, func(v Verdict) { settled(now, v) })
	}
}

// settle counts the fate of a packet of size bytes that reached the bottleneck at sent. The propagation delay outside
// the bottleneck is behind.
func (s *sending) settle(sent cc.Time, size cc.Bytes, behind time.Duration, v Verdict) {
	left := sent
	if v.Dropped == DropNone {
		left = v.Departs
	}
	s.waited -= s.w.end.Sub(min(max(left, s.from), s.w.end))
	if v.Dropped == DropNone && v.Departs >= s.from && v.Departs < s.w.end {
		s.carried += size
	}
	if sent < s.from {
		return
	}
	switch v.Dropped {
	case DropQueue:
		s.Drops++
	case DropLoss:
		s.Losses++
	case DropNone:
		s.queueing = append(s.queueing, v.Departs.Sub(sent))
		s.oneWay = append(s.oneWay, v.Arrives.Sub(sent)+behind)
	}
}

// count adds one to n, unless the warm-up still runs.
func (s *sending) count(n *int) {
	if s.w.now >= s.from {
		*n++
	}
}

// deliver counts size bytes of payload that arrive for the first time.
func (s *sending) deliver(size cc.Bytes) {
	s.perSecond[s.w.now.Sub(s.w.origin)/time.Second] += size
	if s.w.now >= s.from {
		s.arrived += size
	}
}

// sample records the flow's state and the backlog of its queue.
func (s *sending) sample(state flow.Snapshot, read cc.Bytes) {
	bytes, packets := s.w.down.Backlog(s.w.now, s.host)
	s.Samples = append(s.Samples, Sample{
		At: s.w.now.Sub(s.w.origin), Snapshot: state, Read: read, Backlog: bytes, BacklogPackets: packets,
	})
}

// close ends the flow.
func (s *sending) close() { s.closed, s.until = true, s.w.now }

// result sums up the flow.
func (s *sending) result() FlowResult {
	f := s.FlowResult
	f.To = s.until.Sub(s.w.origin)
	f.Throughput = cc.RateOf(s.arrived, s.until.Sub(s.from))
	f.Queueing, f.OneWay = DelaysOf(s.queueing), DelaysOf(s.oneWay)
	f.Utilisation = ratio(s.carried, s.w.offered(s.cfg.Upload, s.host, s.from, s.until))
	for k, n := range s.perSecond {
		length := min(time.Second, s.w.scenario.Duration-time.Duration(k)*time.Second)
		f.PerSecond = append(f.PerSecond, cc.RateOf(n, length))
	}
	return f
}

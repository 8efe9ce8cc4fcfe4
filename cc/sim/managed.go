package sim

import "github.com/penstock-net/penstock/cc"

// ManagedLink is one direction of a path: a queue that is managed as it is served,
// in front of a server, then a delay line. Rate, trace and limits are a Link's; what
// is being sent does not count as waiting.
//
// A packet's fate depends on how long it will have waited, so it is not settled on
// arrival, as a Link's is; Dropped of a Departure tells of one that goes no further.
// The schedule does not depend on when it is asked.
type ManagedLink struct {
	wire     // of the packets that were taken out of the queue
	aqm      aqm
	lanes    lanes
	departed []Departure // since the last Advance
	handed   []Departure // by the last Advance
}

// NewManagedLink returns a link with an AQM that starts at time zero of its trace at start.
func NewManagedLink(cfg LinkConfig, start cc.Time) *ManagedLink {
	l := &ManagedLink{wire: newWire(cfg, start)}
	var n int
	l.aqm, n = newAQM(cfg.AQM, l.rng)
	l.lanes = newLanes(n)
	return l
}

// Enqueue implements Hop.
func (l *ManagedLink) Enqueue(now cc.Time, _ int, size cc.Bytes, flow uint32, ecn Codepoint) (lane int, v Verdict,
	waits bool,
) {
	lane, v.Dropped = l.admit(now, size, flow, ecn)
	return lane, v, v.Dropped == DropNone
}

// admit puts a packet into the lane that it returns, unless it is dropped.
func (l *ManagedLink) admit(now cc.Time, size cc.Bytes, flow uint32, ecn Codepoint) (lane int, drop Drop) {
	l.advance(now)
	now = l.now
	if draws(l.rng, l.cfg.Loss) {
		return 0, DropLoss
	}
	l.aqm.settle(now, &l.lanes)
	lane = l.aqm.lane(flow, ecn)
	if l.full(size) && !l.makeRoom(lane, size) {
		return 0, DropQueue
	}
	p := waitingPacket{at: now, size: size, ecn: ecn}
	switch judged := l.aqm.admit(now, lane, p, &l.lanes); {
	case judged == drops || judged == signals && ecn == NotECT:
		return 0, DropQueue
	case judged == signals:
		p.marked = true
	}
	if l.lanes.n == 0 && l.departs <= now {
		l.begin(now)
	}
	l.lanes.push(lane, p)
	return lane, DropNone
}

// full reports whether the queue has no room for size bytes.
func (l *ManagedLink) full(size cc.Bytes) bool {
	return overflows(l.cfg.QueueBytes, l.cfg.QueuePackets, l.lanes.total+size, l.lanes.n)
}

// makeRoom drops the oldest packets of the longest lane, where flows have lanes of their
// own, until there is room for size bytes more (RFC 8290 §4.1.2); false: there is none.
func (l *ManagedLink) makeRoom(lane int, size cc.Bytes) bool {
	if l.cfg.AQM != FQCoDel {
		return false
	}
	for l.full(size) {
		longest := lane
		for i := range l.lanes.each {
			if l.lanes.each[i].bytes > l.lanes.each[longest].bytes {
				longest = i
			}
		}
		if l.lanes.each[longest].Len() == 0 {
			return false
		}
		p := l.lanes.pop(longest)
		l.departed = append(l.departed, Departure{Lane: longest, Size: p.size, Verdict: Verdict{Dropped: DropQueue}})
	}
	return true
}

// Advance implements Hop.
func (l *ManagedLink) Advance(now cc.Time) []Departure {
	l.advance(now)
	l.handed, l.departed = l.departed, l.handed[:0]
	return l.handed
}

// Next implements Hop.
func (l *ManagedLink) Next() cc.Time {
	switch {
	case len(l.departed) > 0:
		return l.now
	case l.lanes.n == 0:
		return cc.Never
	}
	return l.next()
}

// Backlog implements Hop, without the packet that is being sent.
func (l *ManagedLink) Backlog(now cc.Time, _ int) (bytes cc.Bytes, packets int) {
	l.advance(now)
	return l.lanes.total, l.lanes.n
}

func (l *ManagedLink) advance(now cc.Time) {
	l.now = max(l.now, now)
	for l.lanes.n > 0 && l.next() <= l.now {
		l.aqm.settle(l.next(), &l.lanes)
		l.dequeuePacket(l.next())
	}
}

// dequeuePacket takes one packet out of the queue, to send or to drop it.
func (l *ManagedLink) dequeuePacket(now cc.Time) {
	i := l.aqm.pick(now, &l.lanes)
	p := l.lanes.pop(i)
	d := Departure{Lane: i, Size: p.size}
	judged := l.aqm.judge(now, i, p, &l.lanes)
	if judged == drops || judged == signals && p.ecn == NotECT {
		d.Dropped = DropQueue
	} else {
		l.send(p.size)
		d.Verdict = l.pass()
		d.Marked = judged == signals || p.marked || draws(l.rng, l.cfg.Mark)
	}
	l.departed = append(l.departed, d)
}

package flow

import (
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// EchoBytes is the size of an echo request over IPv4: its headers, and 8 bytes that only its sender knows.
const EchoBytes cc.Bytes = 36

// Echo requests follow what has left, so often that their answers come as acknowledgements of a transport do: evenly,
// and not once for a burst.
const (
	echoEveryBytes            = 100 * EchoBytes       // that leave, at least, between two requests: one per cent of them
	echoPerWindow             = 32                    // requests of a window, where those are fewer
	echoSpacing               = time.Millisecond      // between requests on a fast path, where at least
	leastPerWindow            = 4                     // requests of a window are left
	echoAtEndOfBurst          = 5 * time.Millisecond  // what left last has a request then, while packets wait for room
	echoAtEnd                 = 50 * time.Millisecond // what left last has a request then, while none waits
	echoTimeout               = time.Second           // an answer that is later, and later than echoTimeoutRTTs, is lost
	echoTimeoutRTTs           = 3
	maxPacket        cc.Bytes = 1500 // larger ones are several segments
)

// Source is what acknowledges the packets of an EchoFlow.
type Source uint8

// The sources.
const (
	// ByTransport takes the acknowledgements of the group's other members: what left before a byte of theirs that has
	// arrived has arrived, too. While none of them wants more of the window, nothing holds packets but a maximum rate.
	ByTransport Source = iota
	// ByEcho takes the answers to echo requests, which the owner sends when NextEcho says so.
	ByEcho
)

// A radio link fades for fractions of a second, and its window with it. Sparse flows are not held back by that: they
// may borrow what the usual rate is worth during loanTime, and the other packets make up for it.
const (
	loanTime      = 500 * time.Millisecond
	usualRateTime = 2 * time.Second // over which the usual rate is smoothed
)

// EchoFlow is a Flow for packets of other hosts' transports, such as a QUIC download that this machine forwards.
// Nothing here sees their acknowledgements, so a Source does in their place. An echo request follows what has left, and
// its answer acknowledges all of that, since both stand in one queue.
//
// Calls must not overlap, but with those of the Flow's manager.
type EchoFlow struct {
	flow   *Flow
	source Source
	terms  Terms
	cwnd   atomic.Int64 // the flow's limit

	credit   cc.Bytes // granted by the flow, not used yet; below 0: lent to sparse flows
	report   Report
	probes   []echoProbe // requests without an answer, the oldest first
	sequence uint16      // of the newest request
	leftAt   cc.Time     // when a packet left last
	waits    bool        // a packet was refused last
	answered cc.Time     // when an answer came last; 0: none has
	lost     int         // requests without an answer since then
	srtt     time.Duration
	usual    cc.Rate
	usualAt  cc.Time
}

// echoProbe is a request without an answer.
type echoProbe struct {
	sequence uint16
	at       cc.Time
	upTo     cc.Bytes // stream offset of what had left before it
}

// OpenEcho adds packets that by acknowledges to the group that t leads to. Wake is called, as a Leg's is, when a
// refused Take may succeed.
func (m *Manager) OpenEcho(now cc.Time, t Terms, by Source, wake func()) (*EchoFlow, error) {
	e := &EchoFlow{terms: t, source: by}
	apply := func(l Limit) { e.cwnd.Store(int64(l.Cwnd)) }
	f, err := m.Open(now, t, Leg{Apply: apply, Wake: wake})
	if err != nil {
		return nil, err
	}
	f.follow(now, by == ByTransport)
	e.flow = f
	return e, nil
}

// Source returns what acknowledges the packets.
func (e *EchoFlow) Source() Source { return e.source }

// AcknowledgeBy makes s acknowledge the packets from now on. What is in flight counts as arrived.
func (e *EchoFlow) AcknowledgeBy(now cc.Time, s Source) {
	taken := e.flow.follow(now, s == ByTransport)
	e.source, e.credit, e.probes, e.answered, e.lost = s, 0, nil, 0, 0
	e.report.Written, e.report.Acked = taken, taken
}

// Take implements PacketWindow.
func (e *EchoFlow) Take(now cc.Time, n cc.Bytes, sparse bool) bool {
	if e.source == ByTransport {
		passes, isHeld, srtt := e.flow.passFollower(now, n, sparse)
		if !isHeld {
			return passes
		}
		e.srtt = srtt
	}
	e.updateUsual(now)
	room := e.roomFor(n)
	for e.credit < room { // until there is enough, or the flow has refused
		granted := e.flow.Take(now, room-e.credit).Bytes
		if granted == 0 {
			break
		}
		e.credit += granted
	}
	isIdle := e.source == ByEcho && e.report.Written == e.report.Acked // then nothing would ever bring the rest of the room
	isLent := sparse && e.credit-n >= -e.usual.BytesIn(loanTime)
	if e.waits = e.credit < room && !isIdle && !isLent; e.waits {
		return false
	}
	e.credit -= n
	e.report.Written += n
	e.report.MSS = max(e.report.MSS, min(n, maxPacket))
	e.leftAt = now
	return true
}

// roomFor returns the credit that a packet of n bytes needs. Several segments in one packet may be larger than the
// window: they leave once half of it is free, since small flows beside them may never let it be empty.
func (e *EchoFlow) roomFor(n cc.Bytes) cc.Bytes {
	if n <= maxPacket {
		return n
	}
	return min(n, max(maxPacket, cc.Bytes(e.cwnd.Load())/2))
}

// StopWanting tells the window that no packet waits any more.
func (e *EchoFlow) StopWanting(now cc.Time) { e.flow.Take(now, 0) }

// Usual implements PacketWindow.
func (e *EchoFlow) Usual() cc.Rate { return e.usual }

// updateUsual smooths what the window lets leave in a round trip.
func (e *EchoFlow) updateUsual(now cc.Time) {
	if e.srtt == 0 {
		return
	}
	rate := cc.RateOf(cc.Bytes(e.cwnd.Load()), e.srtt)
	if e.usualAt == 0 {
		e.usual = rate
	} else {
		e.usual += cc.Rate(float64(rate-e.usual) * min(1, now.Sub(e.usualAt).Seconds()/usualRateTime.Seconds()))
	}
	e.usualAt = now
}

// NextEcho returns when the next echo request is to be sent, cc.Never if none.
func (e *EchoFlow) NextEcho() cc.Time {
	if e.source != ByEcho {
		return cc.Never
	}
	covered := e.report.Acked
	if n := len(e.probes); n > 0 {
		covered = e.probes[n-1].upTo
	}
	switch uncovered := e.report.Written - covered; {
	case uncovered <= 0:
		return cc.Never
	case uncovered >= e.echoInterval():
		return e.leftAt
	case e.waits:
		return e.leftAt.Add(echoAtEndOfBurst)
	}
	return e.leftAt.Add(echoAtEnd)
}

// echoInterval returns how many bytes leave between two requests.
func (e *EchoFlow) echoInterval() cc.Bytes {
	cwnd := cc.Bytes(e.cwnd.Load())
	return max(echoEveryBytes, cwnd/echoPerWindow, min(cwnd/leastPerWindow, e.usual.BytesIn(echoSpacing)))
}

// SendEcho accounts for an echo request that is sent now and returns its sequence number.
func (e *EchoFlow) SendEcho(now cc.Time) (sequence uint16) {
	e.sequence++
	e.probes = append(e.probes, echoProbe{e.sequence, now, e.report.Written})
	return e.sequence
}

// ReceiveEcho takes in the answer to an echo request. Late and unknown answers are ignored.
func (e *EchoFlow) ReceiveEcho(now cc.Time, sequence uint16) {
	for i, p := range e.probes {
		if p.sequence != sequence {
			continue
		}
		e.probes = append(e.probes[:0], e.probes[i+1:]...)
		rtt := now.Sub(p.at)
		e.answered, e.lost = now, 0
		if e.srtt == 0 {
			e.srtt = rtt
		} else {
			e.srtt += (rtt - e.srtt) / 8
		}
		e.report.RTT = rtt
		e.reportAcked(now, p.upTo)
		return
	}
}

// NextTimeout returns when the oldest request counts as lost, cc.Never without one.
func (e *EchoFlow) NextTimeout() cc.Time {
	if len(e.probes) == 0 {
		return cc.Never
	}
	return e.probes[0].at.Add(max(echoTimeout, echoTimeoutRTTs*e.srtt))
}

// Expire gives up requests that count as lost. What they covered is taken as gone, without a round trip.
func (e *EchoFlow) Expire(now cc.Time) {
	upTo, lost := cc.Bytes(0), 0
	for ; len(e.probes) > 0 && e.NextTimeout() <= now; lost++ {
		upTo = e.probes[0].upTo
		e.probes = append(e.probes[:0], e.probes[1:]...)
	}
	e.lost += lost
	if lost > 0 {
		e.report.RTT = 0
		e.reportAcked(now, upTo)
	}
}

// Unanswered returns how many requests in a row were lost, and when an answer came last; 0: none has.
func (e *EchoFlow) Unanswered() (requests int, answered cc.Time) { return e.lost, e.answered }

// SetFlows tells how many busy flows the packets belong to. They share the window as that many Flows would.
func (e *EchoFlow) SetFlows(now cc.Time, n int) error {
	t := e.terms
	t.Weight = min(max(1, t.Weight)*max(1, n), MaxWeight)
	return e.flow.Move(now, t)
}

// reportAcked reports that what left up to an offset has arrived.
func (e *EchoFlow) reportAcked(now cc.Time, upTo cc.Bytes) {
	e.report.At = now
	e.report.Acked = max(e.report.Acked, upTo)
	e.report.Pipe = e.report.Written - e.report.Acked
	e.flow.Report(e.report)
}

// Snapshot returns the flow's state.
func (e *EchoFlow) Snapshot() Snapshot { return e.flow.Snapshot() }

// Close leaves the group.
func (e *EchoFlow) Close(now cc.Time) { e.flow.Close(now) }

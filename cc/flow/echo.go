package flow

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// EchoBytes is the size of an echo request over IPv4: its headers, and 8 bytes that only its sender knows.
const EchoBytes cc.Bytes = 36

// Echo requests follow what has left, so often that their answers come as acknowledgements of a transport do: evenly,
// and not once for a burst.
const (
	echoEveryBytes            = 100 * EchoBytes       // least bytes between two requests, which are then 1 % of them
	echoPerWindow             = 32                    // most requests for one window of bytes
	echoSpacing               = time.Millisecond      // least time between requests, if it leaves leastPerWindow
	leastPerWindow            = 4                     // requests for one window of bytes
	echoesOfDrain    cc.Bytes = 24_000                // bytes after a cut of the window, with a request for each packet
	echoAtEndOfBurst          = 5 * time.Millisecond  // from the last packet to its request, while packets wait for room
	echoAtEnd                 = 50 * time.Millisecond // from the last packet to its request, while none waits
	echoTimeout               = time.Second           // an answer after this, and after echoTimeoutRTTs, is lost
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
	// ByEcho takes the answers to echo requests, which the owner sends when NextEcho says so. Acknowledgements of
	// packets by what carries them, such as QUIC, are answers, too.
	ByEcho
)

// A radio link fades for fractions of a second, and its window with it. Sparse flows are not held back by that: they
// may borrow what the usual rate is worth during loanTime, and the other packets make up for it.
const (
	loanTime      = 500 * time.Millisecond
	usualRateTime = 2 * time.Second // over which the usual rate is smoothed
)

// Hosts limit how many requests they answer in a second (macOS and iOS: 250, net.inet.icmp.icmplim), and networks lose
// some. The spacing of requests then grows, and shrinks again by spacingDecay of itself a second.
const (
	answeredGain = 1. / 32 // of the smoothed part of requests that are answered
	stallWeight  = 8       // of a request that timed out while packets waited for its answer
	rareAnswers  = 0.5     // part of the requests answered below which they become rarer
	firstSpacing = 5 * time.Millisecond
	maxSpacing   = 20 * time.Millisecond // rarer answers acknowledge a whole window at once
	spacingDecay = 1. / 256
	leastSpacing = time.Millisecond // below this bytes alone count
)

// Echo requests may be answered by a router in front of the queue, or overtake it. Their round trips are then shorter
// than those that transports beside see at the same moment.
const (
	compareEvery  = 50 * time.Millisecond
	compareGain   = 1. / 32 // of the smoothed part of comparisons in which a transport's round trip is longer
	shorterFactor = 1.5     // by which it is longer, and by shorterBy beyond that
	shorterBy     = 10 * time.Millisecond
	mostlyShorter = 0.9 // part of the comparisons that proves it: 72 in a row, or 4 seconds
)

// A host that has answered none of maxLost requests in a row, over maxSilence, answers no more. No outage lasts longer.
const (
	maxLost    = 3
	maxSilence = 10 * time.Second
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
	// denseBytes is how many bytes still get a request for each packet, after a cut of the window.
	denseBytes atomic.Int64

	credit    cc.Bytes // granted by the flow, not used yet; below 0: lent to sparse flows
	report    Report
	probes    []echoProbe // requests without an answer, the oldest first
	sequence  uint16      // of the newest request
	leftAt    cc.Time     // when a packet left last
	refused   bool        // the newest packet found no room, and waits
	askedAt   cc.Time     // when the newest request was sent
	srtt      time.Duration
	minRTT    time.Duration // least round trip of requests that followed a packet at once; 0: none yet
	usualRate cc.Rate
	usualAt   cc.Time // when usualRate was updated

	// expired is a request that timed out, the first in maxSilence. The zero value: its answer has come, or there is
	// none. An answer to it shows that the timeout is too short.
	expired      echoProbe
	lost         int           // requests that timed out since the newest answer; stallWeight each if packets waited
	silentAt     cc.Time       // when the first of them was sent
	spacing      time.Duration // least time between two requests; 0: bytes alone count
	relaxedAt    cc.Time       // when spacing was changed last
	answeredPart float64       // of the requests, smoothed
	isRare       bool          // too few are answered even at maxSpacing
	shorterPart  float64       // of the comparisons, smoothed: an echo's round trip was shorter than a transport's
	compareAt    cc.Time       // when the next comparison is due
}

// Trouble is why the answers to echo requests do not acknowledge packets.
type Trouble uint8

// The kinds of trouble.
const (
	NoTrouble Trouble = iota
	Silent            // the host answers no more
	RareAnswers
	BesideThePath // answers do not cross the queue that the packets stand in
)

// String returns the words that logs and JSON have for the trouble; empty for NoTrouble.
func (t Trouble) String() string {
	return [...]string{"", "no answers", "rare answers", "beside the path"}[t]
}

// echoProbe is a request without an answer.
type echoProbe struct {
	sequence      uint16
	at            cc.Time
	upTo          cc.Bytes // stream offset of what had left before it
	followsPacket bool     // it followed a packet at once, so that its round trip has the packet's own time on the link
}

// OpenEcho adds packets that by acknowledges to the group that t leads to. Wake is called, as a Leg's is, when a
// refused Take may succeed.
func (m *Manager) OpenEcho(now cc.Time, t Terms, by Source, wake func()) (*EchoFlow, error) {
	e := &EchoFlow{terms: t, source: by, answeredPart: 1}
	f, err := m.Open(now, t, Leg{Apply: e.applyLimit, Wake: wake})
	if err != nil {
		return nil, err
	}
	f.markEchoed()
	f.setFollower(now, by == ByTransport)
	e.flow = f
	return e, nil
}

// Source returns what acknowledges the packets.
func (e *EchoFlow) Source() Source { return e.source }

// AcknowledgeBy makes s acknowledge the packets from now on. What is in flight counts as arrived.
func (e *EchoFlow) AcknowledgeBy(now cc.Time, s Source) {
	taken := e.flow.setFollower(now, s == ByTransport)
	e.source, e.credit, e.probes = s, 0, nil
	e.lost, e.spacing, e.answeredPart, e.isRare, e.shorterPart = 0, 0, 1, false, 0
	e.report.Written, e.report.Acked = taken, taken
}

// applyLimit stores the limit. An algorithm that cuts its window to empty the queue wants to see the least round trip.
// A request behind several packets waits for all of them on a slow link, so each of the next packets gets its own.
func (e *EchoFlow) applyLimit(l Limit) {
	before := cc.Bytes(e.cwnd.Swap(int64(l.Cwnd)))
	if l.Cwnd < before*3/4 {
		e.denseBytes.Store(int64(min(before, echoesOfDrain)))
	}
}

// Take implements PacketWindow. With nothing in flight a packet leaves although there is too little room for it: no
// acknowledgement will make more.
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
	isIdle := e.source == ByEcho && e.report.Written == e.report.Acked
	isLent := sparse && e.credit-n >= -e.usualRate.BytesIn(loanTime)
	if e.refused = e.credit < room && !isIdle && !isLent; e.refused {
		return false
	}
	e.credit -= n
	e.report.Written += n
	e.report.MSS = max(e.report.MSS, min(n, maxPacket))
	e.leftAt = now
	if e.denseBytes.Load() > 0 {
		e.denseBytes.Add(-int64(n))
	}
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

// StopWanting withdraws the request for room, because no packet waits any more.
func (e *EchoFlow) StopWanting(now cc.Time) { e.flow.Take(now, 0) }

// QueueTarget implements PacketWindow.
func (e *EchoFlow) QueueTarget() time.Duration {
	return min(max(queueTargetLeast, e.srtt*3/2), queueTargetMost)
}

// UsualRate implements PacketWindow.
func (e *EchoFlow) UsualRate() cc.Rate { return e.usualRate }

// updateUsual smooths the rate that the window allows.
func (e *EchoFlow) updateUsual(now cc.Time) {
	if e.srtt == 0 {
		return
	}
	rate := cc.RateOf(cc.Bytes(e.cwnd.Load()), e.srtt)
	if e.usualAt == 0 {
		e.usualRate = rate
	} else {
		e.usualRate += cc.Rate(float64(rate-e.usualRate) * min(1, now.Sub(e.usualAt).Seconds()/usualRateTime.Seconds()))
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
	at := e.leftAt
	switch uncovered := e.report.Written - covered; {
	case uncovered <= 0:
		return cc.Never
	case uncovered >= e.echoInterval() || e.denseBytes.Load() > 0:
	case e.refused:
		at = at.Add(echoAtEndOfBurst)
	default:
		at = at.Add(echoAtEnd)
	}
	return max(at, e.askedAt.Add(e.spacing))
}

// echoInterval returns how many bytes leave between two requests.
func (e *EchoFlow) echoInterval() cc.Bytes {
	cwnd := cc.Bytes(e.cwnd.Load())
	return max(echoEveryBytes, cwnd/echoPerWindow, min(cwnd/leastPerWindow, e.usualRate.BytesIn(echoSpacing)))
}

// SendEcho accounts for an echo request that is sent now and returns its sequence number. A packet that its carrier
// acknowledges is a request itself: SendEcho follows its Take then.
func (e *EchoFlow) SendEcho(now cc.Time) (sequence uint16) {
	if now.Sub(e.askedAt) > maxSilence {
		e.lost = 0 // the host was idle, and nothing is known of it
	}
	e.sequence++
	e.askedAt = now
	e.probes = append(e.probes, echoProbe{e.sequence, now, e.report.Written, now == e.leftAt})
	return e.sequence
}

// ReceiveEcho takes in the answer to an echo request. One that is late acknowledges nothing, and lengthens the timeout.
func (e *EchoFlow) ReceiveEcho(now cc.Time, sequence uint16) { e.ReceiveAck(now, sequence, 1, 0) }

// ReceiveAck takes in one answer to n requests. sequence is the newest's, and delay is how long the host kept the
// answer (RFC 9000 §19.3).
func (e *EchoFlow) ReceiveAck(now cc.Time, sequence uint16, n int, delay time.Duration) {
	for i, p := range e.probes {
		if p.sequence != sequence {
			continue
		}
		e.probes = e.probes[i+1:]
		rtt := now.Sub(p.at)
		if less := rtt - delay; e.minRTT > 0 && less >= e.minRTT { // as RFC 9002 §5.3 has it
			rtt = less
		}
		e.countAnswers(now, max(0, e.lost+i+1-n), n)
		e.lost = 0
		e.compareWithTransports(now, rtt)
		if p.followsPacket && (e.minRTT == 0 || rtt < e.minRTT) {
			e.minRTT = rtt
		}
		e.report.RTT = max(rtt, e.minRTT)
		if e.srtt == 0 {
			e.srtt = rtt
		} else {
			e.srtt += (rtt - e.srtt) / 8
		}
		e.reportAcked(now, p.upTo)
		return
	}
	e.lost = max(0, e.lost-stallWeight) // it was late, and not lost
	if p := e.expired; p.sequence == sequence && p.at != 0 {
		e.srtt, e.expired, e.lost = max(e.srtt, now.Sub(p.at)), echoProbe{}, 0 // the others are late as well
	}
}

// countAnswers counts requests as unanswered, and then some as answered. It makes requests as frequent as answers.
func (e *EchoFlow) countAnswers(now cc.Time, unanswered, answered int) {
	e.answeredPart *= math.Pow(1-answeredGain, float64(unanswered))
	e.answeredPart += (1 - e.answeredPart) * (1 - math.Pow(1-answeredGain, float64(answered)))
	switch {
	case e.answeredPart < rareAnswers:
		e.isRare = e.isRare || 2*e.spacing > maxSpacing
		e.spacing = min(max(2*e.spacing, firstSpacing), maxSpacing)
		e.answeredPart, e.relaxedAt = 1, now
	case now.Sub(e.relaxedAt) >= time.Second:
		e.spacing -= time.Duration(spacingDecay * float64(e.spacing))
		if e.relaxedAt = now; e.spacing < leastSpacing {
			e.spacing = 0
		}
	}
}

// compareWithTransports compares an answer's round trip with the newest one of transports to the same host.
func (e *EchoFlow) compareWithTransports(now cc.Time, rtt time.Duration) {
	if now < e.compareAt {
		return
	}
	e.compareAt = now.Add(compareEvery)
	transport, ok := e.flow.transportRTT(now, compareEvery)
	if !ok {
		return
	}
	isShorter := 0.0
	if float64(transport-shorterBy) > shorterFactor*float64(rtt) {
		isShorter = 1
	}
	e.shorterPart += compareGain * (isShorter - e.shorterPart)
}

// Trouble returns why the packets need another kind of acknowledgement; NoTrouble: they do not.
func (e *EchoFlow) Trouble() Trouble {
	switch {
	case e.shorterPart > mostlyShorter:
		return BesideThePath
	case e.isRare:
		return RareAnswers
	case e.lost >= maxLost && e.askedAt.Sub(e.silentAt) > maxSilence:
		return Silent
	}
	return NoTrouble
}

// NextTimeout returns when the oldest request counts as lost, cc.Never without one.
func (e *EchoFlow) NextTimeout() cc.Time {
	if len(e.probes) == 0 {
		return cc.Never
	}
	return e.probes[0].at.Add(max(echoTimeout, echoTimeoutRTTs*e.srtt))
}

// Expire gives up requests that count as lost. What they covered is taken as gone.
func (e *EchoFlow) Expire(now cc.Time) {
	upTo, lost := cc.Bytes(0), 0
	for ; len(e.probes) > 0 && e.NextTimeout() <= now; lost++ {
		if e.lost+lost == 0 {
			e.silentAt = e.probes[0].at
		}
		if e.expired.at == 0 || now.Sub(e.expired.at) > maxSilence {
			e.expired = e.probes[0]
		}
		upTo = e.probes[0].upTo
		e.probes = append(e.probes[:0], e.probes[1:]...)
	}
	if lost == 0 {
		return
	}
	if e.refused {
		lost *= stallWeight
	}
	e.lost += lost
	e.report.RTT = 0
	e.reportAcked(now, upTo)
}

// SetFlows sets how many busy flows the packets belong to. They share the window as that many Flows would.
func (e *EchoFlow) SetFlows(now cc.Time, n int) error {
	return e.flow.Move(now, e.terms.multiply(max(1, n)))
}

// reportAcked reports that what left up to an offset has arrived.
func (e *EchoFlow) reportAcked(now cc.Time, upTo cc.Bytes) {
	e.report.At = now
	e.report.Acked = max(e.report.Acked, upTo)
	e.report.Pipe = e.report.Written - e.report.Acked
	// Bytes arrive evenly, and one answer acknowledges many: half of them, less a packet, count as arrived.
	if len(e.probes) > 0 {
		lump := min(e.probes[0].upTo-e.report.Acked, e.echoInterval())
		e.report.Pipe -= max(0, lump-e.report.MSS) / 2
	}
	e.flow.Report(e.report)
}

// Snapshot returns the flow's state.
func (e *EchoFlow) Snapshot() Snapshot { return e.flow.Snapshot() }

// Close leaves the group.
func (e *EchoFlow) Close(now cc.Time) { e.flow.Close(now) }

package linkstat

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Rates are averaged over meterWindow, or over meterPeriods intervals between readings if that is longer.
const (
	meterWindow  = 40 * time.Millisecond
	meterPeriods = 2
)

// Headers in bytes.
const (
	frameHeader   = 14                   // Ethernet's, which queues count with a packet
	packetHeaders = 1500 - cc.DefaultMSS // IP's and TCP's in a packet that is full
)

// queueID identifies a queue. A queue that replaces another has another queueID.
type queueID struct {
	// link is the index of the interface.
	link   int
	handle uint32
	kind   string
}

// reading is the state of a queue at one moment. Its counters began when the queue was made.
type reading struct {
	at    cc.Time
	queue queueID
	// sent are bytes that have left the queue.
	sent cc.Bytes
	// packets have left the queue; wraps around.
	packets uint32
	// dropped are packets; wraps around.
	dropped uint32
	// backlog are bytes that wait in the queue.
	backlog cc.Bytes
	// waiting are packets that wait in the queue.
	waiting int
}

// meter turns successive readings of a queue into the rate at which bytes arrive.
type meter struct {
	window time.Duration
	// readings have the newest last. The first may be older than the window.
	readings []reading
}

// newMeter returns a meter for readings at an interval. Its window holds at least meterPeriods of
// them.
func newMeter(interval time.Duration) *meter {
	return &meter{window: max(meterWindow, meterPeriods*interval)}
}

// addReading adds a reading. It drops all earlier ones if the queue was replaced, or its counters were reset.
func (m *meter) addReading(r reading) {
	if n := len(m.readings); n > 0 {
		switch last := m.readings[n-1]; {
		case r.queue != last.queue || r.sent < last.sent:
			m.readings = m.readings[:0]
		case r.at <= last.at:
			return
		}
	}
	m.readings = append(m.readings, r)
	// The window begins at the newest reading that is at least as old.
	old := 0
	for old+1 < len(m.readings) && r.at.Sub(m.readings[old+1].at) >= m.window {
		old++
	}
	m.readings = append(m.readings[:0], m.readings[old:]...)
}

// arrivalRate returns the rate at which bytes arrived at the queue, dropped ones included. If no packet has left the
// queue, a dropped one counts as a frame. 0: not known yet.
func (m *meter) arrivalRate(frame cc.Bytes) cc.Rate {
	if len(m.readings) < 2 {
		return 0
	}
	first, last := m.readings[0], m.readings[len(m.readings)-1]
	sent := last.sent - first.sent
	arrived := sent + last.backlog - first.backlog
	if dropped := last.dropped - first.dropped; dropped > 0 {
		size := frame
		if packets := last.packets - first.packets; packets > 0 {
			size = sent / cc.Bytes(packets)
		}
		arrived += cc.Bytes(dropped) * size
	}
	return knownValue(cc.RateOf(max(0, arrived), last.at.Sub(first.at)))
}

// limit bounds what a queue holds. 0: not known, or no limit of that kind.
type limit struct {
	bytes   cc.Bytes
	packets int
}

// smallerOf returns the smaller limit of each kind.
func (l limit) smallerOf(o limit) limit {
	return limit{leastKnownOf(l.bytes, o.bytes), leastKnownOf(l.packets, o.packets)}
}

// freeRoom returns the free bytes in a queue with that limit. 0: not known.
func (l limit) freeRoom(r reading, frame cc.Bytes) (room cc.Bytes) {
	if l.bytes > 0 {
		room = knownValue(l.bytes - r.backlog)
	}
	if l.packets > 0 {
		room = leastKnownOf(room, knownValue(cc.Bytes(l.packets-r.waiting)*frame))
	}
	return room
}

// link has what changes rarely about a link.
type link struct {
	// rate is with frame headers. 0: not known.
	rate cc.Rate
	// limit is that of its queue.
	limit limit
	// mtu is in bytes.
	mtu cc.Bytes
}

// maxFrame returns the size of the largest frame on the link, in bytes.
func (l link) maxFrame() cc.Bytes { return l.mtu + frameHeader }

// payloadRate returns the part of a rate that is payload, in full segments.
func (l link) payloadRate(r cc.Rate) cc.Rate {
	if l.mtu <= 0 {
		return r
	}
	segment := max(0, l.mtu-packetHeaders)
	return cc.Rate(float64(r) * float64(segment) / float64(l.maxFrame()))
}

// makeHint makes the hint for the hosts behind the link, from the newest reading of m. It divides all of the link's
// rate among the hosts, because other traffic on the link is not known here.
func (l link) makeHint(m *meter, u Users) cc.Hint {
	r := m.readings[len(m.readings)-1]
	h := cc.Hint{
		At:          max(1, r.at),
		LinkRate:    l.rate,
		ArrivalRate: m.arrivalRate(l.maxFrame()),
		QueueRoom:   l.limit.freeRoom(r, l.maxFrame()),
		Flows:       u.Flows,
	}
	h.FairShare = l.payloadRate(l.rate) / cc.Rate(max(1, u.Hosts))
	h.Capacity = h.FairShare
	return h
}

// knownValue returns v, but 1 instead of 0, because 0 stands for an unknown value in a cc.Hint.
func knownValue[N cc.Bytes | cc.Rate](v N) N { return max(1, v) }

// leastKnownOf returns the lesser of the known values. 0 is unknown.
func leastKnownOf[N cc.Bytes | cc.Rate | int](a, b N) N {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

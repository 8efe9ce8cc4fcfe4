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

// queueID identifies a queue: another that takes its place has another.
type queueID struct {
	link   int // interface index
	handle uint32
	kind   string
}

// reading is a queue at one moment. What it counts began when the queue was made.
type reading struct {
	at      cc.Time
	queue   queueID
	sent    cc.Bytes // that left it
	packets uint32   // likewise; wraps around
	dropped uint32   // packets; wraps around
	backlog cc.Bytes // that waits in it
	waiting int      // likewise, packets
}

// meter turns successive readings of a queue into the rate at which bytes come.
type meter struct {
	window   time.Duration
	readings []reading // the newest last; the first may be older than the window
}

func newMeter(interval time.Duration) *meter {
	return &meter{window: max(meterWindow, meterPeriods*interval)}
}

// addReading takes in a reading. Where it is of another queue than the last, or of one
// that has begun anew, what came before counts no longer.
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
	// The newest that is as old as the window is where that begins.
	old := 0
	for old+1 < len(m.readings) && r.at.Sub(m.readings[old+1].at) >= m.window {
		old++
	}
	m.readings = append(m.readings[:0], m.readings[old:]...)
}

// arrivalRate is the rate at which bytes came to the queue, those among them that it
// dropped; 0: not known yet.
func (m *meter) arrivalRate(frame cc.Bytes) cc.Rate {
	if len(m.readings) < 2 {
		return 0
	}
	first, last := m.readings[0], m.readings[len(m.readings)-1]
	sent := last.sent - first.sent
	came := sent + last.backlog - first.backlog
	if dropped := last.dropped - first.dropped; dropped > 0 {
		size := frame
		if packets := last.packets - first.packets; packets > 0 {
			size = sent / cc.Bytes(packets)
		}
		came += cc.Bytes(dropped) * size
	}
	return knownValue(cc.RateOf(max(0, came), last.at.Sub(first.at)))
}

// limit is what a queue holds at most; 0: not known, or no limit of that kind.
type limit struct {
	bytes   cc.Bytes
	packets int
}

// smallerOf joins two limits that both hold.
func (l limit) smallerOf(o limit) limit {
	return limit{leastKnownOf(l.bytes, o.bytes), leastKnownOf(l.packets, o.packets)}
}

// freeRoom is what is free in a queue with that limit; 0: not known.
func (l limit) freeRoom(r reading, frame cc.Bytes) (room cc.Bytes) {
	if l.bytes > 0 {
		room = knownValue(l.bytes - r.backlog)
	}
	if l.packets > 0 {
		room = leastKnownOf(room, knownValue(cc.Bytes(l.packets-r.waiting)*frame))
	}
	return room
}

// link is what changes rarely about a link.
type link struct {
	rate  cc.Rate // what it carries, with frame headers; 0: not known
	limit limit   // of its queue
	mtu   cc.Bytes
}

// maxFrame is the largest packet on the link.
func (l link) maxFrame() cc.Bytes { return l.mtu + frameHeader }

// payloadRate is what is left of a rate on the link without headers, in full segments.
func (l link) payloadRate(r cc.Rate) cc.Rate {
	if l.mtu <= 0 {
		return r
	}
	segment := max(0, l.mtu-packetHeaders)
	return cc.Rate(float64(r) * float64(segment) / float64(l.maxFrame()))
}

// makeHint makes a hint for each host behind the link of m, whose newest reading tells the queue, and of
// the link's users. Other traffic on the link is not known here: the hosts divide all of its rate.
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

// knownValue keeps a value that is 0 apart from one that is not known, in a cc.Hint.
func knownValue[N cc.Bytes | cc.Rate](v N) N { return max(1, v) }

// leastKnownOf is the lesser of those two that are known: not 0.
func leastKnownOf[N cc.Bytes | cc.Rate | int](a, b N) N {
	if a == 0 || b == 0 {
		return max(a, b)
	}
	return min(a, b)
}

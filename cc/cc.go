// Package cc holds congestion-control algorithms: signals come in, a window
// and a pacing rate go out. It does no I/O, reads no clock and starts no
// goroutine, so one implementation runs on every datapath and in virtual time.
package cc

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"time"
)

// Algorithm decides how much may be in flight on one path. It does no I/O and never blocks. The caller
// makes one call at a time.
type Algorithm interface {
	OnAck(Ack)        // bytes were acknowledged
	OnLoss(Loss)      // bytes were lost, or the transport's retransmission timer fired
	OnTick(State)     // Control.NextTick has come; may be late, never early
	Control() Control // the limits now in force; no side effects
}

// Inspector is an algorithm that shows internal values, beside its limits.
type Inspector interface {
	Inspect() Internals // no side effects
}

// MaxInternals bounds the number of values that an algorithm shows.
const MaxInternals = 8

// Internals are values in the order of Spec.Internals. All are finite: a value that is not known yet, or
// infinite, is 0. They are for traces only.
type Internals [MaxInternals]float64

// Control is what an algorithm allows from now on.
type Control struct {
	Cwnd       Bytes  // ceiling on bytes in flight; always finite and at least one MSS
	PacingRate Rate   // 0: not paced
	NextTick   Time   // when OnTick is due; 0: no tick wanted
	Phase      string // "slow_start", "probe_rtt", …; for traces only
}

// State is the sender's estimate of its path, which is the same for all algorithms. Every event embeds the
// state after that event.
type State struct {
	Now                  Time
	MSS                  Bytes
	Inflight             Bytes // accepted by the sender and not yet acknowledged
	Delivered            Bytes // acknowledged since the start
	EdgeDelivered        Bytes // acknowledged since the start, over all windows at the edge under this algorithm
	SRTT, RTTVar, MinRTT time.Duration
	// SRTT and RTTVar follow RFC 6298. MinRTT is over the flow's life; an algorithm
	// that needs it over a window keeps its own filter. All are 0 before the first
	// sample.
	CwndLimited bool // the window, not the application, held the sender back
	// OneWay is whether the receiver's timestamps tell the two ways of a round trip
	// apart: of the newest acknowledgement's flow.
	OneWay bool
	// RivalRate is the rate of traffic to the same host under no window of ours, headers included, as counted where it
	// enters the path. 0: there is none, or it is not counted.
	RivalRate Rate
	// Hint is the newest hint about the path, to be read during the call
	// only; nil: there is none.
	Hint *Hint
}

// Hint is information of the network itself, such as a base station or a router, about the path to a host.
// A value that it does not know is 0.
type Hint struct {
	At Time // when the values were measured, by the sender's clock
	// rate that the link could carry for this host now, without headers: the host's part and a share of the idle rate
	Capacity    Rate
	FairShare   Rate    // the same if every active host had the same rate
	LinkRate    Rate    // of the whole link
	ArrivalRate Rate    // at the link's queue, of all flows
	QueueRoom   Bytes   // free in that queue
	Flows       int     // through that queue
	RadioLost   Bytes   // of this host, lost to bad reception and not to a full queue; cumulative
	Share       float64 // of LinkRate, assigned to this host by priority: above 0, up to 1
}

// Age returns the age of the hint at now; for no hint the longest duration.
func (h *Hint) Age(now Time) time.Duration {
	if h == nil {
		return math.MaxInt64
	}
	return now.Sub(h.At)
}

// Ack reports newly acknowledged bytes.
type Ack struct {
	State
	Acked, Marked Bytes         // newly acknowledged, and the part that was ECN-CE marked
	L4S           bool          // they left as ECT(1), and every mark is known, so marks are proportional (RFC 9331)
	RTT           time.Duration // of the newest acknowledged byte; 0: no sample
	DeliveryRate  Rate          // over that byte's flight; 0: no sample
	Sent          Sent          // the flow as it was when that byte left
	// ReverseQueue is the queueing delay of the acknowledgement on its way back. It is a part
	// of RTT, and at most RTT−MinRTT. 0: none, or not known. RTT−ReverseQueue minus its own
	// minimum is the queueing delay on the way there.
	ReverseQueue time.Duration
}

// Sent is the state of a flow at the moment one of its bytes left.
type Sent struct {
	At, DeliveredAt           Time // when it left; when Delivered was last raised before that
	Cwnd, Inflight, Delivered Bytes
	AppLimited                bool // the delivery rate over this byte's flight understates the path
}

// Loss reports bytes that the transport found lost.
type Loss struct {
	State
	Lost    Bytes
	SentAt  Time // when the newest lost byte left; Now−SRTT where the transport hides it
	Timeout bool // the transport's retransmission timer fired
}

// Ends are the source and the destination of bytes; invalid: not known.
type Ends struct{ From, To netip.AddrPort }

// Config is the input of a new algorithm.
type Config struct {
	MSS, InitialCwnd Bytes
	// Ssthresh is where slow start ends at the latest, if the path is known
	// (RFC 5681 §3.1 leaves its first value open); 0: not known.
	Ssthresh Bytes
	// Receives is whether the window is advertised to a host that sends. Its round trips
	// then include the queue towards the host on their way back.
	Receives bool
	Params   Params     // complete: the Spec's defaults, overridden by policy
	Rand     *rand.Rand // the only randomness an algorithm may use
	// Ends are those of a flow with a window of its own. For a shared window To is the host of the first flow, with
	// port 0.
	Ends Ends
	// Wake makes the caller call OnTick at once, before Control.NextTick. It may be called
	// from any goroutine, but not within a call of the algorithm. After the end of the
	// algorithm it does nothing; nil: the algorithm cannot be woken.
	Wake func(now Time)
}

// Closer is an algorithm with resources outside its flow, such as a connection to an agent.
type Closer interface {
	Close() // ends the algorithm: no call follows
}

// Close ends an algorithm that New has built.
func Close(a Algorithm) {
	if c := findCloser(a); c != nil {
		c.Close()
	}
}

// Closes reports whether an algorithm that New has built, or one inside it, is a Closer.
func Closes(a Algorithm) bool { return findCloser(a) != nil }

func findCloser(a Algorithm) Closer {
	for a != nil {
		switch w := a.(type) {
		case Closer:
			return w
		case inspected:
			a = w.Algorithm
		case *ceiling:
			a = w.Algorithm
		case lossMarks:
			a = w.Algorithm
		default:
			return nil
		}
	}
	return nil
}

// NoTick is embedded by algorithms that need no timer.
type NoTick struct{}

// OnTick does nothing.
func (NoTick) OnTick(State) {}

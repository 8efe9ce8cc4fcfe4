package netstack

import (
	"fmt"
	"reflect"
	"time"
	"unsafe"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

// envelope is the stack's own congestion control, whose window bounds ours. It decides alone
// unless the relay keeps a window: then widen opens the stack's, which each packet lost at
// random would halve.
const envelope = "reno"

// The least retransmission timeout of a connection whose window is ours: leastRTOs
// round trips, up to RFC 6298's second (2.4), and no less than the stack's own. The
// stack's timer counts from the last byte acknowledged in order, not from a
// retransmission as that RFC has it (5.1): it allows a round trip and a little, which
// any recovery on a steady path takes, and a radio's pause, and then all that was in
// flight is sent again. A second for all would cost short paths their throughput.
const (
	leastRTOs = 8
	mostLeast = time.Second
)

// places are offsets of fields of gVisor that it shows to its probe in copies only, and has no
// option to set: in an endpoint, of the pointer to its sender; in the sender, of its state, its
// least timeout, and the timers that make it send again.
type places struct{ sender, state, leastRTO, resend, probe uintptr }

var known, unreachable = findPlaces(reflect.TypeFor[tcp.Endpoint]())

// findPlaces looks for the fields by name and type. It fails with a version of the
// stack that keeps them elsewhere.
func findPlaces(endpoint reflect.Type) (p places, err error) {
	snd, ok := endpoint.FieldByName("snd")
	if !ok || snd.Type.Kind() != reflect.Pointer || snd.Type.Elem().Kind() != reflect.Struct {
		return p, fmt.Errorf("netstack: %v has no sender in snd", endpoint)
	}
	field := func(name string, fits func(reflect.Type) bool) uintptr {
		f, ok := snd.Type.Elem().FieldByName(name)
		if !ok || !fits(f.Type) || len(f.Index) != 1 {
			err = fmt.Errorf("netstack: %v has no %s as it is known", snd.Type.Elem(), name)
		}
		return f.Offset
	}
	p = places{
		sender:   snd.Offset,
		state:    field("TCPSenderState", isType[tcp.TCPSenderState]),
		leastRTO: field("minRTO", isType[time.Duration]),
		resend:   field("resendTimer", isTimer),
		probe:    field("probeTimer", isTimer),
	}
	return p, err
}

func isType[T any](t reflect.Type) bool { return t == reflect.TypeFor[T]() }

// isTimer tells whether t is laid out as timer.
func isTimer(t reflect.Type) bool {
	ours := reflect.TypeFor[timer]()
	if t.Kind() != reflect.Struct || t.NumField() != ours.NumField() {
		return false
	}
	for i := range ours.NumField() {
		a, b := t.Field(i), ours.Field(i)
		if a.Name != b.Name || a.Type != b.Type && a.Type.Kind() != reflect.Int || a.Type.Kind() != b.Type.Kind() {
			return false
		}
	}
	return true
}

// timer is laid out as gVisor's timer, which it does not export.
type timer struct {
	state       int // in gVisor of a type of its own
	clock       tcpip.Clock
	target      tcpip.MonotonicTime
	clockTarget tcpip.MonotonicTime
	timer       tcpip.Timer
	callback    func()
}

// States of a timer: one that was stopped, and one that runs.
const (
	timerStopped = 1
	timerRuns    = 2
)

func (t *timer) isRunning() bool { return t.state == timerRuns }

// startTimer makes the timer expire after d, as gVisor's enable does.
func (t *timer) startTimer(d time.Duration) {
	t.target = t.clock.NowMonotonic().Add(d)
	t.clockTarget, t.state = t.target, timerRuns
	if t.timer == nil {
		t.timer = t.clock.AfterFunc(d, t.callback)
	} else {
		t.timer.Reset(d)
	}
}

// sender points into the sending side of an endpoint of the stack.
type sender struct {
	*tcp.TCPSenderState
	leastRTO      *time.Duration
	resend, probe *timer
}

// senderOf returns an endpoint's sender; false: it has none yet, or findPlaces failed. The
// caller holds the endpoint's lock, as the caller of the stack's probe does.
func senderOf(e *tcp.Endpoint) (s sender, ok bool) {
	if unreachable != nil {
		return s, false
	}
	at := *(*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(e), known.sender))
	if at == nil {
		return s, false
	}
	return sender{
		TCPSenderState: (*tcp.TCPSenderState)(unsafe.Add(at, known.state)),
		leastRTO:       (*time.Duration)(unsafe.Add(at, known.leastRTO)),
		resend:         (*timer)(unsafe.Add(at, known.resend)),
		probe:          (*timer)(unsafe.Add(at, known.probe)),
	}, true
}

// correctOutstanding corrects how many packets the stack takes to be in flight. During a
// recovery it leaves out those it has sent again, but takes them off when they are
// acknowledged, so that the count is too low, or 0, for the packets sent since. With
// 0 in flight, it stops its retransmission timer. Outside of a recovery, all that was
// sent and neither acknowledged nor SACKed is in flight (RFC 6675 §2).
func (s sender) correctOutstanding(sacked []header.SACKBlock) {
	sent := s.SndUna.Size(s.SndNxt)
	if sent == 0 || s.MaxPayloadSize <= 0 {
		return
	}
	if s.FastRecovery.Active || !s.FastRecovery.Last.LessThan(s.SndUna) {
		s.Outstanding = max(1, s.Outstanding)
		return
	}
	for _, b := range sacked {
		if s.SndUna.LessThan(b.Start) && b.End.LessThanEq(s.SndNxt) {
			sent -= b.Start.Size(b.End)
		}
	}
	s.Outstanding = max(1, (int(sent)+s.MaxPayloadSize-1)/s.MaxPayloadSize)
}

// widenCwnd opens the stack's window by ours, in bytes, above what it takes to be in flight; it
// never narrows it. The relay bounds what is in flight.
func (s sender) widenCwnd(ours cc.Bytes) {
	if ours == 0 {
		return
	}
	*s.leastRTO = max(tcp.MinRTO, min(leastRTOs*s.RTTState.SRTT, mostLeast))
	s.SndCwnd = max(s.SndCwnd, s.Outstanding+int(ours)/max(s.MaxPayloadSize, 1))
}

// resumeRetransmission starts the retransmission timer if the stack waits for an acknowledgement and no
// timer runs that would make it send again; it tells whether that was so.
func (s sender) resumeRetransmission() bool {
	if s.SndUna == s.SndNxt || s.resend.isRunning() || s.probe.isRunning() || s.resend.clock == nil {
		return false
	}
	s.Outstanding = max(1, s.Outstanding)
	s.resend.startTimer(s.RTO)
	return true
}

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

// stackAlgorithm is the stack's own congestion control. It decides alone unless the relay keeps a
// window: then widenCwnd opens the stack's window, which each packet lost at random would halve.
const stackAlgorithm = "reno"

// The least retransmission timeout of a connection with a window of ours: minRTORoundTrips round
// trips, up to RFC 6298's second (2.4), and no less than the stack's own. The stack's timer
// counts from the last byte acknowledged in order, not from a retransmission as that RFC has it
// (5.1). It allows a round trip and a little. Any recovery on a steady path takes that, and so
// does a radio's pause, and then all that was in flight is sent again. A second for all would
// cost short paths their throughput.
const (
	minRTORoundTrips = 8
	maxMinRTO        = time.Second
)

// senderLayout is where gVisor keeps what this file reads and writes by reflect and unsafe.
// gVisor does not export these fields, shows them to its probe in copies only, and has no option
// to set them.
//
//	field of tcp.Endpoint  of its sender    why
//	snd                                     leads to the sender
//	                       TCPSenderState   SndCwnd: widenCwnd opens the window; Outstanding: correctOutstanding
//	                       minRTO           widenCwnd sets the least retransmission timeout
//	                       resendTimer      resumeRetransmission starts it where the stack forgot to
//	                       probeTimer       its callback is wrapped: tail loss probes wait (minProbeDelay)
//
// findSenderLayout looks for them by name and type when the program starts. With a version of
// gVisor that keeps them elsewhere, senderOf returns false, nothing is written, and the stack's
// own window and timers hold. TestFindSenderLayout fails then. The caller holds the endpoint's
// lock, as gVisor does where it uses these fields.
type senderLayout struct{ sender, state, leastRTO, resend, probe uintptr }

var layout, layoutErr = findSenderLayout(reflect.TypeFor[tcp.Endpoint]())

// findSenderLayout looks for the fields by name and type.
func findSenderLayout(endpoint reflect.Type) (p senderLayout, err error) {
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
	p = senderLayout{
		sender:   snd.Offset,
		state:    field("TCPSenderState", isType[tcp.TCPSenderState]),
		leastRTO: field("minRTO", isType[time.Duration]),
		resend:   field("resendTimer", isTimer),
		probe:    field("probeTimer", isTimer),
	}
	return p, err
}

// isType reports whether t is T.
func isType[T any](t reflect.Type) bool { return t == reflect.TypeFor[T]() }

// isTimer reports whether t is laid out as timer.
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

// isRunning reports whether the timer is to expire. A timer that was stopped may expire all the
// same, and then does nothing.
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

// wrapCallback makes the timer call before each time it expires, ahead of the stack's callback.
// False: the timer has just expired, and nothing was changed.
func (t *timer) wrapCallback(before func()) bool {
	if t.state != timerStopped && t.timer != nil && !t.timer.Stop() {
		return false
	}
	expired := t.callback
	t.callback = func() {
		before()
		expired()
	}
	t.timer = nil // it would call the old callback
	if t.isRunning() {
		t.startTimer(t.target.Sub(t.clock.NowMonotonic()))
	} else {
		t.state = timerStopped
	}
	return true
}

// postponeTarget sets the target of a timer that has expired to d from now. The stack's callback
// compares the time with target, and starts the timer again.
func (t *timer) postponeTarget(d time.Duration) {
	if !t.isRunning() {
		return // a timer of an endpoint that has ended has no clock either
	}
	if due := t.clock.NowMonotonic().Add(d); t.target.Before(due) {
		t.target = due
	}
}

// sender points into the sending side of an endpoint of the stack.
type sender struct {
	*tcp.TCPSenderState
	leastRTO      *time.Duration
	resend, probe *timer
}

// senderOf returns an endpoint's sender; false: it has none yet, or findSenderLayout failed. The
// caller holds the endpoint's lock, as the caller of the stack's probe does.
func senderOf(e *tcp.Endpoint) (s sender, ok bool) {
	if layoutErr != nil {
		return s, false
	}
	at := *(*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(e), layout.sender))
	if at == nil {
		return s, false
	}
	return sender{
		TCPSenderState: (*tcp.TCPSenderState)(unsafe.Add(at, layout.state)),
		leastRTO:       (*time.Duration)(unsafe.Add(at, layout.leastRTO)),
		resend:         (*timer)(unsafe.Add(at, layout.resend)),
		probe:          (*timer)(unsafe.Add(at, layout.probe)),
	}, true
}

// correctOutstanding corrects how many packets the stack takes to be in flight. During a recovery
// it leaves out those it has sent again, but takes them off when they are acknowledged. The count
// is then too low, or 0, for the packets sent since. With 0 in flight, it stops its
// retransmission timer. Outside of a recovery, all that was sent and neither acknowledged nor
// SACKed is in flight (RFC 6675 §2).
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

// widenCwnd opens the stack's window by ours, in bytes, above what it takes to be in flight. It
// never narrows it: the relay bounds what is in flight.
func (s sender) widenCwnd(ours cc.Bytes) {
	if ours == 0 {
		return
	}
	*s.leastRTO = max(tcp.MinRTO, min(minRTORoundTrips*s.RTTState.SRTT, maxMinRTO))
	s.SndCwnd = max(s.SndCwnd, s.Outstanding+int(ours)/max(s.MaxPayloadSize, 1))
}

// resumeRetransmission starts the retransmission timer if the stack waits for an acknowledgement
// and no timer runs that would make it send again. It reports whether it did.
func (s sender) resumeRetransmission() bool {
	if s.SndUna == s.SndNxt || s.resend.isRunning() || s.probe.isRunning() || s.resend.clock == nil {
		return false
	}
	s.Outstanding = max(1, s.Outstanding)
	s.resend.startTimer(s.RTO)
	return true
}

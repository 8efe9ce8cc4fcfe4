package netstack

import (
	"fmt"
	"reflect"
	"time"
	"unsafe"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

// envelope is the stack's own congestion control, inside whose window ours lies.
// It reigns alone where nobody observes; where somebody does, widen opens its
// window, since each packet lost at random would halve it.
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

// places are the offsets of what a stack shows to its probe in copies only, and has
// no option to set: in an endpoint of the pointer to its sender, and in that of its
// state and its least timeout.
type places struct{ sender, state, leastRTO uintptr }

var known, unreachable = findPlaces(reflect.TypeFor[tcp.Endpoint]())

// findPlaces looks for the fields by name and type. It fails with a version of the
// stack that keeps them elsewhere.
func findPlaces(endpoint reflect.Type) (p places, err error) {
	sender, ok := endpoint.FieldByName("snd")
	if !ok || sender.Type.Kind() != reflect.Pointer || sender.Type.Elem().Kind() != reflect.Struct {
		return p, fmt.Errorf("netstack: %v has no sender in snd", endpoint)
	}
	in := func(name string, want reflect.Type) uintptr {
		f, ok := sender.Type.Elem().FieldByName(name)
		if !ok || f.Type != want || len(f.Index) != 1 {
			err = fmt.Errorf("netstack: %v has no %s of type %v", sender.Type.Elem(), name, want)
		}
		return f.Offset
	}
	p = places{
		sender:   sender.Offset,
		state:    in("TCPSenderState", reflect.TypeFor[tcp.TCPSenderState]()),
		leastRTO: in("minRTO", reflect.TypeFor[time.Duration]()),
	}
	return p, err
}

// widen opens the stack's window by ours above what it takes to be in flight, and
// returns what it is now, in segments; it never narrows it. What is in flight is for
// the relay to bound: the stack's own count is not taken anew when a recovery ends,
// and was up to twice the truth then. The caller is the stack's probe, which holds
// the endpoint's lock.
func widen(endpoint tcpip.Endpoint, state *tcp.TCPSenderState, ours cc.Bytes) int {
	e, ok := endpoint.(*tcp.Endpoint)
	if !ok || unreachable != nil || ours == 0 {
		return state.SndCwnd
	}
	sender := *(*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(e), known.sender))
	if sender == nil {
		return state.SndCwnd
	}
	*(*time.Duration)(unsafe.Add(sender, known.leastRTO)) = max(tcp.MinRTO, min(leastRTOs*state.RTTState.SRTT, mostLeast))
	cwnd := max(state.SndCwnd, state.Outstanding+int(ours)/max(state.MaxPayloadSize, 1))
	(*tcp.TCPSenderState)(unsafe.Add(sender, known.state)).SndCwnd = cwnd
	return cwnd
}

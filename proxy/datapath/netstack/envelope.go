package netstack

import (
	"fmt"
	"reflect"
	"unsafe"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
)

// envelope is the stack's own congestion control, inside whose window ours lies.
// It reigns alone where nobody observes; where somebody does, widen opens its
// window, since each packet lost at random would halve it.
const envelope = "reno"

// senderAt is where an endpoint keeps the pointer to its sender, and stateAt
// where that has its window. The stack shows both to its probe as copies only, and
// has no option that sets them.
var senderAt, stateAt, unreachable = findWindow(reflect.TypeFor[tcp.Endpoint]())

// findWindow looks for the fields by name and type. It fails with a version of
// the stack that keeps them elsewhere.
func findWindow(endpoint reflect.Type) (senderAt, stateAt uintptr, err error) {
	sender, ok := endpoint.FieldByName("snd")
	if !ok || sender.Type.Kind() != reflect.Pointer || sender.Type.Elem().Kind() != reflect.Struct {
		return 0, 0, fmt.Errorf("netstack: %v has no sender in snd", endpoint)
	}
	want := reflect.TypeFor[tcp.TCPSenderState]()
	state, ok := sender.Type.Elem().FieldByName(want.Name())
	if !ok || state.Type != want || len(state.Index) != 1 {
		return 0, 0, fmt.Errorf("netstack: %v embeds no %v", sender.Type.Elem(), want)
	}
	return sender.Offset, state.Offset, nil
}

// widen opens the stack's window by ours above what it takes to be in flight, and
// returns what it is now, in segments; it never narrows it. What is in flight is for
// the relay to bound: the stack's own count is not taken anew when a recovery ends,
// and was up to twice the truth then. The caller is the stack's probe, which holds
// the endpoint's lock.
func widen(endpoint tcpip.Endpoint, state *tcp.TCPSenderState, ours cc.Bytes) int {
	want := int(ours)/max(state.MaxPayloadSize, 1) + state.Outstanding
	e, ok := endpoint.(*tcp.Endpoint)
	if !ok || unreachable != nil || ours == 0 || state.SndCwnd >= want {
		return state.SndCwnd
	}
	sender := *(*unsafe.Pointer)(unsafe.Add(unsafe.Pointer(e), senderAt))
	if sender == nil {
		return state.SndCwnd
	}
	(*tcp.TCPSenderState)(unsafe.Add(sender, stateAt)).SndCwnd = want
	return want
}

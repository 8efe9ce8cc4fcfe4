package tunnel

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// Fence keeps peers from the gateway's own addresses, and from each other. It
// comes on top of policy's guard, for TCP and datagrams alike.
type Fence struct {
	Clock func() cc.Time
	Inner func(netip.Addr) bool // reports whether an address is a peer's; nil: none is

	mu   sync.Mutex
	own  []netip.Addr
	read cc.Time // when own was; 0: never
}

// ownLasts is for how long the machine's addresses are taken to stay as they are.
const ownLasts = 2 * time.Second

// Check returns why a peer must not reach target, or nil: it is the gateway's own,
// or, with isolate, another peer's, and not in allow.
func (f *Fence) Check(target netip.Addr, isolate bool, allow []netip.Prefix) error {
	target = target.Unmap().WithZone("")
	if slices.ContainsFunc(allow, func(p netip.Prefix) bool { return p.Contains(target) }) {
		return nil
	}
	if isolate && f.Inner != nil && f.Inner(target) {
		return fmt.Errorf("tunnel: destination %v is another peer's; isolate: false or the listener's allow lets peers reach it", target)
	}
	own, err := f.isOwn(target)
	if err != nil {
		return err
	}
	if own {
		return fmt.Errorf("tunnel: destination %v is the gateway's own; list it under the listener's allow if peers may reach it", target)
	}
	return nil
}

func (f *Fence) isOwn(target netip.Addr) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now := f.Clock(); f.read == 0 || now.Sub(f.read) > ownLasts {
		own, err := ingress.LocalAddrs()
		if err != nil { // what cannot be told apart is not let through
			return false, fmt.Errorf("tunnel: read the gateway's own addresses: %w", err)
		}
		f.own, f.read = own, now
	}
	return slices.Contains(f.own, target), nil
}

// Inner returns how to tell the inner addresses of a tunnel's peers; nil where
// nobody knows them, as behind a device.
func Inner(o Outside) func(netip.Addr) bool {
	if _, device := o.(*TUN); device {
		return nil
	}
	return func(a netip.Addr) bool { return o.Peer(a) != "" }
}

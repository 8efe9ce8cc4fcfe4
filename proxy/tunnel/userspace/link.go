package userspace

import (
	"context"
	"net/netip"
	"os"
	"sync"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

// link makes a stack the TUN device of WireGuard, without a device of the kernel.
type link struct {
	stack  *netstack.Stack
	mtu    int
	peers  peerGate
	events chan tun.Event
	ctx    context.Context
	cancel context.CancelFunc
	once   sync.Once
}

var _ tun.Device = (*link)(nil)

// peerGate decides about packets of peers.
type peerGate interface {
	// mayEnter reports whether a packet from a peer is accepted.
	mayEnter(packet []byte) bool
	// largestPacket returns the size of the largest packet to or from a peer that needs no
	// fragments outside, in bytes. 0: the tunnel's MTU.
	largestPacket(inner netip.Addr) int
}

func newLink(stack *netstack.Stack, mtu int, peers peerGate) *link {
	ctx, cancel := context.WithCancel(context.Background())
	l := &link{stack: stack, mtu: mtu, peers: peers, events: make(chan tun.Event, 1), ctx: ctx, cancel: cancel}
	l.events <- tun.EventUp
	return l
}

// Read implements tun.Device. It returns packets for peers.
func (l *link) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	n, err := l.stack.Collect(l.ctx, bufs, sizes, offset)
	for i := range n {
		fitOutgoing(l.stack, bufs[i][offset:offset+sizes[i]], l.peers.largestPacket)
	}
	return n, err
}

// fitOutgoing makes connections send smaller segments where a packet would need fragments outside.
// It lowers the MSS of a SYN, and reports a larger segment to the stack by ICMP. The packet leaves
// in either case. largest returns the size of the largest packet for an address, in bytes; 0: there
// is no bound.
func fitOutgoing(stack *netstack.Stack, p []byte, largest func(netip.Addr) int) {
	_, to, ok := endsOf(p)
	if !ok || !isTCP(p) {
		return
	}
	syn := isSYN(p)
	if !syn && len(p) <= netstack.MinMTU {
		return // for a path that carries less, the MSS of the SYN was lowered
	}
	switch most := largest(to); {
	case most == 0:
	case syn:
		clampMSS(p, most)
	case len(p) > most:
		if icmp := tooBig(p, most); icmp != nil {
			stack.Deliver(icmp)
		}
	}
}

// fitIncoming lowers the MSS of a peer's SYN to a size that needs no fragments outside.
func fitIncoming(p []byte, largest func(netip.Addr) int) {
	if from, _, ok := endsOf(p); ok && isSYN(p) {
		if most := largest(from); most > 0 {
			clampMSS(p, most)
		}
	}
}

// Write implements tun.Device. It takes packets from peers.
func (l *link) Write(bufs [][]byte, offset int) (int, error) {
	packets := make([][]byte, 0, conn.IdealBatchSize)
	for _, b := range bufs {
		if l.peers.mayEnter(b[offset:]) {
			fitIncoming(b[offset:], l.peers.largestPacket)
			packets = append(packets, b[offset:])
		}
	}
	l.stack.Deliver(packets...)
	return len(bufs), nil
}

// Close implements tun.Device.
func (l *link) Close() error {
	l.once.Do(func() {
		l.cancel()
		close(l.events)
	})
	return nil
}

func (l *link) File() *os.File { return nil }

func (l *link) MTU() (int, error) { return l.mtu, nil }

func (l *link) Name() (string, error) { return "netstack", nil }

func (l *link) Events() <-chan tun.Event { return l.events }

func (l *link) BatchSize() int { return conn.IdealBatchSize }

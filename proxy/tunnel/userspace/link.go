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

// link makes a netstack the TUN device of WireGuard, without a device of the kernel's.
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

// peerGate is what a link asks about the peers.
type peerGate interface {
	// mayEnter tells whether a packet from a peer is taken.
	mayEnter(packet []byte) bool
	// room returns how large a packet to or from a peer may be, in bytes, so that it needs no fragments
	// outside; 0: as large as the tunnel's MTU.
	room(inner netip.Addr) int
}

func newLink(stack *netstack.Stack, mtu int, peers peerGate) *link {
	ctx, cancel := context.WithCancel(context.Background())
	l := &link{stack: stack, mtu: mtu, peers: peers, events: make(chan tun.Event, 1), ctx: ctx, cancel: cancel}
	l.events <- tun.EventUp
	return l
}

// Read implements tun.Device: it returns packets for peers.
func (l *link) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	n, err := l.stack.Collect(l.ctx, bufs, sizes, offset)
	for i := range n {
		l.fitOutgoing(bufs[i][offset : offset+sizes[i]])
	}
	return n, err
}

// fitOutgoing has connections to a peer send smaller segments where a packet would need fragments
// outside. The packet leaves all the same.
func (l *link) fitOutgoing(p []byte) {
	_, to, ok := endsOf(p)
	if !ok {
		return
	}
	room := l.peers.room(to)
	switch {
	case room == 0:
	case isSYN(p):
		clampMSS(p, room)
	case len(p) > room && isTCP(p):
		if icmp := tooBig(p, room); icmp != nil {
			l.stack.Deliver(icmp)
		}
	}
}

// fitIncoming lowers the MSS that a peer tells, to what needs no fragments outside.
func (l *link) fitIncoming(p []byte) {
	if from, _, ok := endsOf(p); ok {
		if room := l.peers.room(from); room > 0 && isSYN(p) {
			clampMSS(p, room)
		}
	}
}

// Write implements tun.Device: it takes packets from peers.
func (l *link) Write(bufs [][]byte, offset int) (int, error) {
	packets := make([][]byte, 0, conn.IdealBatchSize)
	for _, b := range bufs {
		if l.peers.mayEnter(b[offset:]) {
			l.fitIncoming(b[offset:])
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

func (l *link) File() *os.File           { return nil }
func (l *link) MTU() (int, error)        { return l.mtu, nil }
func (l *link) Name() (string, error)    { return "netstack", nil }
func (l *link) Events() <-chan tun.Event { return l.events }
func (l *link) BatchSize() int           { return conn.IdealBatchSize }

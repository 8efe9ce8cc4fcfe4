package userspace

import (
	"context"
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
	events chan tun.Event
	ctx    context.Context
	cancel context.CancelFunc
	once   sync.Once
}

var _ tun.Device = (*link)(nil)

func newLink(stack *netstack.Stack, mtu int) *link {
	ctx, cancel := context.WithCancel(context.Background())
	l := &link{stack: stack, mtu: mtu, events: make(chan tun.Event, 1), ctx: ctx, cancel: cancel}
	l.events <- tun.EventUp
	return l
}

// Read implements tun.Device: it returns packets for peers.
func (l *link) Read(bufs [][]byte, sizes []int, offset int) (int, error) {
	return l.stack.Collect(l.ctx, bufs, sizes, offset)
}

// Write implements tun.Device: it takes packets from peers.
func (l *link) Write(bufs [][]byte, offset int) (int, error) {
	packets := make([][]byte, 0, conn.IdealBatchSize)
	for _, b := range bufs {
		packets = append(packets, b[offset:])
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

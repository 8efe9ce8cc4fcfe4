package tunnel

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"

	"golang.zx2c4.com/wireguard/tun"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

// TUNConfig describes a TUN device that feeds a stack.
type TUNConfig struct {
	Name   string // of the listener
	Device string // its name; created unless it exists
	MTU    int    // of the stack it feeds
	Log    *slog.Logger
}

// headroom is what the device's own header needs before a packet.
const headroom = 16

// TUN is a TUN device that anything that delivers packets may feed: the kernel's
// routes, OpenVPN, IPsec.
type TUN struct {
	device tun.Device
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// OpenTUN opens the device and joins it to a stack. Addresses and routes are the
// administrator's.
func OpenTUN(cfg TUNConfig, stack *netstack.Stack) (*TUN, error) {
	dev, err := tun.CreateTUN(cfg.Device, cfg.MTU)
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: open TUN device %q (it needs CAP_NET_ADMIN and /dev/net/tun): %w", cfg.Name, cfg.Device, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	t := &TUN{device: dev, cancel: cancel}
	log := cfg.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	t.done.Go(func() { t.inward(stack, log.With("listener", cfg.Name)) })
	t.done.Go(func() { t.outward(ctx, stack, log.With("listener", cfg.Name)) })
	t.done.Go(func() {
		for range dev.Events() { // must be taken
		}
	})
	return t, nil
}

func buffers(n, size int) ([][]byte, []int) {
	bufs := make([][]byte, n)
	for i := range bufs {
		bufs[i] = make([]byte, size)
	}
	return bufs, make([]int, n)
}

const largestPacket = 1 << 16

// inward moves packets from the device into the stack.
func (t *TUN) inward(stack *netstack.Stack, log *slog.Logger) {
	bufs, sizes := buffers(t.device.BatchSize(), headroom+largestPacket)
	packets := make([][]byte, len(bufs))
	for {
		n, err := t.device.Read(bufs, sizes, headroom)
		for i := range n {
			packets[i] = bufs[i][headroom : headroom+sizes[i]]
		}
		stack.Deliver(packets[:n]...)
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case err != nil && !errors.Is(err, tun.ErrTooManySegments):
			log.Error("tunnel: TUN device ended", "err", err)
			return
		}
	}
}

// outward moves packets from the stack into the device.
func (t *TUN) outward(ctx context.Context, stack *netstack.Stack, log *slog.Logger) {
	bufs, sizes := buffers(t.device.BatchSize(), headroom+largestPacket)
	out := make([][]byte, len(bufs))
	for {
		n, err := stack.Collect(ctx, bufs, sizes, headroom)
		if err != nil {
			return
		}
		for i := range n {
			out[i] = bufs[i][:headroom+sizes[i]]
		}
		if _, err := t.device.Write(out[:n], headroom); err != nil && ctx.Err() == nil {
			log.Debug("tunnel: packets to the TUN device lost", "err", err)
		}
	}
}

// Peer implements Outside: behind a device each address is somebody.
func (t *TUN) Peer(inner netip.Addr) string { return inner.String() }

// Addr implements Outside.
func (t *TUN) Addr() net.Addr {
	name, _ := t.device.Name()
	return deviceAddr(name)
}

// Close implements Outside.
func (t *TUN) Close() error {
	t.cancel()
	err := t.device.Close()
	t.done.Wait()
	return err
}

// deviceAddr is a device as a net.Addr.
type deviceAddr string

func (deviceAddr) Network() string  { return "tun" }
func (d deviceAddr) String() string { return string(d) }

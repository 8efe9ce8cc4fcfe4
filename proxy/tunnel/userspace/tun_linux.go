package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"

	"golang.zx2c4.com/wireguard/tun"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// TUNConfig describes a TUN device that feeds a stack.
type TUNConfig struct {
	// Name is the listener's.
	Name string
	// Device is the name of the device. It is created unless it exists.
	Device string
	// MTU is that of the stack, in bytes.
	MTU int
	Log *slog.Logger
}

// headroom is the room for the device's own header before a packet, in bytes.
const headroom = 16

// TUN is a TUN device. The kernel routes packets into it, such as those out of OpenVPN or IPsec.
type TUN struct {
	tunnel.Condition
	cfg   TUNConfig
	log   *slog.Logger
	name  deviceAddr
	stack *netstack.Stack
	// paths has the MTUs of the routes behind the device.
	paths  *paths
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// OpenTUN opens the device and joins it to a stack. The administrator gives it addresses and
// routes.
func OpenTUN(cfg TUNConfig, stack *netstack.Stack) (*TUN, error) {
	t := &TUN{
		cfg: cfg, log: cfg.Log, stack: stack, paths: newPaths(readRouteMTU, routePeriod),
	}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	t.log = t.log.With("listener", cfg.Name)
	dev, name, err := t.openDevice()
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", cfg.Name, err)
	}
	t.name = deviceAddr(name)
	ctx, cancel := context.WithCancel(context.Background())
	t.cancel = cancel
	t.done.Go(func() { t.runDevice(ctx, dev) })
	return t, nil
}

func (t *TUN) openDevice() (dev tun.Device, name string, err error) {
	dev, err = tun.CreateTUN(t.cfg.Device, t.cfg.MTU)
	if err != nil {
		return nil, "", fmt.Errorf("open TUN device %q (it needs CAP_NET_ADMIN and /dev/net/tun): %w",
			t.cfg.Device, err)
	}
	if name, err = dev.Name(); err != nil {
		return nil, "", errors.Join(err, dev.Close())
	}
	return dev, name, nil
}

// runDevice moves packets until ctx is done. Where the device is gone, it opens another of that
// name.
func (t *TUN) runDevice(ctx context.Context, dev tun.Device) {
	for {
		err := t.movePackets(ctx, dev)
		if ctx.Err() != nil {
			return
		}
		err = fmt.Errorf("TUN device %q has gone: %w", t.name, err)
		if !t.Reopen(ctx, t.log, err, func() (err error) {
			dev, _, err = t.openDevice()
			return err
		}) {
			return
		}
	}
}

// movePackets moves packets both ways until the device fails or ctx is done. It writes the packets
// that were collected by then.
func (t *TUN) movePackets(ctx context.Context, dev tun.Device) error {
	sending, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, 1)
	var inward, outward, events sync.WaitGroup
	events.Go(func() {
		for range dev.Events() { // must be taken
		}
	})
	inward.Go(func() { failed <- t.moveInward(dev) })
	outward.Go(func() { t.moveOutward(sending, dev) })
	var err error
	select {
	case err = <-failed:
	case <-ctx.Done():
	}
	cancel()
	outward.Wait()
	_ = dev.Close()
	inward.Wait()
	events.Wait()
	return err
}

const largestPacket = 1 << 16

// moveInward moves packets from the device into the stack, and returns why it can read no more.
func (t *TUN) moveInward(dev tun.Device) error {
	bufs, sizes := makeBuffers(dev.BatchSize(), headroom+largestPacket)
	packets := make([][]byte, len(bufs))
	for {
		n, err := dev.Read(bufs, sizes, headroom)
		for i := range n {
			packets[i] = bufs[i][headroom : headroom+sizes[i]]
			fitIncoming(packets[i], t.paths.routeMTU)
		}
		t.stack.Deliver(packets[:n]...)
		if err != nil && !errors.Is(err, tun.ErrTooManySegments) {
			return err
		}
	}
}

// moveOutward moves packets from the stack into the device.
func (t *TUN) moveOutward(ctx context.Context, dev tun.Device) {
	bufs, sizes := makeBuffers(dev.BatchSize(), headroom+largestPacket)
	out := make([][]byte, len(bufs))
	for {
		n, err := t.stack.Collect(ctx, bufs, sizes, headroom)
		if err != nil {
			return
		}
		for i := range n {
			out[i] = bufs[i][:headroom+sizes[i]]
			fitOutgoing(t.stack, out[i][headroom:], t.paths.routeMTU)
		}
		if _, err := dev.Write(out[:n], headroom); err != nil && ctx.Err() == nil {
			t.log.Debug("tunnel: packets to the TUN device lost", "err", err)
		}
	}
}

// Apply implements Outside: a device has no such settings.
func (t *TUN) Apply(tunnel.Settings) error { return nil }

// Resume implements Outside.
func (t *TUN) Resume(map[access.Key]netip.AddrPort) {}

// Report implements Outside.
func (t *TUN) Report(*tunnel.Status) error { return nil }

// Requests implements Outside.
func (t *TUN) Requests() <-chan datapath.Conn { return nil }

// Forward implements Outside: all datagrams come in packets.
func (t *TUN) Forward(*Datagrams) {}

// Peer implements Inside. Behind a device each address is a peer.
func (t *TUN) Peer(inner netip.Addr) string { return inner.String() }

// Place implements Inside. Routes decide what leads to the device.
func (t *TUN) Place(netip.Addr) tunnel.Place { return tunnel.Elsewhere }

// Own implements Inside. The administrator's addresses are not known here.
func (t *TUN) Own(netip.Addr) netip.Addr { return netip.Addr{} }

// Gateway implements Inside. The administrator's addresses are not known here.
func (t *TUN) Gateway(netip.Addr) netip.Addr { return netip.Addr{} }

// Addr implements Outside.
func (t *TUN) Addr() net.Addr { return t.name }

// Drain implements Outside. There is nothing to do, because routes decide what comes.
func (t *TUN) Drain() {}

// Close implements Outside.
func (t *TUN) Close() error {
	t.cancel()
	t.done.Wait()
	return nil
}

// deviceAddr is a device as a net.Addr.
type deviceAddr string

func (deviceAddr) Network() string { return "tun" }

func (d deviceAddr) String() string { return string(d) }

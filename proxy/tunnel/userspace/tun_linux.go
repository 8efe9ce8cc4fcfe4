package userspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// TUNConfig describes a TUN device that feeds a stack.
type TUNConfig struct {
	Name   string // of the listener
	Device string // its name; created unless it exists
	MTU    int    // of the stack it feeds
	Log    *slog.Logger
}

// headroom is the room for the device's own header before a packet, in bytes.
const headroom = 16

// TUN is a TUN device, into which the kernel routes packets, such as those out of OpenVPN or IPsec.
type TUN struct {
	tunnel.Condition
	cfg    TUNConfig
	log    *slog.Logger
	name   deviceAddr
	yields chan yielding
	kept   bool // the device outlives its descriptor, for another to open; run's alone
	stack  *netstack.Stack
	paths  *paths // to the addresses behind the device
	cancel context.CancelFunc
	done   sync.WaitGroup
}

// OpenTUN opens the device and joins it to a stack. The administrator gives it addresses
// and routes.
func OpenTUN(cfg TUNConfig, stack *netstack.Stack) (*TUN, error) {
	t := &TUN{
		cfg: cfg, log: cfg.Log, stack: stack, yields: make(chan yielding),
		paths: newPaths(readRouteMTU, routePeriod),
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
	devices.Store(deviceAddr(name), dev)
	return dev, name, nil
}

// devices are those that are or were open in this process, by their names.
var devices sync.Map

// keepDevice makes the device stay, with its addresses and routes, while no process has it open.
func (t *TUN) keepDevice(dev tun.Device) error {
	req, err := unix.NewIfreq(string(t.name))
	if err != nil {
		return err
	}
	if err := controlDevice(dev, func(fd int) error { return unix.IoctlIfreq(fd, unix.TUNGETIFF, req) }); err != nil {
		return fmt.Errorf("TUNGETIFF: %w", err)
	}
	if req.Uint16()&unix.IFF_PERSIST == 0 {
		t.kept = true
		return setPersistent(dev, 1)
	}
	return nil
}

// unkeepDevice makes the device go once no process has it open.
func (t *TUN) unkeepDevice() {
	if dev, open := devices.Load(t.name); open && t.kept {
		t.kept = setPersistent(dev.(tun.Device), 0) != nil
	}
}

func setPersistent(dev tun.Device, on int) error {
	if err := controlDevice(dev, func(fd int) error { return unix.IoctlSetInt(fd, unix.TUNSETPERSIST, on) }); err != nil {
		return fmt.Errorf("TUNSETPERSIST: %w", err)
	}
	return nil
}

// controlDevice calls f with the device's descriptor, which stays with Go's poller.
func controlDevice(dev tun.Device, f func(fd int) error) error {
	raw, err := dev.File().SyscallConn()
	if err != nil {
		return err
	}
	return datapath.Control(raw, f)
}

// yielding is the time in which another tunnel may have the device.
type yielding struct {
	left   chan error    // gets the outcome once we have left the device
	retake chan struct{} // closed at its end
}

// Yield implements Outside: the device stays, with its addresses and routes.
func (t *TUN) Yield() (retake func(), err error) {
	y := yielding{make(chan error, 1), make(chan struct{})}
	timer := time.NewTimer(yieldWithin)
	defer timer.Stop()
	select {
	case t.yields <- y:
		err = <-y.left
	case <-timer.C: // it has gone and is being opened again
	}
	return func() { close(y.retake) }, err
}

// yieldWithin is how soon run takes a yielding, unless there is no device.
const yieldWithin = time.Second

// runDevice moves packets until ctx is done, over another device of that name once one is gone.
func (t *TUN) runDevice(ctx context.Context, dev tun.Device) {
	for {
		t.unkeepDevice()
		err := t.movePackets(ctx, dev)
		if ctx.Err() != nil {
			t.unkeepDevice()
			return
		}
		if err == nil { // another had it meanwhile
			if dev, _, err = t.openDevice(); err == nil {
				continue
			}
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

// movePackets moves packets both ways until the device fails, or ctx is done and what had
// been collected by then is written. It returns nil after another tunnel has had the device.
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
	var y yielding
	for carrying := true; carrying; {
		select {
		case err = <-failed:
			carrying = false
		case y = <-t.yields:
			if err := t.keepDevice(dev); err != nil {
				y.left <- fmt.Errorf("tunnel: listener %q: %w", t.cfg.Name, err)
				y = yielding{}
				continue
			}
			carrying = false
		case <-ctx.Done():
			carrying = false
		}
	}
	cancel()
	outward.Wait()
	_ = dev.Close()
	inward.Wait()
	events.Wait()
	if y.left != nil {
		close(y.left)
		select {
		case <-y.retake:
		case <-ctx.Done():
		}
	}
	return err
}

func makeBuffers(n, size int) ([][]byte, []int) {
	bufs := make([][]byte, n)
	for i := range bufs {
		bufs[i] = make([]byte, size)
	}
	return bufs, make([]int, n)
}

const largestPacket = 1 << 16

// moveInward moves packets from the device into the stack, and returns why it can read
// no more.
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

// Peer implements Inside: behind a device each address is a peer of its own.
func (t *TUN) Peer(inner netip.Addr) string { return inner.String() }

// Place implements Inside: routes decide what leads to the device.
func (t *TUN) Place(netip.Addr) tunnel.Place { return tunnel.Elsewhere }

// Own implements Inside.
func (t *TUN) Own(netip.Addr) netip.Addr { return netip.Addr{} }

// Gateway implements Inside.
func (t *TUN) Gateway(netip.Addr) netip.Addr { return netip.Addr{} }

// Addr implements Outside.
func (t *TUN) Addr() net.Addr { return t.name }

// Drain implements Outside: there is nothing to do, as routes decide what comes.
func (t *TUN) Drain() {}

// Close implements Outside.
func (t *TUN) Close() error {
	t.cancel()
	t.done.Wait()
	return nil
}

// deviceAddr is a device as a net.Addr.
type deviceAddr string

func (deviceAddr) Network() string  { return "tun" }
func (d deviceAddr) String() string { return string(d) }

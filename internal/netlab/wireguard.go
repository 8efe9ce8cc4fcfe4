//go:build linux

package netlab

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/ipc"
	"golang.zx2c4.com/wireguard/tun"
)

// WireGuardConfig describes one end of a WireGuard tunnel with a network device
// inside, so that ordinary sockets use it.
type WireGuardConfig struct {
	Device     string
	Addrs      []netip.Prefix // of the device
	MTU        int            // of the device
	PrivateKey [32]byte
	Port       uint16 // UDP; 0: any
	Peers      []WireGuardPeer
}

// WireGuardPeer is who is at another end.
type WireGuardPeer struct {
	PublicKey [32]byte
	Endpoint  netip.AddrPort // zero: it comes to us
	Allowed   []netip.Prefix // what is routed to it, and taken from it
}

// WireGuard is one end of a tunnel, in this process: wireguard-go as it is.
type WireGuard struct{ device *device.Device }

// WireGuard opens one end of a tunnel inside the node. Close it before the lab.
func (n *Node) WireGuard(cfg WireGuardConfig) (w *WireGuard, err error) {
	err = n.Do(func() error {
		w, err = OpenWireGuard(cfg)
		return err
	})
	return w, err
}

// OpenWireGuard opens one end of a tunnel in the calling thread's namespace: in a
// child that Node.Command started, which then has it to itself.
func OpenWireGuard(cfg WireGuardConfig) (*WireGuard, error) {
	inside, err := tun.CreateTUN(cfg.Device, cfg.MTU)
	if err != nil {
		return nil, fmt.Errorf("netlab: open TUN device %s: %w", cfg.Device, err)
	}
	w := &WireGuard{device.NewDevice(newSteady(inside, cfg.MTU), conn.NewDefaultBind(),
		device.NewLogger(device.LogLevelSilent, ""))}
	err = w.device.IpcSet(cfg.setup())
	if err == nil {
		err = w.device.Up() // here and now, where its sockets belong
	}
	if err == nil {
		err = cfg.route()
	}
	if err != nil {
		w.device.Close()
		return nil, fmt.Errorf("netlab: bring up WireGuard on %s: %w", cfg.Device, err)
	}
	return w, nil
}

// Rebind takes other sockets and says so to the peers, as apps do when they hear
// that the network has changed; inside the namespace that the tunnel was opened in.
func (w *WireGuard) Rebind() error {
	if err := w.device.BindUpdate(); err != nil {
		return fmt.Errorf("netlab: rebind WireGuard: %w", err)
	}
	w.device.SendKeepalivesToPeersWithCurrentKeypair()
	return nil
}

// Serve has others configure the tunnel, as wireguard-go does, until the process ends.
func (w *WireGuard) Serve(device string) error {
	file, err := ipc.UAPIOpen(device)
	if err != nil {
		return fmt.Errorf("netlab: open the socket of %s: %w", device, err)
	}
	ln, err := ipc.UAPIListen(device, file)
	if err != nil {
		return fmt.Errorf("netlab: listen at the socket of %s: %w", device, err)
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go w.device.IpcHandle(c)
		}
	}()
	return nil
}

// Close ends the tunnel; its device goes with it.
func (w *WireGuard) Close() { w.device.Close() }

// steady is a device that is up all along and knows its MTU. What happens to the
// device would otherwise have WireGuard take new sockets, and ask for the MTU, in
// whatever namespace a thread of its own is in.
type steady struct {
	tun.Device
	mtu    int
	events chan tun.Event // none
}

func newSteady(inside tun.Device, mtu int) *steady {
	s := &steady{inside, mtu, make(chan tun.Event)}
	go func() {
		defer close(s.events)
		for range inside.Events() { // must be taken
		}
	}()
	return s
}

func (s *steady) MTU() (int, error)        { return s.mtu, nil }
func (s *steady) Events() <-chan tun.Event { return s.events }

// setup is cfg in the words of WireGuard's configuration protocol.
func (cfg WireGuardConfig) setup() string {
	var b strings.Builder
	fmt.Fprintf(&b, "private_key=%x\nlisten_port=%d\n", cfg.PrivateKey, cfg.Port)
	for _, p := range cfg.Peers {
		fmt.Fprintf(&b, "public_key=%x\n", p.PublicKey)
		if p.Endpoint.IsValid() {
			fmt.Fprintf(&b, "endpoint=%v\n", p.Endpoint)
		}
		for _, a := range p.Allowed {
			fmt.Fprintf(&b, "allowed_ip=%v\n", a)
		}
	}
	return b.String()
}

// route gives the device its addresses, and what is for the peers.
func (cfg WireGuardConfig) route() error {
	h := &netlink.Handle{} // of the calling thread's namespace
	link, err := h.LinkByName(cfg.Device)
	if err != nil {
		return err
	}
	err = bringUp(h, link, cfg.Addrs)
	for _, p := range cfg.Peers {
		for _, a := range p.Allowed {
			route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: ipNet(a.Masked()), Src: cfg.source(a.Addr())}
			err = errors.Join(err, h.RouteReplace(route))
		}
	}
	return err
}

// source is the device's address for what goes to an address: the kernel might
// choose another device's, which peers refuse.
func (cfg WireGuardConfig) source(to netip.Addr) net.IP {
	for _, a := range cfg.Addrs {
		if a.Addr().Is4() == to.Is4() {
			return a.Addr().AsSlice()
		}
	}
	return nil
}

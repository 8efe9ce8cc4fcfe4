package kernelspace

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// ownAlias is the alias of interfaces that this package makes. It shows which ones an earlier process has left, so
// that they are used and removed.
const ownAlias = "made by penstock"

// discardPort is the UDP port for packets without meaning (RFC 863).
const discardPort = 9

// device is the WireGuard interface with its addresses and routes. The mu of WireGuard guards it.
type device struct {
	// name is that of the interface.
	name string
	// made reports whether the interface has ownAlias, so that removeAdded removes it.
	made bool
	// hadNoKey reports whether the interface had no private key before.
	hadNoKey bool
	// setUp reports whether bringUp has set the interface up.
	setUp bool
	// link is nil while there is no interface.
	link netlink.Link
	// claim is an abstract socket with the interface's name, which only one process of this network namespace can have.
	// It ends with the process.
	claim   net.PacketConn
	control *control
	// added are the gateway's addresses.
	added []netlink.Addr
	// refused are the prefixes inside the tunnel, which have refusal routes.
	refused []netip.Prefix
	// routes are the prefixes in refused that need a route to the interface, because they are no gateway address's
	// network.
	routes []netip.Prefix
	// past is the traffic of interfaces that have gone, current that of the present one at the last readTraffic.
	past, current traffic
	// probes are addresses in routes. The kernel removes these routes when the link goes down, and does not add them
	// again when it comes up.
	probes []netip.Addr
}

// traffic is that inside the tunnel: bytes, and lost packets to peers.
type traffic struct{ received, sent, lost uint64 }

// addTraffic returns the sum of both.
func (t traffic) addTraffic(o traffic) traffic {
	return traffic{t.received + o.received, t.sent + o.sent, t.lost + o.lost}
}

// openDevice finds or makes the interface, and sets its key and its port. It returns the peers that the interface has
// by their keys. All their fields are zero.
func openDevice(cfg Config) (d *device, peers map[access.Key]access.Peer, err error) {
	d = &device{name: cfg.Interface}
	if d.control, err = openControl(); err != nil {
		return nil, nil, err
	}
	if peers, err = d.openInterface(cfg); err != nil {
		return nil, nil, errors.Join(err, d.closeDevice())
	}
	return d, peers, nil
}

// openInterface finds or makes the interface, at the start or after the last one has gone.
func (d *device) openInterface(cfg Config) (peers map[access.Key]access.Peer, err error) {
	if d.claim == nil {
		if d.claim, err = net.ListenPacket("unixgram", "@penstock-tunnel-"+d.name); err != nil {
			return nil, fmt.Errorf("another listener of a Penstock has it: %w", err)
		}
	}
	d.setUp, d.hadNoKey, d.added, d.routes = false, false, nil, nil
	d.past, d.current = d.past.addTraffic(d.current), traffic{}
	if err := d.findOrMakeInterface(); err != nil {
		return nil, err
	}
	key, port := wgtypes.Key(cfg.PrivateKey), int(cfg.Port)
	found, err := d.control.Device(d.name)
	if err != nil {
		return nil, d.explainError("is no WireGuard interface", err)
	}
	d.hadNoKey = found.PrivateKey == wgtypes.Key{}
	if found.PrivateKey != key && !d.hadNoKey && !d.made {
		return nil, errors.New("it is another's: it has another private key")
	}
	err = d.control.ConfigureDevice(d.name, wgtypes.Config{PrivateKey: &key, ListenPort: &port})
	if err != nil {
		return nil, d.explainError(fmt.Sprintf("UDP port %d", port), err)
	}
	peers = map[access.Key]access.Peer{}
	for _, p := range found.Peers {
		peers[access.Key(p.PublicKey)] = access.Peer{}
	}
	return peers, netlink.LinkSetMTU(d.link, cfg.MTU)
}

// findOrMakeInterface finds the interface, or makes it.
func (d *device) findOrMakeInterface() (err error) {
	d.link, err = netlink.LinkByName(d.name)
	if err == nil {
		d.made = d.link.Attrs().Alias == ownAlias
		return nil
	}
	if !errors.As(err, new(netlink.LinkNotFoundError)) {
		return d.explainError("find it", err)
	}
	if err := capture.MakeInterface(d.name, "wireguard"); err != nil {
		return d.explainError("make it", err)
	}
	d.made = true
	if d.link, err = netlink.LinkByName(d.name); err != nil {
		return d.explainError("find it", err)
	}
	if err := netlink.LinkSetAlias(d.link, ownAlias); err != nil {
		return d.explainError("name it", err)
	}
	return nil
}

// explainError adds the cure to errors of the kernel.
func (d *device) explainError(what string, err error) error {
	switch {
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("%s: the kernel has no WireGuard: load its module (modprobe wireguard): %w", what, err)
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%s: needs CAP_NET_ADMIN: run as root, or AmbientCapabilities=CAP_NET_ADMIN in the systemd "+
			"unit: %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// bringUp sets the interface up, and then adds the routes to peers, which need it to be up.
func (d *device) bringUp() error {
	d.setUp = d.link.Attrs().Flags&net.FlagUp == 0
	if err := netlink.LinkSetUp(d.link); err != nil {
		return d.explainError("set it up", err)
	}
	return d.addPeerRoutes()
}

// chosenPort returns the UDP port that WireGuard has chosen.
func (d *device) chosenPort() (uint16, error) {
	found, err := d.control.Device(d.name)
	if err != nil {
		return 0, d.explainError("ask for its port", err)
	}
	return uint16(found.ListenPort), nil
}

// setPeers replaces the peers in present by those in next. Peers without a change keep their sessions.
func (d *device) setPeers(present, next map[access.Key]access.Peer) error {
	var peers []wgtypes.PeerConfig
	for key := range present {
		if _, stays := next[key]; !stays {
			peers = append(peers, wgtypes.PeerConfig{PublicKey: wgtypes.Key(key), Remove: true})
		}
	}
	for key, p := range next {
		if old, known := present[key]; known && old.Equal(p) {
			continue
		}
		peer := wgtypes.PeerConfig{
			PublicKey: wgtypes.Key(key), PresharedKey: new(wgtypes.Key(p.Preshared)),
			PersistentKeepaliveInterval: new(p.Keepalive), ReplaceAllowedIPs: true,
		}
		for _, a := range p.AllowedIPs {
			peer.AllowedIPs = append(peer.AllowedIPs, *ipNet(a.Masked()))
		}
		peers = append(peers, peer)
	}
	if len(peers) == 0 {
		return nil
	}
	if err := d.control.ConfigureDevice(d.name, wgtypes.Config{Peers: peers}); err != nil {
		return fmt.Errorf("set peers: %w", err)
	}
	return nil
}

// setAddresses replaces the gateway's addresses of the interface, and the routes to the prefixes inside the tunnel.
func (d *device) setAddresses(gateways, inside []netip.Prefix) error {
	var wanted []netlink.Addr
	for _, g := range gateways {
		a := netlink.Addr{IPNet: ipNet(g)}
		wanted = append(wanted, a)
		if err := netlink.AddrReplace(d.link, &a); err != nil {
			return d.explainError("add address "+g.String(), err)
		}
	}
	for _, a := range d.added {
		if !slices.ContainsFunc(wanted, a.Equal) {
			if err := netlink.AddrDel(d.link, &a); err != nil && !errors.Is(err, syscall.EADDRNOTAVAIL) {
				return d.explainError("remove address "+a.String(), err)
			}
		}
	}
	d.added = wanted
	if err := d.setRefusalRoutes(inside); err != nil {
		return err
	}
	d.chooseProbes(gateways, inside)
	before := d.routes
	d.routes = slices.DeleteFunc(slices.Clone(inside), func(p netip.Prefix) bool {
		return slices.ContainsFunc(gateways, func(g netip.Prefix) bool { return g.Masked() == p.Masked() })
	})
	for _, p := range before {
		if !slices.Contains(d.routes, p) {
			if err := netlink.RouteDel(d.routeTo(p)); err != nil && !errors.Is(err, syscall.ESRCH) {
				return d.explainError("remove the route to "+p.String(), err)
			}
		}
	}
	return d.addPeerRoutes()
}

// resumePeers sends a packet to peers at their last known endpoints, except to those that have been heard from since.
func (d *device) resumePeers(peers map[access.Key]access.Peer, endpoints map[access.Key]netip.AddrPort) error {
	found, err := d.control.Device(d.name)
	if err != nil {
		return err
	}
	var errs []error
	for _, p := range found.Peers {
		key := access.Key(p.PublicKey)
		if endpoint, known := endpoints[key]; known && p.Endpoint == nil {
			if err := d.contactPeer(peers[key], endpoint); err != nil {
				errs = append(errs, fmt.Errorf("peer %q at %v: %w", peers[key].Name, endpoint, err))
			}
		}
	}
	return errors.Join(errs...)
}

// contactPeer sets the endpoint of a peer and sends it a packet, before which WireGuard makes a handshake.
func (d *device) contactPeer(p access.Peer, endpoint netip.AddrPort) error {
	err := d.control.ConfigureDevice(d.name, wgtypes.Config{Peers: []wgtypes.PeerConfig{{
		PublicKey: wgtypes.Key(p.PublicKey), UpdateOnly: true, Endpoint: net.UDPAddrFromAddrPort(endpoint),
	}}})
	if err != nil || len(p.AllowedIPs) == 0 {
		return err
	}
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.AllowedIPs[0].Addr(), discardPort)))
	if err != nil {
		return err
	}
	_, err = c.Write([]byte{0})
	return errors.Join(err, c.Close())
}

// errGone is the error of readTraffic if the interface has gone.
var errGone = errors.New("it is not there")

// readTraffic reads the interface's counters into current.
func (d *device) readTraffic() error {
	if d.link == nil {
		return errGone
	}
	link, err := netlink.LinkByIndex(d.link.Attrs().Index)
	switch {
	case errors.As(err, new(netlink.LinkNotFoundError)):
		return errGone
	case err != nil:
		return err
	case link.Attrs().Name != d.name: // renamed; control and rules find it by its name
		return errGone
	}
	if s := link.Attrs().Statistics; s != nil {
		d.current = traffic{s.RxBytes, s.TxBytes, s.TxDropped}
	}
	return nil
}

// peerStates returns the state of the peers, ordered by name.
func (d *device) peerStates(peers map[access.Key]access.Peer) ([]tunnel.PeerState, error) {
	found, err := d.control.Device(d.name)
	if err != nil {
		return nil, err
	}
	states := make([]tunnel.PeerState, 0, len(found.Peers))
	for _, p := range found.Peers {
		known := peers[access.Key(p.PublicKey)]
		s := tunnel.PeerState{
			Name: known.Name, PublicKey: access.Key(p.PublicKey), Addresses: known.AllowedIPs,
			Received: uint64(p.ReceiveBytes), Sent: uint64(p.TransmitBytes),
		}
		if p.Endpoint != nil {
			at := p.Endpoint.AddrPort()
			s.Endpoint = netip.AddrPortFrom(at.Addr().Unmap(), at.Port()).String()
		}
		if p.LastHandshakeTime.After(time.Unix(0, 0)) {
			s.Handshake = p.LastHandshakeTime
		}
		states = append(states, s)
	}
	sort.Slice(states, func(i, j int) bool { return states[i].Name < states[j].Name })
	return states, nil
}

// removeAdded removes the interface if this package has made it, and otherwise what it has added to it.
func (d *device) removeAdded() error {
	errs := []error{d.setRefusalRoutes(nil)}
	switch {
	case d.link == nil:
	case d.made:
		err := netlink.LinkDel(d.link)
		if err != nil && !errors.As(err, new(netlink.LinkNotFoundError)) && !errors.Is(err, syscall.ENODEV) {
			errs = append(errs, d.explainError("remove it", err))
		}
	default:
		for _, p := range d.routes {
			_ = netlink.RouteDel(d.routeTo(p)) // an error means that it has gone already
		}
		for _, a := range d.added {
			_ = netlink.AddrDel(d.link, &a)
		}
		if d.setUp {
			errs = append(errs, netlink.LinkSetDown(d.link))
		}
		if d.hadNoKey {
			none := wgtypes.Config{PrivateKey: new(wgtypes.Key), ListenPort: new(int)}
			errs = append(errs, d.control.ConfigureDevice(d.name, none))
		}
	}
	d.link = nil
	if d.claim != nil {
		errs = append(errs, d.claim.Close())
		d.claim = nil
	}
	return errors.Join(errs...)
}

// closeDevice removes what was added, and closes control.
func (d *device) closeDevice() error { return errors.Join(d.removeAdded(), d.control.Close()) }

// ipNet converts a prefix for packages that use net.IPNet.
func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// ForwardingOff returns the kernel settings that are off, and have to be on to forward packets of the pool's families.
func ForwardingOff(pool []netip.Prefix) []string {
	var off []string
	for _, f := range []struct {
		is4     bool
		setting string
	}{{true, "net.ipv4.ip_forward"}, {false, "net.ipv6.conf.all.forwarding"}} {
		if !slices.ContainsFunc(pool, func(p netip.Prefix) bool { return p.Addr().Is4() == f.is4 }) {
			continue
		}
		value, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(f.setting, ".", "/"))
		if err == nil && strings.TrimSpace(string(value)) == "0" {
			off = append(off, f.setting)
		}
	}
	return off
}

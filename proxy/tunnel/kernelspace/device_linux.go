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

// ours is the alias of an interface that we made: one that a process before this one has
// left behind is taken over.
const ours = "made by penstock"

// discard is the port to which nothing is sent that has a meaning (RFC 863).
const discard = 9

// device is the interface and what configures it.
type device struct {
	name    string
	made    bool // by us, so that it goes at the end
	blank   bool // it had no key
	raised  bool // by us
	link    netlink.Link
	claim   net.PacketConn // which nobody else in this network namespace has, and which ends with the process
	control *control
	added   []netlink.Addr
	inside  []netip.Prefix // nothing for these addresses goes elsewhere while there is no interface
	routes  []netip.Prefix // those of inside that are no gateway's
	carried traffic        // by interfaces that have gone
	newest  traffic        // by the present one, as was seen last
	probes  []netip.Addr   // inside: their routes go as the link is set down, and do not come back with it
}

// traffic is of packets inside the tunnel: bytes, and packets to peers that were lost.
type traffic struct{ received, sent, lost uint64 }

func (t traffic) addTraffic(o traffic) traffic {
	return traffic{t.received + o.received, t.sent + o.sent, t.lost + o.lost}
}

// openDevice finds or makes the interface, with its keys and its port. The peers are those
// that it has, of which nothing but the keys is told.
func openDevice(cfg Config) (d *device, peers map[access.Key]access.Peer, err error) {
	d = &device{name: cfg.Interface}
	if d.control, err = openControl(); err != nil {
		return nil, nil, err
	}
	if peers, err = d.takeInterface(cfg); err != nil {
		return nil, nil, errors.Join(err, d.closeDevice())
	}
	return d, peers, nil
}

// takeInterface makes the interface ours, be it the first or one in place of one that has gone.
func (d *device) takeInterface(cfg Config) (peers map[access.Key]access.Peer, err error) {
	if d.claim == nil {
		if d.claim, err = net.ListenPacket("unixgram", "@penstock-tunnel-"+d.name); err != nil {
			return nil, fmt.Errorf("another listener of a Penstock has it: %w", err)
		}
	}
	d.raised, d.blank, d.added, d.routes = false, false, nil, nil
	d.carried, d.newest = d.carried.addTraffic(d.newest), traffic{}
	if err := d.findOrMake(); err != nil {
		return nil, err
	}
	key, port := wgtypes.Key(cfg.PrivateKey), int(cfg.Port)
	is, err := d.control.Device(d.name)
	if err != nil {
		return nil, d.explainError("is no WireGuard interface", err)
	}
	d.blank = is.PrivateKey == wgtypes.Key{}
	if is.PrivateKey != key && !d.blank && !d.made {
		return nil, errors.New("it is another's: it has another private key")
	}
	err = d.control.ConfigureDevice(d.name, wgtypes.Config{PrivateKey: &key, ListenPort: &port})
	if err != nil {
		return nil, d.explainError(fmt.Sprintf("UDP port %d", port), err)
	}
	peers = map[access.Key]access.Peer{}
	for _, p := range is.Peers {
		peers[access.Key(p.PublicKey)] = access.Peer{}
	}
	return peers, netlink.LinkSetMTU(d.link, cfg.MTU)
}

// findOrMake looks for the interface, and makes it where there is none.
func (d *device) findOrMake() (err error) {
	d.link, err = netlink.LinkByName(d.name)
	if err == nil {
		d.made = d.link.Attrs().Alias == ours
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
	if err := netlink.LinkSetAlias(d.link, ours); err != nil {
		return d.explainError("name it", err)
	}
	return nil
}

// explainError says what is missing, and how to get it.
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

// bringUp has packets come.
func (d *device) bringUp() error {
	d.raised = d.link.Attrs().Flags&net.FlagUp == 0
	if err := netlink.LinkSetUp(d.link); err != nil {
		return d.explainError("set it up", err)
	}
	return d.addPeerRoutes() // routes need an interface that is up
}

// chosenPort is the one that was chosen.
func (d *device) chosenPort() (uint16, error) {
	is, err := d.control.Device(d.name)
	if err != nil {
		return 0, d.explainError("ask for its port", err)
	}
	return uint16(is.ListenPort), nil
}

// setPeers takes those that are for those that are to be.
func (d *device) setPeers(are, next map[access.Key]access.Peer) error {
	var peers []wgtypes.PeerConfig
	for key := range are {
		if _, stays := next[key]; !stays {
			peers = append(peers, wgtypes.PeerConfig{PublicKey: wgtypes.Key(key), Remove: true})
		}
	}
	for key, p := range next {
		if old, known := are[key]; known && old.Equal(p) {
			continue
		}
		shared, alive := wgtypes.Key(p.Preshared), p.Keepalive
		peer := wgtypes.PeerConfig{
			PublicKey: wgtypes.Key(key), PresharedKey: &shared, PersistentKeepaliveInterval: &alive, ReplaceAllowedIPs: true,
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

// addAddresses gives the interface the gateway's addresses, and has what is inside routed there.
func (d *device) addAddresses(gateways, inside []netip.Prefix) error {
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
	if err := d.addFence(inside); err != nil {
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

// resumePeers says where peers were, and sends them something, unless they have been heard from.
func (d *device) resumePeers(peers map[access.Key]access.Peer, at map[access.Key]netip.AddrPort) error {
	is, err := d.control.Device(d.name)
	if err != nil {
		return err
	}
	var errs []error
	for _, known := range is.Peers {
		key := access.Key(known.PublicKey)
		if where, was := at[key]; was && known.Endpoint == nil {
			if err := d.seekPeer(peers[key], where); err != nil {
				errs = append(errs, fmt.Errorf("peer %q at %v: %w", peers[key].Name, where, err))
			}
		}
	}
	return errors.Join(errs...)
}

func (d *device) seekPeer(p access.Peer, where netip.AddrPort) error {
	err := d.control.ConfigureDevice(d.name, wgtypes.Config{Peers: []wgtypes.PeerConfig{{
		PublicKey: wgtypes.Key(p.PublicKey), UpdateOnly: true, Endpoint: net.UDPAddrFromAddrPort(where),
	}}})
	if err != nil || len(p.AllowedIPs) == 0 {
		return err
	}
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.AllowedIPs[0].Addr(), discard)))
	if err != nil {
		return err
	}
	_, err = c.Write([]byte{0})
	return errors.Join(err, c.Close())
}

var errGone = errors.New("it is not there")

// readTraffic finds out what the interface has carried, or that it has gone: errGone.
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
	case link.Attrs().Name != d.name: // all else goes by its name
		return errGone
	}
	if s := link.Attrs().Statistics; s != nil {
		d.newest = traffic{s.RxBytes, s.TxBytes, s.TxDropped}
	}
	return nil
}

// peerStates are the peers as WireGuard knows them, by name.
func (d *device) peerStates(peers map[access.Key]access.Peer) ([]tunnel.PeerState, error) {
	is, err := d.control.Device(d.name)
	if err != nil {
		return nil, err
	}
	states := make([]tunnel.PeerState, 0, len(is.Peers))
	for _, p := range is.Peers {
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

// releaseAdded takes away what was added, and the interface if it was made.
func (d *device) releaseAdded() error {
	errs := []error{d.addFence(nil)}
	switch {
	case d.link == nil: // there is none
	case d.made:
		err := netlink.LinkDel(d.link)
		if err != nil && !errors.As(err, new(netlink.LinkNotFoundError)) && !errors.Is(err, syscall.ENODEV) {
			errs = append(errs, d.explainError("remove it", err))
		}
	default:
		for _, p := range d.routes {
			_ = netlink.RouteDel(d.routeTo(p)) // gone with the interface, or by another's hand
		}
		for _, a := range d.added {
			_ = netlink.AddrDel(d.link, &a)
		}
		if d.raised {
			errs = append(errs, netlink.LinkSetDown(d.link))
		}
		if d.blank {
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

func (d *device) closeDevice() error { return errors.Join(d.releaseAdded(), d.control.Close()) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// ForwardingOff names the settings by which the kernel forwards none of the pool's families.
func ForwardingOff(pool []netip.Prefix) []string {
	var off []string
	for _, f := range []struct {
		is4     bool
		setting string
	}{{true, "net.ipv4.ip_forward"}, {false, "net.ipv6.conf.all.forwarding"}} {
		if !slices.ContainsFunc(pool, func(p netip.Prefix) bool { return p.Addr().Is4() == f.is4 }) {
			continue
		}
		is, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(f.setting, ".", "/"))
		if err == nil && strings.TrimSpace(string(is)) == "0" {
			off = append(off, f.setting)
		}
	}
	return off
}

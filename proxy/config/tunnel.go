package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
)

// Tunnel is what holds for every packet of a tunnel.
type Tunnel struct {
	MTU         int            `yaml:"mtu" min:"1280" max:"65535"`
	UDPShare    *Fraction      `yaml:"udp_share" reload:"yes"`
	UDPIdle     *time.Duration `yaml:"udp_idle" reload:"yes"`
	UDPSessions *int           `yaml:"udp_sessions" reload:"yes" min:"0" max:"65536"`
	Isolate     *bool          `yaml:"isolate" reload:"yes"`
	DNS         netip.Addr     `yaml:"dns" reload:"yes"`
}

// WireGuard is a WireGuard endpoint.
type WireGuard struct {
	PrivateKey     access.Key     `yaml:"private_key" secret:"true"`
	PrivateKeyFile string         `yaml:"private_key_file"`
	ConfigFile     string         `yaml:"config_file"`
	PeersFile      string         `yaml:"peers_file" reload:"yes"`
	Peers          []Peer         `yaml:"peers" reload:"yes"`
	Pool           []netip.Prefix `yaml:"pool" reload:"yes"`
	Datapath       Datapath       `yaml:"datapath"`
	ReachableFrom  []netip.Prefix `yaml:"reachable_from" reload:"yes"`
}

// Peer is one client of a tunnel.
type Peer struct {
	Name             string         `yaml:"name" required:"yes"`
	PublicKey        access.Key     `yaml:"public_key" required:"yes"`
	PresharedKey     access.Key     `yaml:"preshared_key" secret:"true"`
	PresharedKeyFile string         `yaml:"preshared_key_file"`
	AllowedIPs       []netip.Prefix `yaml:"allowed_ips" required:"yes"`
	Keepalive        time.Duration  `yaml:"keepalive"`
	Exit             bool           `yaml:"exit"`
}

// MASQUEMTU is what a CONNECT-IP session carries from its first packet on,
// whatever its path turns out to: a QUIC packet of 1350 bytes less its header with the
// longest connection ID, its tag, and the names of stream and context. With a larger
// MTU each connection in a session whose path carries less finds that out by a Packet
// Too Big.
const MASQUEMTU = 1300

const (
	defaultTunnelMTU   = 1420 // WireGuard's over IPv6 and Ethernet
	defaultDeviceMTU   = 1500
	defaultUDPShare    = .5
	defaultUDPIdle     = 5 * time.Minute // RFC 4787 REQ-5
	defaultUDPSessions = 1024

	dnsPort = 53
)

// MTU is the tunnel's.
func (l *Listener) MTU() int {
	switch {
	case l.Tunnel.MTU != 0:
		return l.Tunnel.MTU
	case l.Mode == access.TUN:
		return defaultDeviceMTU
	case l.Mode == access.MASQUE:
		return MASQUEMTU
	}
	return defaultTunnelMTU
}

// Datagrams is what becomes of UDP and ICMP, with what was not set.
func (t Tunnel) Datagrams() access.Datagrams {
	out := access.Datagrams{Share: defaultUDPShare, Idle: defaultUDPIdle, Sessions: defaultUDPSessions, Isolate: true}
	if t.UDPShare != nil {
		out.Share = float64(*t.UDPShare)
	}
	if t.UDPIdle != nil {
		out.Idle = *t.UDPIdle
	}
	if t.UDPSessions != nil {
		out.Sessions = *t.UDPSessions
	}
	if t.Isolate != nil {
		out.Isolate = *t.Isolate
	}
	if t.DNS.IsValid() {
		out.DNS = netip.AddrPortFrom(t.DNS, dnsPort)
	}
	return out
}

// Access are the peers in package access's terms.
func (w WireGuard) Access() []access.Peer {
	out := make([]access.Peer, len(w.Peers))
	for i, p := range w.Peers {
		out[i] = p.Access()
	}
	return out
}

// Access is the peer in package access's terms.
func (p Peer) Access() access.Peer {
	return access.Peer{
		Name: p.Name, PublicKey: p.PublicKey, Preshared: p.PresharedKey,
		AllowedIPs: p.AllowedIPs, Keepalive: p.Keepalive, Exit: p.Exit,
	}
}

// NoNetstack is why a build without Netstack does not end tunnels itself, and the cure.
const NoNetstack = "this is the build for routers (-tags nonetstack), which has no network stack of its own and no " +
	"QUIC, so no tunnel can end in it; install the full build, or have the kernel end it: mode wireguard with " +
	"wireguard.datapath: kernel"

// checkTunnel is about the keys of tunnels, in listeners that are and others.
func (l *Listener) checkTunnel(key string) error {
	var errs []error
	for _, k := range [...]struct {
		misplaced bool
		name, why string
	}{
		{
			l.Mode != access.MASQUE && !l.MASQUE.isZero(), ".masque",
			"only mode masque has this; remove it or change the mode",
		},
		{
			l.Mode != access.MASQUE && l.TLS != TLS{}, ".tls",
			"only mode masque speaks TLS; remove it or change the mode",
		},
		{
			l.Mode != access.WireGuard && !l.WireGuard.isZero(), ".wireguard",
			"only mode wireguard has this; remove it or change the mode",
		},
		{
			l.Mode != access.TUN && l.Mode != access.WireGuard && l.Device != "", ".device",
			"only modes tun and wireguard have a device; remove it or change the mode",
		},
		{
			l.Mode == access.WireGuard && l.Device != "" && l.WireGuard.Path() == DatapathNetstack, ".device",
			"datapath netstack needs no interface; remove it, or set wireguard.datapath to kernel or auto",
		},
		{
			!l.Mode.Tunnels() && l.Tunnel != Tunnel{}, ".tunnel",
			"only modes wireguard, tun and masque are tunnels; remove it or change the mode",
		},
		{
			l.Mode.Tunnels() && len(l.ProxyProtocol.From) > 0, ".proxy_protocol",
			"connections out of a tunnel carry no PROXY header; remove it",
		},
	} {
		if k.misplaced {
			errs = append(errs, keyErrorf(key+k.name, "%s", k.why))
		}
	}
	if l.Mode.Tunnels() && !Netstack && (l.Mode != access.WireGuard || l.WireGuard.Path() == DatapathNetstack) {
		errs = append(errs, keyErrorf(key+".mode", "%s", NoNetstack))
	}
	if idle := l.Tunnel.UDPIdle; l.Mode.Tunnels() && idle != nil && *idle < time.Second {
		errs = append(errs, keyErrorf(key+".tunnel.udp_idle", "%v is less than an answer may take; write at least 1s",
			*idle))
	}
	switch l.Mode {
	case access.TUN:
		errs = append(errs, l.checkDevice(key))
	case access.MASQUE:
		errs = append(errs, l.checkMASQUE(key))
	case access.WireGuard:
		errs = append(errs, l.checkWireGuard(key))
	}
	return errors.Join(errs...)
}

// maxDevice is what a network device's name has room for (IFNAMSIZ).
const maxDevice = 15

func (l *Listener) checkDevice(key string) error {
	var errs []error
	if l.Address != "" {
		errs = append(errs, keyErrorf(key+".address", "mode tun has a device and no address; remove it"))
	}
	if l.Device == "" {
		errs = append(errs, keyErrorf(key+".device",
			"missing; mode tun needs the name of a TUN device, such as penstock0, which is made unless it exists"))
	}
	errs = append(errs, l.checkDeviceName(key))
	if l.Tunnel.Isolate != nil && *l.Tunnel.Isolate {
		errs = append(errs, keyErrorf(key+".tunnel.isolate",
			"mode tun does not know which addresses are peers'; remove it, and have a rule refuse their network"))
	}
	if l.Tunnel.DNS.IsValid() {
		errs = append(errs, keyErrorf(key+".tunnel.dns", "mode tun has no address inside for it; remove it"))
	}
	return errors.Join(errs...)
}

func (l *Listener) checkWireGuard(key string) error {
	w := &l.WireGuard
	at := key + ".wireguard"
	errs := []error{l.checkDeviceName(key)}
	if w.ConfigFile == "" || l.Address != "" {
		err := checkAddress(key+".address", l.Address)
		if host, _, _ := net.SplitHostPort(l.Address); err == nil && host != "" && host != "::" && host != "0.0.0.0" {
			err = keyErrorf(key+".address", "mode wireguard listens on every address of the machine: "+
				"write :%s, and keep others out with the packet filter", portOf(l.Address))
		}
		errs = append(errs, err)
	}
	switch {
	case w.ConfigFile != "" && (w.PrivateKeyFile != "" || w.PrivateKey != access.Key{}):
		errs = append(errs, keyErrorf(at+".config_file",
			"has the private key already; remove private_key and private_key_file"))
	case w.ConfigFile != "" && w.PeersFile != "":
		errs = append(errs, keyErrorf(at+".config_file",
			"has the peers already; remove peers_file, or move them there"))
	case w.PrivateKeyFile != "" && w.PrivateKey != access.Key{}:
		errs = append(errs, keyErrorf(at+".private_key_file", "give private_key or private_key_file, not both"))
	case w.ConfigFile == "" && w.PrivateKeyFile == "" && w.PrivateKey == access.Key{}:
		errs = append(errs, keyErrorf(at+".private_key_file",
			"missing; make one with: umask 077; wg genkey > vpn.key (or penstock gateway key > vpn.key)"))
	}
	if l.Tunnel.DNS.IsValid() && len(w.Pool) == 0 && w.ConfigFile == "" {
		errs = append(errs, keyErrorf(key+".tunnel.dns",
			"without a pool the gateway has no address inside for it; add wireguard.pool, such as [10.9.0.0/24]"))
	}
	if len(w.ReachableFrom) > 0 && w.Path() != DatapathKernel {
		errs = append(errs, keyErrorf(at+".reachable_from", "only datapath kernel forwards to peers; set it, or have a "+
			"listener of mode forward lead there, over TCP"))
	}
	errs = append(errs, checkPool(at+".pool", w.Pool))
	var peers []error
	for i, p := range w.Peers {
		peers = append(peers, p.checkPeer(fmt.Sprintf("%s.peers[%d]", at, i), w.Pool))
	}
	err := errors.Join(peers...)
	if err == nil {
		if err = access.CheckPeers(w.Access()); err != nil {
			err = keyErrorf(at+".peers", "%v", err)
		}
	}
	return errors.Join(append(errs, err)...)
}

func (p Peer) checkPeer(key string, pool []netip.Prefix) error {
	var errs []error
	if err := p.Access().CheckExit(pool, "exit: true"); err != nil {
		errs = append(errs, keyErrorf(key+".allowed_ips", "%v", err))
	}
	switch {
	case p.Name == "":
		errs = append(errs, keyErrorf(key+".name", "missing; give it a name such as phone"))
	case strings.ContainsFunc(p.Name, func(r rune) bool { return !strconv.IsPrint(r) }):
		errs = append(errs, keyErrorf(key+".name", "%q: a name has printable characters only", p.Name))
	case len(p.Name) > maxName:
		errs = append(errs, keyErrorf(key+".name", "a name has at most %d bytes, not %d", maxName, len(p.Name)))
	}
	if (p.PublicKey == access.Key{}) {
		errs = append(errs, keyErrorf(key+".public_key",
			"missing; it is what the client's app shows as its public key"))
	}
	if p.PresharedKeyFile != "" && p.PresharedKey != (access.Key{}) {
		errs = append(errs, keyErrorf(key+".preshared_key_file", "give preshared_key or preshared_key_file, not both"))
	}
	if every := p.Keepalive; every%time.Second != 0 || every > 65535*time.Second {
		errs = append(errs, keyErrorf(key+".keepalive", "%v is not in whole seconds up to 65535s", every))
	}
	return errors.Join(errs...)
}

func (w WireGuard) isZero() bool {
	return w.PrivateKey == access.Key{} && w.PrivateKeyFile == "" && w.ConfigFile == "" && w.PeersFile == "" &&
		len(w.Peers) == 0 && len(w.Pool) == 0 && w.Datapath == "" && len(w.ReachableFrom) == 0
}

// portOf is that of an address that has been checked.
func portOf(address string) string {
	_, p, _ := net.SplitHostPort(address)
	return p
}

// checkPool wants room for a gateway and a client in each prefix of a pool, and none in another.
func checkPool(key string, pool []netip.Prefix) error {
	var errs []error
	for i, p := range pool {
		at := fmt.Sprintf("%s[%d]", key, i)
		if p.Addr().BitLen()-p.Bits() < 2 {
			errs = append(errs, keyErrorf(at, "%v has no room for the gateway and a client; write a prefix such as "+
				"10.9.0.0/24", p))
		}
		if k := slices.IndexFunc(pool[:i], p.Overlaps); k >= 0 {
			errs = append(errs, keyErrorf(at, "%v overlaps %v; leave one out", p, pool[k]))
		}
	}
	return errors.Join(errs...)
}

package access

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// TunnelSettings are what holds for every packet of a tunnel.
type TunnelSettings struct {
	// Largest packet inside the tunnel, 1280 to 65535 bytes; it must be the clients' too. 1420 where not set, 1500 for
	// mode tun, 1300 for masque.
	MTU int `yaml:"mtu" min:"1280" max:"65535"`
	// Forget a UDP session on which nothing moved for this long; 5m where not set, as RFC 4787 asks of middleboxes.
	UDPIdle *time.Duration `yaml:"udp_idle" reload:"yes"`
	// UDP sessions of one peer at once; the one that was idle longest makes room. 0: UDP and ICMP are not forwarded.
	// 1024 where not set.
	UDPSessions *int `yaml:"udp_sessions" reload:"yes" min:"0" max:"65536"`
	// Refuse what one peer sends to another; true where not set. With false they reach each other inside the tunnel.
	// Not for mode tun, where routes decide.
	Isolate *bool `yaml:"isolate" reload:"yes"`
	// A name server that peers find at the gateway's own address inside, by the rules that hold for it; none where not
	// set. Not for mode tun.
	DNS netip.Addr `yaml:"dns" reload:"yes"`
}

// MASQUEMTU is the packet size, in bytes, that a CONNECT-IP session carries over any path from its first packet on: a
// QUIC packet of 1350 bytes less its header with the longest connection ID, its tag, and the numbers of stream and
// context. With a larger MTU each connection over a narrower path has to learn its limit from a Packet Too Big.
const MASQUEMTU = 1300

const (
	defaultTunnelMTU = 1420 // WireGuard's over IPv6 and Ethernet
	defaultDeviceMTU = 1500
	minMTU, maxMTU   = 1280, 65535

	defaultUDPIdle     = 5 * time.Minute // RFC 4787 REQ-5
	defaultUDPSessions = 1024

	dnsPort = 53
)

// NoNetstack is why a build without Netstack does not end tunnels itself, and the cure.
const NoNetstack = "this is the build for routers (-tags nonetstack), which has no network stack of its own and no " +
	"QUIC, so no tunnel can end in it; install the full build, or have the kernel end it: mode wireguard with " +
	"wireguard.datapath: kernel"

// MTU is the largest packet inside the listener's tunnel, in bytes.
func (l *Listener) MTU() int {
	switch {
	case l.Tunnel.MTU != 0:
		return l.Tunnel.MTU
	case l.Mode == TUN:
		return defaultDeviceMTU
	case l.Mode == MASQUE:
		return MASQUEMTU
	}
	return defaultTunnelMTU
}

// Datagrams returns the settings for UDP and ICMP, with defaults for keys that are not set.
func (t TunnelSettings) Datagrams() Datagrams {
	out := Datagrams{
		Idle:     valueOr(t.UDPIdle, defaultUDPIdle),
		Sessions: valueOr(t.UDPSessions, defaultUDPSessions),
		Isolate:  valueOr(t.Isolate, true),
	}
	if t.DNS.IsValid() {
		out.DNS = netip.AddrPortFrom(t.DNS, dnsPort)
	}
	return out
}

// valueOr returns what p points to, or other where p is nil.
func valueOr[T any](p *T, other T) T {
	if p == nil {
		return other
	}
	return *p
}

// checkTunnel checks the keys of a tunnel by the listener's mode.
func (l *Listener) checkTunnel() error {
	var errs []error
	if idle := l.Tunnel.UDPIdle; l.Mode.Tunnels() && idle != nil && *idle < time.Second {
		errs = append(errs, check.Errorf("tunnel.udp_idle", "%v is less than an answer may take; write at least 1s", *idle))
	}
	if (l.Mode == TUN || l.Mode == WireGuard) && !check.IsDeviceName(l.Device, "/ :%") && l.Device != "" {
		errs = append(errs, check.Errorf("device",
			"%q is no name of a network device: at most 15 bytes without spaces, / : or %%", l.Device))
	}
	switch l.Mode {
	case TUN:
		errs = append(errs, l.checkTUN())
	case MASQUE:
		errs = append(errs, l.checkMASQUE())
	case WireGuard:
		errs = append(errs, l.checkWireGuard())
	}
	return errors.Join(errs...)
}

// checkTUN checks the keys of mode tun.
func (l *Listener) checkTUN() error {
	var errs []error
	if l.Address != "" {
		errs = append(errs, check.Errorf("address", "mode tun has a device and no address; remove it"))
	}
	if l.Device == "" {
		errs = append(errs, check.Errorf("device",
			"missing; mode tun needs the name of a TUN device, such as penstock0, which is made unless it exists"))
	}
	if valueOr(l.Tunnel.Isolate, false) {
		errs = append(errs, check.Errorf("tunnel.isolate",
			"mode tun does not know which addresses are peers'; remove it, and have a rule refuse their network"))
	}
	if l.Tunnel.DNS.IsValid() {
		errs = append(errs, check.Errorf("tunnel.dns", "mode tun has no address inside for it; remove it"))
	}
	return errors.Join(errs...)
}

// checkPool checks that each prefix of a pool has room for a gateway and a client, and that none overlaps another.
func checkPool(key string, pool []netip.Prefix) error {
	var errs []error
	for i, p := range pool {
		at := fmt.Sprintf("%s[%d]", key, i)
		if !hasRoom(p) {
			errs = append(errs, check.Errorf(at,
				"%v has no room for the gateway and a client; write a prefix such as 10.9.0.0/24", p))
		}
		if k := slices.IndexFunc(pool[:i], p.Overlaps); k >= 0 {
			errs = append(errs, check.Errorf(at, "%v overlaps %v; leave one out", p, pool[k]))
		}
	}
	return errors.Join(errs...)
}

// hasRoom reports whether a prefix has addresses for a gateway and a client.
func hasRoom(p netip.Prefix) bool { return p.Addr().BitLen()-p.Bits() >= 2 }

// portOf returns the port of an address that has been checked.
func portOf(address string) string {
	_, p, _ := net.SplitHostPort(address)
	return p
}

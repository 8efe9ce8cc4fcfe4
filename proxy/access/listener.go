package access

import (
	"embed"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// Sources are the files with the types of this room's keys. The comment of a field says what its key is for.
//
//go:embed listener.go tunnel.go udp.go wireguard.go masque.go peer.go token.go
var Sources embed.FS

// Listener is one way in.
type Listener struct {
	// For rules, logs and metrics; unique.
	Name string `yaml:"name" required:"yes" reload:"yes"`
	// How clients come: captured (tproxy, redirect), asking (socks5, connect, mixed is both on one port), all to one
	// target (forward), or inside a tunnel (wireguard, tun, masque).
	Mode Mode `yaml:"mode" required:"yes" reload:"sockets"`
	// host:port to listen on; [::]:port is every address of both families. Modes wireguard and masque have a UDP port,
	// such as :51820, and mode tun none.
	Address string `yaml:"address" reload:"sockets"`
	// host:port that mode forward connects to.
	Target string `yaml:"target" reload:"yes"`
	// Who may use a listener that asks; none: everybody.
	Users []User `yaml:"users" reload:"yes"`
	// PROXY protocol v1 or v2 in front of incoming connections.
	ProxyProtocol Header `yaml:"proxy_protocol" reload:"yes"`
	// Connect to the server from the client's own address; mode tproxy only, and replies must come back through this
	// machine.
	KeepClient bool `yaml:"keep_client"`
	// The TUN device of mode tun; made unless it exists. Its addresses and routes are yours. In mode wireguard the
	// interface that the kernel's WireGuard has, wg- and the listener's name unless set; made unless it exists.
	Device string `yaml:"device" reload:"sockets"`
	// What holds for the packets of a tunnel; modes wireguard, tun and masque only.
	Tunnel TunnelSettings `yaml:"tunnel"`
	// The endpoint of mode wireguard.
	WireGuard WireGuardSettings `yaml:"wireguard"`
	// The endpoint of mode masque.
	MASQUE MASQUESettings `yaml:"masque"`
	// Of mode masque: its certificate, and the authorities of clients that are let in.
	TLS TLS `yaml:"tls" reload:"yes"`
	// Most at once; 0: the global limit.
	Connections int `yaml:"connections" min:"0" reload:"yes"`
	// What becomes of the UDP that clients receive past the proxy; modes tproxy and redirect only.
	UDP UDPSettings `yaml:"udp"`
	// Destinations that clients may reach although they are this machine's own, link-local or a cloud's metadata
	// service, or, for clients that ask or are inside a tunnel, multicast or carrier-grade NAT addresses. Not for mode
	// forward.
	Allow []netip.Prefix `yaml:"allow" reload:"yes"`
}

// User is one account of a listener.
type User struct {
	// 1 to 255 bytes.
	Name string `yaml:"name" required:"yes"`
	// 1 to 255 bytes.
	Password Password `yaml:"password" secret:"true"`
	// A file that holds the password in its first line, closed to others; relative to the configuration file, and
	// reread with it.
	PasswordFile string `yaml:"password_file"`
}

// Header says which peers may tell a client's address by a PROXY protocol header.
type Header struct {
	// Peers that must open with a PROXY protocol header; from all others it is plain data.
	From []netip.Prefix `yaml:"from"`
}

// Validate checks the keys of a listener against each other. Errors are *check.Errors.
func (l *Listener) Validate() error {
	errs := []error{check.Name("name", l.Name)}
	if l.Mode == "" {
		return errors.Join(append(errs,
			check.Errorf("mode", "missing; it is one of %s", strings.Join(check.Strings(Modes), ", ")))...)
	}
	if !l.Mode.Tunnels() {
		errs = append(errs, check.Address("address", l.Address))
	}
	switch {
	case l.Mode == Forward && l.Target == "":
		errs = append(errs, check.Errorf("target", "missing; mode forward needs the host:port to connect to"))
	case l.Mode == Forward && strings.Contains(l.Target, "%"):
		errs = append(errs, check.Errorf("target", "%q has a zone, and what is on one link alone is no target", l.Target))
	case l.Mode == Forward:
		errs = append(errs, check.Target("target", l.Target))
	}
	return errors.Join(append(errs, l.checkMisplaced(), l.checkUsers(), l.checkTunnel(), l.UDP.validate())...)
}

// checkMisplaced refuses keys that the listener's mode does not use.
func (l *Listener) checkMisplaced() error {
	var errs []error
	for _, k := range [...]struct {
		misplaced bool
		name, why string
	}{
		{l.Mode != Forward && l.Target != "", "target", "only mode forward has a target; remove it or change the mode"},
		{
			!l.UDP.isZero() && !l.Mode.Captures(), "udp",
			"only modes tproxy and redirect have this; remove it or change the mode",
		},
		{l.KeepClient && l.Mode != TPROXY, "keep_client", "only mode tproxy can keep the client's address"},
		{
			len(l.Users) > 0 && !l.Mode.Asks(), "users",
			fmt.Sprintf("mode %s cannot ask for a password; use socks5, connect or mixed", l.Mode),
		},
		{
			len(l.Allow) > 0 && l.Mode == Forward, "allow",
			"mode forward has the one destination that you gave it; remove allow",
		},
		{l.Mode != MASQUE && !l.MASQUE.isZero(), "masque", "only mode masque has this; remove it or change the mode"},
		{l.Mode != MASQUE && l.TLS != TLS{}, "tls", "only mode masque speaks TLS; remove it or change the mode"},
		{
			l.Mode != WireGuard && !l.WireGuard.isZero(), "wireguard",
			"only mode wireguard has this; remove it or change the mode",
		},
		{
			l.Mode != TUN && l.Mode != WireGuard && l.Device != "", "device",
			"only modes tun and wireguard have a device; remove it or change the mode",
		},
		{
			l.Mode == WireGuard && l.Device != "" && l.WireGuard.DatapathOrDefault() == DatapathNetstack, "device",
			"datapath netstack needs no interface; remove it, or set wireguard.datapath to kernel or auto",
		},
		{
			!l.Mode.Tunnels() && l.Tunnel != TunnelSettings{}, "tunnel",
			"only modes wireguard, tun and masque are tunnels; remove it or change the mode",
		},
		{
			l.Mode.Tunnels() && len(l.ProxyProtocol.From) > 0, "proxy_protocol",
			"connections out of a tunnel carry no PROXY header; remove it",
		},
		{l.Mode.Tunnels() && !Netstack && !l.EndsInKernel(), "mode", NoNetstack},
	} {
		if k.misplaced {
			errs = append(errs, check.Errorf(k.name, "%s", k.why))
		}
	}
	return errors.Join(errs...)
}

// checkUsers checks that each user has a unique name and a password.
func (l *Listener) checkUsers() error {
	var errs []error
	seen := check.Taken{}
	for i, u := range l.Users {
		at := fmt.Sprintf("users[%d]", i)
		if len(u.Name) < 1 || len(u.Name) > maxUser {
			errs = append(errs, check.Errorf(at+".name", "a name has 1 to %d bytes, not %d", maxUser, len(u.Name)))
		} else {
			errs = append(errs, seen.Add(at+".name", u.Name))
		}
		if u.Password == "" && u.PasswordFile == "" {
			errs = append(errs, check.Errorf(at, "needs a password or a password_file"))
		}
	}
	return errors.Join(errs...)
}

// maxUser bounds names and passwords of users, in bytes (RFC 1929 §2).
const maxUser = 255

// Password is what a user shows, 1 to 255 bytes.
type Password string

// Validate checks that SOCKS5 can carry the password.
func (p Password) Validate() error {
	if len(p) < 1 || len(p) > maxUser {
		return fmt.Errorf("a password has 1 to %d bytes, not %d", maxUser, len(p))
	}
	return nil
}

// LoadFiles replaces the names of the listener's files by their contents.
func (l *Listener) LoadFiles(from check.Files) error {
	if l.Mode == MASQUE {
		return errors.Join(check.Within("tls", l.TLS.checkPEM()), l.readTokens(from))
	}
	return l.readPeerFiles(from)
}

// Network returns the network of the listener's address: tcp or udp.
func (l *Listener) Network() string {
	if l.Mode == WireGuard || l.Mode == MASQUE {
		return "udp"
	}
	return "tcp"
}

// EndsInKernel reports whether the listener's tunnel ends in the kernel, or may end there with datapath auto.
func (l *Listener) EndsInKernel() bool {
	return l.Mode == WireGuard && l.WireGuard.DatapathOrDefault() != DatapathNetstack
}

// Interface returns the name of the network device that the listener opens; empty: none.
func (l *Listener) Interface() string {
	if l.Device != "" || !l.EndsInKernel() || l.Name == "" {
		return l.Device
	}
	name := "wg-" + l.Name
	return name[:min(len(name), check.MaxDevice)]
}

// IsSame reports whether next, of a later configuration, is the same listener as l, so that its socket or tunnel stays
// open. The identity of a tunnel is its name, that of a socket its address.
func (l Listener) IsSame(next Listener) bool {
	if l.Mode.Tunnels() {
		return l.Name == next.Name
	}
	return !next.Mode.Tunnels() && l.Address == next.Address
}

// CheckRoom refuses to open next while the open tunnel l has its port or device. The error is a *check.Error.
func (l Listener) CheckRoom(next Listener) error {
	if !l.Mode.Tunnels() || !next.Mode.Tunnels() {
		return nil
	}
	var key string
	switch _, port, _ := net.SplitHostPort(next.Address); {
	case next.Address != "" && port != "0" && l.Address == next.Address:
		key = "address"
	case l.Interface() != "" && l.Interface() == next.Interface():
		key = "device"
	default:
		return nil
	}
	return check.Errorf(key, "the tunnel of listener %q has it until its connections have ended; restart the proxy, or "+
		"choose another", l.Name)
}

// Warnings describes settings that are allowed and probably not intended.
func (l *Listener) Warnings() (out []string) {
	warn := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	if (l.Mode.Asks() && len(l.Users) == 0 || l.MASQUE.Open) && !check.IsLoopback(l.Address) {
		warn("%s serves everybody who can reach %s; add users (or tokens), or listen on loopback", l.Name, l.Address)
	}
	if inner, outer := Overlap(l.WireGuard.Peers); inner != "" {
		warn("allowed_ips of peer %s lie within those of %s, which does not get what is sent there", inner, outer)
	}
	exit := slices.IndexFunc(l.WireGuard.Peers, func(p Peer) bool { return p.Exit })
	if exit >= 0 && l.Tunnel.Datagrams().Isolate {
		warn("peer %s is an exit, but nobody reaches it: peers are isolated; set tunnel.isolate: false",
			l.WireGuard.Peers[exit].Name)
	}
	if slices.ContainsFunc(l.ProxyProtocol.From, func(p netip.Prefix) bool { return p.Bits() == 0 }) {
		warn("proxy_protocol.from lets everybody claim any address")
	}
	return out
}

// SharedPool returns a prefix of l's pool that overlaps one of other's; invalid: there is none.
func (l *Listener) SharedPool(other *Listener) netip.Prefix {
	theirs := slices.Concat(other.WireGuard.Pool, other.MASQUE.Pool)
	for _, p := range slices.Concat(l.WireGuard.Pool, l.MASQUE.Pool) {
		if slices.ContainsFunc(theirs, p.Overlaps) {
			return p
		}
	}
	return netip.Prefix{}
}

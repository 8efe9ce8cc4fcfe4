// Package access is data about who may come in, and how: the modes of listeners,
// WireGuard's keys and peers with the files that hold them, and bearer tokens. It
// opens nothing.
package access

import "slices"

// Mode says how clients come to a listener, and how it learns where they want to go.
type Mode string

// The ways in: the first two capture, those up to Mixed are asked, and the last three
// end tunnels.
const (
	TPROXY   Mode = "tproxy"   // captured, the packet unchanged
	Redirect Mode = "redirect" // captured by NAT to a local port
	SOCKS5   Mode = "socks5"   // RFC 1928, with RFC 1929 passwords
	Connect  Mode = "connect"  // HTTP CONNECT, RFC 9110 §9.3.6
	Mixed    Mode = "mixed"    // SOCKS5 or CONNECT, told apart by the first byte
	Forward  Mode = "forward"  // always to the one configured target

	WireGuard Mode = "wireguard" // the WireGuard endpoint is in this process
	TUN       Mode = "tun"       // packets come from a device that others feed
	MASQUE    Mode = "masque"    // HTTP/3 brings packets and streams
)

// Modes lists every Mode.
var Modes = []Mode{TPROXY, Redirect, SOCKS5, Connect, Mixed, Forward, WireGuard, TUN, MASQUE}

// Known reports whether there is such a mode.
func (m Mode) Known() bool { return slices.Contains(Modes, m) }

// Captures reports whether clients do not know of the listener.
func (m Mode) Captures() bool { return m == TPROXY || m == Redirect }

// Asks reports whether clients speak a proxy protocol that can carry a name, a
// password and an error.
func (m Mode) Asks() bool { return m == SOCKS5 || m == Connect || m == Mixed }

// Tunnels reports whether clients are inside a tunnel that ends here.
func (m Mode) Tunnels() bool { return m == WireGuard || m == TUN || m == MASQUE }

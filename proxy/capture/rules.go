// Package capture installs and removes what makes the kernel hand other
// machines' connections to a transparent listener: one nftables table, and for
// TPROXY a policy rule and a local route for each address family.
package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// What belongs to Penstock in the kernel, however it was configured. These
// three are what Remove looks for, so they are not settings.
const (
	Table         = "penstock" // the nftables table, family inet
	RouteProtocol = 112        // origin ("proto") of our routes and policy rules; unassigned in rt_protos
	RulePriority  = 120        // of our policy rules: before other software's, behind the local table
)

// Defaults of Rules. Both marks are single high bits: the middle ones are used by
// kube-proxy, Tailscale and others. Cilium and Calico use these too: see deploy/kubernetes.
const (
	DefaultMark       = 0x0100_0000
	DefaultOwnMark    = 0x0200_0000
	DefaultRouteTable = 11200
)

// AnyInterface in place of an interface's name is every one of them, the
// outside ones among them.
const AnyInterface = "any"

// Mode is the way of capturing.
type Mode string

// Connected says what becomes of connections to networks that the machine is on.
type Connected string

// Auto leaves them out where a forward chain of the machine drops or rejects
// something, since captured connections do not pass it, and otherwise captures them.
const (
	ConnectedAuto    Connected = "auto"
	ConnectedCapture Connected = "yes"
	ConnectedLeave   Connected = "no"
)

// TPROXY hands packets over as they are and needs no connection tracking;
// Redirect rewrites their destination by NAT and needs it.
const (
	TPROXY   Mode = "tproxy"
	Redirect Mode = "redirect"
)

// PortRange is an inclusive range of ports.
type PortRange struct{ First, Last uint16 }

// UnmarshalText reads "443" or "8000-8099".
func (p *PortRange) UnmarshalText(text []byte) error {
	first, last, ranged := strings.Cut(string(text), "-")
	if !ranged {
		last = first
	}
	a, errA := strconv.ParseUint(first, 10, 16)
	b, errB := strconv.ParseUint(last, 10, 16)
	if errA != nil || errB != nil || a == 0 || b < a {
		return fmt.Errorf("capture: port %q is neither a port nor a range such as 8000-8099", text)
	}
	p.First, p.Last = uint16(a), uint16(b)
	return nil
}

func (p PortRange) String() string {
	if p.First == p.Last {
		return strconv.Itoa(int(p.First))
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}

// Match selects addresses: those in Include (empty: all) that are not in
// Exclude.
type Match struct{ Include, Exclude []netip.Prefix }

// Rules says which connections to capture, and how. Only connections that the
// machine forwards are captured: never those of its own processes, never those
// to its own addresses, and never one that was open before.
//
// A captured connection does not pass the machine's forward chains: it ends
// here, and the proxy's own begins. What these chains keep apart is mostly the
// networks that the machine is on, so Connected leaves destinations there out. It
// goes by the machine's chains, addresses and routes when the rules are applied.
//
// TPROXY fits listeners that keep the client's address towards the server, too:
// the answers, addressed to the client, are kept here. When the listener is
// gone TPROXY captures nothing, and new connections pass as if there were no
// rules; Redirect refuses them.
//
// TPROXY captures by the first packet and recognises the others by the socket
// that it made. A connection answered with a SYN cookie, in a flood, has none
// yet: its client is reset and has to try again.
type Rules struct {
	Mode Mode
	Port uint16 // of our listener, on every local address

	IPv4, IPv6   bool        // neither: both
	Interfaces   []string    // where connections come in, or AnyInterface; at least one
	Connected    Connected   // empty: ConnectedAuto
	Ports        []PortRange // destination ports; empty: all
	Sources      Match
	Destinations Match

	Mark       uint32 // bits set on captured packets, other bits are kept; 0: DefaultMark
	OwnMark    uint32 // bits that mark the proxy's own packets, which are never captured; 0: DefaultOwnMark
	RouteTable int    // where marked packets are routed to this machine; 0: DefaultRouteTable

	machineNetworks []netip.Prefix // networks of this machine, as found when it was looked at
}

// Validate reports what keeps the rules from being applied, without a look at
// the machine.
func (r Rules) Validate() error {
	_, err := r.withDefaults()
	return err
}

// withDefaults fills in the defaults and refuses what cannot work; the error
// names the field as flags and files do.
func (r Rules) withDefaults() (Rules, error) {
	if !r.IPv4 && !r.IPv6 {
		r.IPv4, r.IPv6 = true, true
	}
	if r.Mark == 0 {
		r.Mark = DefaultMark
	}
	if r.Connected == "" {
		r.Connected = ConnectedAuto
	}
	if r.OwnMark == 0 {
		r.OwnMark = DefaultOwnMark
	}
	if r.RouteTable == 0 {
		r.RouteTable = DefaultRouteTable
	}
	switch {
	case r.Mode != TPROXY && r.Mode != Redirect:
		return r, fmt.Errorf("capture: mode %q is neither tproxy nor redirect", r.Mode)
	case r.Connected != ConnectedAuto && r.Connected != ConnectedCapture && r.Connected != ConnectedLeave:
		return r, fmt.Errorf("capture: connected %q is none of auto, yes and no", r.Connected)
	case r.Port == 0:
		return r, errors.New("capture: port: the port of the transparent listener is missing")
	case r.Mark&r.OwnMark != 0:
		return r, fmt.Errorf("capture: mark %#x and own-mark %#x share bits: the proxy's own packets would be "+
			"routed back to it", r.Mark, r.OwnMark)
	case r.RouteTable < 0 || r.RouteTable > 1<<31-1:
		return r, fmt.Errorf("capture: route-table %d is not in 1..2147483647", r.RouteTable)
	case r.RouteTable >= 253 && r.RouteTable <= 255:
		return r, fmt.Errorf("capture: route-table %d is the system's (default, main, local): choose an unused one",
			r.RouteTable)
	}
	if len(r.Interfaces) == 0 {
		return r, errors.New("capture: interface: where connections come in is missing: " +
			"--interface lan0, once for each inside interface; or --interface any, which captures what comes from " +
			"outside, too")
	}
	for _, name := range r.Interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/ \t\n\"*\x00") {
			return r, fmt.Errorf("capture: interface %q: not the full name of a network interface", name)
		}
	}
	for _, p := range r.Ports {
		if p.First == 0 || p.Last < p.First {
			return r, fmt.Errorf("capture: port range %v is empty or has port 0", p)
		}
	}
	for _, list := range [][]netip.Prefix{
		r.Sources.Include, r.Sources.Exclude, r.Destinations.Include,
		r.Destinations.Exclude,
	} {
		for _, p := range list {
			if !p.IsValid() || p.Addr().Is4In6() {
				return r, fmt.Errorf("capture: prefix %v: write it as 192.0.2.0/24 or 2001:db8::/32", p)
			}
		}
	}
	return r, nil
}

package policy

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/proxy/destination"
)

// Match says which connections a rule is for. Every field that is set must
// match; within a field one entry is enough. The zero Match matches everything.
type Match struct {
	// The transport: tcp, or udp and icmp out of tunnels, or udp that a listener holds. Not set: any. QUIC is udp at
	// port 443; refused, browsers go on over TCP.
	Protocol Protocol `yaml:"protocol"`
	// Names of listeners.
	Listeners []string `yaml:"listener"`
	// Addresses or prefixes of clients.
	Sources []netip.Prefix `yaml:"source"`
	// Addresses or prefixes of servers.
	Destinations []netip.Prefix `yaml:"destination"`
	// Server ports and ranges, such as 443 or 8000-8100.
	Ports []PortRange `yaml:"ports"`
	// Names the client asked for: example.com, or .example.com for all names below it. Only listeners that ask know
	// names.
	Hosts []string `yaml:"host"`
	// Names in the client's first bytes (TLS server name, HTTP/1 host, QUIC where UDP is held): example.com, or
	// *.example.com for all names below it. Only where a rule needs them are those bytes looked at;
	// limits.server_name_wait bounds for how long.
	ServerNames []NamePattern `yaml:"server_name"`
	// A part of the client hosts, such as 5%: to try other terms on some of them, and to compare. A host is in the
	// sample or out of it for as long as the rule has its name: the peer of a tunnel, an IPv4 address, or an IPv6 /64.
	Sample Sample `yaml:"sample"`
}

// Protocol is a transport. Only what comes out of tunnels, and what is held, is anything but TCP.
type Protocol string

// The transports that rules tell apart. An echo request is ICMP's, and has no port.
const (
	TCP  Protocol = "tcp"
	UDP  Protocol = "udp"
	ICMP Protocol = "icmp"
)

// PortRange is an inclusive range of ports.
type PortRange struct{ First, Last uint16 }

// ParsePorts reads "443" or "8000-8100".
func ParsePorts(s string) (PortRange, error) {
	first, last, isRange := strings.Cut(s, "-")
	if !isRange {
		last = first
	}
	a, errA := strconv.ParseUint(strings.TrimSpace(first), 10, 16)
	b, errB := strconv.ParseUint(strings.TrimSpace(last), 10, 16)
	if errA != nil || errB != nil || a == 0 || b < a {
		return PortRange{}, fmt.Errorf("%q is no port (1 to 65535) or range of ports such as 8000-8100", s)
	}
	return PortRange{uint16(a), uint16(b)}, nil
}

// containsPort reports whether a port is in the range.
func (r PortRange) containsPort(port uint16) bool { return r.First <= port && port <= r.Last }

// String writes the range so that ParsePorts reads it.
func (r PortRange) String() string {
	if r.First == r.Last {
		return strconv.Itoa(int(r.First))
	}
	return fmt.Sprintf("%d-%d", r.First, r.Last)
}

// Sample is a part of all client hosts, above 0 up to 1. The zero value stands for all of them.
type Sample float64

// NoHosts is the sample of a rule that was stopped. No text stands for it.
const NoHosts Sample = -1

// ParseSample reads a percentage such as 5% or 0.5%.
func ParseSample(s string) (Sample, error) {
	number, ok := strings.CutSuffix(strings.TrimSpace(s), "%")
	v, err := strconv.ParseFloat(strings.TrimSpace(number), 64)
	if !ok || err != nil || !(v > 0 && v <= 100) {
		return 0, fmt.Errorf("%q is no sample; write a percentage above 0%% up to 100%%, such as 5%%", s)
	}
	return Sample(v / 100), nil
}

// String writes the sample so that ParseSample reads it.
func (s Sample) String() string { return strconv.FormatFloat(100*float64(s), 'g', 6, 64) + "%" }

// isPart reports whether some hosts are not in the sample.
func (s Sample) isPart() bool { return s != 0 && s < 1 }

// containsHost reports whether the client host of f is in the sample. The salt makes the samples of two rules
// independent of each other. Hosts are those of the default group template, so that all flows of one group are in the
// sample or none. An IPv6 host is its /64, because privacy addresses change within it.
func (s Sample) containsHost(f *Facts, salt string) bool {
	switch {
	case s == 0, s >= 1:
		return true
	case s == NoHosts:
		return false
	}
	peer := ""
	if f.Inside { // otherwise Peer forwards for many hosts
		peer = f.Peer
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(salt + "|" + ClientHost(f.Source.Addr(), peer)))
	// The high bits of FNV-1a depend little on the last bytes.
	return float64(mixBits(h.Sum64())>>11)/(1<<53) < float64(s)
}

// mixBits is the finaliser of SplitMix64: every bit of the result depends on every bit of x.
func mixBits(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// ClientHost returns the name of a client host in samples: the tunnel's peer that it is inside, else the IPv4 address
// or the IPv6 /64.
func ClientHost(client netip.Addr, peer string) string {
	if peer != "" {
		return peer
	}
	client = client.Unmap().WithZone("")
	if client.Is4() {
		return client.String()
	}
	network, err := client.Prefix(64)
	if err != nil { // not valid: no host is known
		return ""
	}
	return network.String()
}

// checkMatch checks values that the configuration's parsers refuse, since callers may build a Match without them.
func (m Match) checkMatch() error {
	for _, p := range slices.Concat(m.Sources, m.Destinations) {
		if !p.IsValid() || p.Addr().Is4In6() {
			return fmt.Errorf("%v is no prefix", p)
		}
	}
	for _, r := range m.Ports {
		if r.Last < r.First {
			return fmt.Errorf("ports %v are back to front", r)
		}
	}
	if m.Protocol == ICMP && len(m.ServerNames) > 0 || m.hasHostsWithoutTCP() {
		return fmt.Errorf("what comes over %s has no such name", m.Protocol)
	}
	if (m.Sample < 0 || m.Sample > 1) && m.Sample != NoHosts {
		return fmt.Errorf("a sample of %v; it is above 0%% up to 100%%", m.Sample)
	}
	if slices.Contains(m.ServerNames, NamePattern{}) {
		return fmt.Errorf("an empty server name matches nothing")
	}
	return nil
}

// hasHostsWithoutTCP reports whether Hosts can never match: only listeners for TCP ask clients for a host.
func (m *Match) hasHostsWithoutTCP() bool {
	return m.Protocol != "" && m.Protocol != TCP && len(m.Hosts) > 0
}

// matchesName reports whether ServerNames matches a name as ServerName returns it.
func (m *Match) matchesName(name string) bool {
	return len(m.ServerNames) == 0 ||
		slices.ContainsFunc(m.ServerNames, func(p NamePattern) bool { return p.matchesName(name) })
}

// matchesBeforeName reports whether everything but ServerNames matches. The server name is known later than the rest.
func (m *Match) matchesBeforeName(f Facts) bool { return m.mismatchBeforeName(&f) == "" }

// mismatchBeforeName returns the key of a matcher that does not match; empty: all but ServerNames match. It has one
// case for each matcher.
func (m *Match) mismatchBeforeName(f *Facts) string {
	switch {
	case m.Protocol != "" && m.Protocol != cmp.Or(f.Protocol, TCP):
		return "protocol"
	case len(m.Listeners) > 0 && !slices.Contains(m.Listeners, f.Listener):
		return "listener"
	case len(m.Sources) > 0 && !destination.Contains(m.Sources, f.Source.Addr()):
		return "source"
	case len(m.Destinations) > 0 && !destination.Contains(m.Destinations, f.Target.Addr()):
		return "destination"
	case len(m.Ports) > 0 && !slices.ContainsFunc(m.Ports,
		func(r PortRange) bool { return r.containsPort(f.Target.Port()) }):
		return "ports"
	case len(m.Hosts) > 0 && !slices.ContainsFunc(m.Hosts,
		func(pattern string) bool { return hostMatches(pattern, f.Host) }):
		return "host"
	}
	return ""
}

// hostMatches compares names the way DNS does: without case or a final dot.
func hostMatches(pattern, host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	pattern = strings.ToLower(strings.TrimSuffix(pattern, "."))
	if host == "" || pattern == "" {
		return false
	}
	if strings.HasPrefix(pattern, ".") {
		return strings.HasSuffix(host, pattern)
	}
	return host == pattern
}

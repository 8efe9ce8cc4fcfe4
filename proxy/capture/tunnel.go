package capture

import (
	"net/netip"
	"slices"
	"strconv"

	"github.com/google/nftables"
)

// tunnelTable is what the names of tables of tunnels begin with; the interface follows.
const tunnelTable = Table + "_"

// Tunnel is what surrounds the interface of a tunnel that the kernel ends: what comes out
// of it as TCP goes to a transparent listener, and the rest is forwarded, in this
// machine's name. It stands beside Rules and knows nothing of them.
//
// When the listener is gone, what is TCP is forwarded, too.
type Tunnel struct {
	Interface string
	Port      uint16 // of our listener, on every local address

	Inside   []netip.Prefix // all addresses inside
	Gateways []netip.Addr   // this machine's inside: they answer pings
	DNS      netip.AddrPort // answers at Gateways of its family, at port 53; invalid: nobody does
	Isolate  bool           // refuse what one peer sends to another
	Closed   []netip.Prefix // where nothing may go
	Open     []netip.Prefix // where it may all the same, this machine's own addresses included
	From     []netip.Prefix // who may begin something with a peer
	// of what goes to Open or is forwarded besides, the first that matches decides; where none does it passes
	Verdicts []Verdict

	routeTable int // where captured packets are routed to this machine
}

// Verdict says what becomes of what peers send past the proxy.
type Verdict struct {
	Refuse           bool
	Sources, Targets []netip.Prefix // empty: all
	Ports            []PortRange    // of the target, over UDP and TCP; empty: all, of whatever protocol
	TCP, UDP, ICMP   bool           // that alone; none of them: whatever it is
}

// tableName is the name of the tunnel's table.
func (t Tunnel) tableName() string { return tunnelTable + t.Interface }

// usedFamilies are those that there are addresses of inside.
func (t Tunnel) usedFamilies() []family {
	return slices.DeleteFunc([]family{ipv4, ipv6}, func(f family) bool {
		return !slices.ContainsFunc(t.Inside, func(p netip.Prefix) bool { return p.Addr().Is4() == f.isIPv4() })
	})
}

// buildRuleset builds the tunnel's table.
//
//	prerouting   TCP from the tunnel, but to this machine     to us, with the ICMP errors about it
//	dns          port 53 at the gateway's own address         to the name server
//	input        from the tunnel to this machine              refused, but for pings, names, answers and Open
//	forward      from the tunnel to a peer                    passes, unless Isolate, and not Open
//	             from the tunnel to elsewhere                 passes, unless Closed, and not Open
//	             from elsewhere into the tunnel               answers alone, but for From
//	both         what a Verdict refuses                       refused, Open or not
//	postrouting  from the tunnel to elsewhere, From into it   in this machine's name
func (t Tunnel) buildRuleset() ruleset {
	r := ruleset{table: t.tableName()}
	families := t.usedFamilies()
	closed, open, outside := map[family]set{}, map[family]set{}, map[family]set{}
	verdicts := map[family][][]clause{}
	for _, f := range families {
		kind := f.addressType()
		closed[f] = r.addSet("closed"+f.setSuffix(), kind, addressElements(t.Closed, f.isIPv4()))
		open[f] = r.addSet("open"+f.setSuffix(), kind, addressElements(t.Open, f.isIPv4()))
		outside[f] = r.addSet("outside"+f.setSuffix(), kind, addressElements(t.From, f.isIPv4()))
		for i, v := range t.Verdicts {
			verdicts[f] = append(verdicts[f], r.verdictRules(v, f, strconv.Itoa(i)+f.setSuffix())...)
		}
	}
	decide := func(where func(f family) []clause) {
		for _, f := range families {
			for _, v := range verdicts[f] {
				r.addRule(slices.Concat(where(f), v)...)
			}
		}
	}
	from, to := fromInterface(t.Interface), toInterface(t.Interface)

	r.beginChain("prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityMangle,
		"type filter hook prerouting priority mangle")
	r.addRule(notFromInterface(t.Interface), returnToCaller())
	r.deliverICMPErrors(DefaultMark, families)
	r.addRule(notTCP(), returnToCaller())
	r.deliverToSocket(DefaultMark, notFirst())
	r.addRule(notFirst(), returnToCaller())
	r.addRule(toThisMachine(), returnToCaller())
	for _, f := range families {
		r.addRule(ofFamily(f), isTCP(), countPackets(), toProxy(f, t.Port), addMark(DefaultMark), acceptPacket())
	}

	r.beginChain("dns", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, nftables.ChainPriorityNATDest,
		"type nat hook prerouting priority dstnat")
	for _, gateway := range t.Gateways {
		if f := familyOf(gateway); t.DNS.IsValid() && f == familyOf(t.DNS.Addr()) {
			for _, protocol := range []clause{isUDP(), isTCP()} {
				r.addRule(from, ofFamily(f), targetIs(f, gateway), protocol, toPort(dnsPort), translateTo(f, t.DNS))
			}
		}
	}

	r.beginChain("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter,
		"type filter hook input priority filter")
	r.addRule(notFromInterface(t.Interface), returnToCaller())
	r.addRule(hasMark(DefaultMark), returnToCaller())
	r.addRule(isAnswer(), returnToCaller())
	r.addRule(ofTranslated(), returnToCaller())
	for _, gateway := range t.Gateways {
		f := familyOf(gateway)
		r.addRule(ofFamily(f), targetIs(f, gateway), isEcho(f), returnToCaller())
	}
	decide(func(f family) []clause { return []clause{ofFamily(f), targetIn(f, open[f])} })
	for _, f := range families {
		r.addRule(ofFamily(f), targetIn(f, open[f]), returnToCaller())
	}
	r.addRule(isTCP(), countPackets(), rejectWithReset())
	r.addRule(countPackets(), rejectPacket())

	r.beginChain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter,
		"type filter hook forward priority filter")
	r.addRule(isAnswer(), returnToCaller())
	decide(func(f family) []clause { return []clause{from, ofFamily(f), targetIn(f, open[f])} })
	if t.Isolate {
		for _, f := range families {
			r.addRule(from, to, ofFamily(f), targetIn(f, open[f]), returnToCaller())
		}
		r.addRule(from, to, countPackets(), rejectPacket())
	} else {
		decide(func(f family) []clause { return []clause{from, to, ofFamily(f)} })
		r.addRule(from, to, returnToCaller())
	}
	for _, f := range families {
		r.addRule(from, ofFamily(f), targetIn(f, open[f]), returnToCaller())
		r.addRule(from, ofFamily(f), targetIn(f, closed[f]), countPackets(), rejectPacket())
	}
	decide(func(f family) []clause { return []clause{from, ofFamily(f)} })
	r.addRule(from, returnToCaller())
	for _, f := range families {
		r.addRule(to, ofFamily(f), sourceIn(f, outside[f]), returnToCaller())
	}
	r.addRule(to, countPackets(), rejectPacket())

	r.beginChain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource,
		"type nat hook postrouting priority srcnat")
	for _, f := range families {
		r.addRule(to, ofFamily(f), sourceIn(f, outside[f]), masqueradeSource())
	}
	r.addRule(to, returnToCaller())
	for _, f := range families {
		inside := r.addSet("inside"+f.setSuffix(), f.addressType(), addressElements(t.Inside, f.isIPv4()))
		r.addRule(ofFamily(f), sourceIn(f, inside), masqueradeSource())
	}
	return r
}

// verdictRules returns what a Verdict means for a family: the ends of rules. suffix makes the names of its sets.
func (t *ruleset) verdictRules(v Verdict, f family, suffix string) (ends [][]clause) {
	var match []clause
	for _, part := range []struct {
		name  string
		in    func(family, set) clause
		addrs []netip.Prefix
	}{{"from", sourceIn, v.Sources}, {"to", targetIn, v.Targets}} {
		if len(part.addrs) == 0 {
			continue
		}
		elements := addressElements(part.addrs, f.isIPv4())
		if len(elements) == 0 {
			return nil // it is about the other family
		}
		match = append(match, part.in(f, t.addSet(part.name+suffix, f.addressType(), elements)))
	}
	protocols := [][]clause{nil}
	switch {
	case v.ICMP && len(v.Ports) > 0:
		return nil // it has none
	case v.ICMP:
		protocols = [][]clause{{isICMP(f)}}
	case v.UDP:
		protocols = [][]clause{{isUDP()}}
	case v.TCP:
		protocols = [][]clause{{isTCP()}}
	case len(v.Ports) > 0:
		protocols = [][]clause{{isUDP()}, {isTCP()}}
	}
	if len(v.Ports) > 0 {
		s := t.addSet("ports"+suffix, nftables.TypeInetService, portElements(v.Ports))
		for i := range protocols {
			protocols[i] = append(protocols[i], clause{"th dport @" + s.name, portIn(s).exprs})
		}
	}
	end := []clause{returnToCaller()}
	if v.Refuse {
		end = []clause{countPackets(), rejectPacket()}
	}
	for _, protocol := range protocols {
		ends = append(ends, slices.Concat(match, protocol, end))
	}
	return ends
}

package capture

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func aTunnel() Tunnel {
	prefix := netip.MustParsePrefix
	return Tunnel{
		Interface: "wg0", Port: 1081,
		Inside:   []netip.Prefix{prefix("10.9.0.0/24"), prefix("fd09::/64"), prefix("10.9.0.2/32")},
		Gateways: []netip.Addr{netip.MustParseAddr("10.9.0.1"), netip.MustParseAddr("fd09::1")},
		DNS:      netip.MustParseAddrPort("192.0.2.53:53"), Isolate: true,
		Closed: []netip.Prefix{prefix("169.254.0.0/16"), prefix("fe80::/10")}, Open: []netip.Prefix{prefix("10.9.0.3/32")},
		From: []netip.Prefix{prefix("192.168.7.0/24"), prefix("fd77::/64")},
		Verdicts: []Verdict{
			{Sources: []netip.Prefix{prefix("10.9.0.9/32")}, Ports: []PortRange{{53, 53}}},
			{Refuse: true, Targets: []netip.Prefix{prefix("10.0.0.0/8"), prefix("fc00::/7")}},
			{Refuse: true, UDP: true, Ports: []PortRange{{123, 123}, {443, 444}}},
			{Refuse: true, ICMP: true},
			{Refuse: true, TCP: true, Ports: []PortRange{{22, 22}}},
		},
	}
}

// Once more, or after a process that was killed, there is what there was; after Remove
// there is nothing, and the rules for others stay.
func TestATunnelIsSurroundedAndLeftAsItWas(t *testing.T) {
	for name, tunnel := range map[string]Tunnel{
		"all of it": aTunnel(),
		"little": {
			Interface: "wg0", Port: 1081,
			Inside: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")},
		},
	} {
		t.Run(name, func(t *testing.T) {
			ns := newNamespace(t)
			ns.do(t, func() error { return MakeInterface("wg0", "veth") })
			ns.do(t, func() error { return everything().Apply(t.Context()) })
			before := ns.state(t)
			ns.do(t, func() error { return tunnel.Apply(t.Context()) })
			once := ns.state(t)
			require.Equal(t, 1, count(once, "table 1 penstock_wg0"))
			rules := 0
			for _, c := range tunnel.buildRuleset().chains {
				rules += len(c.rules)
			}
			assert.Equal(t, rules, count(once, "rule 1 penstock_wg0"))
			families := len(tunnel.usedFamilies())
			assert.Equal(t, count(before, "policy")+families, count(once, "policy"))
			assert.Equal(t, count(before, "route")+families, count(once, "route"))
			ns.do(t, func() error { return tunnel.Apply(t.Context()) })
			assert.Equal(t, once, ns.state(t))

			ns.do(t, func() error { return Tunnel{Interface: "wg0"}.Remove(t.Context()) })
			assert.Equal(t, before, ns.state(t))
			ns.do(t, func() error { return Tunnel{Interface: "wg0"}.Remove(t.Context()) })
			assert.Equal(t, before, ns.state(t))

			ns.do(t, func() error { return tunnel.Apply(t.Context()) })
			ns.do(t, func() error { return Remove(t.Context()) })
			assert.Equal(t, count(once, "rule 1 penstock_wg0"), count(ns.state(t), "rule 1 penstock_wg0"))
		})
	}
}

// The kernel answers each rule, and a socket has room for few hundred answers by default.
func TestATunnelHasRoomForManyVerdicts(t *testing.T) {
	tunnel := aTunnel()
	for port := range uint16(300) {
		tunnel.Verdicts = append(tunnel.Verdicts, Verdict{Refuse: true, UDP: true, Ports: []PortRange{{port, port}}})
	}
	ns := newNamespace(t)
	ns.do(t, func() error { return MakeInterface("wg0", "veth") })
	ns.do(t, func() error { return tunnel.Apply(t.Context()) })
}

func TestATunnelWithoutItsInterfaceLeavesNothing(t *testing.T) {
	ns := newNamespace(t)
	before := ns.state(t)
	ns.do(t, func() error {
		assert.ErrorContains(t, aTunnel().Apply(t.Context()), "wg0")
		return nil
	})
	assert.Equal(t, before, ns.state(t))
}

// The kernel forwards for peers meanwhile, so what held them has to stay.
func TestATunnelThatTheKernelRefusesLeavesWhatThereWas(t *testing.T) {
	ns := newNamespace(t)
	ns.do(t, func() error { return MakeInterface("wg0", "veth") })
	ns.do(t, func() error { return aTunnel().Apply(t.Context()) })
	before := ns.state(t)
	refused := aTunnel()
	refused.Inside = refused.Inside[1:2]                      // one family less
	refused.Gateways = append(refused.Gateways, netip.Addr{}) // none
	ns.do(t, func() error {
		assert.ErrorContains(t, refused.Apply(t.Context()), "install the nftables table")
		return nil
	})
	assert.Equal(t, before, ns.state(t))
}

// What is printed for a rule is what nft says of it.
func TestVerdictsReadAsTheyAreMeant(t *testing.T) {
	var texts []string
	for _, c := range aTunnel().buildRuleset().chains {
		if c.name == "forward" {
			for _, r := range c.rules {
				texts = append(texts, ruleText(r))
			}
		}
	}
	const from = `iifname "wg0" meta nfproto `
	const no = "counter reject with icmpx admin-prohibited"
	for _, want := range []string{
		from + "ipv4 ip saddr @from04 meta l4proto udp th dport @ports04 return",
		from + "ipv4 ip daddr @to14 " + no,
		from + "ipv6 ip6 daddr @to16 " + no,
		from + "ipv6 meta l4proto udp th dport @ports26 " + no,
		from + "ipv4 meta l4proto icmp " + no,
		from + "ipv6 meta l4proto icmpv6 " + no,
		from + "ipv4 meta l4proto tcp th dport @ports44 " + no,
	} {
		assert.Contains(t, texts, want)
	}
	for _, text := range texts {
		assert.NotContains(t, text, "from06", "a source of the other family")
	}
}

// What may be reached although it is closed to others is still what a rule may refuse.
func TestWhatIsOpenIsRefusedByAVerdictAllTheSame(t *testing.T) {
	for _, c := range aTunnel().buildRuleset().chains {
		texts := make([]string, len(c.rules))
		for i, r := range c.rules {
			texts[i] = ruleText(r)
		}
		const open = "meta nfproto ipv4 ip daddr @open4 "
		var from string
		switch c.name {
		case "input":
		case "forward":
			from = `iifname "wg0" `
		default:
			continue
		}
		passes := slices.Index(texts, from+open+"return")
		require.Positive(t, passes, c.name)
		for _, refused := range []string{
			"ip daddr @to14 ", "meta l4proto udp th dport @ports24 ", "meta l4proto icmp ",
			"meta l4proto tcp th dport @ports44 ",
		} {
			at := slices.Index(texts, from+open+refused+"counter reject with icmpx admin-prohibited")
			assert.Positive(t, at, "%s: %s", c.name, refused)
			assert.Less(t, at, passes, "%s: %s", c.name, refused)
		}
		assert.Contains(t, texts, from+open+"ip saddr @from04 meta l4proto udp th dport @ports04 return", c.name)
	}
}

// A pool may be closed to others, as one of 100.64.0.0/10 is. Verdicts hold among peers, too.
func TestPeersReachEachOtherWhereTheirAddressesAreClosed(t *testing.T) {
	tunnel := aTunnel()
	tunnel.Isolate = false
	var texts []string
	for _, c := range tunnel.buildRuleset().chains {
		if c.name == "forward" {
			for _, r := range c.rules {
				texts = append(texts, ruleText(r))
			}
		}
	}
	const among = `iifname "wg0" oifname "wg0" `
	const no = "counter reject with icmpx admin-prohibited"
	refused := slices.Index(texts, among+"meta nfproto ipv4 meta l4proto icmp "+no)
	passes := slices.Index(texts, among+"return")
	closed := slices.Index(texts, `iifname "wg0" meta nfproto ipv4 ip daddr @closed4 `+no)
	require.NotEqual(t, -1, refused)
	assert.Less(t, refused, passes)
	assert.Less(t, passes, closed)
}

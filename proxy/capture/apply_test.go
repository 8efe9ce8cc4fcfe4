package capture

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// anywhere is an interface that everything comes in by.
var anywhere = []string{AnyInterface}

// everything uses every setting of TPROXY.
func everything() Rules {
	prefixes := func(list ...string) []netip.Prefix {
		var ps []netip.Prefix
		for _, s := range list {
			ps = append(ps, netip.MustParsePrefix(s))
		}
		return ps
	}
	return Rules{
		Mode: TPROXY, Port: 1081,
		Interfaces: []string{"lan1", "lan0", "lan1"},
		Ports:      []PortRange{{443, 443}, {80, 80}, {8000, 8099}, {8050, 8100}, {65000, 65535}},
		Sources: Match{
			Include: prefixes("192.168.0.0/16", "192.168.7.0/24", "fd00::/8"),
			Exclude: prefixes("192.168.7.9/32"),
		},
		Destinations: Match{Exclude: prefixes("10.0.0.0/9", "10.128.0.0/9", "10.0.0.5/32", "ff00::/8")},
	}
}

func TestApplyTwiceIsApplyOnce(t *testing.T) {
	for _, row := range []struct {
		name  string
		rules Rules
	}{
		{"little", Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081}},
		{"everything", everything()},
		{"IPv4 only", Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081, IPv4: true}},
		{"IPv6 only", Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081, IPv6: true, RouteTable: 100}},
		{"redirect", Rules{Mode: Redirect, Interfaces: anywhere, Port: 1081, Ports: []PortRange{{80, 80}}}},
		{"all addresses, all ports", Rules{
			Mode: Redirect, Interfaces: anywhere, Port: 1081, Ports: []PortRange{{1, 65535}},
			Sources: Match{Include: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}},
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			ns := newNamespace(t)
			clean := ns.state(t)
			require.Zero(t, count(clean, "table "))

			ns.do(t, func() error { return row.rules.Apply(t.Context()) })
			once := ns.state(t)
			require.Equal(t, 1, count(once, "table "))
			require.Equal(t, 1, count(once, "table 1 penstock"))
			r, err := row.rules.withDefaults()
			require.NoError(t, err)
			assert.Equal(t, len(r.buildRuleset().chains[0].rules), count(once, "rule 1 penstock"))
			routed := 0
			if r.Mode == TPROXY {
				routed = len(r.usedFamilies())
			}
			assert.Equal(t, count(clean, "policy")+2*routed, count(once, "policy"))
			assert.Equal(t, count(clean, "route")+routed, count(once, "route"))

			ns.do(t, func() error { return row.rules.Apply(t.Context()) })
			assert.Equal(t, once, ns.state(t))

			ns.do(t, func() error { return Remove(t.Context()) })
			assert.Equal(t, clean, ns.state(t))
			ns.do(t, func() error { return Remove(t.Context()) })
			assert.Equal(t, clean, ns.state(t))
		})
	}
}

func TestSetsHoldDisjointRanges(t *testing.T) {
	ns := newNamespace(t)
	ns.do(t, func() error { return everything().Apply(t.Context()) })
	s := ns.state(t)
	for set, want := range map[string]int{
		"interfaces":        2,
		"ports":             4 + 3, // the last range is open
		"sources4":          1 + 1,
		"sources6":          1 + 1,
		"not_destinations4": 1 + 1, // two halves are one whole
		"not_destinations6": 1 + 0,
	} {
		assert.Equal(t, want, count(s, "element 1 penstock "+set+" "), set)
	}
}

// An attribute of netlink has 64 KiB at most, and a socket's buffer 208 KiB by default.
func TestLargeSetsAreWhole(t *testing.T) {
	for name, n := range map[string]int{"more than an attribute": 2000, "more than a buffer": 20000} {
		t.Run(name, func(t *testing.T) {
			rules := Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081}
			for i := range n {
				four := netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0})
				six := netip.AddrFrom16([16]byte{0xfd, 0, byte(i >> 7), byte(i << 1)})
				rules.Destinations.Exclude = append(rules.Destinations.Exclude,
					netip.PrefixFrom(four, 24), netip.PrefixFrom(six, 32))
			}
			ns := newNamespace(t)
			ns.do(t, func() error { return rules.Apply(t.Context()) })
			s := ns.state(t)
			for _, set := range []string{"not_destinations4", "not_destinations6"} {
				assert.Equal(t, 2*n, count(s, "element 1 penstock "+set+" "), set)
			}
		})
	}
}

func TestOtherSettingsReplaceTheOldOnes(t *testing.T) {
	ns := newNamespace(t)
	clean := ns.state(t)
	ns.do(t, func() error { return everything().Apply(t.Context()) })
	other := Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1082, IPv4: true, Mark: 0x40, RouteTable: 7}
	ns.do(t, func() error { return other.Apply(t.Context()) })
	s := ns.state(t)
	assert.Equal(t, count(clean, "policy")+2, count(s, "policy"))
	assert.Equal(t, count(clean, "route")+1, count(s, "route"))
	assert.Equal(t, 1, count(s, "policy 2 priority 120 mark 0x40/0x40 table 7 proto 112"))

	ns.do(t, func() error { return Rules{Mode: Redirect, Interfaces: anywhere, Port: 1083}.Apply(t.Context()) })
	s = ns.state(t)
	assert.Equal(t, count(clean, "policy"), count(s, "policy"), "redirect needs no routing")
	assert.Equal(t, count(clean, "route"), count(s, "route"))
	assert.Equal(t, 1, count(s, "chain 1 penstock prerouting nat"))
}

func TestOfCallsAtOnceTheLastCounts(t *testing.T) {
	ns := newNamespace(t)
	rules := func(table int) Rules {
		return Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081, RouteTable: table}
	}
	var each [][]string
	for _, table := range []int{7, 8} {
		ns.do(t, func() error { return rules(table).Apply(t.Context()) })
		each = append(each, ns.state(t))
	}
	for range 10 {
		calls := []int{7, 7, 8, 8}
		errs := make(chan error, len(calls))
		for _, table := range calls {
			go func() { errs <- ns.in(func() error { return rules(table).Apply(t.Context()) }) }()
		}
		for range calls {
			require.NoError(t, <-errs)
		}
		require.Contains(t, each, ns.state(t))
	}
}

// foreign puts things of other programs beside ours, as close as they can be.
func foreign(t *testing.T, ns namespace) {
	t.Helper()
	ns.do(t, func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		for _, table := range []*nftables.Table{
			{Family: nftables.TableFamilyINet, Name: "penstock2"},
			{Family: nftables.TableFamilyIPv4, Name: Table}, // our name, another family
		} {
			c.AddTable(table)
			chain := c.AddChain(&nftables.Chain{
				Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter,
				Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
			})
			c.AddRule(&nftables.Rule{
				Table: table, Chain: chain,
				Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}},
			})
		}
		if err := c.Flush(); err != nil {
			return err
		}
		rule := netlink.NewRule()
		rule.Family, rule.Priority, rule.Table, rule.Mark = unix.AF_INET, RulePriority, DefaultRouteTable, 0x1
		if err := netlink.RuleAdd(rule); err != nil {
			return err
		}
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		_, dst, _ := net.ParseCIDR("203.0.113.0/24")
		for _, proto := range []netlink.RouteProtocol{unix.RTPROT_STATIC, RouteProtocol} { // the second is no local one
			route := &netlink.Route{
				Table: DefaultRouteTable + int(proto), Dst: dst, LinkIndex: lo.Attrs().Index,
				Protocol: proto,
			}
			if err := netlink.RouteAdd(route); err != nil {
				return err
			}
		}
		return nil
	})
}

func TestAnothersTableOfOurNameStays(t *testing.T) {
	for name, chain := range map[string]nftables.Chain{
		"another chain": {
			Name: "mine", Hooknum: nftables.ChainHookInput,
			Priority: nftables.ChainPriorityFilter,
		},
		"a chain that is called alike": {
			Name: ourChain, Hooknum: nftables.ChainHookPrerouting,
			Priority: nftables.ChainPriorityMangle,
		},
		"a chain at another place": {
			Name: ourChain, Hooknum: nftables.ChainHookInput,
			Priority: nftables.ChainPriorityMangle,
		},
		"a chain that hooks nowhere": {Name: ourChain},
		"no chain":                   {},
	} {
		t.Run(name, func(t *testing.T) {
			ns := newNamespace(t)
			ns.do(t, func() error {
				c, err := nftables.New()
				if err != nil {
					return err
				}
				chain.Table = c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: Table})
				if chain.Hooknum != nil {
					chain.Type = nftables.ChainTypeFilter
				}
				if chain.Name != "" {
					c.AddRule(&nftables.Rule{
						Table: chain.Table, Chain: c.AddChain(&chain),
						Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}},
					})
				}
				return c.Flush()
			})
			before := ns.state(t)
			for _, mode := range []Mode{TPROXY, Redirect} {
				err := ns.in(func() error { return Rules{Mode: mode, Interfaces: anywhere, Port: 1081}.Apply(t.Context()) })
				assert.ErrorContains(t, err, "nft delete table inet penstock")
				assert.Equal(t, before, ns.state(t), "what was added is taken back")
			}
			ns.do(t, func() error { return Remove(t.Context()) })
			assert.Equal(t, before, ns.state(t))
		})
	}
}

func TestNothingOfOthersIsTouched(t *testing.T) {
	ns := newNamespace(t)
	foreign(t, ns)
	before := ns.state(t)
	ns.do(t, func() error { return everything().Apply(t.Context()) })
	ns.do(t, func() error { return Remove(t.Context()) })
	assert.Equal(t, before, ns.state(t))
}

func TestAnothersRouteInOurTableIsAnError(t *testing.T) {
	ns := newNamespace(t)
	ns.do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		route := localRoute(DefaultRouteTable, ipv6, lo.Attrs().Index)
		route.Protocol = unix.RTPROT_STATIC
		return netlink.RouteAdd(route)
	})
	before := ns.state(t)
	err := ns.in(func() error { return Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081}.Apply(t.Context()) })
	assert.ErrorContains(t, err, "route-table 11200 already has a default route that is not ours")
	assert.Equal(t, before, ns.state(t), "what was added for IPv4 is taken back")
}

func TestAFailedApplyTakesBackWhatItAdded(t *testing.T) {
	ns := newNamespace(t)
	clean := ns.state(t)
	// The transaction fails on a chain type that the kernel does not have.
	ns.do(t, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		g := routing{handle: h}
		r, err := Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081}.withDefaults()
		if err != nil {
			return err
		}
		if err := g.addObjects(r); err != nil {
			return err
		}
		broken := r.buildRuleset()
		broken.chains[0].kind = "no such type"
		if err := replaceTable(broken); assert.Error(t, err) {
			assert.NotContains(t, err.Error(), "CAP_NET_ADMIN")
		}
		return g.undoAdded()
	})
	assert.Equal(t, clean, ns.state(t))
}

func TestRemoveAfterACrashAtAnyStep(t *testing.T) {
	r, err := everything().withDefaults()
	require.NoError(t, err)
	steps := []struct {
		name string
		left func(ns namespace)
	}{
		{"after the first route", func(ns namespace) {
			ns.do(t, func() error {
				lo, err := netlink.LinkByName("lo")
				if err != nil {
					return err
				}
				return netlink.RouteAdd(localRoute(r.RouteTable, ipv4, lo.Attrs().Index))
			})
		}},
		{"after all routing", func(ns namespace) {
			ns.do(t, func() error {
				h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
				if err != nil {
					return err
				}
				defer h.Close()
				g := routing{handle: h}
				return g.addObjects(r)
			})
		}},
		{"of a removal, after the table", func(ns namespace) {
			ns.do(t, func() error { return r.Apply(t.Context()) })
			ns.do(t, deleteTable)
		}},
		{"of a removal, within the rules", func(ns namespace) {
			ns.do(t, func() error { return r.Apply(t.Context()) })
			ns.do(t, func() error { return netlink.RuleDel(policyRule(r, ipv6)) })
		}},
		{"with the table alone", func(ns namespace) {
			ns.do(t, func() error { return replaceTable(r.buildRuleset()) })
		}},
	}
	for _, step := range steps {
		t.Run(step.name, func(t *testing.T) {
			ns := newNamespace(t)
			clean := ns.state(t)
			step.left(ns)
			require.NotEqual(t, clean, ns.state(t))
			ns.do(t, func() error { return Remove(t.Context()) })
			assert.Equal(t, clean, ns.state(t))

			// And Apply repairs it.
			step.left(ns)
			ns.do(t, func() error { return r.Apply(t.Context()) })
			repaired := ns.state(t)
			ns.do(t, func() error { return Remove(t.Context()) })
			ns.do(t, func() error { return r.Apply(t.Context()) })
			assert.Equal(t, ns.state(t), repaired)
		})
	}
}

func TestWithoutTheCapabilityTheErrorSaysHowToGetIt(t *testing.T) {
	ns := newNamespace(t)
	for name, do := range map[string]func() error{
		"apply tproxy":   func() error { return Rules{Mode: TPROXY, Interfaces: anywhere, Port: 1081}.Apply(t.Context()) },
		"apply redirect": func() error { return Rules{Mode: Redirect, Interfaces: anywhere, Port: 1081}.Apply(t.Context()) },
	} {
		before := ns.state(t)
		err := ns.in(func() error {
			// Capabilities are the thread's, which ends with this function.
			header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			if err := unix.Capset(&header, &(&[2]unix.CapUserData{})[0]); err != nil {
				return err
			}
			return do()
		})
		assert.ErrorIs(t, err, unix.EPERM, name)
		assert.ErrorContains(t, err, "needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep", name)
		assert.Equal(t, before, ns.state(t))
	}
}

func TestLostPartsOfTheRulesAreNamed(t *testing.T) {
	for lose, part := range map[string]string{
		"ip rule del priority 120":               "ip policy rule of priority 120",
		"ip -6 rule del priority 119":            "ip6 policy rule of priority 119",
		"ip link set lo down; ip link set lo up": "route of table",
		"nft delete table inet penstock":         "the nftables table inet penstock",
		"true":                                   "",
	} {
		ns := edge(t)
		ns.nft(t, "")
		ns.do(t, func() error {
			require.NoError(t, Rules{Mode: TPROXY, Port: 7, Interfaces: []string{"lan0"}}.Apply(t.Context()))
			require.NoError(t, exec.Command("sh", "-c", lose).Run())
			lost, err := LostParts()
			if part == "" {
				assert.Empty(t, lost)
			} else {
				assert.Contains(t, strings.Join(lost, ", "), part, lose)
			}
			return err
		})
	}
}

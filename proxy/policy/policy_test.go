package policy_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/policy"
)

// fixed stands in for the real algorithms: the policy only needs its name and parameters.
type fixed struct{ cc.NoTick }

func (fixed) OnAck(cc.Ack)        {}
func (fixed) OnLoss(cc.Loss)      {}
func (fixed) Control() cc.Control { return cc.Control{Cwnd: cc.MaxCwnd} }

func TestMain(m *testing.M) {
	cc.Register(cc.Spec{
		Name:   "fixed",
		Params: []cc.Param{{Name: "window", Default: 10, Min: 1, Max: 100}},
		New:    func(cc.Config) cc.Algorithm { return fixed{} },
	})
	m.Run()
}

func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

func prefix(s string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(s)} }

func ports(t *testing.T, s string) []policy.PortRange {
	t.Helper()
	r, err := policy.ParsePorts(s)
	require.NoError(t, err)
	return []policy.PortRange{r}
}

func TestTheFirstMatchingRuleWins(t *testing.T) {
	p, err := policy.New([]policy.Rule{
		{Name: "quic", Match: policy.Match{Protocol: policy.UDP, Ports: ports(t, "443")}, Refuse: "over TCP"},
		{Name: "streams", Match: policy.Match{Protocol: policy.TCP, Ports: ports(t, "8443")}},
		{Name: "pings", Match: policy.Match{Protocol: policy.ICMP}},
		{Name: "mail is refused", Match: policy.Match{Ports: ports(t, "25")}, Refuse: "no mail from here"},
		{
			Name: "phones", Match: policy.Match{Listeners: []string{"lan"}, Sources: prefix("10.0.0.0/8")},
			Down: policy.Terms{Algorithm: "fixed", Weight: 2},
		},
		{
			Name: "video", Match: policy.Match{Hosts: []string{".video.example"}, Ports: ports(t, "443-445")},
			Up: policy.Terms{Algorithm: "fixed"},
		},
		{Name: "v6", Match: policy.Match{Destinations: prefix("2001:db8::/32")}},
	}, policy.Rule{Name: "ignored", SendProxy: 2})
	require.NoError(t, err)
	for _, row := range []struct {
		name   string
		facts  policy.Facts
		rule   string
		refuse bool
	}{
		{"a phone fetching a page", policy.Facts{
			Listener: "lan", Source: addrPort("10.1.2.3:999"),
			Target: addrPort("192.0.2.1:443"),
		}, "phones", false},
		{"an IPv4-mapped phone", policy.Facts{
			Listener: "lan", Source: addrPort("[::ffff:10.1.2.3]:999"),
			Target: addrPort("192.0.2.1:443"),
		}, "phones", false},
		{"a phone's QUIC", policy.Facts{
			Protocol: policy.UDP, Listener: "lan", Source: addrPort("10.1.2.3:999"),
			Target: addrPort("192.0.2.1:443"),
		}, "quic", true},
		{
			"datagrams for another port",
			policy.Facts{Protocol: policy.UDP, Target: addrPort("192.0.2.1:8443")},
			"",
			false,
		},
		{"a connection to that port", policy.Facts{Target: addrPort("192.0.2.1:8443")}, "streams", false},
		{"a ping", policy.Facts{Protocol: policy.ICMP, Target: addrPort("192.0.2.1:0")}, "pings", false},
		{"a phone sending mail", policy.Facts{
			Listener: "lan", Source: addrPort("10.1.2.3:999"),
			Target: addrPort("192.0.2.1:25"),
		}, "mail is refused", true},
		{"a phone on another listener", policy.Facts{
			Listener: "guest", Source: addrPort("10.1.2.3:999"),
			Target: addrPort("192.0.2.1:443"),
		}, "", false},
		{"a named host below the domain", policy.Facts{
			Source: addrPort("192.0.2.9:1"),
			Target: addrPort("192.0.2.1:444"), Host: "CDN.Video.Example.",
		}, "video", false},
		{"the domain itself", policy.Facts{
			Source: addrPort("192.0.2.9:1"), Target: addrPort("192.0.2.1:444"),
			Host: "video.example",
		}, "", false},
		{"a port above the range", policy.Facts{
			Source: addrPort("192.0.2.9:1"), Target: addrPort("192.0.2.1:446"),
			Host: "a.video.example",
		}, "", false},
		{"a destination in the prefix", policy.Facts{
			Source: addrPort("192.0.2.9:1"),
			Target: addrPort("[2001:db8::7]:80"),
		}, "v6", false},
		{"nothing known at all", policy.Facts{}, "", false},
	} {
		t.Run(row.name, func(t *testing.T) {
			v := p.Decide(row.facts)
			assert.Equal(t, row.rule, v.Rule)
			assert.Equal(t, row.refuse, v.Refuse != "")
			if row.rule == "" {
				assert.Equal(t, 2, v.SendProxy, "the defaults apply")
				assert.Equal(t, policy.Unmanaged, v.Down.Algorithm)
			}
		})
	}
}

func patterns(t require.TestingT, list ...string) []policy.NamePattern {
	out := make([]policy.NamePattern, len(list))
	for i, s := range list {
		var err error
		out[i], err = policy.ParseNamePattern(s)
		require.NoError(t, err)
	}
	return out
}

func TestProspectsAreWhatAServerNameMayStillDecide(t *testing.T) {
	p, err := policy.New([]policy.Rule{
		{Name: "mail", Match: policy.Match{Ports: ports(t, "25")}, Refuse: "no mail"},
		{Name: "ads", Match: policy.Match{ServerNames: patterns(t, "*.ads.example")}, Refuse: "no ads"},
		{Name: "video", Match: policy.Match{
			ServerNames: patterns(t, "video.example", "*.video.example"),
			Ports:       ports(t, "443"),
		}},
		{Name: "plain", Match: policy.Match{Ports: ports(t, "80-443")}},
		{Name: "late", Match: policy.Match{ServerNames: patterns(t, "late.example")}},
	}, policy.Rule{})
	require.NoError(t, err)
	for _, row := range []struct {
		name, target, server string
		prospects            []string
		rule                 string
	}{
		{"settled by a rule before any name", "192.0.2.1:25", "x.ads.example", []string{"mail"}, "mail"},
		{"a name that a rule has", "192.0.2.1:443", "video.example", []string{"ads", "video", "plain"}, "video"},
		{"a name below", "192.0.2.1:443", "a.b.video.example", []string{"ads", "video", "plain"}, "video"},
		{"a name that goes first", "192.0.2.1:443", "x.ads.example", []string{"ads", "video", "plain"}, "ads"},
		{"no name", "192.0.2.1:443", "", []string{"ads", "video", "plain"}, "plain"},
		{"a port of which another rule is", "192.0.2.1:80", "video.example", []string{"ads", "plain"}, "plain"},
		{"the name behind the rule that ends it", "192.0.2.1:80", "late.example", []string{"ads", "plain"}, "plain"},
		{"a port without a rule", "192.0.2.1:8443", "late.example", []string{"ads", "late", ""}, "late"},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := policy.Facts{Target: addrPort(row.target), ServerName: row.server}
			var names []string
			for _, v := range p.Prospects(nil, f) {
				names = append(names, v.Rule)
			}
			assert.Equal(t, row.prospects, names)
			assert.Equal(t, row.rule, p.Decide(f).Rule)
		})
	}
}

func TestARefusalByNameCanFailClosed(t *testing.T) {
	ads := policy.Rule{
		Name: "ads", Match: policy.Match{ServerNames: patterns(t, "*.ads.example"), Ports: ports(t, "443")},
		Refuse: "no ads", Nameless: true,
	}
	p, err := policy.New([]policy.Rule{ads, {Name: "rest"}}, policy.Rule{})
	require.NoError(t, err)
	for _, row := range []struct{ name, target, server, rule, refuse string }{
		{"its name", "192.0.2.1:443", "x.ads.example", "ads", "no ads"},
		{"no name", "192.0.2.1:443", "", "ads", "it shows no server name"},
		{"another name", "192.0.2.1:443", "news.example", "rest", ""},
		{"no name on another port", "192.0.2.1:22", "", "rest", ""},
	} {
		v := p.Decide(policy.Facts{Target: addrPort(row.target), ServerName: row.server})
		assert.Equal(t, row.rule, v.Rule, row.name)
		assert.Equal(t, row.refuse, v.Refuse, row.name)
	}
	prospects := p.Prospects(nil, policy.Facts{Target: addrPort("192.0.2.1:443")})
	passes := func(v policy.Verdict) bool { return v.Refuse == "" }
	assert.True(t, slices.ContainsFunc(prospects, passes), "it may still pass")

	_, err = policy.New([]policy.Rule{{Name: "all", Nameless: true}}, policy.Rule{})
	assert.ErrorContains(t, err, "nothing shows a name")
}

// A translator or tunnel on the way leads to the IPv4 address. Terms are for what the rule names alone: an
// address that only looks like it may lead elsewhere.
func TestARefusedDestinationIsSoInEveryFormOfItsAddress(t *testing.T) {
	inside := policy.Match{Destinations: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Ports: ports(t, "25")}
	named := inside
	named.ServerNames = patterns(t, "mail.example")
	p, err := policy.New([]policy.Rule{
		{Name: "terms", Match: inside},
		{Name: "named", Match: named, Refuse: "no"},
		{Name: "refused", Match: inside, Refuse: "no"},
	}, policy.Rule{})
	require.NoError(t, err)
	for target, want := range map[string]string{
		"192.0.2.9:25": "terms", "[::ffff:192.0.2.9]:25": "terms",
		"[64:ff9b::192.0.2.9]:25": "refused", "[64:ff9b:1::192.0.2.9]:25": "refused",
		"[64:ff9b:1:0:c0:2:900:0]:25": "refused",
		"[2002:c000:209::1]:25":       "refused", "[::ffff:0:192.0.2.9]:25": "refused", "[::192.0.2.9]:25": "refused",
		"[64:ff9b::192.0.3.9]:25": "", "[64:ff9b::192.0.2.9]:26": "", "[2001:db8::192.0.2.9]:25": "",
	} {
		f := policy.Facts{Target: addrPort(target)}
		assert.Equal(t, want, p.Decide(f).Rule, target)
		prospects := p.Prospects(nil, f)
		assert.Equal(t, want, prospects[len(prospects)-1].Rule, target)
	}
	assert.Equal(t, "named", p.Decide(policy.Facts{
		Target: addrPort("[64:ff9b::192.0.2.9]:25"), ServerName: "mail.example",
	}).Rule)
}

func TestGroups(t *testing.T) {
	facts := policy.Facts{Listener: "lan", Source: addrPort("10.1.2.3:999"), Target: addrPort("192.0.2.1:443")}
	handed := facts
	handed.Peer = "gateway"
	inside := facts
	inside.Peer, inside.Inside = "phone", true
	sixth := facts
	sixth.Source = addrPort("[2001:db8:1:2:3:4:5:6]:999")
	for _, row := range []struct {
		group, down, up string
		facts           policy.Facts
	}{
		{"", "down|lan|10.1.2.3", "up|lan|to 192.0.2.1", facts},
		{"peer", "down|lan|10.1.2.3", "up|lan|to 192.0.2.1", facts},
		{"source", "down|lan|10.1.2.3", "up|lan|10.1.2.3", facts},
		{"source/24", "down|lan|10.1.2.0/24", "up|lan|10.1.2.0/24", facts},
		{"source/24", "down|lan|2001:db8:1:2::/64", "up|lan|2001:db8:1:2::/64", sixth},
		{"source/24/48", "down|lan|2001:db8:1::/48", "up|lan|2001:db8:1::/48", sixth},
		{"destination", "down|lan|to 192.0.2.1", "up|lan|to 192.0.2.1", facts},
		{"tunnel", "down|lan|through gateway", "up|lan|through gateway", handed},
		{"tunnel", "down|lan|10.1.2.3", "up|lan|10.1.2.3", facts},
		{"source", "down|lan|10.1.2.3", "up|lan|10.1.2.3", handed},
		{"peer", "down|lan|10.1.2.3", "up|lan|to 192.0.2.1", handed},
		{"", "down|lan|through phone", "up|lan|to 192.0.2.1", inside},
		{"source", "down|lan|10.1.2.3", "up|lan|10.1.2.3", inside},
		{"tunnel", "down|lan|through phone", "up|lan|through phone", inside},
		{"listener", "down|lan|", "up|lan|", facts},
		{"flow", "down|lan|10.1.2.3:999 to 192.0.2.1:443", "up|lan|10.1.2.3:999 to 192.0.2.1:443", facts},
		{"satellite", "down|satellite", "up|satellite", facts},
	} {
		t.Run(row.group+" "+row.facts.Source.String()+row.facts.Peer, func(t *testing.T) {
			g, err := policy.ParseGroup(row.group)
			require.NoError(t, err)
			terms := policy.Terms{Algorithm: "fixed", Group: g}
			p, err := policy.New(nil, policy.Rule{Down: terms, Up: terms})
			require.NoError(t, err)
			v := p.Decide(row.facts)
			assert.Equal(t, row.down, v.Down.Group)
			assert.Equal(t, row.up, v.Up.Group)
		})
	}
	for _, bad := range []string{
		"source/0", "source/33", "source/24/129", "source/", "source/a", "a/b", "two words",
		"{client}",
	} {
		_, err := policy.ParseGroup(bad)
		assert.Error(t, err, bad)
	}
}

func TestTermsNameTheHostThatBytesGoTo(t *testing.T) {
	p, err := policy.New(nil, policy.Rule{Down: policy.Terms{Algorithm: "fixed"}, Up: policy.Terms{Algorithm: "fixed"}})
	require.NoError(t, err)
	for _, row := range []struct{ client, down string }{
		{"10.1.2.3", "10.1.2.3"},
		{"::ffff:10.1.2.3", "10.1.2.3"},
		{"fe80::7%lan0", "fe80::7"},
	} {
		v := p.Decide(policy.Facts{
			Listener: "lan",
			Source:   netip.AddrPortFrom(netip.MustParseAddr(row.client), 1234),
			Target:   netip.MustParseAddrPort("[2001:db8::7]:443"),
		})
		assert.Equal(t, row.down, v.Down.Host.String(), row.client)
		assert.Equal(t, "2001:db8::7", v.Up.Host.String())
		assert.Nil(t, v.Up.Ends)
	}
}

func TestTermsOfAFlowAloneNameItsEnds(t *testing.T) {
	flow, err := policy.ParseGroup("flow")
	require.NoError(t, err)
	alone := policy.Terms{Algorithm: "fixed", Group: flow}
	p, err := policy.New(nil, policy.Rule{Down: alone, Up: alone})
	require.NoError(t, err)
	f := policy.Facts{
		Source: netip.MustParseAddrPort("10.1.2.3:1234"), Target: netip.MustParseAddrPort("[2001:db8::7]:443"),
	}
	v := p.Decide(f)
	assert.Equal(t, &cc.Ends{From: f.Source, To: f.Target}, v.Up.Ends)
	assert.Equal(t, &cc.Ends{From: f.Target, To: f.Source}, v.Down.Ends)
}

func TestBadRulesAreNamed(t *testing.T) {
	for _, row := range []struct {
		name, says string
		rules      []policy.Rule
	}{
		{"no name", "needs its own", []policy.Rule{{}}},
		{"the same name twice", "taken", []policy.Rule{{Name: "a"}, {Name: "a"}}},
		{
			"an unknown algorithm", `no algorithm "warp"`,
			[]policy.Rule{{Name: "a", Down: policy.Terms{Algorithm: "warp"}}},
		},
		{
			"an unknown parameter", `no parameter "speed"`,
			[]policy.Rule{{Name: "a", Up: policy.Terms{Algorithm: "fixed", Params: cc.Params{"speed": 1}}}},
		},
		{"a negative weight", "negative", []policy.Rule{{Name: "a", Up: policy.Terms{Weight: -1}}}},
		{"a PROXY protocol that does not exist", "version 3", []policy.Rule{{Name: "a", SendProxy: 3}}},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := policy.New(row.rules, policy.Rule{})
			assert.ErrorContains(t, err, row.says)
		})
	}
}

func TestPortRanges(t *testing.T) {
	r, err := policy.ParsePorts("8000-8100")
	require.NoError(t, err)
	assert.Equal(t, policy.PortRange{First: 8000, Last: 8100}, r)
	assert.Equal(t, "8000-8100", r.String())
	for _, bad := range []string{"", "0", "-1", "65536", "9-8", "http", "1-2-3"} {
		_, err := policy.ParsePorts(bad)
		assert.Error(t, err, bad)
	}
}

func anyAddr(t *rapid.T) netip.Addr {
	switch rapid.IntRange(0, 3).Draw(t, "family") {
	case 0:
		return netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "v4")))
	case 1:
		return netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "v6")))
	case 2:
		v4 := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "mapped")))
		return netip.AddrFrom16(v4.As16())
	default:
		return netip.Addr{}
	}
}

func anyFacts(t *rapid.T) policy.Facts {
	return policy.Facts{
		Peer:       rapid.SampledFrom([]string{"", "gateway"}).Draw(t, "peer"),
		Listener:   rapid.SampledFrom([]string{"", "lan", "wan"}).Draw(t, "listener"),
		Source:     netip.AddrPortFrom(anyAddr(t), rapid.Uint16().Draw(t, "source port")),
		Target:     netip.AddrPortFrom(anyAddr(t), rapid.Uint16().Draw(t, "target port")),
		Host:       rapid.SampledFrom([]string{"", "a.example", "b.a.example", "."}).Draw(t, "host"),
		ServerName: rapid.SampledFrom([]string{"", "a.example", "b.a.example"}).Draw(t, "server name"),
	}
}

func anyPrefix(t *rapid.T) netip.Prefix {
	if rapid.Bool().Draw(t, "is v4") {
		a := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "prefix v4")))
		return netip.PrefixFrom(a, rapid.IntRange(0, 32).Draw(t, "bits")).Masked()
	}
	a := netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "prefix v6"))).Unmap()
	return netip.PrefixFrom(a, rapid.IntRange(0, a.BitLen()).Draw(t, "bits")).Masked()
}

func anyMatch(t *rapid.T) policy.Match {
	var m policy.Match
	if rapid.Bool().Draw(t, "by listener") {
		m.Listeners = []string{"lan"}
	}
	if rapid.Bool().Draw(t, "by source") {
		m.Sources = []netip.Prefix{anyPrefix(t)}
	}
	if rapid.Bool().Draw(t, "by destination") {
		m.Destinations = []netip.Prefix{anyPrefix(t)}
	}
	if rapid.Bool().Draw(t, "by port") {
		m.Ports = []policy.PortRange{{First: 1, Last: rapid.Uint16Min(1).Draw(t, "last port")}}
	}
	if rapid.Bool().Draw(t, "by host") {
		m.Hosts = []string{rapid.SampledFrom([]string{"a.example", ".a.example"}).Draw(t, "pattern")}
	}
	if rapid.Bool().Draw(t, "by server name") {
		m.ServerNames = patterns(t, rapid.SampledFrom([]string{"a.example", "*.a.example"}).Draw(t, "name pattern"))
	}
	return m
}

// Every decision is that of the first rule that would match were it alone.
func TestDecideIsFirstMatchAndDeterministic(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var rules []policy.Rule
		for i := range rapid.IntRange(0, 6).Draw(t, "rules") {
			r := policy.Rule{Name: string(rune('a' + i)), Match: anyMatch(t), Down: policy.Terms{Algorithm: "fixed"}}
			r.Nameless = len(r.Match.ServerNames) > 0 && rapid.Bool().Draw(t, "nameless")
			rules = append(rules, r)
		}
		p, err := policy.New(rules, policy.Rule{})
		require.NoError(t, err)
		facts := anyFacts(t)
		want := ""
		for _, r := range rules {
			alone, err := policy.New([]policy.Rule{r}, policy.Rule{})
			require.NoError(t, err)
			if alone.Decide(facts).Rule != "" {
				want = r.Name
				break
			}
		}
		got := p.Decide(facts)
		assert.Equal(t, want, got.Rule)
		assert.Equal(t, got, p.Decide(facts), "asked twice")
		prospects := p.Prospects(nil, facts)
		assert.Contains(t, prospects, got, "whatever the name is, it was among the prospects")
		nameless := facts
		nameless.ServerName = ""
		assert.Equal(t, p.Decide(nameless), prospects[len(prospects)-1])
		if got.Refuse == "" {
			assert.NotEmpty(t, got.Down.Algorithm)
			assert.NotEqual(t, got.Down.Group, got.Up.Group, "directions never share")
		}
	})
}

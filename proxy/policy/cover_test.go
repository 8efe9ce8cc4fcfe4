package policy

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// drawRule draws a rule of a small world, so that rules often cover each other.
func drawRule(t *rapid.T, label string) Rule {
	pattern := func(s string) NamePattern {
		p, err := ParseNamePattern(s)
		require.NoError(t, err)
		return p
	}
	prefixes := rapid.SliceOfN(rapid.SampledFrom([]netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("10.1.0.0/16"),
		netip.MustParsePrefix("::/0"), netip.MustParsePrefix("64:ff9b::/96"),
	}), 0, 2)
	r := Rule{
		Name:   label,
		Refuse: rapid.SampledFrom([]string{"", "no"}).Draw(t, label+" refuse"),
		Match: Match{
			Protocol:     rapid.SampledFrom([]Protocol{"", "", TCP, UDP}).Draw(t, label+" protocol"),
			Listeners:    rapid.SliceOfN(rapid.SampledFrom([]string{"lan", "vpn"}), 0, 2).Draw(t, label+" listeners"),
			Sources:      prefixes.Draw(t, label+" sources"),
			Destinations: prefixes.Draw(t, label+" destinations"),
			Ports: rapid.SliceOfN(rapid.SampledFrom([]PortRange{{1, 65535}, {443, 443}, {400, 500}}), 0, 1).
				Draw(t, label+" ports"),
		},
	}
	if r.Match.Protocol != UDP && rapid.Bool().Draw(t, label+" has names") {
		r.Match.Hosts = rapid.SliceOfN(rapid.SampledFrom([]string{"a.example", ".example", "B.a.example."}), 0, 1).
			Draw(t, label+" hosts")
		r.Match.ServerNames = rapid.SliceOfN(rapid.SampledFrom([]NamePattern{
			pattern("a.example"), pattern("*.example"), pattern("*.a.example"),
		}), 0, 2).Draw(t, label+" server names")
		r.Nameless = len(r.Match.ServerNames) > 0 && rapid.Bool().Draw(t, label+" nameless")
	}
	return r
}

func drawFacts(t *rapid.T) Facts {
	ends := rapid.SampledFrom([]netip.AddrPort{
		netip.MustParseAddrPort("10.1.0.1:443"), netip.MustParseAddrPort("10.2.0.1:80"),
		netip.MustParseAddrPort("192.0.2.1:450"), netip.MustParseAddrPort("[2001:db8::1]:443"),
		netip.MustParseAddrPort("[64:ff9b::a01:1]:443"), netip.MustParseAddrPort("[::1]:0"),
	})
	f := Facts{
		Listener: rapid.SampledFrom([]string{"lan", "vpn"}).Draw(t, "listener"),
		Protocol: rapid.SampledFrom([]Protocol{TCP, UDP, ICMP}).Draw(t, "protocol"),
		Source:   ends.Draw(t, "source"), Target: ends.Draw(t, "target"),
	}
	if f.Protocol == TCP {
		names := rapid.SampledFrom([]string{"", "a.example", "b.a.example", "c.example", "other"})
		f.Host, f.ServerName = names.Draw(t, "host"), names.Draw(t, "server name")
	}
	return f
}

// decides is whether the rule by itself decides about a connection.
func (r *Rule) decides(f Facts) bool {
	return r.matchesBeforeName(f) && (r.Match.matchesName(f.ServerName) || r.Nameless && f.ServerName == "")
}

func TestARuleThatIsCoveredIsNeverReached(t *testing.T) {
	covered := 0
	rapid.Check(t, func(t *rapid.T) {
		first, second := drawRule(t, "first"), drawRule(t, "second")
		if !first.Covers(&second) {
			return
		}
		covered++
		for range 20 {
			if f := drawFacts(t); second.decides(f) {
				assert.True(t, first.decides(f), "%+v is for %+v and not for %+v", f, second, first)
			}
		}
	})
	assert.True(t, covered > 0 || testing.Short(), "with -short there are too few draws to be sure of one")
}

func TestCovers(t *testing.T) {
	ten := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	part := []netip.Prefix{netip.MustParsePrefix("10.3.0.0/16"), netip.MustParsePrefix("10.4.5.6/32")}
	both := []netip.Prefix{netip.MustParsePrefix("::/0"), netip.MustParsePrefix("0.0.0.0/0")}
	web := []PortRange{{80, 80}, {443, 443}}
	for name, c := range map[string]struct {
		first, second Rule
		covers        bool
	}{
		"everything, anything": {Rule{}, Rule{Match: Match{Ports: web}}, true},
		"anything, everything": {Rule{Match: Match{Ports: web}}, Rule{}, false},
		"both families":        {Rule{Match: Match{Destinations: both}}, Rule{}, true},
		"one family":           {Rule{Match: Match{Destinations: both[1:]}}, Rule{}, false},
		"a wider prefix":       {Rule{Match: Match{Sources: ten}}, Rule{Match: Match{Sources: part, Ports: web}}, true},
		"a narrower prefix":    {Rule{Match: Match{Sources: part}}, Rule{Match: Match{Sources: ten}}, false},
		"the refusal of addresses in others": {
			Rule{Match: Match{Destinations: ten}}, Rule{Refuse: "no", Match: Match{Destinations: part}}, false,
		},
		"names below a name": {
			Rule{Match: Match{Hosts: []string{".example"}}}, Rule{Match: Match{Hosts: []string{"a.b.example"}}}, true,
		},
		"TCP and a name": {
			Rule{Match: Match{Protocol: TCP}}, Rule{Match: Match{Hosts: []string{"a.example"}}}, true,
		},
		"TCP and anything": {Rule{Match: Match{Protocol: TCP}}, Rule{}, false},
	} {
		assert.Equal(t, c.covers, c.first.Covers(&c.second), name)
	}
}

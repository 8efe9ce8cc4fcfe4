package policy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// sampledBy returns the rule that decides about a client, of a policy with samples of half and of a fifth.
func sampledBy(t *testing.T, p *Policy, client netip.Addr, peer string) string {
	t.Helper()
	f := Facts{
		Source: netip.AddrPortFrom(client, 4000), Target: netip.MustParseAddrPort("192.0.2.1:443"),
		Peer: peer, Inside: peer != "",
	}
	rule := p.Decide(f).Rule
	f.Source, f.Target = netip.AddrPortFrom(client, 5000), netip.MustParseAddrPort("198.51.100.7:80")
	assert.Equal(t, rule, p.Decide(f).Rule, "%v stays where it is", client)
	return rule
}

func TestASampleIsAPartOfTheHostsAndSticky(t *testing.T) {
	p, err := New([]Rule{
		{Name: "half", Match: Match{Sample: 0.5}}, {Name: "fifth", Match: Match{Sample: 0.2}}, {Name: "rest"},
	}, Rule{})
	require.NoError(t, err)
	const hosts = 5000
	counts := map[string]map[string]int{"IPv4": {}, "IPv6": {}, "peers": {}}
	for i := range hosts {
		v4 := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		counts["IPv4"][sampledBy(t, p, v4, "")]++
		counts["peers"][sampledBy(t, p, v4, fmt.Sprintf("phone-%d", i))]++
		v6 := netip.AddrFrom16([16]byte{0x20, 1, 0xd, 0xb8, 4: byte(i >> 8), 5: byte(i), 15: 1})
		rule := sampledBy(t, p, v6, "")
		counts["IPv6"][rule]++
		private := v6.As16()
		private[9] = 77
		assert.Equal(t, rule, sampledBy(t, p, netip.AddrFrom16(private), ""), "a /64 is one host")
		assert.Equal(t, p.Decide(Facts{Source: netip.AddrPortFrom(v4, 1)}).Rule,
			p.Decide(Facts{Source: netip.AddrPortFrom(netip.AddrFrom16(v4.As16()), 1)}).Rule, "a mapped address")
	}
	for kind, n := range counts { // the second sample is of those that the first left, so they are independent
		assert.InDelta(t, 0.5, float64(n["half"])/hosts, 0.03, kind)
		assert.InDelta(t, 0.2*0.5, float64(n["fifth"])/hosts, 0.02, kind)
	}
}

func TestSamplesAreReadAsTheyAreWritten(t *testing.T) {
	for text, want := range map[string]Sample{"5%": 0.05, " 0.5 %": 0.005, "100%": 1} {
		s, err := ParseSample(text)
		require.NoError(t, err, text)
		assert.InDelta(t, float64(want), float64(s), 1e-12, text)
		again, err := ParseSample(s.String())
		require.NoError(t, err)
		assert.InDelta(t, float64(s), float64(again), 1e-12)
	}
	for _, text := range []string{"", "5", "0%", "-1%", "101%", "NaN%", "x%", "%"} {
		_, err := ParseSample(text)
		assert.ErrorContains(t, err, "write a percentage", text)
	}
}

func TestARuleOfASampleCoversNoOther(t *testing.T) {
	sampled, all := Rule{Match: Match{Sample: 0.05}}, Rule{}
	assert.False(t, sampled.Covers(&all))
	assert.False(t, sampled.MatchesAll())
	assert.True(t, all.Covers(&sampled))
	whole := Rule{Match: Match{Sample: 1}}
	assert.True(t, whole.MatchesAll())
}

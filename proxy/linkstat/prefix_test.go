package linkstat

import (
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"pgregory.net/rapid"
)

func prefixList(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestWhoIsOnAnotherInterfaceIsNotBehindThisOne(t *testing.T) {
	for _, tt := range []struct {
		name                   string
		prefixes, others, want []netip.Prefix
	}{
		{"nobody else", prefixList("0.0.0.0/0"), nil, prefixList("0.0.0.0/0")},
		{"a part", prefixList("10.0.0.0/8"), prefixList("10.64.0.0/10"), prefixList("10.128.0.0/9", "10.0.0.0/10")},
		{"one host", prefixList("10.0.0.0/30"), prefixList("10.0.0.1/32"), prefixList("10.0.0.2/31", "10.0.0.0/32")},
		{"another family", prefixList("::/0"), prefixList("10.0.0.0/8"), prefixList("::/0")},
		{
			"the same network on two: both may say", prefixList("10.0.0.0/8"), prefixList("10.0.0.0/8"),
			prefixList("10.0.0.0/8"),
		},
		{
			"a wider one, of which this is a part", prefixList("10.1.0.0/16"), prefixList("10.0.0.0/8"),
			prefixList("10.1.0.0/16"),
		},
		{"elsewhere", prefixList("10.1.0.0/16"), prefixList("192.168.0.0/16"), prefixList("10.1.0.0/16")},
	} {
		assert.ElementsMatch(t, tt.want, prefixesBehind(tt.prefixes, tt.others), tt.name)
	}
}

func TestEveryHostIsBehindExactlyWhatIsLeft(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string, least int) netip.Prefix {
			b := rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, name)
			b[0] = 10
			return netip.PrefixFrom(netip.AddrFrom4([4]byte(b)),
				rapid.IntRange(least, 32).Draw(t, name+" bits")).Masked()
		}
		whole := netip.MustParsePrefix("10.0.0.0/8")
		others := []netip.Prefix{draw("a", 9), draw("b", 9)}
		rest := prefixesBehind([]netip.Prefix{whole}, others)
		for _, host := range []netip.Addr{
			draw("host", 32).Addr(), others[0].Addr(), others[1].Addr(),
			others[1].Addr().Next(),
		} {
			n := 0
			for _, p := range rest {
				if p.Contains(host) {
					n++
				}
			}
			want := 1
			if !whole.Contains(host) || others[0].Contains(host) || others[1].Contains(host) {
				want = 0
			}
			assert.Equal(t, want, n, "%v less %v: %v", host, others, rest)
		}
	})
}

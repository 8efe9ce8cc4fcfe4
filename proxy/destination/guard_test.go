package destination_test

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/proxy/destination"
)

// own stands for a machine with two addresses.
func own(a netip.Addr) (bool, error) {
	return a == netip.MustParseAddr("203.0.113.1") || a == netip.MustParseAddr("2001:db8::1"), nil
}

func TestGuard(t *testing.T) {
	for _, row := range []struct{ addr, says string }{
		{"8.8.8.8", ""},
		{"192.168.1.1", ""},
		{"10.0.0.1", ""},
		{"172.16.0.1", ""},
		{"100.63.255.255", ""},
		{"100.128.0.0", ""},
		{"223.255.255.255", ""},
		{"2001:4860:4860::8888", ""},
		{"fd12:3456::1", ""},
		{"64:ff9b:1:0:cb:71:7f00:0", ""}, // 203.0.113.127 by a translator's /64
		{"64:ff9b::808:808", ""},

		{"127.0.0.1", "loopback"},
		{"127.255.255.254", "loopback"},
		{"::1", "loopback"},
		{"::ffff:127.0.0.1", "loopback"},
		{"64:ff9b::7f00:1", "loopback"},
		{"64:ff9b:1::7f00:1", "loopback"},
		{"64:ff9b:1:fffe::7f00:1", "loopback"},
		{"64:ff9b:1:0:7f:0:100:0", "loopback"},
		{"64:ff9b:1:0:64:6464:c800:0", "metadata"},
		{"::ffff:0:7f00:1", "loopback"},
		{"2002:7f00:1::", "loopback"},
		{"::7f00:1", "loopback"},
		{"0.0.0.0", "unspecified"},
		{"0.1.2.3", "unspecified"},
		{"::", "unspecified"},
		{"::ffff:0.0.0.0", "unspecified"},
		{"169.254.1.1", "link-local"},
		{"fe80::1", "link-local"},
		{"fe80::1%eth0", "link-local"},
		{"169.254.169.254", "metadata"},
		{"::ffff:169.254.169.254", "metadata"},
		{"64:ff9b::a9fe:a9fe", "metadata"},
		{"fd00:ec2::254", "metadata"},
		{"100.100.100.200", "metadata"},
		{"64:ff9b:1::6464:64c8", "metadata"},
		{"2002:a83f:8110::", "metadata"},
		{"fd00:c1::a9fe:a9fe", "metadata"},
		{"fd20:ce::254", "metadata"},
		{"fd00:a9fe:a9fe::1", "metadata"},
		{"fd00:42::42", "metadata"},
		{"fd00:100::100:200", "metadata"},
		{"192.0.0.192", "metadata"},
		{"203.0.113.1", "the proxy's own machine"},
		{"::ffff:203.0.113.1", "the proxy's own machine"},
		{"64:ff9b::cb00:7101", "the proxy's own machine"},
		{"2001:db8::1", "the proxy's own machine"},
		{"203.0.113.2", ""},
		{"100.64.0.0", "NAT"},
		{"100.127.255.255", "NAT"},
		{"224.0.0.1", "multicast"},
		{"239.255.255.250", "multicast"},
		{"ff02::1", "multicast"},
		{"240.0.0.1", "broadcast"},
		{"255.255.255.255", "broadcast"},
	} {
		t.Run(row.addr, func(t *testing.T) {
			err := destination.Guard{Own: own}.Check(netip.MustParseAddr(row.addr))
			if row.says == "" {
				assert.NoError(t, err)
				return
			}
			assert.ErrorContains(t, err, row.says)
		})
	}
	assert.Error(t, destination.Guard{Own: own}.Check(netip.Addr{}), "no address at all")
}

func TestGuardKeepsCapturedClientsFromWhatTheyWouldNotReachByThemselves(t *testing.T) {
	g := destination.Guard{Captured: true, Own: own}
	for _, addr := range []string{
		"169.254.169.254", "64:ff9b::a9fe:a9fe", "::ffff:169.254.169.254", "2002:a9fe:a9fe::", "fd00:ec2::254",
		"100.100.100.200", "192.0.0.192", "169.254.7.7", "fe80::1%eth0", "127.0.0.1", "0.0.0.0", "203.0.113.1", "2001:db8::1",
	} {
		assert.Error(t, g.Check(netip.MustParseAddr(addr)), addr)
	}
	// Others are where they were going.
	for _, addr := range []string{"100.64.0.1", "192.0.0.8", "10.0.0.1", "203.0.113.2", "fd12:3456::1"} {
		assert.NoError(t, g.Check(netip.MustParseAddr(addr)), addr)
	}
	g.Allow = []netip.Prefix{netip.MustParsePrefix("169.254.169.254/32"), netip.MustParsePrefix("203.0.113.1/32")}
	assert.NoError(t, g.Check(netip.MustParseAddr("169.254.169.254")))
	assert.NoError(t, g.Check(netip.MustParseAddr("203.0.113.1")))
	assert.Error(t, g.Check(netip.MustParseAddr("169.254.170.2")))
}

func TestGuardTellsWhoseAnAddressIs(t *testing.T) {
	g := destination.Guard{
		Own: own, Allow: []netip.Prefix{netip.MustParsePrefix("10.9.0.4/32")},
		Inner: func(a netip.Addr) bool { return netip.MustParsePrefix("10.9.0.0/24").Contains(a) },
	}
	assert.ErrorContains(t, g.Check(netip.MustParseAddr("10.9.0.3")), "another peer's")
	assert.ErrorContains(t, g.Check(netip.MustParseAddr("::ffff:10.9.0.3")), "another peer's")
	assert.NoError(t, g.Check(netip.MustParseAddr("10.9.0.4")))
	assert.NoError(t, g.Check(netip.MustParseAddr("198.51.100.1")))

	g.Own = func(netip.Addr) (bool, error) { return false, errors.New("no netlink") }
	assert.ErrorContains(t, g.Check(netip.MustParseAddr("198.51.100.1")), "no netlink",
		"what cannot be told apart is refused")
}

func TestGuardAllowsWhatIsListed(t *testing.T) {
	g := destination.Guard{Own: own, Allow: []netip.Prefix{
		netip.MustParsePrefix("127.0.0.0/8"),
		netip.MustParsePrefix("fe80::/10"),
	}}
	for _, addr := range []string{"127.0.0.1", "::ffff:127.0.0.1", "fe80::1%eth0", "64:ff9b::7f00:1"} {
		assert.NoError(t, g.Check(netip.MustParseAddr(addr)), addr)
	}
	assert.Error(t, g.Check(netip.MustParseAddr("::1")), "IPv4's loopback was listed, not IPv6's")
}

// However an address is written, the guard sees the same host.
func TestGuardSeesThroughMapping(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		v4 := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "address")))
		plain := destination.Guard{Own: own}.Check(v4)
		mapped := destination.Guard{Own: own}.Check(netip.AddrFrom16(v4.As16()))
		require.Equal(t, plain == nil, mapped == nil)
		six := [16]byte{0, 0x64, 0xff, 0x9b}
		copy(six[12:], v4.AsSlice())
		translated := destination.Guard{Own: own}.Check(netip.AddrFrom16(six))
		require.Equal(t, plain == nil, translated == nil)
	})
}

func TestWhatIsClosedIsSoInEveryFormOfAnAddress(t *testing.T) {
	all := destination.Closed()
	closed := func(addr string) bool {
		a := netip.MustParseAddr(addr)
		return slices.ContainsFunc(all, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for _, form := range []string{"%s", "64:ff9b::%s", "::ffff:0:%s", "::%s"} {
		assert.True(t, closed(fmt.Sprintf(form, "169.254.169.254")), form)
		assert.True(t, closed(fmt.Sprintf(form, "127.255.255.255")), form)
		assert.False(t, closed(fmt.Sprintf(form, "192.0.2.1")), form)
	}
	assert.True(t, closed("2002:a9fe:a9fe::1"))
	assert.False(t, closed("2002:c000:201::1"))
}

package userspace

import (
	"bytes"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

func TestWhoComesWhenThePoolIsEmptyIsTurnedAwayUntilSomebodyGoes(t *testing.T) {
	m, _ := masque(t, func(c *MASQUEConfig) { c.Pool = []netip.Prefix{netip.MustParsePrefix("10.10.0.0/30")} })
	first, _, err := dialMASQUE(t, m).packets(phoneToken)
	require.NoError(t, err)
	given, err := first.ReceiveAddressAssignment(deadlineOf(t))
	require.NoError(t, err)
	assert.Equal(t, "10.10.0.2/32", given[0].IPPrefix.String())

	c := dialMASQUE(t, m)
	_, said, err := c.packets(tabletToken)
	require.Error(t, err)
	assert.Equal(t, http.StatusServiceUnavailable, said.status)
	require.NoError(t, first.Close())
	var second *connectip.Conn
	require.Eventually(t, func() bool {
		second, _, err = c.packets(tabletToken)
		return err == nil
	}, soon, 10*time.Millisecond)
	require.NoError(t, second.Close())
}

func TestAPeerCannotTakeAllAddresses(t *testing.T) {
	m, _ := masque(t, nil)
	c := dialMASQUE(t, m)
	for range maxSessions {
		ip, _, err := c.packets(phoneToken)
		require.NoError(t, err)
		t.Cleanup(func() { assert.NoError(t, ip.Close()) })
	}
	_, said, err := c.packets(phoneToken)
	require.Error(t, err)
	assert.Equal(t, http.StatusServiceUnavailable, said.status)
	other, _, err := c.packets(tabletToken)
	require.NoError(t, err)
	require.NoError(t, other.Close())
}

func TestAClientThatAsksForAddressesGetsItsOwn(t *testing.T) {
	m, _ := masque(t, nil)
	ip, _, err := dialMASQUE(t, m).packets(phoneToken)
	require.NoError(t, err)
	own, err := ip.ReceiveAddressAssignment(deadlineOf(t))
	require.NoError(t, err)
	require.Len(t, own, 2)
	four, six := own[0].IPPrefix.String(), own[1].IPPrefix.String()
	for _, row := range []struct {
		asks []string
		gets []string
	}{
		{[]string{"0.0.0.0/32", "::/128"}, []string{four, six}},
		{[]string{four}, []string{four, six}},
		{[]string{"10.10.0.3/32", "::/128"}, []string{"0.0.0.0/32", six, four}},
		{[]string{"0.0.0.0/32", "0.0.0.0/32"}, []string{four, "0.0.0.0/32", six}},
	} {
		var asks []netip.Prefix
		for _, a := range row.asks {
			asks = append(asks, netip.MustParsePrefix(a))
		}
		_, err := ip.RequestAddresses(asks)
		require.NoError(t, err)
		given, err := ip.ReceiveAddressAssignment(deadlineOf(t))
		require.NoError(t, err)
		var gets []string
		for _, a := range given {
			gets = append(gets, a.IPPrefix.String())
		}
		assert.Equal(t, row.gets, gets, "%v", row.asks)
	}
	require.NoError(t, ip.Close())
}

// A client may assign addresses, too (RFC 9484 §4.7.1), and the library keeps only so many.
func TestAClientMayAssignAddresses(t *testing.T) {
	m, _ := masque(t, nil)
	ip, _, err := dialMASQUE(t, m).packets(phoneToken)
	require.NoError(t, err)
	_, err = ip.ReceiveAddressAssignment(deadlineOf(t))
	require.NoError(t, err)
	some := []netip.Prefix{netip.MustParsePrefix("192.0.2.7/32")}
	for range 10 {
		for range 20 {
			require.NoError(t, ip.AssignAddresses(some))
		}
		_, err = ip.RequestAddresses([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/32")})
		require.NoError(t, err)
		_, err = ip.ReceiveAddressAssignment(deadlineOf(t))
		require.NoError(t, err)
	}
	require.NoError(t, ip.Close())
}

func TestWhoAsksForTooManyAddressesGetsNone(t *testing.T) {
	m, _ := masque(t, nil)
	ip, _, err := dialMASQUE(t, m).packets(phoneToken)
	require.NoError(t, err)
	_, err = ip.ReceiveAddressAssignment(deadlineOf(t))
	require.NoError(t, err)
	_, err = ip.RequestAddresses(slices.Repeat([]netip.Prefix{netip.MustParsePrefix("0.0.0.0/32")}, maxRequestedAddresses+1))
	require.NoError(t, err)
	_, err = ip.ReceiveAddressAssignment(deadlineOf(t))
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestSessionsAreKeptApart(t *testing.T) {
	m, l := masque(t, nil)
	seen := echoing(t, l)
	phone, tablet := dialMASQUE(t, m).tunnel(phoneToken), dialMASQUE(t, m).tunnel(tabletToken)
	require.NotEqual(t, phone.addrs, tablet.addrs)
	assert.Equal(t, "phone", m.Peer(phone.addrs[0]))
	assert.Equal(t, "tablet", m.Peer(tablet.addrs[0]))
	assert.Empty(t, m.Peer(netip.MustParseAddr("10.10.0.1")))
	for name, n := range map[string]*tunnelled{"phone": phone, "tablet": tablet} {
		c, err := n.DialContextTCPAddrPort(deadlineOf(t), netip.MustParseAddrPort("203.0.113.7:443"))
		require.NoError(t, err)
		exchange(t, c, randomBytes(100<<10))
		got := <-seen
		assert.Equal(t, name, got.Peer)
		assert.Equal(t, n.addrs[0], got.Source.Addr())
	}

	// One that says to be the other is not heard. The library of its client
	// would not send it; the stream below does.
	c := dialMASQUE(t, m)
	raw := c.raw(t, m, 3)
	state := func() tunnel.SessionState { // the third one's
		all := m.Sessions()
		i := slices.IndexFunc(all, func(s tunnel.SessionState) bool {
			return s.Addresses[0] != phone.addrs[0] && s.Addresses[0] != tablet.addrs[0]
		})
		require.GreaterOrEqual(t, i, 0)
		return all[i]
	}
	from := state().Addresses[0]
	for _, p := range [][]byte{
		udp(phone.addrs[0], server4, 100), udp(tablet.addrs[1], server6, 100), udp(server4, server4, 100),
	} {
		require.NoError(t, raw.SendDatagram(append([]byte{0}, p...)))
	}
	require.Eventually(t, func() bool { return m.Drops().Source == 3 }, soon, time.Millisecond)
	require.NoError(t, raw.SendDatagram(append([]byte{0}, udp(from, server4, 100)...)))
	require.Eventually(t, func() bool { return state().Received == 100 }, soon, time.Millisecond)
}

// raw is a CONNECT-IP session without a library that would keep it in order; it
// is the last of so many.
func (c *client) raw(t testing.TB, m *MASQUE, of int) *http3.RequestStream {
	return c.scoped(t, m, of, "*/*/")
}

// scoped is one that asks for a target and a protocol.
func (c *client) scoped(t testing.TB, m *MASQUE, of int, scope string) *http3.RequestStream {
	s, err := c.h3.OpenRequestStream(t.Context())
	require.NoError(t, err)
	r, err := http.NewRequest(http.MethodConnect, "https://vpn.test"+ipPath+scope, nil)
	require.NoError(t, err)
	r.Proto, r.Header = "connect-ip", bearer(phoneToken)
	r.Header.Set(http3.CapsuleProtocolHeader, "?1")
	require.NoError(t, s.SendRequestHeader(r))
	said, err := read(s)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, said.status)
	require.Eventually(t, func() bool { return len(m.Sessions()) == of }, soon, time.Millisecond)
	return s
}

func TestWhatSessionsCarriedIsCountedWhenTheyHaveEnded(t *testing.T) {
	m, _ := masque(t, nil)
	status := func() (s tunnel.Status) {
		require.NoError(t, m.Report(&s))
		return s
	}
	for n := range uint64(2) {
		s := dialMASQUE(t, m).raw(t, m, 1)
		p := udp(status().Sessions[0].Addresses[0], server4, 100)
		require.NoError(t, s.SendDatagram(append([]byte{0}, p...)))
		require.Eventually(t, func() bool { return status().Clients["phone"].Received == (n+1)*100 }, soon, time.Millisecond)
		s.CancelRead(0)
		s.CancelWrite(0)
		require.Eventually(t, func() bool { return len(m.Sessions()) == 0 }, soon, time.Millisecond)
	}
	assert.EqualValues(t, 200, status().Clients["phone"].Received)
}

func TestMalformedPacketsAreCountedAndEndNothing(t *testing.T) {
	m, l := masque(t, nil)
	answering(t, l, nil, echo(t))
	c := dialMASQUE(t, m)
	s := c.raw(t, m, 1)
	from := m.Sessions()[0].Addresses[0]
	whole := syn(from, server4, 2, []byte{2, 4, 5, 180})
	taken := func() uint64 { return m.Drops().Malformed*100_000 + m.Sessions()[0].Received }
	send := func(d []byte, malformed bool) { // one at a time: a full queue loses datagrams
		want := taken() + uint64(len(d)) - 1
		if malformed {
			want = taken() + 100_000
		}
		require.NoError(t, s.SendDatagram(d))
		require.Eventually(t, func() bool { return taken() == want }, soon, 100*time.Microsecond)
	}
	for n := range len(whole) { // every beginning of a packet
		send(append([]byte{0}, whole[:n]...), n < ipv4Header)
	}
	for _, d := range [][]byte{{}, {0xc0}, {0, 0x99}, append([]byte{0}, bytes.Repeat([]byte{0xff}, 1000)...)} {
		send(d, true)
	}
	require.NoError(t, s.SendDatagram([]byte{5, 1, 2, 3}), "of an extension: no error")
	exchange(t, c.mustStream("192.0.2.80:443"), []byte("all is well"))
	require.Len(t, m.Sessions(), 1)
}

func FuzzTokens(f *testing.F) {
	f.Add("phone " + phoneToken + "\n# x\n")
	f.Fuzz(func(t *testing.T, text string) {
		tokens, err := access.ParseTokens(strings.NewReader(text))
		if err != nil {
			return
		}
		hashed, err := hashTokens(tokens)
		require.NoError(t, err)
		for i, x := range tokens {
			name, ok := findToken(hashed, hashed[i].value)
			assert.True(t, ok)
			assert.Equal(t, x.Name, name)
		}
	})
}

package proxy_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// echoHere answers datagrams at an address of this machine, with what they say.
func echoHere(t *testing.T) *net.UDPAddr {
	ip := listenHere(t).Addr().(*net.TCPAddr).IP
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: ip})
	require.NoError(t, err)
	return need.Echo(t, c)
}

// ask sends a datagram through the tunnel and waits for an answer.
func (p *phone) ask(t *testing.T, to *net.UDPAddr, wait time.Duration) (string, error) {
	c, err := p.net.DialUDP(nil, to)
	require.NoError(t, err)
	defer c.Close() //nolint:errcheck // a socket in memory
	got, err := answer(t, c, []byte("hello"), wait)
	return string(got), err
}

// answer returns what comes back for a datagram, which is sent again each second: one may
// be lost, as while the ends of a tunnel shake hands.
func answer(t *testing.T, c net.Conn, datagram []byte, wait time.Duration) ([]byte, error) {
	t.Helper()
	b := make([]byte, 100)
	for {
		turn := min(wait, time.Second)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(turn))) //nolint:forbidigo // a deadline is by the clock
		_, err := c.Write(datagram)
		require.NoError(t, err)
		n, err := c.Read(b)
		if wait -= turn; err == nil || wait <= 0 {
			return b[:n], err
		}
	}
}

func TestDatagramsGoThroughTheTunnelByTheRulesOfItsConnections(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, nil, p)
	p.connect(g)
	server := echoHere(t)
	got, err := p.ask(t, server, patience)
	require.NoError(t, err)
	assert.Equal(t, "hello", got)
	assert.Positive(t, g.proxy.Tunnels()[0].Datagrams.ReceivedPackets)

	g.reload(func(c *config.Config) {
		c.Rules = []policy.RuleSettings{{Name: "closed", Refuse: "not today"}}
	})
	_, err = p.ask(t, server, 200*time.Millisecond)
	require.Error(t, err)
	g.refuses(1)
}

// refuses waits until so many datagrams have been refused.
func (g *gateway) refuses(n uint64) {
	g.tb.Helper()
	require.Eventually(g.tb, func() bool { return g.proxy.Tunnels()[0].Datagrams.Refused == n }, patience, time.Millisecond)
}

func TestARuleForDatagramsLeavesConnectionsAlone(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) {
		c.Rules = []policy.RuleSettings{
			{Name: "no-udp", Match: policy.Match{Protocol: "udp"}, Refuse: "over TCP"},
			{Name: "no-pings", Match: policy.Match{Protocol: "icmp"}, Refuse: "nor so"},
		}
	}, p)
	p.connect(g)
	page := website(t, []byte("hello"))
	p.download(t, page.URL)
	_, err := p.ask(t, echoHere(t), 200*time.Millisecond)
	require.Error(t, err)
	g.refuses(1)
	p.download(t, page.URL)

	g.reload(func(c *config.Config) {
		c.Rules = []policy.RuleSettings{{Name: "no-tcp", Match: policy.Match{Protocol: "tcp"}, Refuse: "over UDP"}}
	})
	_, err = p.ask(t, echoHere(t), patience)
	require.NoError(t, err)
	_, err = p.dial(t, listenHere(t).Addr().String())
	require.ErrorContains(t, err, "refused")
}

// algorithm: none leaves the window of connections alone, but max_rate is for all of the group.
func TestAMaximumRateHoldsDatagramsWithoutAnAlgorithm(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) {
		c.Defaults.Algorithm, c.Defaults.MaxRate = "none", 80_000
	}, p)
	p.connect(g)
	c, err := p.net.DialUDP(nil, echoHere(t))
	require.NoError(t, err)
	defer c.Close() //nolint:errcheck // a socket in memory
	for range 300 {
		_, err = c.Write(make([]byte, 1000))
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		d := g.proxy.Tunnels()[0].Datagrams
		return d.Late+d.Overflow > 0
	}, patience, 10*time.Millisecond, "300 kB are more than 80 kbit/s pass on")
}

func TestAPeerDoesNotReachTheGatewaysOwnAddressesUnlessTheyAreAllowed(t *testing.T) {
	p := newPhone(t, "phone", "10.9.0.2")
	g := newGateway(t, func(c *config.Config) { c.Listeners[0].Allow = nil }, p)
	p.connect(g)
	server := echoHere(t)
	_, err := p.ask(t, server, 200*time.Millisecond)
	require.Error(t, err)
	g.refuses(1)
	_, err = p.dial(t, listenHere(t).Addr().String())
	require.ErrorContains(t, err, "refused")
}

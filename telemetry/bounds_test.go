package telemetry

import (
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
)

// arrivals is a listener at which connections arrive as a test makes them.
type arrivals struct {
	net.Listener
	next chan net.Conn
}

func (a arrivals) Accept() (net.Conn, error) {
	conn, ok := <-a.next
	if !ok {
		return nil, net.ErrClosed
	}
	return conn, nil
}

// arrivingConn is a connection between two addresses.
type arrivingConn struct {
	net.Conn
	from, to string
	closed   bool
}

func (c *arrivingConn) RemoteAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.from))
}

func (c *arrivingConn) LocalAddr() net.Addr {
	return net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.to))
}
func (c *arrivingConn) Close() error { c.closed = true; return nil }

// portUnderTest is a bounded port with all that it has let in.
type portUnderTest struct {
	t     *testing.T
	bound *BoundedListener
	next  chan net.Conn
}

func newPort(t *testing.T, total int, dialled func(from, to netip.AddrPort) bool) portUnderTest {
	next := make(chan net.Conn, 1)
	return portUnderTest{t, Bound(arrivals{next: next}, total, dialled, nil), next}
}

// connect has n connections come, and returns those that are let in.
func (p portUnderTest) connect(n int, from string) (in []net.Conn) {
	const here = "192.0.2.1:9465"
	for range n {
		conn := &arrivingConn{from: from, to: here}
		p.next <- conn
		marker := &arrivingConn{from: here, to: here} // is let in in any case, unless the port is full
		go func() { p.next <- marker }()
		got, err := p.bound.Accept()
		require.NoError(p.t, err)
		if got.RemoteAddr().String() == here {
			assert.True(p.t, conn.closed, "a connection that is refused is closed at once")
			require.NoError(p.t, got.Close())
			continue
		}
		in = append(in, got)
		<-p.next
	}
	return in
}

func TestOneHostDoesNotTakeAPortOfTelemetry(t *testing.T) {
	p := newPort(t, 64, nil)
	one := p.connect(100, "198.51.100.1:4000")
	assert.Len(t, one, maxPerSource)
	assert.Len(t, p.connect(1, "198.51.100.2:4000"), 1, "another scraper")
	assert.Len(t, p.connect(20, "[2001:db8::1]:4000"), maxPerSource)
	assert.Empty(t, p.connect(5, "[2001:db8::2:1]:4000"), "of the same /64")
	assert.Equal(t, map[proxy.Reason]uint64{
		proxy.RejectedSourceLimit: 92 + 12 + 5, proxy.RejectedListenerLimit: 0,
	}, p.bound.Refused())

	require.NoError(t, one[0].Close())
	require.NoError(t, one[0].Close(), "twice is once")
	assert.Len(t, p.connect(5, "198.51.100.1:4000"), 1, "a place that was given back")
}

func TestAPortOfTelemetryHasRoomForThisMachineWhateverOthersDo(t *testing.T) {
	p := newPort(t, 64, nil)
	others := 0
	for i := range 200 {
		from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 4000)
		others += len(p.connect(10, from.String()))
	}
	assert.Equal(t, 48, others)
	assert.Len(t, p.connect(7, "127.0.0.1:4000"), 7, "by loopback")
	assert.Len(t, p.connect(8, "192.0.2.1:4000"), 8, "by its own address")
	last := &arrivingConn{from: "127.0.0.1:4000", to: "127.0.0.1:9465"}
	_, ok := p.bound.admitHost(p.bound.sourceOf(last))
	require.True(t, ok)
	reason, ok := p.bound.admitHost(p.bound.sourceOf(last))
	assert.False(t, ok, "the total holds for all")
	assert.Equal(t, proxy.RejectedListenerLimit, reason)
}

func TestAClientByWayOfTheProxyIsNotThisMachine(t *testing.T) {
	p := newPort(t, 64, func(from, _ netip.AddrPort) bool { return from.Port() == 5000 })
	assert.Len(t, p.connect(20, "192.0.2.1:5000"), maxPerSource)
	assert.Len(t, p.connect(20, "192.0.2.1:4000"), 20)
}

func TestOneUserDoesNotTakeTheSocketForHints(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hints.sock")
	ln, err := ListenSocket(path)
	require.NoError(t, err)
	bound := Bound(ln, 64, nil, nil)
	for range maxPerSource {
		conn, err := net.Dial("unix", path)
		require.NoError(t, err)
		defer conn.Close() //nolint:errcheck // nothing is in it
		_, err = bound.Accept()
		require.NoError(t, err)
	}
	accepted := make(chan error, 1)
	go func() {
		_, err := bound.Accept()
		accepted <- err
	}()
	conn, err := net.Dial("unix", path)
	require.NoError(t, err)
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err, "it is closed at once")
	require.NoError(t, bound.Close())
	require.ErrorIs(t, <-accepted, net.ErrClosed)
	assert.Equal(t, uint64(1), bound.Refused()[proxy.RejectedSourceLimit])
}

func TestRefusalsAtPortsOfTelemetryAreCounted(t *testing.T) {
	p := newPort(t, 64, nil)
	p.connect(maxPerSource+3, "198.51.100.1:4000")
	o := busyOptions(&handClock{t: 1})
	o.Ports = map[string]*BoundedListener{"health": p.bound}
	assert.NoError(t, testutil.GatherAndCompare(NewRegistry(busyProxy(), o), strings.NewReader(`
# HELP penstock_telemetry_rejections_total Connections to a port of telemetry that were closed at once, by the bound that they met.
# TYPE penstock_telemetry_rejections_total counter
penstock_telemetry_rejections_total{listener="health",reason="listener_limit"} 0
penstock_telemetry_rejections_total{listener="health",reason="source_limit"} 3
`), "penstock_telemetry_rejections_total"))
}

package netstack

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
)

const mtu = 1420

var (
	client = netip.MustParseAddr("10.9.0.2")
	server = netip.MustParseAddrPort("203.0.113.7:443")
)

func clock() func() cc.Time {
	start := time.Now() //nolint:forbidigo // the stack under test runs on it
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

// join carries packets from one stack to the other until the test ends, but loses
// those of a's that lost asks for by their number; nil: none.
func join(t testing.TB, a, b *Stack, lost func(n int) bool) {
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	for _, way := range [][2]*Stack{{a, b}, {b, a}} {
		arrives := func() bool { return true }
		if sent := 0; way[0] == a && lost != nil {
			arrives = func() bool { sent++; return !lost(sent) }
		}
		done.Go(func() {
			bufs, sizes, packets := make([][]byte, 64), make([]int, 64), make([][]byte, 64)
			for i := range bufs {
				bufs[i] = make([]byte, mtu)
			}
			for {
				n, err := way[0].Collect(ctx, bufs, sizes, 0)
				if err != nil {
					return
				}
				arrived := packets[:0]
				for i := range n {
					if arrives() {
						arrived = append(arrived, bufs[i][:sizes[i]])
					}
				}
				way[1].Deliver(arrived...)
			}
		})
	}
	t.Cleanup(func() {
		assert.NoError(t, a.Close())
		assert.NoError(t, b.Close())
		cancel()
		done.Wait()
	})
}

// dial connects from a stack's own side, which only a test's client does.
func dial(t testing.TB, s *Stack, from netip.Addr, to netip.AddrPort) *Conn {
	local := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(from.AsSlice()), Port: nextPort()}
	remote := tcpip.FullAddress{NIC: nic, Addr: tcpip.AddrFromSlice(to.Addr().AsSlice()), Port: to.Port()}
	c := newConn(s.conns, stack.TransportEndpointID{
		LocalAddress: local.Addr, LocalPort: local.Port, RemoteAddress: remote.Addr, RemotePort: remote.Port,
	})
	s.conns.addConn(c)
	protocol := header.IPv4ProtocolNumber
	if from.Is6() {
		protocol = header.IPv6ProtocolNumber
	}
	ep, err := s.net.NewEndpoint(tcp.ProtocolNumber, protocol, &c.events)
	require.Nil(t, err)
	entry, connected := waiter.NewChannelEntry(waiter.WritableEvents)
	c.events.EventRegister(&entry)
	defer c.events.EventUnregister(&entry)
	require.Nil(t, ep.Bind(local))
	require.IsType(t, &tcpip.ErrConnectStarted{}, ep.Connect(remote))
	<-connected
	require.Nil(t, ep.LastError())
	require.NoError(t, c.adoptEndpoint(context.Background(), ep))
	return c
}

var (
	portMu sync.Mutex
	port   uint16 = 20000
)

func nextPort() uint16 {
	portMu.Lock()
	defer portMu.Unlock()
	port++
	return port
}

func pair(t *testing.T) (a, b datapath.Conn) { return connect(t, nil) }

// connect returns both ends of a connection: what was accepted, and the client's.
// Of the packets of the former, those are lost that lost asks for.
func connect(t testing.TB, lost func(n int) bool) (a, b *Conn) {
	now := clock()
	near, err := New(Config{Clock: now, MTU: mtu})
	require.NoError(t, err)
	far, err := New(Config{Clock: now, MTU: mtu})
	require.NoError(t, err)
	join(t, near, far, lost)
	admitted := make(chan *Conn, 1)
	go func() {
		c, err := near.Accept()
		if assert.NoError(t, err) && assert.NoError(t, c.Admit(context.Background())) {
			admitted <- c
		}
	}()
	dialled := dial(t, far, client, server)
	accepted := <-admitted
	assert.Equal(t, server, accepted.LocalAddrPort())
	return accepted, dialled
}

func TestNetstackConforms(t *testing.T) {
	datapathtest.Run(t, pair, nil)
	datapathtest.PeerClock(t, pair)
}

func TestHeldWindowsConformWherePacketsAreLost(t *testing.T) {
	datapathtest.Held(t, func(t *testing.T) (a, b datapath.Conn) {
		return connect(t, func(n int) bool { return n%50 == 0 })
	})
}

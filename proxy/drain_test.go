package proxy_test

import (
	"context"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// draining is a gateway with one connection out of its tunnel, told to end.
func draining(t *testing.T, drain time.Duration) (g *gateway, p *phone, client net.Conn, server *net.TCPConn,
	ended chan error,
) {
	p = newPhone(t, "phone", "10.9.0.2")
	g = newGateway(t, func(c *config.Config) { c.Shutdown.Drain = drain }, p)
	p.connect(g)
	ln := listenHere(t)
	client, err := p.dial(t, ln.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = client.Close() })
	server, err = ln.AcceptTCP()
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Close() })
	send(t, server, "before")
	hears(t, client, "before")
	ended = make(chan error, 1)
	go func() { ended <- g.stop() }()
	require.Eventually(t, func() bool { return !g.proxy.Ready() }, patience, time.Millisecond)
	return g, p, client, server, ended
}

// hears reads as much as want has, and wants just that.
func hears(t *testing.T, conn net.Conn, want string) {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience))) //nolint:forbidigo // a deadline is by the clock
	b := make([]byte, len(want))
	_, err := io.ReadFull(conn, b)
	require.NoError(t, err)
	assert.Equal(t, want, string(b))
}

func TestATunnelCarriesItsConnectionsWhileTheyDrain(t *testing.T) {
	_, p, client, server, ended := draining(t, time.Hour)
	send(t, server, "still here")
	hears(t, client, "still here")
	send(t, client, "me too")
	hears(t, server, "me too")

	// Nobody says that there is no server, for there will be again.
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	_, err := p.net.DialContext(ctx, "tcp", listenHere(t).Addr().String())
	require.ErrorIs(t, err, context.DeadlineExceeded)

	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
	select {
	case err := <-ended:
		require.NoError(t, err)
	case <-time.After(patience): //nolint:forbidigo // nothing tells of what does not happen
		t.Fatal("the drain goes on without a connection")
	}
}

func TestWhatIsLeftOfATunnelWhenTheDrainIsOverIsResetAndToldSo(t *testing.T) {
	g, _, client, server, ended := draining(t, time.Millisecond)
	deadline := time.Now().Add(patience) //nolint:forbidigo // it is by the clock
	require.NoError(t, client.SetReadDeadline(deadline))
	_, err := client.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
	_, err = server.Read(make([]byte, 1))
	require.ErrorContains(t, err, "reset")
	require.NoError(t, <-ended)
	assert.Contains(t, g.logs.String(), "closed_by=proxy reason=shutdown")
}

// slowListener is a listener whose end takes long, as that of MASQUE does with clients that do not leave.
type slowListener struct{ *fakeListener }

func (slowListener) Close() error {
	time.Sleep(5 * time.Second)
	return nil
}

func TestListenersCloseAtTheSameTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{clock: func() cc.Time { return 1 }}
		cfg := config.Default()
		cfg.Listeners = []access.Listener{
			{Name: "a", Mode: "forward", Address: "192.0.2.1:1", Target: "203.0.113.9:443"},
			{Name: "b", Mode: "forward", Address: "192.0.2.1:2", Target: "203.0.113.9:443"},
		}
		s, err := proxy.New(cfg, proxy.Parts{
			Clock: b.clock, Flows: &flow.Manager{}, Dial: b.dial,
			Open: func(proxy.ListenerConfig) (proxy.Listener, error) { return slowListener{newFakeListener()}, nil },
		})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		began := time.Now()
		require.NoError(t, s.Serve(ctx))
		assert.Equal(t, 5*time.Second, time.Since(began))
	})
}

//go:build linux

package e2e

import (
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// uploadTime is how long a client uploads; the queue is looked at after the first tenth.
const uploadTime = 10 * time.Second

// holdingClients has clients' uploads held, or not.
func holdingClients(receive string) string {
	return "defaults: {algorithm: penstock, up: {receive: " + receive + "}}\n"
}

// hop is a network whose client has an uplink and a downlink alike, each with a queue of
// 2 MB, and a proxy at its edge, which has these sysctls.
func hop(t *testing.T, link sim.LinkConfig, edge map[string]string, config string) (*scene, *netlab.Path) {
	t.Helper()
	need.OverLink(t)
	need.TUN(t)
	link.QueueBytes = 2e6
	lab, err := netlab.NewCellular(netlab.CellularConfig{Down: link, Up: link})
	require.NoError(t, err)
	s := &scene{Routed: lab.Routed, t: t}
	t.Cleanup(func() { require.NoError(t, lab.Close()) })
	for key, value := range edge {
		require.NoError(t, s.Edge.Sysctl(key, value))
	}
	s.start(ways[0].yaml(config))
	s.capture(ways[0])
	lab.Path.StartOnData()
	return s, lab.Path
}

// lastHop is a hop over which an upload takes its time.
func lastHop(t *testing.T, receive string) (*scene, *netlab.Path) {
	t.Helper()
	return hop(t, sim.LinkConfig{Rate: linkRate, Delay: linkDelay}, nil, holdingClients(receive))
}

// shortHop is one over which a client's queue is seen soon, and little takes no time.
var shortHop = sim.LinkConfig{Rate: 2 * linkRate, Delay: linkDelay / 5}

// serve answers each connection to a port.
func (s *scene) serve(port uint16, answer func(net.Conn)) netip.AddrPort {
	at := netip.AddrPortFrom(s.ServerAddr.V4, port)
	need.Serve(s.t, s.listen(at), answer)
	return at
}

// dial connects the client for as long as a test runs, with a congestion control of its own.
func (s *scene) dial(at netip.AddrPort, control string) *net.TCPConn {
	s.t.Helper()
	c, err := s.Client.Dial("tcp", at.String())
	require.NoError(s.t, err)
	s.t.Cleanup(func() { c.Close() })
	require.NoError(s.t, c.SetDeadline(time.Now().Add(uploadTime)))
	raw, err := c.(*net.TCPConn).SyscallConn()
	require.NoError(s.t, err)
	require.NoError(s.t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptString(int(fd), syscall.IPPROTO_TCP, unix.TCP_CONGESTION, control)
	}))
	require.NoError(s.t, err)
	return c.(*net.TCPConn)
}

// upload has a client with Linux's own control upload until time is up.
func upload(t *testing.T, receive string) (up netlab.DirectionReport, direction map[string]any) {
	t.Helper()
	s, path := lastHop(t, receive)
	sink := s.serve(servicePort, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	watch := newWatch()
	defer watch.stop()
	c := s.dial(sink, "cubic")
	_, _ = io.Copy(struct{ io.Writer }{c}, random(1, 1<<40))
	direction = s.proxy.flows()[0]["up"].(map[string]any)
	watch.skip(t, 40*time.Millisecond)
	return path.Report(uploadTime/10, uploadTime).Up, direction
}

// TestAClientsOwnCubicQueuesLittleInAHeldWindow is about a client that knows of nothing.
func TestAClientsOwnCubicQueuesLittleInAHeldWindow(t *testing.T) {
	needsPrivilege(t)
	without, unheld := upload(t, "none")
	with, held := upload(t, "penstock")
	t.Logf("without %v, queueing p50 %v p95 %v; with %v, p50 %v p95 %v",
		without.Throughput, without.DataQueueing.P50, without.DataQueueing.P95,
		with.Throughput, with.DataQueueing.P50, with.DataQueueing.P95)
	assert.LessOrEqual(t, with.DataQueueing.P95, without.DataQueueing.P95/10)
	assert.GreaterOrEqual(t, float64(with.Throughput), 0.97*float64(without.Throughput))

	assert.Equal(t, map[string]any{"algorithm": "none"}, unheld["receive"])
	receive := held["receive"].(map[string]any)
	assert.Equal(t, "penstock", receive["algorithm"])
	assert.Contains(t, receive["control"], "queueing_delay_seconds")
}

// TestBothDirectionsAndAPingPongKeepGoingBesideAnUpload has all at once on one last hop.
func TestBothDirectionsAndAPingPongKeepGoingBesideAnUpload(t *testing.T) {
	needsPrivilege(t)
	s, path := lastHop(t, "penstock")
	sink := s.serve(servicePort, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	source := s.serve(servicePort+1, func(c net.Conn) { _, _ = io.Copy(struct{ io.Writer }{c}, random(1, 1<<40)) })
	echo := s.serve(servicePort+2, func(c net.Conn) { _, _ = io.Copy(c, c) })
	watch := newWatch()
	defer watch.stop()
	var busy sync.WaitGroup
	up, down, ping := s.dial(sink, "cubic"), s.dial(source, "cubic"), s.dial(echo, "cubic")
	busy.Go(func() { _, _ = io.Copy(struct{ io.Writer }{up}, random(2, 1<<40)) })
	busy.Go(func() { _, _ = io.Copy(io.Discard, down) })
	var took []time.Duration
	every := time.NewTicker(100 * time.Millisecond)
	defer every.Stop()
	for b := make([]byte, 1); ; <-every.C {
		began := time.Now()
		if _, err := ping.Write(b); err != nil {
			break
		}
		if _, err := io.ReadFull(ping, b); err != nil {
			break
		}
		took = append(took, time.Since(began))
	}
	busy.Wait()
	watch.skip(t, 40*time.Millisecond)
	r := path.Report(uploadTime/10, uploadTime)
	slices.Sort(took)
	require.Greater(t, len(took), 50)
	p95 := took[len(took)*95/100]
	t.Logf("up %v, queueing p95 %v; down %v, queueing p95 %v; ping-pong p50 %v, p95 %v",
		r.Up.Throughput, r.Up.DataQueueing.P95, r.Down.Throughput, r.Down.DataQueueing.P95, took[len(took)/2], p95)
	least, most := 0.6, 150*time.Millisecond
	if present.envelope != kernel.EBPF { // there a download's round trips hold the uplink's queue as well
		least, most = 0.5, 200*time.Millisecond
	}
	assert.Greater(t, r.Up.Throughput.Mbps(), least*linkRate.Mbps())
	assert.Greater(t, r.Down.Throughput.Mbps(), least*linkRate.Mbps())
	assert.Less(t, p95, most)
}

// received is how the window of the first client is held.
func (s *scene) received() map[string]any {
	return s.proxy.flows()[0]["up"].(map[string]any)["receive"].(map[string]any)
}

// awaitHeld waits until it is.
func (s *scene) awaitHeld() {
	s.t.Helper()
	require.Eventually(s.t, func() bool { return s.received()["held"] == true }, patience, 5*time.Millisecond)
	assert.Equal(s.t, "penstock", s.received()["algorithm"])
	assert.Contains(s.t, s.received(), "control")
}

// TestAClientOfMPTCPIsHeldAsItsTCP: what MPTCP asks for is not granted, so it falls back
// to TCP (RFC 8684 §3.7).
func TestAClientOfMPTCPIsHeldAsItsTCP(t *testing.T) {
	needsPrivilege(t)
	s, _ := hop(t, shortHop, nil, "")
	const size = 2 * megabyte
	sum := make(chan string, 1)
	sink := s.serve(servicePort, func(c net.Conn) {
		got, _, _ := digest(c)
		sum <- got
	})
	var d net.Dialer
	d.SetMultipathTCP(true)
	c, err := s.Client.DialWith(t.Context(), &d, "tcp", sink.String())
	require.NoError(t, err)
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	require.NoError(t, err)
	protocol := 0
	require.NoError(t, raw.Control(func(fd uintptr) {
		protocol, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PROTOCOL)
	}))
	require.NoError(t, err)
	if protocol != unix.IPPROTO_MPTCP {
		t.Skip("this kernel has no MPTCP")
	}
	_, err = io.Copy(struct{ io.Writer }{c}, random(1, size))
	require.NoError(t, err)
	s.awaitHeld()
	require.NoError(t, c.(*net.TCPConn).CloseWrite())
	assert.Equal(t, digestOf(1, size), <-sum)
}

// TestWhatIsHeldArrivesIntact has clients whose TCP differs upload and download at once.
func TestWhatIsHeldArrivesIntact(t *testing.T) {
	needsPrivilege(t)
	for name, tt := range map[string]struct {
		edge map[string]string // sysctls
		held bool
		why  string
	}{
		"a window without a scale": {edge: map[string]string{"net.ipv4.tcp_window_scaling": "0"}, held: true},
		"a window in steps of 16 KiB": {
			edge: map[string]string{"net.ipv4.tcp_rmem": "4096 131072 1073741824"}, held: true,
		},
		"no timestamps": {
			edge: map[string]string{"net.ipv4.tcp_timestamps": "0"},
			why:  "kernel: the peer sends no TCP timestamps, so that its round trips are not known",
		},
		"the least receive buffers": {edge: map[string]string{"net.ipv4.tcp_rmem": "4096 4096 8192"}},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := hop(t, shortHop, tt.edge, "defaults: {receive: penstock}\n")
			w := ways[0]
			client, server := w.pair(s)
			const size = 2 * megabyte
			sum := make(chan string)
			go func() {
				got, _, _ := digest(server)
				sum <- got
			}()
			_, err := io.Copy(struct{ io.Writer }{client}, random(1, size))
			require.NoError(t, err)
			switch {
			case tt.held:
				s.awaitHeld()
			case tt.why != "":
				require.Eventually(t, func() bool { return s.received()["why"] == tt.why }, patience, 5*time.Millisecond)
				assert.NotContains(t, s.received(), "control")
			}
			require.NoError(t, client.CloseWrite())
			assert.Equal(t, digestOf(1, size), <-sum)
			_ = server.Close()
			_ = client.Close()
			onceMore, far := w.pair(s)
			exchange(t, onceMore, far, size)
		})
	}
}

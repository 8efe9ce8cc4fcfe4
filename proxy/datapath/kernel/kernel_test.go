//go:build linux

package kernel

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// clock starts above zero, as cc.Time wants.
func clock() func() cc.Time {
	start := time.Now()
	return func() cc.Time { return cc.Time(time.Since(start)) + 1 }
}

// start returns a datapath that ends with the test.
func start(tb testing.TB, cfg Config) *Datapath {
	tb.Helper()
	cfg.Clock = clock()
	d, err := New(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, d.Close()) })
	return d
}

// pair returns a dialled and an accepted leg on loopback, closed with the test.
func (d *Datapath) pair(tb testing.TB, addr string) (dialled, accepted *Conn) {
	tb.Helper()
	tcp, err := Listen(tb.Context(), addr, false)
	require.NoError(tb, err)
	ln, err := d.Listener(tcp)
	require.NoError(tb, err)
	legs, ended := make(chan datapath.Conn, 1), make(chan error, 1)
	go func() {
		ended <- ln.Serve(func(c datapath.Conn) { legs <- c }, func(error) time.Duration { return -1 })
	}()
	type dial struct {
		conn *Conn
		err  error
	}
	dials := make(chan dial, 1)
	go func() {
		c, err := d.Dial(context.Background(), DialConfig{Host: ln.Addr().String(), Timeout: 10 * time.Second})
		dials <- dial{c, err}
	}()
	select {
	case leg := <-legs:
		accepted = leg.(*Conn)
	case err := <-ended:
		require.NoError(tb, err)
	}
	require.NoError(tb, ln.Close())
	got := <-dials
	require.NoError(tb, got.err)
	tb.Cleanup(func() { _, _ = got.conn.Close(), accepted.Close() })
	return got.conn, accepted
}

// listen returns a listener of this package that accepts nothing by itself, closed with the test.
func listen(t *testing.T, addr string) *net.TCPListener {
	t.Helper()
	ln, err := Listen(t.Context(), addr, false)
	require.NoError(t, err)
	t.Cleanup(func() { _ = ln.Close() })
	return ln
}

const (
	loopback4 = "127.0.0.1:0"
	loopback6 = "[::1]:0"
)

func needsIPv6(t *testing.T) {
	t.Helper()
	ln, err := net.Listen("tcp6", loopback6)
	if err != nil {
		t.Skipf("no IPv6 loopback here: %v", err)
	}
	require.NoError(t, ln.Close())
}

// needsEBPF skips where the kernel does not enforce windows for this process.
func needsEBPF(t testing.TB) {
	t.Helper()
	if err := bpf.Check(); err != nil {
		t.Skip(err)
	}
}

// needsPacketSockets skips where this process may not read acknowledgements.
func needsPacketSockets(t *testing.T) {
	t.Helper()
	var p peerClocks
	if err := p.open(clock()); err != nil {
		t.Skip(err)
	}
	require.NoError(t, p.close())
}

// pairs returns pairs of legs; those of one test have a datapath in common.
func pairs(cfg Config, addr string) datapathtest.Pair {
	var of *testing.T
	var d *Datapath
	return func(t *testing.T) (a, b datapath.Conn) {
		t.Helper()
		if of != t {
			of, d = t, start(t, cfg)
		}
		return d.pair(t, addr)
	}
}

// mute has everything lost on the way to a socket.
func mute(t *testing.T, c datapath.Conn) {
	t.Helper()
	drop := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	require.NoError(t, datapath.Control(c.(*Conn).raw, func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: 1, Filter: &drop})
	}))
}

// TestConformanceInShards has several ticks serve the legs.
func TestConformanceInShards(t *testing.T) {
	for _, envelope := range []string{EBPF, "cubic"} {
		t.Run(envelope, func(t *testing.T) {
			if envelope == EBPF {
				needsEBPF(t)
			}
			datapathtest.Run(t, pairs(Config{Envelope: envelope, Cells: 256, Shards: 3}, loopback4), mute)
			if envelope != EBPF {
				needsPacketSockets(t)
			}
			for _, addr := range []string{loopback4, loopback6} {
				if addr == loopback6 {
					needsIPv6(t)
				}
				datapathtest.PeerClock(t, pairs(Config{Envelope: envelope, Cells: 8}, addr))
			}
		})
	}
}

func TestConformance(t *testing.T) {
	for _, envelope := range []string{EBPF, "bbr", "cubic"} {
		t.Run(envelope, func(t *testing.T) {
			switch envelope {
			case EBPF:
				needsEBPF(t)
			case "cubic":
				need.SameCode(t)
			}
			for name, addr := range map[string]string{"IPv4": loopback4, "IPv6": loopback6} {
				t.Run(name, func(t *testing.T) {
					if addr == loopback6 {
						needsIPv6(t)
						need.SameCode(t)
					}
					datapathtest.Run(t, pairs(Config{Envelope: envelope, Cells: 64}, addr), mute)
				})
			}
		})
	}
}

// adoptConn makes a leg of a connection that package net has made, and has loop serve it. It owns tcp from then on.
func (d *Datapath) adoptConn(tcp *net.TCPConn, loop *eventloop.Loop, dialled bool) (*Conn, error) {
	defer tcp.Close() //nolint:errcheck // the leg has a descriptor of its own
	own, err := duplicateFD(tcp)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	socket, err := loop.Watch(own)
	if err != nil {
		_ = unix.Close(own)
		return nil, fmt.Errorf("kernel: %w", err)
	}
	return d.newLeg(socket, datapath.RemoteOf(tcp), dialled), nil
}

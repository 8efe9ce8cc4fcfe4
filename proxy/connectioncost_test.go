//go:build linux

package proxy_test

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
)

// allocatedPerConnection bounds what a connection with one exchange allocates, in bytes.
const allocatedPerConnection = 400

// A connection of the algorithm none gives back most of what it needs. The client and the server are system calls,
// which allocate nothing.
func TestAConnectionAllocatesLittle(t *testing.T) {
	need.SameCode(t) // and a pool forgets at random what it is given
	r := newRig(t, func(c *config.Config) { c.Defaults.Algorithm, c.Log.Flows = "none", false })
	to, err := netip.ParseAddrPort(r.addr())
	require.NoError(t, err)
	raw, err := r.backend.SyscallConn()
	require.NoError(t, err)
	exchange := rawExchange{to: unix.RawSockaddrInet4{
		Family: unix.AF_INET, Addr: to.Addr().As4(), Port: to.Port()<<8 | to.Port()>>8,
	}}
	require.NoError(t, raw.Control(func(fd uintptr) { exchange.server = fd }))
	require.NoError(t, unix.SetNonblock(int(exchange.server), false))

	const warmUp, counted = 200, 1000
	for range warmUp {
		require.NoError(t, exchange.run())
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range counted {
		if err := exchange.run(); err != nil {
			require.NoError(t, err)
		}
	}
	runtime.ReadMemStats(&after)
	t.Logf("%d bytes in %.1f objects", (after.TotalAlloc-before.TotalAlloc)/counted,
		float64(after.Mallocs-before.Mallocs)/counted)
	assert.LessOrEqual(t, (after.TotalAlloc-before.TotalAlloc)/counted, uint64(allocatedPerConnection))
}

// rawExchange is a client and a server on one thread. It allocates nothing.
type rawExchange struct {
	server uintptr // a listening socket that blocks
	to     unix.RawSockaddrInet4
	buf    [128]byte
}

// run opens a connection, sends 100 bytes each way, and has the server end it first.
func (e *rawExchange) run() error {
	client, _, errno := unix.Syscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if errno != 0 {
		return errno
	}
	if _, err := systemCall(unix.SYS_CONNECT, client, unsafe.Pointer(&e.to), unix.SizeofSockaddrInet4); err != nil {
		return err
	}
	server, err := systemCall(unix.SYS_ACCEPT4, e.server, nil, 0)
	if err != nil {
		return err
	}
	for _, step := range [...]struct{ number, fd, n uintptr }{
		{unix.SYS_WRITE, client, 100},
		{unix.SYS_READ, server, 128},
		{unix.SYS_WRITE, server, 100},
		{unix.SYS_READ, client, 128},
		{unix.SYS_CLOSE, server, 0},
		{unix.SYS_READ, client, 128}, // the end
		{unix.SYS_CLOSE, client, 0},
	} {
		if _, err := systemCall(step.number, step.fd, unsafe.Pointer(&e.buf), step.n); err != nil {
			return err
		}
	}
	return nil
}

// systemCall makes a system call with a descriptor, memory, and its size.
func systemCall(number, fd uintptr, memory unsafe.Pointer, size uintptr) (uintptr, error) {
	r, _, errno := unix.Syscall(number, fd, uintptr(memory), size)
	if errno != 0 {
		return 0, errno
	}
	return r, nil
}

// Connections take over the memory of ended ones while walks over all connections look at them. Each has its own
// bytes and its own counts; some are reset, and some half-closed.
func TestConnectionsThatTakeOverMemoryAreNotMixedUp(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	need.Serve(t, ln, func(c net.Conn) { _, _ = io.Copy(c, c) })
	r := newRig(t, func(c *config.Config) { c.Defaults.Algorithm, c.Listeners[0].Target = "none", ln.Addr().String() })
	over := make(chan struct{})
	var walks, all sync.WaitGroup
	walks.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
				r.proxy.Snapshot(func(f *proxy.FlowInfo) { assert.Equal(t, "fwd", f.Listener) })
				time.Sleep(time.Millisecond)
			}
		}
	})
	const clients, each = 8, 60
	for client := range clients {
		all.Go(func() {
			for i := range each {
				said := fmt.Sprintf("%d of %d", i, client)
				c, err := net.Dial("tcp", r.addr())
				if !assert.NoError(t, err) {
					return
				}
				_, _ = io.WriteString(c, said)
				heard := make([]byte, len(said))
				_, err = io.ReadFull(c, heard)
				assert.NoError(t, err)
				assert.Equal(t, said, string(heard))
				switch i % 3 {
				case 0:
					_ = c.(*net.TCPConn).SetLinger(0) // a reset
				case 1:
					_ = c.(*net.TCPConn).CloseWrite()
					rest, err := io.ReadAll(c)
					assert.NoError(t, err)
					assert.Empty(t, rest)
				}
				_ = c.Close()
			}
		})
	}
	all.Wait()
	close(over)
	walks.Wait()
	var route proxy.RouteCounters
	require.Eventually(t, func() bool {
		counters := r.proxy.Counters()
		route = counters.Routes[0]
		return counters.Active == 0
	}, patience, time.Millisecond)
	assert.EqualValues(t, clients*each, route.Opened)
	assert.Equal(t, route.Up.Written, route.Down.Read)
	closed := uint64(0)
	for _, n := range route.Closed {
		closed += n
	}
	assert.EqualValues(t, clients*each, closed)
	assert.EqualValues(t, clients*each/3, route.Closed[proxy.Cause{Who: proxy.ClientSide, How: proxy.ClosedReset}])
}

package ingress

import (
	"bytes"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// fakeConn is a datapath.Conn whose peer has said all it will say: Read hands
// it out in pieces of at most chunk bytes, then waits until a deadline passes
// or, after hangUp, ends.
type fakeConn struct {
	local, remote net.Addr
	chunk         int  // 0: all at once
	hangUp        bool // the peer closes after its last byte

	mu                        sync.Mutex
	changed                   *sync.Cond
	in                        []byte
	out                       bytes.Buffer
	readExpired, writeExpired bool
	shut, closed, reset       bool
}

func newFakeConn(said string) *fakeConn {
	c := &fakeConn{
		in:     []byte(said),
		local:  net.TCPAddrFromAddrPort(netip.MustParseAddrPort("192.0.2.1:1080")),
		remote: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("198.51.100.7:40000")),
	}
	c.changed = sync.NewCond(&c.mu)
	return c
}

func (c *fakeConn) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, net.ErrClosed
		case c.readExpired:
			return 0, os.ErrDeadlineExceeded
		case len(c.in) > 0:
			if c.chunk > 0 && len(b) > c.chunk {
				b = b[:c.chunk]
			}
			n := copy(b, c.in)
			c.in = c.in[n:]
			return n, nil
		case c.hangUp || c.shut: // a peer that is told to go goes
			return 0, io.EOF
		}
		c.changed.Wait()
	}
}

func (c *fakeConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed || c.shut:
		return 0, net.ErrClosed
	case c.writeExpired:
		return 0, os.ErrDeadlineExceeded
	}
	return c.out.Write(b)
}

func (c *fakeConn) set(f func()) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	f()
	c.changed.Broadcast()
	return nil
}

func (c *fakeConn) Close() error      { return c.set(func() { c.closed = true }) }
func (c *fakeConn) CloseWrite() error { return c.set(func() { c.shut = true }) }
func (c *fakeConn) Reset() error      { return c.set(func() { c.closed, c.reset = true, true }) }

// A deadline is either none or long past: nothing here sets any other.
func (c *fakeConn) SetDeadline(t time.Time) error {
	return c.set(func() { c.readExpired, c.writeExpired = !t.IsZero(), !t.IsZero() })
}

func (c *fakeConn) SetReadDeadline(t time.Time) error {
	return c.set(func() { c.readExpired = !t.IsZero() })
}

func (c *fakeConn) SetWriteDeadline(t time.Time) error {
	return c.set(func() { c.writeExpired = !t.IsZero() })
}

func (c *fakeConn) LocalAddr() net.Addr { return c.local }

func (c *fakeConn) RemoteAddr() net.Addr                     { return c.remote }
func (c *fakeConn) Enforce(datapath.Hold, int) datapath.Hold { return 0 }
func (c *fakeConn) Observe(func(flow.Report))                {}
func (c *fakeConn) Apply(flow.Limit)                         {}
func (c *fakeConn) Info() datapath.Info                      { return datapath.Info{Tier: "fake"} }
func (c *fakeConn) Undelivered() (cc.Bytes, error)           { return 0, nil }
func (c *fakeConn) Aborted() bool                            { return false }
func (c *fakeConn) InProcess() bool                          { return true }

// heard is what was written to the peer.
func (c *fakeConn) heard() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.String()
}

func (c *fakeConn) isClosed() (closed, reset bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed, c.reset
}

// sockets opens sockets of the kernel datapath, which ends with the test.
func sockets(tb testing.TB) Open {
	tb.Helper()
	start := time.Now()
	dp, err := kernel.New(kernel.Config{
		Clock: func() cc.Time { return cc.Time(time.Since(start)) + 1 }, Envelope: "cubic",
	})
	require.NoError(tb, err)
	tb.Cleanup(func() { assert.NoError(tb, dp.Close()) })
	return func(ln *net.TCPListener) (Acceptor, error) { return dp.Listener(ln) }
}

// fakeAcceptor gives what next says.
type fakeAcceptor struct {
	next   func() (datapath.Conn, error)
	addr   net.Addr
	closed chan struct{} // nil: it is never closed
}

func (a *fakeAcceptor) Serve(take func(datapath.Conn), failed func(error) time.Duration) error {
	for {
		conn, err := a.next()
		pause := time.Duration(0)
		if err == nil {
			take(conn)
		} else if pause = failed(err); pause < 0 {
			return err
		}
		select {
		case <-time.After(pause):
		case <-a.closed:
			return net.ErrClosed
		}
	}
}

func (a *fakeAcceptor) SetTransparent() error { return nil }

func (a *fakeAcceptor) Duplicate() (int, error) { return 0, errors.ErrUnsupported }

func (a *fakeAcceptor) Close() error {
	if a.closed != nil {
		close(a.closed)
	}
	return nil
}

func (a *fakeAcceptor) Addr() net.Addr {
	if a.addr == nil {
		return net.TCPAddrFromAddrPort(netip.MustParseAddrPort("192.0.2.1:1080"))
	}
	return a.addr
}

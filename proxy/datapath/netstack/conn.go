package netstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Conn is a connection that ends in a Stack. It implements datapath.Conn,
// datapath.Ending, datapath.Peeker and datapath.ReadyReader.
type Conn struct {
	stack   *Stack
	id      stack.TransportEndpointID
	hops    uint8 // how many routers the SYN may still pass
	signals signals
	queue   waiter.Queue
	reads   *deadline
	writes  *deadline
	aborted atomic.Bool // by the peer, or by a timeout
	watched atomic.Bool // the poller looks at it
	stuck   atomic.Bool // the stack cannot be made to send again

	checked cc.Time // when the poller last looked at the stack's timers
	resumed int     // how often since it had to start one, without an answer

	mu       sync.Mutex
	request  *request       // a SYN that waits for its answer; nil: none does
	endpoint tcpip.Endpoint // nil before it is admitted
	closed   bool
}

var (
	_ datapath.Conn        = (*Conn)(nil)
	_ datapath.Ending      = (*Conn)(nil)
	_ datapath.Peeker      = (*Conn)(nil)
	_ datapath.ReadyReader = (*Conn)(nil)
)

func newConn(s *Stack, id stack.TransportEndpointID) *Conn {
	return &Conn{stack: s, id: id, reads: newDeadline(), writes: newDeadline()}
}

// Admit answers the SYN and waits until the client has completed its handshake.
func (c *Conn) Admit(ctx context.Context) error {
	c.mu.Lock()
	r := c.request
	c.request = nil
	c.mu.Unlock()
	if r == nil {
		return fmt.Errorf("netstack: admit: %w", os.ErrClosed)
	}
	c.stack.conns.add(c)
	endpoint, err := r.CreateEndpoint(&c.queue)
	r.Complete(false)
	if err != nil {
		c.forget()
		return fmt.Errorf("netstack: admit: %w", failure(err))
	}
	return c.adopt(ctx, endpoint)
}

// adopt takes an endpoint that is connected.
func (c *Conn) adopt(ctx context.Context, endpoint tcpip.Endpoint) error {
	endpoint.SocketOptions().SetDelayOption(false)
	if err := keepAlive(endpoint); err != nil {
		c.forget()
		endpoint.Abort()
		return fmt.Errorf("netstack: admit: %w", err)
	}
	c.mu.Lock()
	c.endpoint = endpoint
	closed := c.closed
	c.mu.Unlock()
	if closed || ctx.Err() != nil {
		c.forget()
		endpoint.Abort()
		return fmt.Errorf("netstack: admit: %w", errors.Join(context.Cause(ctx), os.ErrClosed))
	}
	return nil
}

// live returns the endpoint, or why there is none.
func (c *Conn) live() (tcpip.Endpoint, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return nil, net.ErrClosed
	case c.endpoint == nil:
		return nil, errNotAdmitted
	}
	return c.endpoint, nil
}

// block repeats try until it need not wait, or its deadline has come.
func (c *Conn) block(d *deadline, events waiter.EventMask, try func() tcpip.Error) error {
	err := try()
	if _, wait := err.(*tcpip.ErrWouldBlock); !wait {
		return failure(err)
	}
	entry, ready := waiter.NewChannelEntry(events)
	c.queue.EventRegister(&entry)
	defer c.queue.EventUnregister(&entry)
	for {
		expired := d.wait()
		err := try()
		if _, wait := err.(*tcpip.ErrWouldBlock); !wait {
			return failure(err)
		}
		select {
		case <-ready:
		case <-expired:
			return os.ErrDeadlineExceeded
		}
	}
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	return c.read(func() []byte { return b }, func() {}, false)
}

// ReadReady implements datapath.ReadyReader.
func (c *Conn) ReadReady(take func() []byte, back func()) (int, error) {
	return c.read(take, back, false)
}

func (c *Conn) read(take func() []byte, back func(), peek bool) (n int, err error) {
	endpoint, err := c.live()
	if err != nil {
		return 0, c.opError("read", err)
	}
	select {
	case <-c.reads.wait():
		return 0, c.opError("read", os.ErrDeadlineExceeded)
	default:
	}
	err = c.block(c.reads, waiter.ReadableEvents, func() tcpip.Error {
		if endpoint.Readiness(waiter.ReadableEvents) == 0 {
			return &tcpip.ErrWouldBlock{}
		}
		w := tcpip.SliceWriter(take())
		result, err := endpoint.Read(&w, tcpip.ReadOptions{Peek: peek})
		if n = result.Count; n == 0 {
			back()
		}
		return err
	})
	if n > 0 && !peek {
		endpoint.(interface{ ModerateRecvBuf(int) }).ModerateRecvBuf(n)
	}
	return n, c.result("read", err)
}

// Peek implements datapath.Peeker.
func (c *Conn) Peek(b []byte, look func([]byte) bool) error {
	endpoint, err := c.live()
	if err != nil {
		return c.opError("read", err)
	}
	seen := 0
	err = c.block(c.reads, waiter.ReadableEvents, func() tcpip.Error {
		w := tcpip.SliceWriter(b)
		result, err := endpoint.Read(&w, tcpip.ReadOptions{Peek: true})
		if _, ended := err.(*tcpip.ErrClosedForReceive); ended {
			return nil
		}
		if err != nil {
			return err
		}
		if result.Count > seen {
			seen = result.Count
			if look(b[:seen]) || seen == len(b) {
				return nil
			}
		}
		if endpoint.Readiness(waiter.EventRdHUp)&waiter.EventRdHUp != 0 {
			return nil // what there is, is all
		}
		return &tcpip.ErrWouldBlock{}
	})
	return c.opError("read", err)
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (n int, err error) {
	endpoint, err := c.live()
	if err != nil {
		return 0, c.opError("write", err)
	}
	select {
	case <-c.writes.wait():
		return 0, c.opError("write", os.ErrDeadlineExceeded)
	default:
	}
	var r bytes.Reader
	for n < len(b) && err == nil {
		err = c.block(c.writes, waiter.WritableEvents, func() tcpip.Error {
			r.Reset(b[n:])
			wrote, err := endpoint.Write(&r, tcpip.WriteOptions{})
			c.signals.took(int(wrote))
			c.watch()
			n += int(wrote)
			return err
		})
	}
	return n, c.result("write", err)
}

// CloseWrite implements datapath.Conn.
func (c *Conn) CloseWrite() error {
	endpoint, err := c.live()
	if err == nil {
		err = failure(endpoint.Shutdown(tcpip.ShutdownWrite))
		c.watch()
	}
	return c.opError("close", err)
}

// Close implements net.Conn.
func (c *Conn) Close() error { return c.shut(tcpip.Endpoint.Close) }

// Reset implements datapath.Conn. A SYN that waits is refused.
func (c *Conn) Reset() error { return c.shut(tcpip.Endpoint.Abort) }

// Leave forgets a SYN that waits, without an answer to it.
func (c *Conn) Leave() {
	c.mu.Lock()
	request := c.request
	c.request, c.closed = nil, true
	c.mu.Unlock()
	if request != nil {
		request.Complete(false)
	}
}

func (c *Conn) shut(how func(tcpip.Endpoint)) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	endpoint, request := c.endpoint, c.request
	c.request = nil
	c.mu.Unlock()
	c.signals.end()
	if request != nil {
		request.Complete(true)
	}
	if endpoint != nil {
		how(endpoint)
		if c.waits() {
			c.watch() // until what it was given has arrived
		} else {
			c.forget()
		}
		c.queue.Notify(waiter.EventHUp | waiter.ReadableEvents | waiter.WritableEvents) // whoever waits
	}
	return nil
}

// forget has the stack's signals go nowhere.
func (c *Conn) forget() { c.stack.conns.remove(c) }

// Observe implements datapath.Conn.
func (c *Conn) Observe(exchange func(flow.Report) flow.Limit, want datapath.Hold) datapath.Hold {
	if limited := exchange; limited != nil && want&datapath.HoldWindow == 0 {
		exchange = func(r flow.Report) flow.Limit {
			l := limited(r)
			l.Cwnd = 0 // the stack keeps its own window
			return l
		}
	}
	c.signals.observe(c.stack.clock, exchange)
	return 0
}

// tcp is the endpoint, which may outlive Close; nil: there is none yet.
func (c *Conn) tcp() *tcp.Endpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, _ := c.endpoint.(*tcp.Endpoint)
	return e
}

// timeouts counts the expiries of the retransmission timer.
func (c *Conn) timeouts() int {
	endpoint, err := c.live()
	if err != nil {
		return 0
	}
	return timeouts(endpoint)
}

func timeouts(endpoint tcpip.Endpoint) int {
	stats, ok := endpoint.Stats().(*tcp.Stats)
	if !ok {
		return 0
	}
	return int(stats.SendErrors.Timeouts.Value())
}

// Info implements datapath.Conn.
func (c *Conn) Info() datapath.Info {
	g := &c.signals
	g.mu.Lock()
	defer g.mu.Unlock()
	return datapath.Info{
		Tier: "netstack", Envelope: envelope, Cwnd: g.cwnd, SRTT: g.srtt, MinRTT: g.minRTT,
		Unsent: max(0, g.written-max(g.sndMax, g.una)), Retransmitted: g.lost,
	}
}

// Undelivered implements datapath.Ending.
func (c *Conn) Undelivered() (cc.Bytes, error) {
	if _, err := c.live(); err != nil {
		return 0, c.opError("read", err)
	}
	if c.Aborted() {
		return 0, nil // nothing will be
	}
	c.signals.mu.Lock()
	defer c.signals.mu.Unlock()
	return max(0, c.signals.written-c.signals.una), nil
}

// Aborted implements datapath.Ending.
func (c *Conn) Aborted() bool {
	endpoint, err := c.live()
	if err != nil {
		return false
	}
	return tcp.EndpointState(endpoint.State()) == tcp.StateError || c.ended() && c.aborted.Load()
}

// ended tells whether the stack is through with the connection, other than by
// an error in the midst of it; and notes whether a RST came behind a FIN, which
// the stack says only once.
func (c *Conn) ended() bool {
	endpoint, err := c.live()
	if err != nil || tcp.EndpointState(endpoint.State()) != tcp.StateClose {
		return false
	}
	if endpoint.LastError() != nil {
		c.aborted.Store(true)
	}
	return true
}

// result is err as callers see it.
func (c *Conn) result(op string, err error) error {
	if err != nil && c.stuck.Load() {
		err = errStuck
	}
	switch {
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.ECONNABORTED), errors.Is(err, syscall.ETIMEDOUT):
		c.aborted.Store(true)
	case err == io.EOF && c.aborted.Load(): //nolint:errorlint // as io.Reader's callers do
		err = syscall.ECONNRESET
	}
	return c.opError(op, err)
}

// LocalAddr implements net.Conn: where the client meant to go.
func (c *Conn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(c.Target()) }

// RemoteAddr implements net.Conn: the client.
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.Source()) }

// Source is the client.
func (c *Conn) Source() netip.AddrPort { return addrPort(c.id.RemoteAddress, c.id.RemotePort) }

// Hops is how many routers the client's SYN may still pass behind us.
func (c *Conn) Hops() uint8 { return c.hops }

// Target is where the client meant to go.
func (c *Conn) Target() netip.AddrPort { return addrPort(c.id.LocalAddress, c.id.LocalPort) }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.set(c.reads, t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.set(c.writes, t) }

func (c *Conn) set(d *deadline, t time.Time) error {
	d.set(t)
	// A wait may have begun under the old one.
	c.queue.Notify(waiter.ReadableEvents | waiter.WritableEvents)
	return nil
}

// opError wraps err as package net does; nil and the end of the stream stay as they are.
func (c *Conn) opError(op string, err error) error {
	if err == nil || err == io.EOF { //nolint:errorlint // compared as io.Reader's callers do
		return err
	}
	return &net.OpError{Op: op, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: err}
}

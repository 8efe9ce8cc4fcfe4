package netstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Conn is a connection that ends in a Stack. It implements datapath.Conn,
// datapath.Ending, datapath.Peeker, datapath.ReadyReader and datapath.Advertiser.
type Conn struct {
	stack    *Stack
	id       stack.TransportEndpointID
	hops     uint8 // see Hops
	dscp     uint8 // see ReceivedDSCP
	signals  signals
	incoming incoming
	queue    waiter.Queue
	reads    *datapath.Deadline
	writes   *datapath.Deadline
	aborted  atomic.Bool // by the peer, or by a timeout
	managed  atomic.Bool // the relay writes no more than a window
	watched  atomic.Bool // the poller looks at it
	stuck    atomic.Bool // the stack cannot be made to send again
	settled  bool        // settle has returned true; guarded by the endpoint's lock

	window  atomic.Int64 // bytes, of the limit applied last, if the relay keeps it; 0: the stack's own holds
	widened atomic.Int64 // the value of window that the stack's own has been opened for

	// Only the poller touches these.
	since   cc.Time // when the poller began to look at it
	due     cc.Time // when to look next
	checked cc.Time // when it last looked at the stack's timers
	resumed int     // how many timers it has started since a segment came last

	mu       sync.Mutex
	request  *request       // a SYN that waits for its answer; nil: none does
	admits   bool           // the SYN is answered, and Admit waits for the client
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
	return &Conn{stack: s, id: id, reads: datapath.NewDeadline(), writes: datapath.NewDeadline()}
}

// Admit answers the SYN and waits until the client has completed its handshake, or c is closed.
func (c *Conn) Admit(ctx context.Context) error {
	c.mu.Lock()
	r := c.request
	c.request, c.admits = nil, r != nil
	c.mu.Unlock()
	if r == nil {
		return fmt.Errorf("netstack: admit: %w", os.ErrClosed)
	}
	c.stack.conns.addConn(c)
	endpoint, err := r.CreateEndpoint(&c.queue)
	c.mu.Lock()
	c.admits = false
	c.mu.Unlock()
	r.Complete(false)
	if err != nil {
		c.removeFromTable()
		return fmt.Errorf("netstack: admit: %w", kernelError(err))
	}
	return c.adoptEndpoint(ctx, endpoint)
}

// adoptEndpoint takes an endpoint that is connected.
func (c *Conn) adoptEndpoint(ctx context.Context, endpoint tcpip.Endpoint) error {
	endpoint.SocketOptions().SetDelayOption(false)
	if err := enableKeepAlive(endpoint); err != nil {
		c.removeFromTable()
		endpoint.Abort()
		return fmt.Errorf("netstack: admit: %w", err)
	}
	c.mu.Lock()
	c.endpoint = endpoint
	closed := c.closed
	c.mu.Unlock()
	if closed || ctx.Err() != nil {
		c.removeFromTable()
		endpoint.Abort()
		return fmt.Errorf("netstack: admit: %w", errors.Join(context.Cause(ctx), os.ErrClosed))
	}
	return nil
}

// liveEndpoint returns the endpoint, or why there is none.
func (c *Conn) liveEndpoint() (tcpip.Endpoint, error) {
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

// retryUntilReady repeats try until it does not return ErrWouldBlock, or the deadline has come.
func (c *Conn) retryUntilReady(d *datapath.Deadline, events waiter.EventMask, try func() tcpip.Error) error {
	err := try()
	if _, wait := err.(*tcpip.ErrWouldBlock); !wait {
		return kernelError(err)
	}
	entry, ready := waiter.NewChannelEntry(events)
	c.queue.EventRegister(&entry)
	defer c.queue.EventUnregister(&entry)
	for {
		expired := d.Wait()
		err := try()
		if _, wait := err.(*tcpip.ErrWouldBlock); !wait {
			return kernelError(err)
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
	return c.readInto(datapath.Lent(b), false)
}

// ReadReady implements datapath.ReadyReader.
func (c *Conn) ReadReady(room datapath.Room) (int, error) { return c.readInto(room, false) }

func (c *Conn) readInto(room datapath.Room, peek bool) (n int, err error) {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return 0, c.opError("read", err)
	}
	select {
	case <-c.reads.Wait():
		return 0, c.opError("read", os.ErrDeadlineExceeded)
	default:
	}
	err = c.retryUntilReady(c.reads, waiter.ReadableEvents, func() tcpip.Error {
		if endpoint.Readiness(waiter.ReadableEvents) == 0 {
			return &tcpip.ErrWouldBlock{}
		}
		w := tcpip.SliceWriter(room.Take())
		result, err := endpoint.Read(&w, tcpip.ReadOptions{Peek: peek})
		if n = result.Count; n == 0 {
			room.GiveBack()
		}
		return err
	})
	if n > 0 && !peek {
		endpoint.(interface{ ModerateRecvBuf(int) }).ModerateRecvBuf(n)
	}
	return n, c.resultError("read", err)
}

// Peek implements datapath.Peeker.
func (c *Conn) Peek(b []byte, look func([]byte) bool) error {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return c.opError("read", err)
	}
	seen := 0
	err = c.retryUntilReady(c.reads, waiter.ReadableEvents, func() tcpip.Error {
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
			return nil // no more bytes will come
		}
		return &tcpip.ErrWouldBlock{}
	})
	return c.opError("read", err)
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (n int, err error) {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return 0, c.opError("write", err)
	}
	select {
	case <-c.writes.Wait():
		return 0, c.opError("write", os.ErrDeadlineExceeded)
	default:
	}
	var r bytes.Reader
	for n < len(b) && err == nil {
		err = c.retryUntilReady(c.writes, waiter.WritableEvents, func() tcpip.Error {
			c.widenStackWindow()
			r.Reset(b[n:])
			wrote, err := endpoint.Write(&r, tcpip.WriteOptions{})
			c.signals.noteAccepted(int(wrote))
			c.startWatching()
			n += int(wrote)
			return err
		})
	}
	return n, c.resultError("write", err)
}

// CloseWrite implements datapath.Conn.
func (c *Conn) CloseWrite() error {
	endpoint, err := c.liveEndpoint()
	if err == nil {
		err = kernelError(endpoint.Shutdown(tcpip.ShutdownWrite))
		c.startWatching()
	}
	return c.opError("close", err)
}

// Close implements net.Conn.
func (c *Conn) Close() error { return c.shutEndpoint(tcpip.Endpoint.Close) }

// Reset implements datapath.Conn. A SYN that waits is answered with a RST.
func (c *Conn) Reset() error { return c.shutEndpoint(tcpip.Endpoint.Abort) }

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

func (c *Conn) shutEndpoint(how func(tcpip.Endpoint)) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	endpoint, request, admits := c.endpoint, c.request, c.admits
	c.request = nil
	c.mu.Unlock()
	c.signals.stopReports()
	if request != nil {
		request.Complete(true)
	}
	if admits {
		c.interruptAdmit()
	}
	if endpoint != nil {
		how(endpoint)
		if c.isWaitingForAck() {
			c.startWatching() // until the peer has acknowledged what was written
		} else {
			c.removeFromTable()
		}
		c.queue.Notify(waiter.EventHUp | waiter.ReadableEvents | waiter.WritableEvents) // for calls that wait
	}
	return nil
}

// interruptAdmit ends an Admit that waits for the client, or is about to.
func (c *Conn) interruptAdmit() {
	for c.isAdmitting() && c.queue.IsEmpty() {
		runtime.Gosched()
	}
	c.queue.Notify(waiter.WritableEvents)
}

func (c *Conn) isAdmitting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.admits
}

// removeFromTable removes c from the table by which the stack's signals find it.
func (c *Conn) removeFromTable() {
	c.stack.conns.removeConn(c)
	if c.incoming.stopCounting() {
		c.stack.asked.Add(-1)
	}
}

// Enforce implements datapath.Conn. The stack enforces nothing. If the relay keeps a window, the
// stack's own is opened so far that it does not bind.
func (c *Conn) Enforce(want datapath.Hold, _ int) datapath.Hold {
	c.managed.Store(want&datapath.HoldWindow != 0)
	if want&datapath.HoldWindow == 0 {
		c.window.Store(0)
	}
	return 0
}

// Observe implements datapath.Conn.
func (c *Conn) Observe(report func(flow.Report)) {
	if report == nil {
		c.Enforce(0, 0)
	}
	c.signals.setObserver(c.stack.clock, report)
}

// Apply implements datapath.Conn. The relay keeps the window; Write opens the stack's own for it.
func (c *Conn) Apply(l flow.Limit) {
	if c.managed.Load() {
		c.window.Store(int64(l.Cwnd))
	}
}

// widenStackWindow opens the stack's window if ours has grown since the last segment came.
func (c *Conn) widenStackWindow() {
	window := c.window.Load()
	if window <= c.widened.Load() {
		return
	}
	if e := c.tcpEndpoint(); e != nil {
		e.LockUser()
		if snd, ok := senderOf(e); ok {
			snd.widenCwnd(cc.Bytes(window))
		}
		e.UnlockUser()
		c.widened.Store(window)
	}
}

// tcpEndpoint is the endpoint, which may outlive Close; nil: there is none yet.
func (c *Conn) tcpEndpoint() *tcp.Endpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, _ := c.endpoint.(*tcp.Endpoint)
	return e
}

// timeoutCount counts the expiries of the retransmission timer.
func (c *Conn) timeoutCount() int {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return 0
	}
	return endpointTimeouts(endpoint)
}

func endpointTimeouts(endpoint tcpip.Endpoint) int {
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
	if _, err := c.liveEndpoint(); err != nil {
		return 0, c.opError("read", err)
	}
	if c.Aborted() || !c.isWaitingForAck() {
		return 0, nil // nothing will be delivered any more, or all is
	}
	c.signals.mu.Lock()
	defer c.signals.mu.Unlock()
	return max(1, c.signals.written-c.signals.una), nil
}

// InProcess implements datapath.Ending.
func (c *Conn) InProcess() bool { return true }

// Aborted implements datapath.Ending.
func (c *Conn) Aborted() bool {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return false
	}
	return tcp.EndpointState(endpoint.State()) == tcp.StateError || c.hasEnded() && c.aborted.Load()
}

// hasEnded tells whether the connection is in state CLOSED, without an error before its end;
// and notes whether a RST came behind a FIN, which the stack says only once.
func (c *Conn) hasEnded() bool {
	endpoint, err := c.liveEndpoint()
	if err != nil || tcp.EndpointState(endpoint.State()) != tcp.StateClose {
		return false
	}
	switch endpoint.LastError().(type) {
	case *tcpip.ErrAborted, *tcpip.ErrConnectionReset: // not what ICMP said
		c.aborted.Store(true)
	}
	return true
}

// resultError is the error that a caller gets for err.
func (c *Conn) resultError(op string, err error) error {
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

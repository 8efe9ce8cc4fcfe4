package netstack

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
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

// Conn is a connection that ends in a Stack. It implements datapath.Conn, datapath.ReadyReader,
// datapath.Advertiser and datapath.Marker.
//
// Who touches what:
//
//	fields                        guard                     touched by
//	request, admitting,           mu                        callers, the probe, the poller
//	endpoint, closed
//	signals, incoming             their own locks           the probe, segments that leave, callers, the poller
//	probeDelayed, widened         the endpoint's lock       the probe; Write
//	window, windowHeld,           atomic                    Enforce, Apply and Write; the probe reads window
//	aborted, watched, stalled     atomic                    callers, the poller
//	checkedAt, restarts           none                      the poller alone
//	id, hops, dscp                none                      never change after newConn, Dial or Accept
type Conn struct {
	conns         *registry
	id            stack.TransportEndpointID
	hops          uint8 // see Hops
	dscp          uint8 // see ReceivedDSCP
	signals       signals
	incoming      incoming
	events        waiter.Queue // for calls that wait for the endpoint
	readDeadline  *datapath.Deadline
	writeDeadline *datapath.Deadline
	aborted       atomic.Bool // by the peer, or by a timeout
	windowHeld    atomic.Bool // the relay writes no more than a window
	watched       atomic.Bool // the poller checks it
	stalled       atomic.Bool // the stack cannot be made to send again
	probeDelayed  bool        // delayTailProbe has returned true

	window  atomic.Int64 // bytes, of the limit applied last, if the relay keeps it; 0: only the stack's own window binds
	widened atomic.Int64 // the value of window for which the stack's own was last opened

	checkedAt cc.Time // when the poller last looked at the stack's timers
	restarts  int     // timers that it has started since a segment came last

	mu        sync.Mutex
	request   *request       // a SYN that waits for its answer; nil: none does
	admitting bool           // the SYN is answered, and Admit waits for the client
	endpoint  tcpip.Endpoint // nil before it is admitted
	closed    bool
}

var (
	_ datapath.Conn        = (*Conn)(nil)
	_ datapath.ReadyReader = (*Conn)(nil)
	_ datapath.Advertiser  = (*Conn)(nil)
	_ datapath.Marker      = (*Conn)(nil)
	_ datapath.Addressed   = (*Conn)(nil)
)

// newConn returns a connection without an endpoint. It is not in the table yet.
func newConn(conns *registry, id stack.TransportEndpointID) *Conn {
	return &Conn{conns: conns, id: id, readDeadline: datapath.NewDeadline(), writeDeadline: datapath.NewDeadline()}
}

var errNotAdmitted = errors.New("the handshake has not been answered yet")

// LocalAddr implements net.Conn: the address that the client connected to.
func (c *Conn) LocalAddr() net.Addr { return net.TCPAddrFromAddrPort(c.LocalAddrPort()) }

// RemoteAddr implements net.Conn: the client.
func (c *Conn) RemoteAddr() net.Addr { return net.TCPAddrFromAddrPort(c.RemoteAddrPort()) }

// LocalAddrPort implements datapath.Addressed.
func (c *Conn) LocalAddrPort() netip.AddrPort { return addrPortOf(c.id.LocalAddress, c.id.LocalPort) }

// RemoteAddrPort implements datapath.Addressed.
func (c *Conn) RemoteAddrPort() netip.AddrPort {
	return addrPortOf(c.id.RemoteAddress, c.id.RemotePort)
}

// Hops returns the hop limit that the client's SYN would leave us with if it were forwarded.
func (c *Conn) Hops() uint8 { return c.hops }

// ReceivedDSCP implements datapath.Marker. It is that of the client's SYN. Of a connection that
// Dial opened it is not known.
func (c *Conn) ReceivedDSCP() uint8 { return c.dscp }

// Admit answers the SYN and waits until the client has completed its handshake, or c is closed.
// It is called once.
func (c *Conn) Admit(ctx context.Context) error {
	c.mu.Lock()
	r := c.request
	c.request, c.admitting = nil, r != nil
	c.mu.Unlock()
	if r == nil {
		return fmt.Errorf("netstack: admit: %w", os.ErrClosed)
	}
	c.conns.addConn(c)
	endpoint, err := r.CreateEndpoint(&c.events)
	c.mu.Lock()
	c.admitting = false
	c.mu.Unlock()
	r.Complete(false)
	if err != nil {
		c.removeFromTable()
		return fmt.Errorf("netstack: admit: %w", kernelError(err))
	}
	return c.adoptEndpoint(ctx, endpoint)
}

// adoptEndpoint makes a connected endpoint that of c. On an error it aborts the endpoint.
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

// enableKeepAlive turns on TCP keep-alive (RFC 9293 §3.8.4).
func enableKeepAlive(endpoint tcpip.Endpoint) error {
	idle := tcpip.KeepaliveIdleOption(datapath.KeepAliveIdle)
	interval := tcpip.KeepaliveIntervalOption(datapath.KeepAliveInterval)
	err := endpoint.SetSockOpt(&idle)
	if err == nil {
		err = endpoint.SetSockOpt(&interval)
	}
	if err == nil {
		err = endpoint.SetSockOptInt(tcpip.KeepaliveCountOption, datapath.KeepAliveCount)
	}
	if err != nil {
		return kernelError(err)
	}
	endpoint.SocketOptions().SetKeepAlive(true)
	return nil
}

// SetDSCP implements datapath.Marker: it sets the DSCP of the packets that leave.
func (c *Conn) SetDSCP(dscp uint8) error {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return err
	}
	option := tcpip.IPv4TOSOption
	if c.RemoteAddrPort().Addr().Is6() {
		option = tcpip.IPv6TrafficClassOption
	}
	if err := endpoint.SetSockOptInt(option, int(dscp)<<dscpShift); err != nil {
		return fmt.Errorf("netstack: set a DSCP of %d: %w", dscp, kernelError(err))
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

// retryUntilReady calls try after each of events until it does not return ErrWouldBlock, or the
// deadline has come. try runs without locks.
func (c *Conn) retryUntilReady(d *datapath.Deadline, events waiter.EventMask, try func() tcpip.Error) error {
	err := try()
	if _, wait := err.(*tcpip.ErrWouldBlock); !wait {
		return kernelError(err)
	}
	entry, ready := waiter.NewChannelEntry(events)
	c.events.EventRegister(&entry)
	defer c.events.EventUnregister(&entry)
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

// Read implements net.Conn. It returns io.EOF behind the peer's FIN, and syscall.ECONNRESET where
// a RST came behind that.
func (c *Conn) Read(b []byte) (int, error) {
	return c.ReadReady(datapath.Lent(b))
}

// ReadReady implements datapath.ReadyReader: while it waits it holds no memory.
func (c *Conn) ReadReady(room datapath.Room) (n int, err error) {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return 0, c.opError("read", err)
	}
	if c.readDeadline.HasCome() {
		return 0, c.opError("read", os.ErrDeadlineExceeded)
	}
	err = c.retryUntilReady(c.readDeadline, waiter.ReadableEvents, func() tcpip.Error {
		if endpoint.Readiness(waiter.ReadableEvents) == 0 {
			return &tcpip.ErrWouldBlock{}
		}
		w := tcpip.SliceWriter(room.Take())
		result, err := endpoint.Read(&w, tcpip.ReadOptions{})
		if n = result.Count; n == 0 {
			room.GiveBack()
		}
		return err
	})
	if n > 0 {
		endpoint.(interface{ ModerateRecvBuf(int) }).ModerateRecvBuf(n)
	}
	return n, c.resultError("read", err)
}

// Write implements net.Conn. It returns once the stack has taken all bytes. They may wait there
// for the peer's window.
func (c *Conn) Write(b []byte) (n int, err error) {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return 0, c.opError("write", err)
	}
	if c.writeDeadline.HasCome() {
		return 0, c.opError("write", os.ErrDeadlineExceeded)
	}
	var r bytes.Reader
	for n < len(b) && err == nil {
		err = c.retryUntilReady(c.writeDeadline, waiter.WritableEvents, func() tcpip.Error {
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

// CloseWrite implements datapath.Conn: a FIN follows the bytes written before.
func (c *Conn) CloseWrite() error {
	endpoint, err := c.liveEndpoint()
	if err == nil {
		err = kernelError(endpoint.Shutdown(tcpip.ShutdownWrite))
		c.startWatching()
	}
	return c.opError("close", err)
}

// Close implements net.Conn. Bytes written before are still sent, and the poller looks after
// them.
func (c *Conn) Close() error { return c.shutEndpoint(tcpip.Endpoint.Close) }

// Reset implements datapath.Conn. A SYN that waits is answered with a RST.
func (c *Conn) Reset() error { return c.shutEndpoint(tcpip.Endpoint.Abort) }

// Leave drops a SYN that waits, and leaves it unanswered.
func (c *Conn) Leave() {
	c.mu.Lock()
	request := c.request
	c.request, c.closed = nil, true
	c.mu.Unlock()
	if request != nil {
		request.Complete(false)
	}
}

// shutEndpoint closes the connection once; how ends the endpoint.
func (c *Conn) shutEndpoint(how func(tcpip.Endpoint)) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	endpoint, request, admits := c.endpoint, c.request, c.admitting
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
		c.events.Notify(waiter.EventHUp | waiter.ReadableEvents | waiter.WritableEvents) // for calls that wait
	}
	return nil
}

// interruptAdmit ends an Admit that waits for the client, or is about to: the stack notices a
// closed queue only while a goroutine waits on it.
func (c *Conn) interruptAdmit() {
	for c.isAdmitting() && c.events.IsEmpty() {
		runtime.Gosched()
	}
	c.events.Notify(waiter.WritableEvents)
}

// isAdmitting reports whether Admit waits for the client.
func (c *Conn) isAdmitting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.admitting
}

// isClosed reports whether Close, Reset or Leave was called.
func (c *Conn) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// removeFromTable removes c from the table by which packets find it.
func (c *Conn) removeFromTable() {
	c.conns.removeConn(c)
	if c.incoming.stopCounting() {
		c.conns.counting.Add(-1)
	}
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(c.readDeadline, t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(c.writeDeadline, t) }

// setDeadline sets a deadline, and wakes calls that wait with the old one.
func (c *Conn) setDeadline(d *datapath.Deadline, t time.Time) error {
	d.Set(t)
	c.events.Notify(waiter.ReadableEvents | waiter.WritableEvents)
	return nil
}

// Enforce implements datapath.Conn. The stack enforces nothing. If the relay keeps a window, the
// stack's own is opened so far that it does not bind.
func (c *Conn) Enforce(want datapath.Hold, _ int) datapath.Hold {
	c.windowHeld.Store(want&datapath.HoldWindow != 0)
	if want&datapath.HoldWindow == 0 {
		c.window.Store(0)
	}
	return 0
}

// Observe implements datapath.Conn. Reports come from the probe, from the poller, and from
// Observe itself.
func (c *Conn) Observe(report func(flow.Report)) {
	if report == nil {
		c.Enforce(0, 0)
	}
	c.signals.setObserver(c.conns.clock, report)
}

// Apply implements datapath.Conn. The relay keeps the window, and Write opens the stack's own for
// it. It takes no lock, since it is called during a report.
func (c *Conn) Apply(l flow.Limit) {
	if c.windowHeld.Load() {
		c.window.Store(int64(l.Cwnd))
	}
}

// Info implements datapath.Conn.
func (c *Conn) Info() datapath.Info {
	g := &c.signals
	g.mu.Lock()
	defer g.mu.Unlock()
	return datapath.Info{
		Tier: "netstack", Envelope: stackAlgorithm, Cwnd: g.cwnd, SRTT: g.srtt, MinRTT: g.minRTT,
		Delivered: g.una, Unsent: max(0, g.written-max(g.sndMax, g.una)), Retransmitted: g.retransmitted,
	}
}

// Arrivals implements datapath.Advertiser. Until data has shown a round trip, RTT is that of the
// handshake.
func (c *Conn) Arrivals() (flow.Arrivals, error) {
	e := c.tcpEndpoint()
	if e == nil {
		return flow.Arrivals{}, errNotAdmitted
	}
	e.LockUser()
	stamped := e.SendTSOk
	e.UnlockUser()
	if !stamped {
		return flow.Arrivals{}, errNoTimestamps
	}
	peer, handshake := c.signals.peerTimestamps()
	in := &c.incoming
	in.mu.Lock()
	defer in.mu.Unlock()
	rtt := in.rtt
	if !in.counting && !in.ended {
		in.counting = true
		c.conns.counting.Add(1)
	}
	if rtt == 0 {
		rtt = handshake
	}
	return flow.Arrivals{
		Received: in.acked, RTT: rtt, Peer: peer, Window: max(0, in.windowEnd-in.acked), Holes: in.holes, MSS: in.mss,
	}, nil
}

// Advertise implements datapath.Advertiser. A window is rounded up to a multiple of what its
// scale allows. It is no less than two segments, since a sender may wait with less (RFC 9293
// §3.8.6.2.1).
func (c *Conn) Advertise(window cc.Bytes) error {
	in := &c.incoming
	in.mu.Lock()
	defer in.mu.Unlock()
	in.window = window
	if window > 0 {
		in.window = max(window, 2*max(in.mss, minSegment))
	}
	return nil
}

// errNoTimestamps is why the queueing delay on a peer's path is not known.
var errNoTimestamps = errors.New("netstack: the peer sends no TCP timestamps, so that its round trips are not known")

// Undelivered implements datapath.Conn. A connection that was aborted delivers nothing any
// more: 0.
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

// InProcess implements datapath.Conn.
func (c *Conn) InProcess() bool { return true }

// Aborted implements datapath.Conn.
func (c *Conn) Aborted() bool {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return false
	}
	return tcp.EndpointState(endpoint.State()) == tcp.StateError || c.hasEnded() && c.aborted.Load()
}

// hasEnded reports whether the connection is in state CLOSED, without an error before its end. It
// notes whether a RST came behind a FIN, which the stack says only once.
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

// onProbe reads the stack's state after a segment that came, corrects it, and reports it. The
// stack holds the endpoint's lock. The report is made at once: on another goroutine it would cost
// a switch for each segment, and come late for what the stack does next. So a report must take no
// lock that a goroutine holds while it waits for an endpoint.
func (c *Conn) onProbe(state *tcp.TCPEndpointState) {
	e := c.tcpEndpoint()
	if e == nil {
		return
	}
	snd, ok := senderOf(e)
	if ok {
		snd.correctOutstanding(state.SACK.ReceivedBlocks)
		state.Sender.Outstanding = snd.Outstanding
	}
	if ok && !c.probeDelayed {
		c.probeDelayed = c.delayTailProbe(e, snd.probe)
	}
	c.incoming.onProbe(state)
	c.signals.updateFromState(state, endpointTimeouts(e), c.conns.clock)
	if ok {
		window := c.window.Load()
		snd.widenCwnd(cc.Bytes(window))
		c.widened.Store(window)
		state.Sender.SndCwnd = snd.SndCwnd
	}
	c.signals.noteStackWindow(state.Sender.SndCwnd)
}

// delayTailProbe makes the stack's timer for tail loss probes wait for minProbeDelay. The caller
// holds the endpoint's lock. False: the timer has just expired, and the caller is to try again
// later.
func (c *Conn) delayTailProbe(e *tcp.Endpoint, probe *timer) bool {
	return probe.wrapCallback(func() {
		e.LockUser()
		defer e.UnlockUser()
		if quiet := c.signals.quietTime(c.conns.clock()); quiet < minProbeDelay {
			probe.postponeTarget(minProbeDelay - quiet)
		}
	})
}

// minProbeDelay is the least time without a segment in either direction before the stack sends a
// tail loss probe (draft-dukkipati-tcpm-tcp-loss-probe-01 §2.1). The stack itself has no such
// bound. On a path of less than a millisecond it would probe whenever the processor is busy for
// two round trips, and each probe counts as a loss.
const minProbeDelay = 10 * time.Millisecond

// startWatching makes the poller check the connection until it waits for no acknowledgement.
func (c *Conn) startWatching() {
	if !c.watched.Swap(true) {
		c.conns.poller.watchConn(c)
	}
}

// stopWatching is called by the poller once checkProgress has returned false. If c waits for an
// acknowledgement again, the poller watches it again.
func (c *Conn) stopWatching() {
	c.watched.Store(false)
	if c.isWaitingForAck() {
		c.startWatching()
	} else if c.isClosed() {
		c.removeFromTable()
	}
}

// isWaitingForAck reports whether the peer has yet to acknowledge bytes, or our FIN.
func (c *Conn) isWaitingForAck() bool {
	e := c.tcpEndpoint()
	if e == nil {
		return false
	}
	switch tcp.EndpointState(e.State()) {
	case tcp.StateEstablished, tcp.StateCloseWait:
		c.signals.mu.Lock()
		defer c.signals.mu.Unlock()
		return c.signals.written > c.signals.una
	case tcp.StateFinWait1, tcp.StateClosing, tcp.StateLastAck:
		return true
	default:
		return false
	}
}

const (
	// checkAfterSilence is the time without a segment from the peer before the stack's timers are
	// checked.
	checkAfterSilence = tcp.MinRTO
	// maxRestarts is how often a stopped timer of the stack is started without an answer of the
	// peer: as often as the stack itself retransmits, and also at doubling intervals.
	maxRestarts = tcp.MaxRetries
)

var errStalled = fmt.Errorf("the stack in user space has stopped retransmitting: %w", syscall.ECONNABORTED)

// checkProgress is called by the poller. It reports changes that no incoming segment shows, and
// restarts a stack that has stopped retransmitting. It returns whether the poller is to call it
// again.
func (c *Conn) checkProgress() bool {
	early := c.signals.reportWithoutSegment(c.conns.clock, c.timeoutCount, c.hasEnded() && !c.aborted.Load())
	if !c.isWaitingForAck() {
		return early
	}
	now := c.conns.clock()
	switch heard := c.signals.lastSegmentTime(); {
	case heard > c.checkedAt:
		c.checkedAt, c.restarts = heard, 0
	case now.Sub(c.checkedAt) >= checkAfterSilence:
		c.checkedAt = now
		c.restartTimer(c.tcpEndpoint())
	}
	return true
}

// restartTimer starts the retransmission timer of a stack that waits for an acknowledgement with
// no timer running. The stack starts none while it counts nothing in flight. correctOutstanding
// corrects that count only when the next segment comes.
func (c *Conn) restartTimer(e *tcp.Endpoint) {
	e.LockUser()
	snd, ok := senderOf(e)
	resumed := ok && snd.resumeRetransmission()
	e.UnlockUser()
	if !resumed {
		return
	}
	c.conns.stalls.Add(1)
	if c.restarts++; c.restarts > maxRestarts {
		c.stalled.Store(true)
		e.Abort()
	}
}

// tcpEndpoint returns the endpoint, which may outlive Close; nil: there is none yet.
func (c *Conn) tcpEndpoint() *tcp.Endpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, _ := c.endpoint.(*tcp.Endpoint)
	return e
}

// timeoutCount returns how often the retransmission timer has expired.
func (c *Conn) timeoutCount() int {
	endpoint, err := c.liveEndpoint()
	if err != nil {
		return 0
	}
	return endpointTimeouts(endpoint)
}

// endpointTimeouts returns how often an endpoint's retransmission timer has expired. gVisor
// counts them for each endpoint.
func endpointTimeouts(endpoint tcpip.Endpoint) int {
	stats, ok := endpoint.Stats().(*tcp.Stats)
	if !ok {
		return 0
	}
	return int(stats.SendErrors.Timeouts.Value())
}

// resultError returns the error that a caller gets for err, and notes an abort.
func (c *Conn) resultError(op string, err error) error {
	if err != nil && c.stalled.Load() {
		err = errStalled
	}
	switch {
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.ECONNABORTED), errors.Is(err, syscall.ETIMEDOUT):
		c.aborted.Store(true)
	case err == io.EOF && c.aborted.Load(): //nolint:errorlint // as io.Reader's callers do
		err = syscall.ECONNRESET
	}
	return c.opError(op, err)
}

// opError is datapath.OpError of the connection.
func (c *Conn) opError(op string, err error) error { return datapath.OpError(c, op, "tcp", err) }

// registry is the table of a Stack's connections, with the state that they share. It is searched
// for every packet. A sync.Map would allocate memory for each key that is looked up.
type registry struct {
	clock    func() cc.Time
	poller   poller
	counting atomic.Int64  // connections with incoming.counting set; 0: noteIncoming need not be called
	stalls   atomic.Uint64 // see Counts.Stalls

	mu    sync.RWMutex
	conns map[stack.TransportEndpointID]*Conn
}

// newRegistry returns one without connections. clock is the Stack's.
func newRegistry(clock func() cc.Time) *registry {
	return &registry{clock: clock, poller: newPoller(clock), conns: map[stack.TransportEndpointID]*Conn{}}
}

// findConn returns the connection; nil: there is none.
func (r *registry) findConn(id stack.TransportEndpointID) *Conn {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.conns[id]
}

// addConn adds c. A connection with the same addresses and ports is replaced.
func (r *registry) addConn(c *Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns[c.id] = c
}

// removeConn removes c, unless another connection with the same addresses and ports has replaced
// it.
func (r *registry) removeConn(c *Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.conns[c.id] == c {
		delete(r.conns, c.id)
	}
}

// allConns returns a copy of the table, to be used without its lock.
func (r *registry) allConns() []*Conn {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return slices.Collect(maps.Values(r.conns))
}

package proxy

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/policy"
)

// State is how far a connection has come.
type State string

// greeting ──▶ dialing ──▶ open ──▶ half_closed ──▶ (gone)
//
//	└─────▶ closing ─────▶ (gone)
const (
	StateGreeting   State = "greeting"    // where does it want to go?
	StateDialing    State = "dialing"     // the server leg is being made, or a rule waits for a name
	StateOpen       State = "open"        // both directions move
	StateHalfClosed State = "half_closed" // one side has finished sending
	// both sides have finished, or one leg has failed; what they sent is being delivered
	StateClosing State = "closing"
)

// connection is one accepted client on its way through the proxy.
type connection struct {
	id        uint64
	srv       *Server
	listener  *listenerState
	started   cc.Time
	stopped   atomic.Bool  // torn down from our side; set with mu held
	active    atomic.Int64 // cc.Time when a byte last moved
	accepted  datapath.Conn
	keptAlive bool // sweep has seen to it
	looked    look // what sweep has seen last
	prompt    bool // the client is not asked anything, so that nothing waits for it

	client, server leg
	down, up       direction
	chosen         ingress.Client
	decidedOn      policy.Facts      // what the verdict was given on
	prospects      []policy.Verdict  // while it is dialled: what the rules may say of decidedOn
	mostly         [1]policy.Verdict // prospects that are one
	route          *route            // that it is counted under, once it is relayed
	peer           *PeerCounters     // likewise; nil: none
	opened         cc.Time
	counted        *client      // whom this counts against; nil: nobody yet
	captured       bool         // it is noted in the loop guard
	dialled        bool         // its server leg is noted there
	moving         atomic.Int32 // directions that are not over
	done           func()       // called once none is
	post           func()       // has the loop call step; nil: goroutines run the directions

	mu        sync.Mutex // guards what follows, and leg's fields
	state     State
	stop      chan struct{} // closed by tearDown; nil: nobody has waited for that
	cancel    func()        // ends the greeting or the dial; nil: there is none, or it needs no end
	cause     Cause
	causeErr  error
	verdict   *policy.Verdict // and each direction's terms
	decidedBy *settings       // whose rules gave it
}

// leg is one of the two legs, as far as ending it goes; connection.mu guards
// all but conn.
type leg struct {
	conn   datapath.Conn
	ended  bool // it has sent us all it will
	failed bool // it takes nothing more
	closed bool // we have sent it our end
}

func (c *connection) sideOf(l *leg) Side {
	if l == &c.server {
		return ServerSide
	}
	return ClientSide
}

// startRelay has both directions run until the connection is over, and calls done then: on the
// loop of both legs, or where they have none in common each on a goroutine that has done
// nothing yet: the stack of one that has greeted and dialled is several times what an idle
// direction needs.
func (c *connection) startRelay(done func()) {
	c.done = done
	c.moving.Store(2)
	if c.chosen.Exchange == nil { // reading that may take several reads for a byte
		if post, ok := kernel.Drive(c.client.conn, c.server.conn, c.stepBoth); ok {
			c.post = post
			c.post()
			return
		}
	}
	for _, d := range []*direction{&c.down, &c.up} {
		d.wake = make(chan struct{}, 1)
		if d.unbound {
			d.boundInflow()
		}
		go func() {
			if l := c.finishDirection(d, d.runUntilEnd()); l != nil {
				c.abortLeg(l)
			}
			c.directionEnded()
		}()
	}
}

// stepBoth moves what can be moved now. It runs on a loop, and does not wait.
func (c *connection) stepBoth() {
	for _, d := range [...]*direction{&c.down, &c.up} {
		if d.finished.Load() {
			continue
		}
		switch p, e := d.moveBytes(); p {
		case waits:
		case again:
			c.post()
		case over:
			d.carrier.Release()
			if l := c.finishDirection(d, e); l != nil {
				go func() {
					c.abortLeg(l)
					c.directionEnded()
				}()
				continue
			}
			c.directionEnded()
		}
	}
}

// directionEnded notes that a direction is over.
func (c *connection) directionEnded() {
	if c.moving.Add(-1) == 0 {
		c.waitForDelivery()
		c.done()
	}
}

// waitForDelivery waits until what was sent by transports in this process has arrived, lest the
// process end before. The kernel's go on by themselves.
func (c *connection) waitForDelivery() {
	for _, l := range []*leg{&c.client, &c.server} {
		if e, ok := l.conn.(datapath.Ending); ok && e.InProcess() {
			c.mu.Lock()
			c.state = StateClosing
			c.mu.Unlock()
			c.waitUntilDelivered(l.conn)
		}
	}
}

// finishDirection draws the consequences of one direction's end, and returns the leg that is to be
// aborted; nil: none.
//
// A FIN is passed on as a FIN, once all that came before it is written. A leg
// that fails is different: what it had sent is still delivered, and then the
// other leg is reset, since a FIN there would make a cut transfer look whole.
func (c *connection) finishDirection(d *direction, e end) (abort *leg) {
	defer d.finished.Store(true)
	switch {
	case e.stopped:
		return nil
	case e.writeErr != nil:
		return c.writeFailed(d.dst, d.src, e.writeErr)
	case e.readErr != nil:
		return c.readFailed(d.src, d.dst, e.readErr)
	default:
		return c.sourceEnded(d)
	}
}

// sourceEnded passes the source's FIN on, if it was one.
func (c *connection) sourceEnded(d *direction) (abort *leg) {
	c.mu.Lock()
	// A write to src may have met a RST and collected the error, so that the
	// read saw a plain end.
	if d.src.failed || !d.src.closed && isAborted(d.src.conn) {
		c.mu.Unlock()
		return c.readFailed(d.src, d.dst, nil)
	}
	d.src.ended = true
	c.noteCause(Cause{c.sideOf(d.src), ClosedEOF}, nil)
	if c.state == StateOpen {
		c.state = StateHalfClosed
	}
	d.dst.closed = true
	var err error
	if !c.closesNext(d) {
		err = d.dst.conn.CloseWrite()
	}
	c.mu.Unlock()
	if err != nil {
		return c.writeFailed(d.dst, d.src, err)
	}
	return nil
}

// closesNext tells whether the end of d is that of the connection, so that closing the legs
// ends them as well as CloseWrite would. c.mu is held.
func (c *connection) closesNext(d *direction) bool {
	return c.post != nil && c.moving.Load() == 1 && d.dst.ended
}

// writeFailed handles a leg that takes no more. What it sent before may still
// be on its way through the other direction, which then ends the connection;
// only if that is over already, it is done here.
func (c *connection) writeFailed(failed, other *leg, err error) (abort *leg) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noteFailure(failed, err)
	if failed.ended {
		return other
	}
	return nil
}

// readFailed handles a leg that gives no more and did not say so.
func (c *connection) readFailed(failed, other *leg, err error) (abort *leg) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.noteFailure(failed, err)
	return other
}

// noteFailure notes that a leg has failed; c.mu is held.
func (c *connection) noteFailure(l *leg, err error) {
	l.failed = true
	c.state = StateClosing
	reason := ClosedReset
	if err != nil {
		reason = legReason(err)
	}
	// Whoever had finished in good order before is not the cause of this.
	if c.cause.How == ClosedEOF {
		c.cause = Cause{}
	}
	c.noteCause(Cause{c.sideOf(l), reason}, err)
}

// noteCause remembers the first cause; c.mu is held.
func (c *connection) noteCause(cause Cause, err error) {
	if c.cause == (Cause{}) {
		c.cause, c.causeErr = cause, err
	}
}

// abortLeg waits until l has acknowledged what it was sent, then tears all down.
func (c *connection) abortLeg(l *leg) {
	c.waitUntilDelivered(l.conn)
	c.tearDown(Cause{}, nil)
}

// How often an aborted connection is asked whether its last bytes have arrived.
const (
	deliverFirst = time.Millisecond
	deliverLast  = 100 * time.Millisecond
)

// waitUntilDelivered waits for acknowledgements; the half-closed timeout, through stop,
// bounds how long without any.
func (c *connection) waitUntilDelivered(conn datapath.Conn) {
	e, ok := conn.(datapath.Ending)
	if !ok {
		return
	}
	stopping := c.stopChannel()
	wait := deliverFirst
	timer := time.NewTimer(wait)
	defer timer.Stop()
	for last := cc.Bytes(-1); ; {
		n, err := e.Undelivered()
		if n == 0 || err != nil {
			return
		}
		if n != last {
			last = n
			c.active.Store(int64(c.srv.clock()))
		}
		select {
		case <-timer.C:
		case <-stopping:
			return
		}
		wait = min(2*wait, deliverLast)
		timer.Reset(wait)
	}
}

// peerIsRevoked reports whether the peer that it is from, or that it leads to, has gone
// from the tunnel: its address may be another's next.
func (c *connection) peerIsRevoked() bool {
	c.mu.Lock()
	state := c.state
	c.mu.Unlock()
	switch {
	case state == StateGreeting:
		return false // nobody knows yet whose it is
	case c.chosen.Current != nil && !c.chosen.Current():
		return true
	case state == StateDialing:
		return false // what it is decided on is not settled
	}
	to := c.decidedOn
	if to.TargetPeer == "" {
		return false
	}
	via, err := c.tunnelFor(to.Target.Addr())
	return err != nil || via == nil || via.Peer(to.Target.Addr()) != to.TargetPeer
}

func isAborted(conn datapath.Conn) bool {
	e, ok := conn.(datapath.Ending)
	return ok && e.Aborted()
}

// tearDown resets what there is and makes everything of this connection
// return. The first call counts.
func (c *connection) tearDown(cause Cause, err error) {
	c.mu.Lock()
	if c.stopped.Swap(true) {
		c.mu.Unlock()
		return
	}
	if cause.How != "" {
		if c.cause.How == ClosedEOF {
			c.cause = Cause{}
		}
		c.noteCause(cause, err)
	}
	client, server, cancel := c.client.conn, c.server.conn, c.cancel
	if client == nil {
		client = c.accepted
	}
	if c.stop != nil {
		close(c.stop)
	}
	c.mu.Unlock()
	if cancel != nil {
		cancel()
	}
	_ = client.Reset()
	if server != nil {
		_ = server.Reset()
	}
}

// endsBy tells how the greeting or the dial is ended: tearDown calls cancel. If tearDown was called
// before, endsBy calls it.
func (c *connection) endsBy(cancel func()) {
	c.mu.Lock()
	if c.state == StateGreeting || c.state == StateDialing {
		c.cancel = cancel
	}
	c.mu.Unlock()
	if c.stopped.Load() {
		cancel()
	}
}

// setServer attaches the server leg, and tells whether the connection goes on: it may be
// being torn down.
func (c *connection) setServer(conn datapath.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server = leg{conn: conn}
	return !c.stopped.Load()
}

// stopChannel is closed once the connection is torn down from our side.
func (c *connection) stopChannel() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stop == nil {
		c.stop = make(chan struct{})
		if c.stopped.Load() {
			close(c.stop)
		}
	}
	return c.stop
}

// closeLegs ends both legs in good order and the flows after them: a leg's last
// report still has somebody to go to.
func (c *connection) closeLegs() {
	end := datapath.Conn.Close
	if c.stopped.Load() { // tearDown may be halfway, and must not find a leg that has ended in good order
		end = datapath.Conn.Reset
	}
	_ = end(c.client.conn)
	_ = end(c.server.conn)
	now := c.srv.clock()
	for _, d := range []*direction{&c.down, &c.up} {
		if d.flow != nil {
			d.flow.Close(now)
		}
		if d.hold != nil {
			d.hold.closeFlow(now)
		}
	}
}

// clientAddress is the client's address as far as it is known.
func (c *connection) clientAddress() netip.AddrPort {
	if c.chosen.Source.IsValid() {
		return c.chosen.Source
	}
	return addrPort(c.accepted.RemoteAddr())
}

package proxy

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/policy"
)

const (
	// minPiece is the first read from a source that may be faster than its destination, in bytes. Bytes beyond what the
	// destination takes would wait here. Larger pieces cost less CPU per byte: at 1 MiB a splice costs two thirds of
	// what it costs at 256 KiB.
	minPiece = 64 << 10
	// stepBytes bounds what a direction moves in one step, in bytes, because other connections of the loop wait.
	stepBytes = 2 << 20
	// initialWindow is what a transport may have in flight before it has heard from its peer
	// (RFC 6928 section 2), in bytes.
	initialWindow = 14600
	// unmanaged is the allowance of a direction that has a flow already, or never gets one.
	unmanaged = -1
)

// errStopped ends a direction when the connection was torn down.
var errStopped = errors.New("proxy: relay stopped")

// leg is one of the two legs of a connection; relay.mu guards all but conn.
type leg struct {
	conn   datapath.Conn
	ended  bool // its peer has sent a FIN
	failed bool // it has ended without a FIN, or takes no more bytes
	closed bool // we have sent a FIN, or send it by closing the leg
}

// relay is what the directions of a connection share. Its lock also guards the legs, and the terms and flows of both
// directions once they run.
type relay struct {
	env     *environment
	stopped atomic.Bool  // torn down by the proxy; set with mu held
	active  atomic.Int64 // cc.Time when a byte last moved
	driver  kernel.Driver
	onLoop  bool // driver runs the steps of the connection; else goroutines do

	mu   sync.Mutex
	stop chan struct{} // closed when stopped is set; nil: nothing has waited for it
}

// stopChannel returns a channel that is closed once the connection is torn down.
func (r *relay) stopChannel() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stop == nil {
		r.stop = make(chan struct{})
		if r.stopped.Load() {
			close(r.stop)
		}
	}
	return r.stop
}

// markStopped sets stopped and closes stop. It returns false if that was done before. The caller holds mu.
func (r *relay) markStopped() bool {
	if r.stopped.Swap(true) {
		return false
	}
	if r.stop != nil {
		close(r.stop)
	}
	return true
}

// markActive sets the time when a byte last moved to now.
func (r *relay) markActive() { r.active.Store(int64(r.env.Clock())) }

// direction moves the bytes of one direction from its source leg to its destination leg.
// One goroutine runs it: its own, or that of the loop that serves both legs.
//
// Between two calls of moveBytes everything that is read and not yet written is in early and in carrier.
//
//	field                           written by                       read by
//	terms, receives, flow, receive  reloads, runner; under relay.mu  runner; others under relay.mu
//	earlier                         reloads, under relay.mu          any, under relay.mu
//	allowance                       reloads, runner; under relay.mu  any
//	read, written, spliced          runner                           any
//	finished                        runner                           any
//	wake                            made before it runs              any
//	all others                      runner                           runner
type direction struct {
	relay     *relay
	src, dst  *leg
	terms     *flow.Terms         // for sending to dst, part of a verdict
	receives  *flow.Terms         // for the receive window that src advertises, part of a verdict
	earlier   []AlgorithmCounters // of the algorithms that terms had before
	flow      *flow.Flow          // nil: unmanaged, or not managed yet
	receive   *receiveControl     // of src's receive window; nil: too little has come yet
	allowance atomic.Int64        // bytes that may be underway before a flow is opened; below 0: none need be
	underway  int64               // upper bound of the bytes underway while there is no flow
	carrier   datapath.Carrier
	early     []byte        // was read from src before the relay began, and is written first
	granted   int           // stored bytes that may be written now
	lastRead  int           // bytes of the last read; 0: all of them are written
	ending    error         // how src has ended; it takes effect once all stored bytes are written
	inflow    *inflow       // bounds what src takes in; nil: no bound, or none yet
	piece     int           // bytes to read at once at present
	maxPiece  int           // bound of piece
	counted   *countedBytes // nil: all are this process's
	wake      chan struct{} // holds a token when a refused Take may succeed; nil: a loop runs the direction

	read, written, spliced atomic.Int64 // bytes
	finished               atomic.Bool
	up                     bool // from the client to the server
	enforces               bool // dst enforces the window: grants are needed for a maximum rate alone
	waited                 bool // the last read could not be written in one go
	unbounded              bool // src takes in what it likes, and is bounded once much comes or dst is slower
}

// isManaged reports whether terms need a flow.
func isManaged(t *flow.Terms) bool {
	return t.Algorithm != policy.Unmanaged || t.MaxRate > 0 || t.ConnectionRate > 0
}

// isUnmanaged reports whether the direction has had neither a flow nor a bound of what its source takes in.
func (d *direction) isUnmanaged() bool { return d.flow == nil && d.receive == nil && d.inflow == nil }

// unmanagedAllowance returns the bytes that may be underway before terms are in force. Most connections
// never have more than an initial window, which any sender may have. Terms with a limit of
// their own hold from the first byte, and so do algorithms that need hints.
func unmanagedAllowance(t *flow.Terms) int64 {
	spec, err := cc.Lookup(t.Algorithm)
	switch {
	case !isManaged(t):
		return unmanaged
	case t.Algorithm == policy.Unmanaged, err == nil && (spec.Fixed || slices.Contains(spec.Needs, cc.NeedsHints)),
		t.MaxRate > 0, t.ConnectionRate > 0, t.HintCap > 0, t.Target > 0, t.MinRate > 0:
		return 0
	}
	return initialWindow
}

// enforcedLimits returns which limits of a flow its transport is to enforce. Terms without an algorithm
// set no window, so the transport keeps its own.
func enforcedLimits(t *flow.Terms) datapath.Hold {
	if t.Algorithm == policy.Unmanaged {
		return datapath.HoldRate
	}
	return datapath.HoldAll
}

// setFirstTerms puts the first terms into force, before the direction runs. Terms that leave nothing unmanaged open a
// flow at once. before describes the direction in another process; nil: it begins here.
func (d *direction) setFirstTerms(
	terms, receives *flow.Terms, limits *config.Limits, before *directionRecord,
) error {
	d.terms, d.receives = terms, receives
	d.read.Store(int64(len(d.early)))
	d.maxPiece = int(limits.Buffer)
	d.piece = d.maxPiece
	_, d.unbounded = d.src.conn.(datapath.Receiver)
	d.unbounded = d.unbounded && limits.ReceiveBuffer > 0
	if isManaged(terms) {
		d.piece = min(minPiece, d.maxPiece)
	}
	free, window := unmanagedAllowance(terms), flow.Dormant{}
	if before != nil {
		d.restoreCounts(before)
		if window = before.Window; before.Managed {
			free = 0
		} else if before.Finished {
			free = unmanaged
		}
	}
	d.allowance.Store(free)
	if free != 0 {
		return nil
	}
	return d.openFlow(window)
}

// restoreCounts continues the counters of another process.
func (d *direction) restoreCounts(r *directionRecord) {
	d.read.Store(r.Read)
	d.written.Store(r.Written)
	d.spliced.Store(r.Spliced)
	d.counted = &countedBytes{cc.Bytes(r.Read), cc.Bytes(r.Written), cc.Bytes(r.Spliced), cc.Bytes(r.Retransmitted)}
	d.underway = r.Underway
	if r.Finished {
		d.finished.Store(true)
		d.src.ended, d.dst.closed = true, true
	}
}

// unloadCarrier moves what the carrier stores to early, and reports whether it could.
func (d *direction) unloadCarrier() bool {
	if d.finished.Load() || d.storedBytes() == 0 || len(d.early) > 0 {
		return true
	}
	u, ok := d.carrier.(datapath.Unloader)
	if ok {
		d.early, ok = u.TakeStored()
	}
	return ok && len(d.early) <= maxStored
}

// makeRecord describes the direction for another process. relay.mu is held.
func (d *direction) makeRecord(now cc.Time) directionRecord {
	r := directionRecord{
		Read: d.read.Load(), Written: d.written.Load(), Spliced: d.spliced.Load(), Stored: d.early,
		Finished: d.finished.Load(), Managed: d.flow != nil, Underway: d.underway,
	}
	if d.flow != nil {
		r.Window = d.flow.Dormant(now)
	}
	return r
}

// openFlow opens the flow, unless a reload has made that needless. from is the window that the direction had in another
// process. Only the runner may call it once bytes move.
func (d *direction) openFlow(from flow.Dormant) error {
	d.relay.mu.Lock()
	defer d.relay.mu.Unlock()
	if d.allowance.Swap(unmanaged) < 0 {
		return nil
	}
	to, flows := d.dst.conn, d.relay.env.Flows
	// The leg is asked first: whether it enforces the window decides how the flow counts bytes in flight.
	enforces := to.Enforce(enforcedLimits(d.terms), flows.Shard(*d.terms))&datapath.HoldWindow != 0
	leg := flow.Leg{Enforces: enforces, Apply: to.Apply, Wake: d.wakeUp}
	f, err := flows.Resume(d.relay.env.Clock(), *d.terms, leg, from)
	if err != nil {
		return fmt.Errorf("proxy: %s: %w", directionName(d.up), err)
	}
	d.flow, d.enforces = f, enforces
	// Reports begin only now, so that none comes before the flow is there.
	to.Observe(f.Report)
	return nil
}

// closeFlows ends the flow and the receive control. The legs are closed already, so that their last reports have come.
func (d *direction) closeFlows(now cc.Time) {
	if d.flow != nil {
		d.flow.Close(now)
	}
	d.receive.closeFlow(now)
}

// applyTerms sends under other terms from now on, and counts that in done. relay.mu is held.
func (d *direction) applyTerms(t *flow.Terms, done *Reloaded) {
	if reflect.DeepEqual(t, d.terms) || d.finished.Load() {
		return
	}
	if d.allowance.Load() >= 0 { // no flow is open yet, and the next one is opened under these terms
		d.terms = t
		d.allowance.Store(unmanagedAllowance(t))
		done.Moved++
		return
	}
	if t.Algorithm != d.terms.Algorithm && (t.Algorithm == policy.Unmanaged ||
		d.terms.Algorithm == policy.Unmanaged) || d.flow == nil {
		// Neither our control nor the kernel's can take a running connection over from the other.
		if isManaged(t) || isManaged(d.terms) {
			done.Kept++
		}
		return
	}
	before := d.flow.Snapshot()
	if err := d.flow.Move(d.relay.env.Clock(), *t); err != nil { // the check of the configuration excludes it
		d.relay.env.Log.Error("direction keeps its terms", "direction", directionName(d.up),
			"algorithm", t.Algorithm, "err", err)
		done.Kept++
		return
	}
	if t.Algorithm != d.terms.Algorithm {
		d.keepCountersOf(d.terms.Algorithm, &before)
	}
	d.terms = t
	done.Moved++
}

// applyReceiveTerms bounds the receive window of src by other terms, and reports whether
// that changes anything. relay.mu is held.
func (d *direction) applyReceiveTerms(t *flow.Terms) (moved bool, err error) {
	if d.receive != nil {
		return d.receive.applyTerms(d.relay.env.Clock(), t)
	}
	_, can := d.src.conn.(datapath.Advertiser)
	moved = can && !reflect.DeepEqual(t, d.receives)
	d.receives = t
	return moved, nil
}

// end is how a direction has ended. At most one of the errors is set;
// the zero value is the source's orderly end.
type end struct {
	readErr, writeErr error
	stopped           bool
}

// wakeUp is flow.Leg's Wake: it neither blocks nor calls back.
func (d *direction) wakeUp() {
	if d.wake == nil {
		d.relay.driver.Post()
		return
	}
	datapath.Signal(d.wake)
}

// progress is why moveBytes has returned.
type progress uint8

const (
	mustWait progress = iota // for a leg, or for the flow to grant more
	hasMore                  // it has moved stepBytes, and other connections of the loop may be waiting
	hasEnded
)

// moveBytes moves bytes until the source ends, a leg fails or the connection stops. On a loop it also
// returns when it would wait. Elsewhere the calls of the legs and of takeGrant wait instead.
func (d *direction) moveBytes() (progress, end) {
	for moved := 0; ; {
		switch err := d.drainStored(); {
		case err == nil:
		case errors.Is(err, datapath.ErrWait):
			if moved > 0 {
				d.relay.markActive()
			}
			if d.unbounded {
				d.boundInflow()
			}
			return mustWait, end{}
		case errors.Is(err, errStopped):
			return hasEnded, end{stopped: true}
		default:
			return hasEnded, end{writeErr: err}
		}
		if d.ending != nil {
			return hasEnded, d.readEnd()
		}
		if moved >= stepBytes {
			return hasMore, end{}
		}
		n, err := d.carrier.Fill(d.piece)
		if n > 0 {
			d.onArrived(d.read.Add(int64(n)))
			if d.wake != nil { // on a loop, the write or the wait of the next drainStored does
				d.relay.markActive()
			}
			d.lastRead, d.waited = n, false
			moved += n
			if d.unbounded && d.read.Load() >= datapath.SmallBuffer { // from here on the kernel takes in far more
				d.boundInflow()
			}
		}
		if errors.Is(err, datapath.ErrWait) {
			return mustWait, end{}
		}
		d.ending = err
	}
}

// runUntilEnd moves bytes until the direction is over. A goroutine of its own calls it.
func (d *direction) runUntilEnd() end {
	for {
		if p, e := d.moveBytes(); p == hasEnded {
			d.carrier.Release()
			return e
		}
	}
}

// readEnd returns how the source has ended.
func (d *direction) readEnd() end {
	switch {
	case d.relay.stopped.Load():
		return end{stopped: true}
	case errors.Is(d.ending, io.EOF):
		return end{}
	default:
		return end{readErr: d.ending}
	}
}

// onArrived creates the control of src's receive window once flow.ReceiveBulk bytes have come, and lets it look at what
// has arrived. got is the number of bytes read in all.
func (d *direction) onArrived(got int64) {
	if cc.Bytes(got) < flow.ReceiveBulk {
		return
	}
	if d.receive == nil {
		d.relay.mu.Lock()
		d.receive = newReceiveControl(d.src.conn, &d.relay.env.Parts, d.receives)
		d.relay.mu.Unlock()
	}
	d.receive.onRead(got)
}

// boundInflow bounds what src takes in from now on.
func (d *direction) boundInflow() {
	d.unbounded = false // this is done once
	from, ok := d.src.conn.(datapath.Receiver)
	if !ok {
		return
	}
	in := &inflow{from: from, bound: int64(d.relay.env.currentSettings().cfg.Limits.ReceiveBuffer)}
	if from.LimitReceive(cc.Bytes(in.bound)) {
		d.inflow = in
	}
}

// drainStored writes all that is stored, as fast as the flow grants it.
func (d *direction) drainStored() error {
	for n := d.storedBytes(); n > 0; n = d.storedBytes() {
		if d.granted == 0 {
			granted, err := d.takeGrant(n)
			if err != nil {
				d.waited = true
				return err
			}
			d.granted = granted
			d.waited = d.waited || granted < n
		}
		inKernel := d.carrier.Splicing() // asked before the write, which may end it
		n, err := d.writeStored(d.granted)
		d.countWritten(n)
		if inKernel {
			d.spliced.Add(int64(n))
		}
		d.granted -= n
		d.waited = d.waited || d.granted > 0
		if err != nil {
			if d.relay.stopped.Load() {
				return errStopped
			}
			return err
		}
	}
	if d.lastRead > 0 {
		d.resizePiece(d.lastRead, d.waited)
		d.lastRead = 0
	}
	return nil
}

// readEarly adds to early what src has sent, before the relay begins. It returns ErrWait or waits while that is
// nothing.
func (d *direction) readEarly(src datapath.Conn, buffers *datapath.Buffers) error {
	var read bytes.Buffer
	c := datapath.NewCopy(&read, src, buffers)
	defer c.Release()
	n, err := c.Fill(datapath.SmallBuffer)
	if n > 0 {
		_, _ = c.Drain(n)
		d.early = append(d.early, read.Bytes()...)
		return nil
	}
	if !errors.Is(err, datapath.ErrWait) && !errors.Is(err, os.ErrDeadlineExceeded) {
		d.ending = err // the socket may report it only once
	}
	return err
}

// storedBytes returns how many bytes have been read and not written.
func (d *direction) storedBytes() int {
	if n := len(d.early); n > 0 {
		return n
	}
	return d.carrier.Buffered()
}

// writeStored writes up to limit of the stored bytes.
func (d *direction) writeStored(limit int) (int, error) {
	if len(d.early) == 0 {
		return d.carrier.Drain(limit)
	}
	n, err := d.dst.conn.Write(d.early[:min(limit, len(d.early))])
	if d.early = d.early[n:]; len(d.early) == 0 {
		d.early = nil
	}
	return n, err
}

// resizePiece adapts piece to the last read, which had n bytes. waited is set if they could not be written at once.
func (d *direction) resizePiece(n int, waited bool) {
	switch {
	case waited:
		d.piece = max(d.piece/2, min(minPiece, d.maxPiece))
	case n == d.piece:
		d.piece = min(2*d.piece, d.maxPiece)
	}
}

// countWritten counts n bytes written, and adapts the bound of src to them.
func (d *direction) countWritten(n int) {
	if n > 0 {
		written := d.written.Add(int64(n))
		if d.inflow != nil && !d.inflow.growIfNeeded(d.relay.env.Clock, written) {
			d.inflow = nil
		}
		d.relay.markActive()
	}
}

// takeGrant returns how many of n bytes may be written, and waits until some may. On a loop it
// returns datapath.ErrWait instead, and the flow's Wake makes the loop call again.
func (d *direction) takeGrant(n int) (int, error) {
	if err := d.manageIfNeeded(n); err != nil {
		return 0, err
	}
	if d.flow == nil || d.enforces && !d.flow.NeedsGrants() {
		return n, nil
	}
	for {
		if g := d.flow.Take(d.relay.env.Clock(), cc.Bytes(n)); g.Bytes > 0 {
			return int(g.Bytes), nil
		}
		if d.wake == nil {
			if d.relay.stopped.Load() { // Wake is not called for a leg that is closed
				return 0, errStopped
			}
			return 0, datapath.ErrWait
		}
		select {
		case <-d.wake:
		case <-d.relay.stopChannel():
			return 0, errStopped
		}
	}
}

// manageIfNeeded opens the flow if n bytes more would exceed what may be underway without one. It first asks the
// transport how many bytes are still undelivered.
func (d *direction) manageIfNeeded(n int) error {
	free := d.allowance.Load()
	if free < 0 {
		return nil
	}
	d.underway += int64(n)
	if d.underway <= free {
		return nil
	}
	// The bound has counted all bytes since the last question. Most of them may have arrived.
	if left, err := d.dst.conn.Undelivered(); err == nil && int64(left)+int64(n) <= free {
		d.underway = int64(left) + int64(n)
		return nil
	}
	return d.openFlow(flow.Dormant{})
}

// fillMoved writes the bytes moved, and what else costs nothing to read, into out. relay.mu is held.
func (d *direction) fillMoved(out *DirectionInfo) {
	out.Algorithm = d.terms.Algorithm
	out.Read, out.Written, out.Spliced = cc.Bytes(d.read.Load()), cc.Bytes(d.written.Load()), cc.Bytes(d.spliced.Load())
	if out.counted = (countedBytes{}); d.counted != nil {
		out.counted = *d.counted
	}
	out.Finished, out.Managed = d.finished.Load(), d.flow != nil
}

// fillInfo writes the whole state into out. relay.mu is held, so that no reload moves
// counters from one algorithm to another in between.
func (d *direction) fillInfo(out *DirectionInfo) {
	d.fillMoved(out)
	if d.flow != nil {
		out.Flow = d.flow.Snapshot()
	} else {
		out.Flow.Group = d.terms.Group
	}
	out.Receive = d.receiveInfo()
	out.Control = append(append(out.Control, d.earlier...), d.countersSince(out.Algorithm, &out.Flow))
}

// receiveInfo returns the state of src's receive window. relay.mu is held.
func (d *direction) receiveInfo() HoldingInfo {
	if d.receive != nil {
		return d.receive.currentInfo()
	}
	return HoldingInfo{Algorithm: cmp.Or(d.receives.Algorithm, policy.Unmanaged)}
}

// countersSince returns what has happened up to s under the present algorithm: the flow counts under all of them.
func (d *direction) countersSince(algorithm string, s *flow.Snapshot) AlgorithmCounters {
	now := AlgorithmCounters{Algorithm: algorithm, LossEvents: uint64(s.LossEvents), Limited: s.Limited}
	for _, e := range d.earlier {
		now.LossEvents -= e.LossEvents
		for by, t := range e.Limited {
			now.Limited[by] -= t
		}
	}
	return now
}

// keepCountersOf adds what has happened up to s under an algorithm that ends now to earlier. It has one entry for each
// algorithm, because the number of reloads has no bound.
func (d *direction) keepCountersOf(algorithm string, s *flow.Snapshot) {
	now := d.countersSince(algorithm, s)
	i := slices.IndexFunc(d.earlier, func(e AlgorithmCounters) bool { return e.Algorithm == algorithm })
	if i < 0 {
		d.earlier = append(d.earlier, now)
		return
	}
	d.earlier[i].addCounters(now)
}

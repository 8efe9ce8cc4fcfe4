package proxy

import (
	"errors"
	"io"
	"slices"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/policy"
)

// minPiece is read at once from a source whose bytes have to wait anyway: more
// would only wait here. Above it, larger pieces cost less CPU per byte: at
// 1 MiB a splice costs two thirds of what it does at 256 KiB.
const minPiece = 64 << 10

// errStopped ends a relay whose connection was ended by somebody else.
var errStopped = errors.New("proxy: relay stopped")

// initialWindow is what a transport may have in flight before it has heard from its peer
// (RFC 6928 section 2), in bytes.
const initialWindow = 14600

// direction moves the bytes of one direction from one leg to the other. One
// goroutine runs it: its own, or that of the loop that drives both legs.
type direction struct {
	conn     *connection
	src, dst *leg
	terms    *flow.Terms         // of the moment, in a verdict; the connection's mu guards it once it is open
	earlier  []AlgorithmCounters // of algorithms before, likewise
	flow     *flow.Flow          // nil: unmanaged, or not yet: the kernel alone decides; likewise
	free     atomic.Int64        // what may be underway before it is managed, in bytes; below 0: it need not become so
	underway int64               // at most, until it is managed
	receives *flow.Terms         // what decides the window that src advertises; likewise
	hold     *receiveControl     // keeps that window; nil: little has come yet; likewise
	carrier  datapath.Carrier
	early    []byte  // read from src already, goes first
	granted  int     // of what is stored, may be passed on
	filled   int     // read last, until it is passed on
	ending   error   // src has ended; it comes after what is stored
	inflow   *inflow // bounds what src takes in; nil: nothing does, or not yet
	piece    int     // read at once at present
	maxPiece int
	wake     chan struct{} // a refused Take may now succeed; nil: a loop drives both legs

	read, written, spliced atomic.Int64
	finished               atomic.Bool
	enforces               bool // dst keeps the window by itself: ask for no grants without a maximum rate
	waited                 bool // what was filled could not be passed on in one go
	unbound                bool // what src takes in is to be bounded, once it brings much, or more than dst takes
}

func (d *direction) directionName() string {
	if d == &d.conn.up {
		return "up"
	}
	return "down"
}

// isManaged reports whether terms need a flow of ours.
func isManaged(t *flow.Terms) bool {
	return t.Algorithm != policy.Unmanaged || t.MaxRate > 0 || t.ConnectionRate > 0
}

// unmanaged is free for a direction that is managed already, or never.
const unmanaged = -1

// unmanagedAllowance returns how much may be underway before terms are in force: most connections
// never have more than an initial window, which any sender may have. Terms with a limit of
// their own hold from the first byte, and hints find who needs them.
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

// wantedHold is which parts of a flow's limits its transport is to enforce. An algorithm
// that sets no window must not take the transport's own from it.
func wantedHold(t *flow.Terms) datapath.Hold {
	if t.Algorithm == policy.Unmanaged {
		return datapath.HoldRate
	}
	return datapath.HoldAll
}

// end is how a direction came to its end; exactly one of the errors is set,
// none after the source's orderly end.
type end struct {
	readErr, writeErr error
	stopped           bool
}

// wakeUp is flow.Leg's Wake: it neither blocks nor calls back.
func (d *direction) wakeUp() {
	if d.wake == nil {
		d.conn.post()
		return
	}
	select {
	case d.wake <- struct{}{}:
	default:
	}
}

// progress is how far a step has come.
type progress uint8

const (
	waits progress = iota // for a leg, or for its flow to grant more
	again                 // it has done its part, and others may be waiting
	over
)

// stepBytes is what a direction moves in one step at most, lest others of its loop wait.
const stepBytes = 2 << 20

// moveBytes moves bytes until the source ends, a leg fails, the connection stops, or there is a
// reason to return that progress tells. Where nothing drives the legs it waits instead.
func (d *direction) moveBytes() (progress, end) {
	for moved := 0; ; {
		switch err := d.drainStored(); {
		case err == nil:
		case errors.Is(err, datapath.ErrWait):
			if d.unbound {
				d.boundInflow()
			}
			return waits, end{}
		case errors.Is(err, errStopped):
			return over, end{stopped: true}
		default:
			return over, end{writeErr: err}
		}
		if d.ending != nil {
			return over, d.readEnd()
		}
		if moved >= stepBytes {
			return again, end{}
		}
		n, err := d.carrier.Fill(d.piece)
		if n > 0 {
			d.onArrived(d.read.Add(int64(n)))
			d.noteActivity()
			d.filled, d.waited = n, false
			moved += n
			if d.unbound && d.read.Load() >= datapath.SmallBuffer { // what is read lets the kernel take in far more
				d.boundInflow()
			}
		}
		if errors.Is(err, datapath.ErrWait) {
			return waits, end{}
		}
		d.ending = err
	}
}

// readEnd is how the source has ended.
func (d *direction) readEnd() end {
	switch {
	case d.conn.stopped.Load():
		return end{stopped: true}
	case errors.Is(d.ending, io.EOF):
		return end{}
	default:
		return end{readErr: d.ending}
	}
}

// runUntilEnd steps until it is over.
func (d *direction) runUntilEnd() end {
	for {
		if p, e := d.moveBytes(); p == over {
			d.carrier.Release()
			return e
		}
	}
}

// resizePiece adapts the piece to how the last one, of n bytes, fared.
func (d *direction) resizePiece(n int, waited bool) {
	switch {
	case waited:
		d.piece = max(d.piece/2, min(minPiece, d.maxPiece))
	case n == d.piece:
		d.piece = min(2*d.piece, d.maxPiece)
	}
}

// drainStored passes on what is stored, as fast as the flow grants.
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
		inKernel := d.carrier.Splicing()
		n, err := d.passBytes(d.granted)
		d.noteWritten(n)
		if inKernel {
			d.spliced.Add(int64(n))
		}
		d.granted -= n
		d.waited = d.waited || d.granted > 0
		if err != nil {
			return d.unlessStopped(err)
		}
	}
	if d.filled > 0 {
		d.resizePiece(d.filled, d.waited)
		d.filled = 0
	}
	return nil
}

// storedBytes is how much has been read and not been passed on.
func (d *direction) storedBytes() int {
	if n := len(d.early); n > 0 {
		return n
	}
	return d.carrier.Buffered()
}

// passBytes passes up to limit of the stored bytes on.
func (d *direction) passBytes(limit int) (int, error) {
	if len(d.early) == 0 {
		return d.carrier.Drain(limit)
	}
	n, err := d.dst.conn.Write(d.early[:min(limit, len(d.early))])
	if d.early = d.early[n:]; len(d.early) == 0 {
		d.early = nil
	}
	return n, err
}

// manageIfNeeded has d be managed if with n bytes more there would be more underway than it may
// have before.
func (d *direction) manageIfNeeded(n int) error {
	free := d.free.Load()
	if free < 0 {
		return nil
	}
	d.underway += int64(n)
	if d.underway <= free {
		return nil
	}
	if e, ok := d.dst.conn.(datapath.Ending); ok {
		if left, err := e.Undelivered(); err == nil && int64(left)+int64(n) <= free {
			d.underway = int64(left) + int64(n)
			return nil
		}
	}
	return d.conn.openFlow(d)
}

// takeGrant returns how many of n bytes may be written, waiting until some may. On a loop it
// returns datapath.ErrWait instead, and step is called again once some may.
func (d *direction) takeGrant(n int) (int, error) {
	if err := d.manageIfNeeded(n); err != nil {
		return 0, err
	}
	if d.flow == nil || d.enforces && !d.flow.NeedsGrants() {
		return n, nil
	}
	for {
		if g := d.flow.Take(d.conn.srv.clock(), cc.Bytes(n)); g.Bytes > 0 {
			return int(g.Bytes), nil
		}
		if d.wake == nil {
			if d.conn.stopped.Load() { // nobody will call Wake for a leg that is closed
				return 0, errStopped
			}
			return 0, datapath.ErrWait
		}
		select {
		case <-d.wake:
		case <-d.conn.stopChannel():
			return 0, errStopped
		}
	}
}

func (d *direction) noteWritten(n int) {
	if n > 0 {
		if written := d.written.Add(int64(n)); d.inflow != nil && !d.inflow.grow(d.conn.srv.clock, written) {
			d.inflow = nil
		}
		d.noteActivity()
	}
}

func (d *direction) noteActivity() { d.conn.active.Store(int64(d.conn.srv.clock())) }

func (d *direction) unlessStopped(err error) error {
	if d.conn.stopped.Load() {
		return errStopped
	}
	return err
}

package kernel

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// EBPF is the envelope that enforces our window and pacing rate by itself.
const EBPF = "ebpf"

// enforcer has the kernel enforce the windows of a bounded number of legs.
type enforcer struct {
	control    *bpf.Control
	clockAhead time.Duration          // what the Clock is ahead of the kernel's
	legs       []atomic.Pointer[Conn] // by cell

	bound                                 atomic.Int64
	refusedFull, refusedFailed, fallbacks atomic.Uint64
	answerTimes                           *datapath.Durations
}

// answerBounds are in seconds: from a fraction of a tick to what makes a socket fall
// back.
var answerBounds = []float64{
	.0001, .0002, .0003, .0005, .00075, .001, .0015, .002, .003, .005, .0075, .01, .02, .05, .1, .2, .5,
}

// newEnforcer returns one for a number of legs (0: defaultCells), in at most so many parts.
func newEnforcer(cells, parts int, clock func() cc.Time) (*enforcer, error) {
	if cells <= 0 {
		cells = defaultCells
	}
	c, err := bpf.Open(bpf.Config{Cells: cells, Parts: parts})
	if err != nil {
		return nil, err
	}
	offset, err := clockOffset(clock)
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &enforcer{
		control: c, answerTimes: datapath.NewDurations(answerBounds), legs: make([]atomic.Pointer[Conn], cells),
		clockAhead: offset,
	}, nil
}

// clockOffset is what clock is ahead of the kernel's: the least of several readings, since
// a thread may wait for its processor between the two clocks.
func clockOffset(clock func() cc.Time) (least time.Duration, err error) {
	for i := range 16 {
		var ts unix.Timespec
		if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
			return 0, fmt.Errorf("read CLOCK_MONOTONIC: %w", err)
		}
		if ahead := time.Duration(int64(clock()) - ts.Nano()); i == 0 || ahead < least {
			least = ahead
		}
	}
	return least, nil
}

// clockTime is the Clock's time of one of the kernel's.
func (o *enforcer) clockTime(at uint64) cc.Time { return cc.Time(at).Add(o.clockAhead) }

// bindCell has the kernel enforce c's window, by a cell of its shard's. After an error the
// leg is as before.
func (o *enforcer) bindCell(c *Conn) (*cellReporter, error) {
	h := &cellReporter{}
	err := c.raw.Visit(func(fd int) (err error) {
		if h.cell, err = o.control.Bind(fd, c.shard.index); err != nil {
			return err
		}
		if h.readFirst(c.accepted.Load()) {
			return nil
		}
		h.cell.Free()
		return errors.Join(errors.New("the socket does not answer"),
			unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, c.systemControl))
	})
	switch {
	case errors.Is(err, bpf.ErrFull):
		o.refusedFull.Add(1)
		return nil, fmt.Errorf("kernel: it enforces the windows of %d legs, and of no more; "+
			"the relay keeps this one's (limits.held_legs)", len(o.legs))
	case err != nil:
		o.refusedFailed.Add(1)
		return nil, fmt.Errorf("kernel: it does not enforce this leg's window: %w", err)
	}
	o.bound.Add(1)
	o.legs[h.cell.Index()].Store(c)
	return h, nil
}

// releaseCell gives the cell of a leg back; the kernel no longer enforces its window.
func (o *enforcer) releaseCell(h *cellReporter) {
	o.legs[h.cell.Index()].Store(nil)
	h.cell.Free()
	o.bound.Add(-1)
}

// eachWithNews calls yield for legs of a shard whose sockets have news, for as many as the budget at most.
func (o *enforcer) visitLegsWithNews(shard, budget int, yield func(*Conn)) {
	o.control.News(shard, budget, func(cell uint32) {
		if c := o.legs[cell].Load(); c != nil {
			yield(c)
		}
	})
}

// answerReport tells the kernel that the limit takes the last report into account. fresh: the report told
// of something new, which happened at that time.
func (o *enforcer) answerReport(h *cellReporter, fresh bool, happened, now cc.Time) {
	h.cell.Answer(&h.reported)
	if fresh {
		o.answerTimes.Observe(now.Sub(happened))
	}
}

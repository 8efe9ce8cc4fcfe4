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

// EBPF is the envelope that holds our window and pacing rate by itself.
const EBPF = "ebpf"

// holder has the kernel hold the windows of a bounded number of legs.
type holder struct {
	control *bpf.Control
	offset  time.Duration          // what the Clock is ahead of the kernel's
	legs    []atomic.Pointer[Conn] // by cell
	each    atomic.Int64           // how many are asked for every acknowledgement

	held                atomic.Int64
	full, failed, falls atomic.Uint64
	answers             *datapath.Durations
}

// answerBounds are in seconds: from a fraction of a tick to what makes a socket
// help itself.
var answerBounds = []float64{.0001, .0002, .0003, .0005, .00075, .001, .0015, .002, .003, .005, .0075, .01, .02, .05, .1, .2, .5}

func newHolder(cells int, clock func() cc.Time) (*holder, error) {
	if cells <= 0 {
		cells = DefaultCells
	}
	c, err := bpf.Open(bpf.Config{Cells: cells})
	if err != nil {
		return nil, err
	}
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		return nil, errors.Join(fmt.Errorf("read CLOCK_MONOTONIC: %w", err), c.Close())
	}
	return &holder{
		control: c, answers: datapath.NewDurations(answerBounds), legs: make([]atomic.Pointer[Conn], cells),
		offset: time.Duration(int64(clock()) - ts.Nano()),
	}, nil
}

// when is the Clock's time of one of the kernel's.
func (o *holder) when(at uint64) cc.Time { return cc.Time(at).Add(o.offset) }

// bind has the kernel hold c's window. After an error the leg is as before.
func (o *holder) bind(c *Conn) (*held, error) {
	h := &held{}
	err := control(c.raw, func(fd int) (err error) {
		if h.cell, err = o.control.Bind(fd); err != nil {
			return err
		}
		if h.start(c.wrote.Load()) {
			return nil
		}
		h.cell.Free()
		return errors.Join(errors.New("the socket does not answer"),
			unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, c.system))
	})
	switch {
	case errors.Is(err, bpf.ErrFull):
		o.full.Add(1)
		return nil, fmt.Errorf("kernel: it holds the windows of %d legs, and of no more; this one's is held by the relay (limits.held_legs)", len(o.legs))
	case err != nil:
		o.failed.Add(1)
		return nil, fmt.Errorf("kernel: it does not hold this leg's window: %w", err)
	}
	o.held.Add(1)
	o.legs[h.cell.Index()].Store(c)
	return h, nil
}

// ask has every acknowledgement of a leg told by itself, or not.
func (o *holder) ask(h *held, each bool) {
	switch {
	case each && !h.told.EveryAck:
		o.each.Add(1)
	case !each && h.told.EveryAck:
		o.each.Add(-1)
	}
}

// release lets a leg's socket go.
func (o *holder) release(h *held) {
	o.ask(h, false)
	h.told.EveryAck = false
	o.legs[h.cell.Index()].Store(nil)
	h.cell.Free()
	o.held.Add(-1)
}

// news calls yield for legs that have told something, up to a budget.
func (o *holder) news(budget int, yield func(*Conn)) {
	o.control.News(budget, func(cell uint32) {
		if c := o.legs[cell].Load(); c != nil {
			yield(c)
		}
	})
}

// acks reports single acknowledgements to those who want each.
func (o *holder) acks() error {
	if o.each.Load() == 0 {
		return nil
	}
	return o.control.Acks(func(a *bpf.Ack) {
		if int(a.Cell) < len(o.legs) {
			if c := o.legs[a.Cell].Load(); c != nil {
				c.acknowledged(a)
			}
		}
	})
}

// note counts what a reading tells of the answers to those before it.
func (o *holder) note(h *held) {
	if h.next.Lag != h.seen.Lag && h.next.Lag > 0 {
		o.answers.Observe(time.Duration(h.next.Lag))
	}
	o.falls.Add(uint64(h.next.Falls - h.seen.Falls))
}

//go:build linux

package netlab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// DefaultSpin is how long before a delivery the emulator stops sleeping and
// watches the clock: about the time this kind of machine needs to wake a thread.
const DefaultSpin = 60 * time.Microsecond

// PathConfig describes an emulated link between two nodes.
type PathConfig struct {
	Near, Far End            // their devices are created
	Down, Up  sim.LinkConfig // Far to Near, and Near to Far
	Spin      time.Duration  // 0: DefaultSpin; negative: none
}

// Path is an emulated link between two nodes. What it does to a packet is
// settled by package sim's schedule when the packet arrives; real time only
// decides how late the packet is then handed over.
//
// Until it is started a path delays packets and does nothing else to them, and
// records nothing.
type Path struct {
	cfg    PathConfig
	spin   time.Duration
	record *record
	dirs   [2]pipe

	epoch time.Time // the clock's zero
	zero  atomic.Int64
	armed atomic.Bool

	wake     int // eventfd that ends the emulator's sleep
	stopping atomic.Bool
	moved    chan struct{} // closed when the emulator has ended
	err      error         // why it ended by itself; read after moved
	quit     chan struct{} // ends the record's supply, which must outlive the emulator
	supplied chan struct{}
	once     sync.Once
	closeErr error
}

// Path joins two nodes with an emulated link, which runs until the lab closes.
func (l *Lab) Path(cfg PathConfig) (*Path, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errClosed
	}
	for dir, c := range map[Direction]sim.LinkConfig{Down: cfg.Down, Up: cfg.Up} {
		if err := check(c); err != nil {
			return nil, fmt.Errorf("netlab: path, %s: %w", dir, err)
		}
	}
	p := &Path{cfg: cfg, spin: cfg.Spin, record: newRecord(), epoch: time.Now(), wake: -1}
	p.moved, p.quit, p.supplied = make(chan struct{}), make(chan struct{}), make(chan struct{})
	switch {
	case p.spin == 0:
		p.spin = DefaultSpin
	case p.spin < 0:
		p.spin = 0
	}
	p.dirs[Down] = pipe{dir: Down, cfg: cfg.Down, in: -1, out: -1}
	p.dirs[Up] = pipe{dir: Up, cfg: cfg.Up, in: -1, out: -1}
	if err := p.open(); err != nil {
		return nil, errors.Join(err, p.closeFDs())
	}
	e := newEmulator(p)
	go func() {
		defer close(p.supplied)
		p.record.supply(p.quit)
	}()
	go func() {
		defer close(p.moved)
		e.run()
	}()
	l.paths = append(l.paths, p)
	return p, nil
}

func check(c sim.LinkConfig) error {
	switch {
	case c.Rate < 0:
		return fmt.Errorf("rate %d is negative", c.Rate)
	case c.Delay < 0:
		return fmt.Errorf("delay %s is negative", c.Delay)
	case c.QueueBytes < 0 || c.QueuePackets < 0:
		return errors.New("queue limit is negative")
	case !(c.Loss >= 0 && c.Loss <= 1):
		return fmt.Errorf("loss %g is not a probability", c.Loss)
	}
	return nil
}

func (p *Path) open() error {
	near, err := p.cfg.Near.tun()
	if err != nil {
		return err
	}
	p.dirs[Up].in, p.dirs[Down].out = near, near
	far, err := p.cfg.Far.tun()
	if err != nil {
		return err
	}
	p.dirs[Down].in, p.dirs[Up].out = far, far
	if p.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		return fmt.Errorf("netlab: create eventfd: %w", err)
	}
	return nil
}

// now reads the path's clock: monotonic, above zero.
func (p *Path) now() cc.Time { return 1 + cc.Time(time.Since(p.epoch)) }

// Start begins both directions' schedules, and the record, now. Later calls
// change nothing.
func (p *Path) Start() { p.zero.CompareAndSwap(0, int64(p.now())) }

// StartOnData begins as Start does, when the first packet that carries data
// arrives in either direction.
func (p *Path) StartOnData() { p.armed.Store(true) }

// Elapsed is the time since the start; 0 before it.
func (p *Path) Elapsed() time.Duration {
	zero := cc.Time(p.zero.Load())
	if zero == 0 {
		return 0
	}
	return p.now().Sub(zero)
}

// Missed is how many packets the path's devices dropped before the emulator
// could read them, since they were made. Anything but 0 spoils a measurement.
func (p *Path) Missed() (uint64, error) {
	near, err := p.cfg.Near.missed()
	if err != nil {
		return 0, err
	}
	far, err := p.cfg.Far.missed()
	return near + far, err
}

// close ends the emulator and removes the devices. The record stays readable.
func (p *Path) close() error {
	p.once.Do(func() {
		p.stopping.Store(true)
		_, err := unix.Write(p.wake, binary.NativeEndian.AppendUint64(nil, 1))
		<-p.moved
		close(p.quit)
		<-p.supplied
		p.closeErr = errors.Join(err, p.err, p.closeFDs())
	})
	return p.closeErr
}

func (p *Path) closeFDs() error {
	var errs []error
	for _, fd := range []int{p.dirs[Down].in, p.dirs[Up].in, p.wake} {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}

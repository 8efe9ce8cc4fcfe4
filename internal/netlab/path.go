//go:build linux

package netlab

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// spin is how long before a delivery the emulator stops sleeping and
// watches the clock: about the time this kind of machine needs to wake a thread.
const spin = 60 * time.Microsecond

// Late is the p99 of lateness from which a run tells more about the machine than
// about what was measured.
const Late = 2 * time.Millisecond

// PathConfig describes an emulated link between two nodes.
type PathConfig struct {
	// Near and Far have their devices created. Near's addresses are hosts: the
	// first of each family are host 0's, the second host 1's, and so on.
	Near, Far End
	Down, Up  sim.LinkConfig  // Far to Near, and Near to Far
	Cell      *sim.CellConfig // in place of Down; nil: none
}

// maxHosts bounds the hosts of a path.
const maxHosts = 100

// Path is an emulated link, or a radio cell, between two nodes. What it does to a
// packet is settled by package sim's schedule and when packets arrive; real time
// only decides how late the packet is then handed over.
//
// Until it is started a path delays packets and does nothing else to them, and
// records nothing.
type Path struct {
	History
	cfg    PathConfig
	record *record
	dirs   [2]pipe
	hosts  map[netip.Addr]int

	epoch time.Time // the clock's zero
	zero  atomic.Int64
	armed atomic.Bool

	wake     int         // eventfd that ends the emulator's sleep
	asked    chan func() // for the emulator to do
	asking   sync.Mutex  // guards wake against being closed
	shut     bool
	stopping atomic.Bool
	moved    chan struct{} // closed when the emulator has ended
	err      error         // why it ended by itself; read after moved
	quit     chan struct{} // ends the record's supply, which must outlive the emulator
	supplied chan struct{}
}

// Path joins two nodes with an emulated link, which runs until the lab closes.
func (l *Lab) Path(cfg PathConfig) (*Path, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, errClosed
	}
	if err := cfg.check(); err != nil {
		return nil, err
	}
	p := &Path{
		cfg: cfg, record: newRecord(), hosts: cfg.Near.hosts(),
		epoch: time.Now(), wake: -1, asked: make(chan func(), 1),
	}
	p.History = History{p.readRecord}
	p.moved, p.quit, p.supplied = make(chan struct{}), make(chan struct{}), make(chan struct{})
	p.dirs[Down] = pipe{dir: Down, cfg: cfg.Down, in: -1, out: -1}
	if cfg.Cell != nil {
		cell := *cfg.Cell
		p.dirs[Down].radio = &cell
	}
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

func (c PathConfig) check() error {
	for dir, c := range map[Direction]sim.LinkConfig{Down: c.Down, Up: c.Up} {
		if err := c.Check(); err != nil {
			return fmt.Errorf("netlab: path, %s: %w", dir, err)
		}
	}
	if n := len(c.Near.hosts()); n > 2*maxHosts {
		return fmt.Errorf("netlab: path: %d addresses; a path has at most %d hosts", n, maxHosts)
	}
	if c.Cell == nil {
		return nil
	}
	if c.Down != (sim.LinkConfig{}) {
		return errors.New("netlab: path: a cell takes the place of the link down; there is one of them")
	}
	if err := c.Cell.Check(); err != nil {
		return fmt.Errorf("netlab: path, cell: %w", err)
	}
	return nil
}

// hosts numbers the end's addresses, each family for itself.
func (e End) hosts() map[netip.Addr]int {
	hosts := map[netip.Addr]int{}
	var next [2]int
	for _, p := range e.Addrs {
		family := 0
		if p.Addr().Is6() {
			family = 1
		}
		hosts[p.Addr()] = next[family]
		next[family]++
	}
	return hosts
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

// SetDelay changes the propagation delay of both directions, for the packets that
// leave their queues from now on: on a link, those that come to it.
func (p *Path) SetDelay(d time.Duration) error {
	if d < 0 {
		return fmt.Errorf("netlab: path: delay %s is negative", d)
	}
	return p.do(func() {
		for i := range p.dirs {
			p.dirs[i].setDelay(d)
		}
	})
}

// do has the emulator do something between two packets, and waits until it has.
func (p *Path) do(f func()) error {
	done := make(chan struct{})
	if err := p.ask(func() { f(); close(done) }); err != nil {
		return err
	}
	select {
	case <-done:
		return nil
	case <-p.moved:
		return errPathClosed
	}
}

func (p *Path) ask(f func()) error {
	p.asking.Lock()
	defer p.asking.Unlock()
	if p.shut {
		return errPathClosed
	}
	select {
	case p.asked <- f:
	case <-p.moved:
		return errPathClosed
	}
	return p.rouse()
}

// rouse ends the emulator's sleep.
func (p *Path) rouse() error {
	if _, err := unix.Write(p.wake, binary.NativeEndian.AppendUint64(nil, 1)); err != nil {
		return fmt.Errorf("netlab: path: %w", err)
	}
	return nil
}

var errPathClosed = errors.New("netlab: the path is closed")

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
	p.asking.Lock()
	p.shut = true
	p.asking.Unlock()
	p.stopping.Store(true)
	err := p.rouse()
	<-p.moved
	close(p.quit)
	<-p.supplied
	return errors.Join(err, p.err, p.closeFDs())
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

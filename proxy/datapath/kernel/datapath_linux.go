package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// Datapath makes legs over kernel TCP and polls the busy ones.
type Datapath struct {
	clock     func() cc.Time
	onTick    func(cc.Time) cc.Time
	keepAlive net.KeepAliveConfig
	holder    *holder // has the kernel hold windows; nil: the relay does
	envelope  string  // set on each socket that is not held so; empty: the system's default stays
	inUse     string  // what sockets then have
	why       string  // windows are not held by the kernel; empty: they are, or need not be
	receiving receiving
	missing   []string // what this kernel, or our privilege, does not give
	budget    int
	log       *slog.Logger
	pipes     *pipes
	done      chan struct{}

	mu      sync.Mutex
	timer   *timer
	mode    mode
	period  time.Duration // in mode ticking
	wake    cc.Time       // in mode sleeping: until when
	kicked  bool          // Wake was called since OnTick last ran
	joining []*Conn
	closed  bool

	busy atomic.Int64 // len(active), for Status

	// Only the goroutine touches these.
	active []*Conn // polled in turns
	cursor int     // in active: whose turn it is
	awake  []*Conn // held by the kernel: looked at when they have news
	turn   int     // in awake: who is looked at without
	easy   int     // how many of awake are
	ticks  uint64  // since the start, missed ones included
	warned bool
}

// mode is what the timer is set to.
type mode uint8

const (
	disarmed mode = iota // nothing is busy: no CPU is used
	sleeping             // until the hook wants to be called
	ticking
)

// New checks what this kernel offers and starts the tick's goroutine, which
// Close ends.
func New(cfg Config) (*Datapath, error) {
	d, err := prepared(cfg)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	go d.run()
	return d, nil
}

// prepared returns a datapath that does not tick yet.
func prepared(cfg Config) (*Datapath, error) {
	if cfg.Clock == nil {
		return nil, errors.New("Config.Clock is required")
	}
	d := &Datapath{
		clock: cfg.Clock, onTick: cfg.OnTick, keepAlive: cfg.KeepAlive, budget: cfg.PollsPerTick, log: cfg.Log,
		done: make(chan struct{}),
	}
	if d.keepAlive == (net.KeepAliveConfig{}) {
		d.keepAlive = DefaultKeepAlive
	}
	if d.budget <= 0 {
		d.budget = DefaultPollsPerTick
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	d.pipes = newPipes(cfg.Pipes)
	if err := d.settle(cfg); err != nil {
		return nil, err
	}
	var err error
	if d.timer, err = newTimer(); err != nil && d.holder != nil {
		err = errors.Join(err, d.holder.control.Close())
	}
	return d, err
}

// settle chooses the tier and the envelope.
func (d *Datapath) settle(cfg Config) (err error) {
	envelope := cfg.Envelope
	if envelope == EBPF {
		envelope = "" // for the legs that it has no room for
	}
	if err := d.probe(envelope, cfg.ReceiveBuffer); err != nil {
		return err
	}
	if cfg.Envelope != "" && cfg.Envelope != EBPF {
		return nil
	}
	d.holder, err = newHolder(cfg.Cells, d.clock)
	if err != nil && cfg.Envelope == EBPF {
		return fmt.Errorf("envelope %q: %w", EBPF, err)
	}
	if err != nil {
		d.why = err.Error()
	}
	return nil
}

// probe asks a socket that goes nowhere what this kernel has.
func (d *Datapath) probe(envelope string, receive cc.Bytes) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is in it

	var info unix.TCPInfo
	size, errno := tcpInfo(uintptr(fd), &info)
	if errno != 0 {
		return fmt.Errorf("probe TCP_INFO: %w", errno)
	}
	if uintptr(size) < uptoNotsent {
		return errors.New("TCP_INFO has no notsent_bytes: Linux 4.6 or later is needed")
	}
	d.missing = lacking(uintptr(size))
	var why string
	if d.envelope, why = settleEnvelope(fd, envelope); why != "" {
		d.missing = append(d.missing, why)
	}
	if d.receiving, why = settleReceiving(fd, receive); why != "" {
		d.missing = append(d.missing, why)
	}
	d.missing = slices.Clip(d.missing) // conns append to it
	d.inUse = envelopeOf(fd)
	return nil
}

// Close ends the tick and waits for it. Legs stay open, but nothing is
// reported of them any more.
func (d *Datapath) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	err := d.timer.close()
	d.mu.Unlock()
	<-d.done
	d.pipes.close()
	if d.holder != nil {
		err = errors.Join(err, d.holder.control.Close())
	}
	return err
}

// Envelope returns the congestion control that new managed legs get.
func (d *Datapath) Envelope() string {
	if d.holder != nil {
		return EBPF
	}
	return d.inUse
}

// Beneath returns the congestion control of legs whose window the kernel does
// not hold for us.
func (d *Datapath) Beneath() string { return d.inUse }

// Control is the name under which the kernel lists our congestion control; empty:
// it has none.
func (d *Datapath) Control() string {
	if d.holder == nil {
		return ""
	}
	return d.holder.control.Name()
}

// Why says why the kernel does not hold our windows although it was to if it
// can; empty: it does, or was not to.
func (d *Datapath) Why() string { return d.why }

// Missing says in words what was asked for, or is useful, and cannot be had.
func (d *Datapath) Missing() []string { return slices.Clone(d.missing) }

// String names the tier and the envelope, for the start-up log.
func (d *Datapath) String() string {
	if d.holder != nil {
		return fmt.Sprintf("%s: window and pacing held by the kernel, as %s; envelope %s where it has no room", Tier, d.Control(), d.inUse)
	}
	return fmt.Sprintf("%s: window held by the relay, pacing by the kernel, envelope %s", Tier, d.inUse)
}

// Status is the load of the shared tick.
type Status struct {
	Busy     int           // legs polled, those with bytes unsent or unacknowledged
	Interval time.Duration // between two polls of one leg

	Held *HeldStatus // nil: the kernel holds no windows
}

// HeldStatus is how it goes with the windows that the kernel holds.
type HeldStatus struct {
	Legs, Limit  int                // held now, and at most
	Full, Failed uint64             // legs that were to be held and are not: for lack of room, for another reason
	Falls        uint64             // times a socket had to control itself, since nobody answered it
	Answers      datapath.Histogram // from an acknowledgement until the window computed from it was in force
}

// Status returns the load of the shared tick.
func (d *Datapath) Status() Status {
	busy := int(d.busy.Load())
	rounds := max(1, (busy+d.budget-1)/d.budget)
	s := Status{Busy: busy, Interval: time.Duration(rounds) * Tick}
	if o := d.holder; o != nil {
		s.Held = &HeldStatus{
			Legs: int(o.held.Load()), Limit: len(o.legs), Full: o.full.Load(), Failed: o.failed.Load(),
			Falls: o.falls.Load(), Answers: o.answers.Snapshot(),
		}
	}
	return s
}

// Wake has OnTick called at the next tick, even when nothing is busy.
func (d *Datapath) Wake() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.kicked = true
	d.set(ticking, 0)
}

// join has the tick poll c.
func (d *Datapath) join(c *Conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.joining = append(d.joining, c)
	d.set(ticking, 0)
}

// set sets the timer; wake is until when to sleep. d.mu is held.
func (d *Datapath) set(m mode, wake cc.Time) {
	d.setPeriod(m, wake, Tick)
}

// setPeriod is set with the period of mode ticking.
func (d *Datapath) setPeriod(m mode, wake cc.Time, period time.Duration) {
	if d.closed || m == d.mode && wake == d.wake && (m != ticking || period == d.period) {
		return
	}
	var err error
	switch m {
	case disarmed:
		err = d.timer.set(0, 0)
	case sleeping:
		err = d.timer.set(max(Tick, wake.Sub(d.clock())), 0)
	case ticking:
		err = d.timer.set(period, period)
	}
	if err != nil {
		d.log.Error("kernel: set timer", "err", err)
		return
	}
	d.mode, d.period, d.wake = m, period, wake
}

func (d *Datapath) run() {
	defer close(d.done)
	for {
		n, err := d.timer.wait()
		if err != nil {
			d.mu.Lock()
			closed := d.closed
			d.mu.Unlock()
			if !closed {
				d.log.Error("kernel: the shared tick has stopped", "err", err)
			}
			return
		}
		d.pass(n)
		d.tick()
	}
}

// pass counts n firings of the timer.
func (d *Datapath) pass(n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mode == ticking {
		n *= uint64(d.period / Tick)
	}
	d.ticks += n
}

func (d *Datapath) tick() {
	d.mu.Lock()
	if d.mode == sleeping {
		d.mode = disarmed // it fired once
	}
	for _, c := range d.joining {
		c.due, c.quiet, c.easy, c.lull = 0, 0, 0, 0
		if c.held.Load() != nil {
			c.place = len(d.awake)
			d.awake = append(d.awake, c)
		} else {
			d.active = append(d.active, c)
		}
	}
	clear(d.joining)
	d.joining = d.joining[:0]
	d.kicked = false
	d.mu.Unlock()

	if d.holder != nil {
		if err := d.attend(); err != nil {
			d.log.Error("kernel: single acknowledgements are missing", "err", err)
		}
	}
	easy := d.poll() && d.easy == len(d.awake)
	d.busy.Store(int64(len(d.active) + len(d.awake)))
	d.overload()

	next := cc.Never
	if d.onTick != nil {
		next = d.onTick(d.clock())
	}

	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case easy && len(d.active)+len(d.awake) > 0 && !d.kicked && len(d.joining) == 0 && next > d.clock().Add(easyPause*Tick):
		d.setPeriod(ticking, 0, easyPause*Tick)
	case d.kicked || len(d.active)+len(d.awake)+len(d.joining) > 0 || next <= d.clock().Add(Tick):
		d.set(ticking, 0)
	case next == cc.Never:
		d.set(disarmed, 0)
	default:
		d.set(sleeping, next)
	}
}

// overload tells once that the budget is what sets the polling interval.
func (d *Datapath) overload() {
	if d.warned || len(d.active) <= d.budget {
		return
	}
	d.warned = true
	d.log.Warn("kernel: more busy connections than are polled in one tick; each is polled less often",
		"busy", len(d.active), "polls_per_tick", d.budget)
}

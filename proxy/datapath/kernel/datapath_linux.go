package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
)

// Datapath makes legs over kernel TCP and serves those that are busy. All of its methods may be called from any
// goroutine. Its fields do not change after New, but for what has a lock of its own.
type Datapath struct {
	clock      func() cc.Time
	beforeTick func() // nil: none
	onTick     func(shard int, now cc.Time) cc.Time
	pollBudget int // legs polled in one tick of a shard at most
	log        *slog.Logger
	shards     []*shard
	loops      *eventloop.Loops
	pipes      *pipes
	closing    sync.Once

	enforcer      *enforcer // has the kernel enforce windows; nil: the relay does
	whyUnenforced string    // see WhyUnenforced
	envelope      string    // set on polled legs; empty: the system's default stays
	relayEnvelope string    // what polled legs then have
	missing       []string  // what this kernel, or our privilege, does not give
	receiveBounds receiveBounds
	pressure      memoryPressure
	tosReader     tosReader
	peerClocks    peerClocks // of polled legs, where the kernel enforces no windows
	noPeerClocks  error      // why there are none; nil: there are, or none are needed

	resolver      happyeyeballs.Resolver
	lookups       *datapath.Places // nil: unbounded
	spareAttempts *datapath.Places // attempts beside others; see happyeyeballs.Host
}

// New checks what this kernel offers and starts the ticks and the loops, which Close ends. Until then GOMAXPROCS is
// higher by their number. It fails on a kernel before Linux 5.4, and if Config.Envelope cannot be had.
func New(cfg Config) (*Datapath, error) {
	d, err := newDatapath(cfg)
	if err != nil {
		return nil, fmt.Errorf("kernel: %w", err)
	}
	eventloop.ReserveProcessors(len(d.shards))
	for _, s := range d.shards {
		go s.tickLoop()
	}
	return d, nil
}

// maxShards bounds the ticks, and their threads.
const maxShards = 8

// newDatapath returns a datapath that does not tick yet.
func newDatapath(cfg Config) (*Datapath, error) {
	if cfg.Clock == nil {
		return nil, errors.New("Config.Clock is required")
	}
	if cfg.Shards <= 0 {
		cfg.Shards = max(1, eventloop.Processors()/2)
	}
	cfg.Shards = min(cfg.Shards, maxShards)
	d := &Datapath{
		clock: cfg.Clock, beforeTick: cfg.BeforeTick, onTick: cfg.OnTick, pollBudget: pollsPerTick, log: cfg.Log,
		resolver: cfg.Resolver, spareAttempts: datapath.NewPlaces(cfg.Attempts),
	}
	if cfg.Lookups > 0 {
		d.lookups = datapath.NewPlaces(cfg.Lookups)
	}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	d.pipes = newPipes(cfg.Pipes)
	if err := d.chooseTier(cfg); err != nil {
		return nil, err
	}
	loops, err := eventloop.New(0)
	if err != nil {
		return nil, errors.Join(err, d.releaseAll())
	}
	d.loops = loops
	d.tosReader.open()
	if d.enforcer == nil {
		d.noPeerClocks = d.peerClocks.open(cfg.Clock)
	}
	if d.enforcer != nil {
		cfg.Shards = d.enforcer.control.Parts()
	}
	for i := range cfg.Shards {
		timer, err := newTimer()
		if err != nil {
			for _, s := range d.shards {
				err = errors.Join(err, s.timer.closeTimer())
			}
			return nil, errors.Join(err, d.releaseAll())
		}
		d.shards = append(d.shards, &shard{dp: d, index: i, timer: timer, done: make(chan struct{}), tickAt: cc.Never})
	}
	return d, nil
}

// chooseTier chooses the tier and the envelope.
func (d *Datapath) chooseTier(cfg Config) (err error) {
	envelope := cfg.Envelope
	if envelope == EBPF {
		envelope = "" // for the legs that it has no cell for
	}
	if err := d.probeKernel(envelope, cfg.ReceiveBuffer > 0); err != nil {
		return err
	}
	if cfg.Envelope != "" && cfg.Envelope != EBPF {
		return nil
	}
	d.enforcer, err = newEnforcer(cfg.Cells, cfg.Shards, d.clock)
	if err != nil && cfg.Envelope == EBPF {
		return fmt.Errorf("envelope %q: %w", EBPF, err)
	}
	if err != nil {
		d.whyUnenforced = err.Error()
	}
	return nil
}

// probeKernel asks an unconnected socket what this kernel has. receive: receive buffers are to be bounded.
func (d *Datapath) probeKernel(envelope string, receive bool) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return fmt.Errorf("probe: %w", err)
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is in it

	var info unix.TCPInfo
	size, err := tcpInfo(fd, &info)
	if err != nil {
		return fmt.Errorf("probe TCP_INFO: %w", err)
	}
	if d.missing, err = missingFields(size, bpf.KernelRelease()); err != nil {
		return err
	}
	var why string
	if d.envelope, why = chooseEnvelope(fd, envelope); why != "" {
		d.missing = append(d.missing, why)
	}
	if receive {
		if d.receiveBounds, why = probeReceiveBounds(fd); why != "" {
			d.missing = append(d.missing, why)
		}
	}
	d.pressure.clock, d.pressure.log = d.clock, d.log
	if d.pressure.bound, err = tcpBound(); err != nil {
		d.pressure.bound = math.MaxInt64
		d.missing = append(d.missing, fmt.Sprintf("receive windows do not follow the memory of TCP: %v", err))
	}
	d.missing = slices.Clip(d.missing) // legs append to it
	d.relayEnvelope = envelopeOf(fd)
	return nil
}

// releaseAll gives back what newDatapath has taken, but for the timers of shards.
func (d *Datapath) releaseAll() (err error) {
	if d.loops != nil {
		d.loops.Close()
	}
	d.pipes.closeAll()
	err = errors.Join(d.tosReader.close(), d.peerClocks.close())
	if d.enforcer != nil {
		err = errors.Join(err, d.enforcer.control.Close())
	}
	return err
}

// Close ends the ticks and the loops, and waits for them. Legs stay open, but are not served or reported any more.
func (d *Datapath) Close() (err error) {
	d.closing.Do(func() {
		for _, s := range d.shards {
			err = errors.Join(err, s.stopTicking())
		}
		eventloop.ReserveProcessors(-len(d.shards))
		err = errors.Join(err, d.releaseAll())
	})
	return err
}

// placeOnShard gives a leg a shard, unless it has one: the wanted one or, if that has no free cell, the one with the
// most of them.
func (d *Datapath) placeOnShard(s *sender, wanted int) {
	if s.shard != nil {
		return
	}
	s.shard = d.shards[wanted]
	if d.enforcer != nil && d.freeCells(s.shard) == 0 {
		s.shard = slices.MaxFunc(d.shards, func(a, b *shard) int { return cmp.Compare(d.freeCells(a), d.freeCells(b)) })
	}
}

// freeCells returns the number of further legs of a shard that the kernel could enforce.
func (d *Datapath) freeCells(s *shard) int { return d.enforcer.control.Room(s.index) }

// Shards returns the number of ticks.
func (d *Datapath) Shards() int { return len(d.shards) }

// Wake makes a shard call OnTick within Tick, also when none of its legs is busy.
func (d *Datapath) Wake(shard int) { d.shards[shard].wakeSoon() }

// Envelope returns the congestion control that new managed legs get.
func (d *Datapath) Envelope() string {
	if d.enforcer != nil {
		return EBPF
	}
	return d.relayEnvelope
}

// RelayEnvelope returns the congestion control of polled legs.
func (d *Datapath) RelayEnvelope() string { return d.relayEnvelope }

// Control returns the name under which the kernel lists our congestion control; empty: it is not loaded.
func (d *Datapath) Control() string {
	if d.enforcer == nil {
		return ""
	}
	return d.enforcer.control.Name()
}

// WhyUnenforced says why the kernel enforces no windows although Config.Envelope left the choice open; empty: it does,
// or another envelope was asked for.
func (d *Datapath) WhyUnenforced() string { return d.whyUnenforced }

// Missing says in words what was asked for, or is useful, and cannot be had.
func (d *Datapath) Missing() []string { return slices.Clone(d.missing) }

// String names the tier and the envelope, for the start-up log.
func (d *Datapath) String() string {
	if d.enforcer != nil {
		return fmt.Sprintf("%s: window and pacing enforced by the kernel, as %s; envelope %s where it has no room",
			Tier, d.Control(), d.relayEnvelope)
	}
	clocks := "clients' timestamps read"
	if d.noPeerClocks != nil {
		clocks = fmt.Sprintf("clients' timestamps not read (%v)", d.noPeerClocks)
	}
	return fmt.Sprintf("%s: window enforced by the relay, pacing by the kernel, envelope %s, %s", Tier, d.relayEnvelope,
		clocks)
}

// Status is the load of the ticks.
type Status struct {
	Busy     int           // legs with bytes unsent or unacknowledged
	Interval time.Duration // the longest between two polls of a busy polled leg

	Enforced *EnforcedStatus // nil: the kernel enforces no windows
}

// EnforcedStatus is the state of the windows that the kernel enforces, and totals since New.
type EnforcedStatus struct {
	Legs, Limit  int                // legs with such a window now, and at most
	Full, Failed uint64             // legs refused because all Limit were in use; legs refused for another reason
	Fallbacks    uint64             // times that a socket fell back to Reno because the process did not answer in time
	Answers      datapath.Histogram // from an acknowledgement until the window computed from it was in force
}

// Status returns the load of the ticks.
func (d *Datapath) Status() Status {
	s := Status{Interval: Tick}
	for _, h := range d.shards {
		polled := int(h.pollCount.Load())
		s.Busy += polled + int(max(0, h.enforcedBusy.Load()))
		s.Interval = max(s.Interval, time.Duration((polled+d.pollBudget-1)/d.pollBudget)*Tick)
	}
	if o := d.enforcer; o != nil {
		s.Enforced = &EnforcedStatus{
			Legs: int(o.bound.Load()), Limit: len(o.legs), Full: o.refusedFull.Load(), Failed: o.refusedFailed.Load(),
			Fallbacks: o.fallbacks.Load(), Answers: o.answerTimes.Snapshot(),
		}
	}
	return s
}

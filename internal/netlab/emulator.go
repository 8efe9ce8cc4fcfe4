//go:build linux

package netlab

import (
	"fmt"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

const (
	readyPackets = 2048    // made beforehand
	slabPackets  = 256     // made at once when those are not enough
	maxPackets   = 1 << 16 // bound on what a path holds: 100 MB
	readBatch    = 16      // packets read from one side before deliveries get their turn
)

// packet is one IP packet on its way.
type packet struct {
	due  cc.Time
	at   cc.Time // it came into the queue
	host int
	rec  *entry // nil before the start
	n    int
	data [MTU]byte
}

// pipe is one direction: in, through the schedule of a link or a cell, out.
type pipe struct {
	dir     Direction
	cfg     sim.LinkConfig
	radio   *sim.CellConfig // in place of cfg; nil: none
	in, out int
	hop     sim.Hop // nil before the start
	waiting []queue // by lane of the hop
	line    queue   // packets by due time
}

// queue holds packets.
type queue = sim.Ring[*packet]

// insert puts a packet in its place on the line, by due time and behind those that are as early.
func (d *pipe) insert(p *packet) {
	d.line.Push(p)
	for i := d.line.Len() - 1; i > 0 && (*d.line.At(i - 1)).due > p.due; i-- {
		*d.line.At(i), *d.line.At(i - 1) = *d.line.At(i - 1), p
	}
}

// emulator is the state of the one thread that moves a path's packets.
type emulator struct {
	*Path
	free []*packet
	made int
	fds  [3]unix.PollFd // by direction, then the eventfd
}

func newEmulator(p *Path) *emulator {
	e := &emulator{Path: p, free: make([]*packet, 0, maxPackets)}
	for e.made < readyPackets {
		e.makeSlab()
	}
	for d := range p.dirs {
		e.fds[d] = unix.PollFd{Fd: int32(p.dirs[d].in), Events: unix.POLLIN}
		p.dirs[d].waiting = make([]queue, max(sim.MaxLanes, len(p.hosts)))
	}
	e.fds[2] = unix.PollFd{Fd: int32(p.wake), Events: unix.POLLIN}
	return e
}

func (e *emulator) makeSlab() {
	slab := make([]packet, slabPackets)
	for i := range slab {
		e.free = append(e.free, &slab[i])
	}
	e.made += slabPackets
}

// run moves packets until the path closes. It never unlocks its thread, because
// timer slack and priority are not for others: the thread ends with it.
func (e *emulator) run() {
	runtime.LockOSThread()
	if err := unix.Prctl(unix.PR_SET_TIMERSLACK, 1, 0, 0, 0); err != nil {
		e.err = fmt.Errorf("netlab: set timer slack: %w", err)
		return
	}
	hurry()
	for !e.stopping.Load() {
		e.serve(&e.dirs[Down])
		e.serve(&e.dirs[Up])
		e.deliver(&e.dirs[Down])
		e.deliver(&e.dirs[Up])
		if !e.wait() {
			continue
		}
		if e.fds[2].Revents != 0 {
			e.answer()
		}
		for d := range e.dirs {
			switch r := e.fds[d].Revents; {
			case r&unix.POLLIN != 0:
				e.receive(&e.dirs[d])
			case r != 0:
				e.err = fmt.Errorf("netlab: path: the device of direction %s is gone", Direction(d))
				return
			}
		}
	}
}

// hurry lifts the calling thread above the machine's other work, where that is
// allowed: to root. Beside busy neighbours it takes the 99th percentile of
// lateness at 12 Mbit/s from milliseconds to tenths of one. The thread sleeps
// most of the time at such rates; at hundreds of Mbit/s the kernel's guard
// against starvation may stop it for 50 ms, which lateness shows.
func hurry() {
	attr := unix.SchedAttr{
		Size:     unix.SizeofSchedAttr,
		Policy:   unix.SCHED_FIFO,
		Priority: 1,
		Flags:    unix.SCHED_FLAG_RESET_ON_FORK,
	}
	if unix.SchedSetAttr(0, &attr, 0) != nil {
		_ = unix.Setpriority(unix.PRIO_PROCESS, 0, -20) // 0: this thread
	}
}

// answer does what others have asked for.
func (e *emulator) answer() {
	var count [8]byte
	_, _ = unix.Read(e.wake, count[:]) // it does not block, and how often it was woken is no matter
	for {
		select {
		case do := <-e.asked:
			do()
		default:
			return
		}
	}
}

// wait sleeps until a packet arrives, the next is nearly due, a cell's next
// subframe begins, a managed link takes its next packet or a call asks for
// something, and reports whether there is anything to read. Packets arrive some time
// after they are served, so nothing is late that is served a little late.
func (e *emulator) wait() bool {
	next := cc.Never
	for d := range e.dirs {
		if line := &e.dirs[d].line; line.Len() > 0 {
			next = min(next, (*line.At(0)).due.Add(-spin))
		}
		if hop := e.dirs[d].hop; hop != nil {
			next = min(next, hop.Next())
		}
	}
	var timeout *unix.Timespec // nil: for ever
	if next != cc.Never {
		ts := unix.NsecToTimespec(int64(max(0, next.Sub(e.now()))))
		timeout = &ts
	}
	n, errno := ppoll(e.fds[:], timeout)
	return errno == 0 && n > 0
}

func ppoll(fds []unix.PollFd, timeout *unix.Timespec) (int, unix.Errno) {
	n, _, errno := unix.Syscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&fds[0])), uintptr(len(fds)),
		uintptr(unsafe.Pointer(timeout)), 0, 0, 0)
	return int(n), errno
}

// receive takes a batch of packets into the link.
func (e *emulator) receive(d *pipe) {
	for range readBatch {
		p := e.take()
		if p == nil {
			e.refuse(d)
			return
		}
		n, errno := readPacket(d.in, p.data[:])
		if errno != 0 || n <= 0 {
			e.release(p)
			return // nothing left, or interrupted: poll tells
		}
		p.n = n
		e.admit(d, p)
	}
}

// hostOf returns the host that a packet is for or from: of an address that is
// none of theirs, the first.
func (e *emulator) hostOf(d *pipe, p *packet) int {
	src, dst := addresses(p.data[:p.n])
	if d.dir == Up {
		dst = src
	}
	return e.hosts[dst]
}

// take returns an empty packet; nil when the path holds as many as it may.
func (e *emulator) take() *packet {
	if len(e.free) == 0 {
		if e.made >= maxPackets {
			return nil
		}
		e.makeSlab()
	}
	p := e.free[len(e.free)-1]
	e.free = e.free[:len(e.free)-1]
	return p
}

// release takes back a packet that has come to its end.
func (e *emulator) release(p *packet) {
	p.rec = nil
	e.free = append(e.free, p)
}

// refuse reads one packet that there is no room for and records it as dropped.
func (e *emulator) refuse(d *pipe) {
	var scratch [MTU]byte
	if n, errno := readPacket(d.in, scratch[:]); errno == 0 && n > 0 && e.zero.Load() != 0 {
		e.record.add(entry{at: e.now(), size: uint16(n), dir: d.dir, drop: dropHeld})
	}
}

// admit puts the packet into the queue or, before the start, on the line. On a link its fate is settled, and recorded,
// at once.
func (e *emulator) admit(d *pipe, p *packet) {
	now, host := e.now(), e.hostOf(d, p)
	if d.hop == nil && !e.begin(d, now, p.n) {
		p.due = now.Add(d.delay(host))
		d.insert(p)
		return
	}
	p.at, p.host = max(now, cc.Time(e.zero.Load())), host
	flow := uint32(0)
	if d.cfg.AQM != sim.DropTail { // which alone looks at it
		flow = flowOf(p.data[:p.n])
	}
	lane, v, waits := d.hop.Enqueue(p.at, host, cc.Bytes(p.n), flow, codepoint(p.data[:p.n]))
	if waits {
		d.waiting[lane].Push(p)
	} else {
		e.settle(d, p, v)
	}
}

// settle records what becomes of a packet, and puts it on the line unless it is lost.
func (e *emulator) settle(d *pipe, p *packet, v sim.Verdict) {
	p.due, p.rec = v.Arrives, e.record.add(entry{
		at: p.at, departs: v.Departs, arrives: v.Arrives, late: latePending,
		size: uint16(p.n), dir: d.dir, drop: v.Dropped, host: uint16(p.host),
	})
	if v.Dropped != sim.DropNone {
		e.release(p)
		return
	}
	if v.Marked {
		mark(p.data[:p.n])
	}
	d.insert(p)
}

// serve settles what the hop has let go.
func (e *emulator) serve(d *pipe) {
	if d.hop == nil || d.hop.Next() > e.now() {
		return
	}
	for _, gone := range d.hop.Advance(e.now()) {
		e.settle(d, d.waiting[gone.Lane].Pop(), gone.Verdict)
	}
}

// delay is the direction's propagation towards a host before the start, as it was configured or set.
func (d *pipe) delay(host int) time.Duration {
	if d.radio != nil {
		return d.radio.Delay + d.radio.Host(host).Delay
	}
	if t := d.cfg.Delays; t != nil {
		return d.cfg.Delay + t.First()
	}
	return d.cfg.Delay
}

// setDelay changes it for the packets to come.
func (d *pipe) setDelay(delay time.Duration) {
	if d.radio != nil {
		d.radio.Delay = delay
	}
	d.cfg.Delay = delay
	if d.hop != nil {
		d.hop.SetDelay(delay)
	}
}

// begin makes the direction's schedule if the path has started, or starts with this packet.
func (e *emulator) begin(d *pipe, now cc.Time, size int) bool {
	if size >= DataSize && e.armed.Load() {
		e.zero.CompareAndSwap(0, int64(now))
	}
	zero := cc.Time(e.zero.Load())
	if zero == 0 {
		return false
	}
	d.hop = sim.NewHop(d.cfg, d.radio, zero)
	return true
}

// deliver hands over what is due.
func (e *emulator) deliver(d *pipe) {
	for d.line.Len() > 0 {
		now := e.now()
		if (*d.line.At(0)).due > now {
			return
		}
		p := d.line.Pop()
		errno := writePacket(d.out, p.data[:p.n])
		if p.rec != nil {
			if errno == 0 {
				p.rec.settle(now.Sub(p.due))
			} else {
				p.rec.fail()
			}
		}
		e.release(p)
	}
}

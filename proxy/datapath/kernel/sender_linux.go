package kernel

import (
	"cmp"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/eventloop"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// sender is the sending direction of a leg: what the socket has accepted and what is underway of it, the reports of
// that, and the limits that are in force.
//
// # Concurrency
//
// Writers (the goroutines or the loop's task that call Write), the tick of the leg's shard, and whoever calls Apply or
// Info use a sender at the same time.
//
//	field          says                             written by                    read by
//	accepted       bytes that the socket took       writers, after each write     reports, Apply, Info
//	writeCount     writes that took bytes           writers, after accepted       the tick
//	writersInside  writers between beginWrite and   writers                       the tick
//	               endWrite, while observed
//	onTick         the tick serves the leg          whoever moves it (below)      writers, Apply, the tick
//	inOptionsList  queued for setQueuedOptions      Apply sets, the tick clears   Apply, the tick
//	observed       reports are made                 Observe and Close, under mu   writers
//	writeClosed    CloseWrite was called            CloseWrite                    reports, before accepted
//	enforced       the kernel enforces the window   Enforce, under mu             all
//	limits         set once, by Enforce or Observe  under mu                      all
//	roomStep       bytes between two looks for room setChangedOptions, under mu   writers
//	roomLeft       what is left of them             writers                       writers
//
// mu guards the fields below it and is held during a report. So report may call Apply, and must not call anything else
// of the leg. Locks are taken in this order: mu, then what the observer takes (a group's), then limits.mu or shard.mu,
// under which nothing is locked. Writers take mu only where a limit waits for its socket options. Enforce and Observe
// need that no writer is active.
//
// # From a signal to a limit
//
// An enforced leg's cell has news, or it is a polled leg's turn (shard). pollLeg reads the state (readState) and
// reports it (sendReport). The observer, which is the leg's flow, answers with Apply, at once or later. A window for
// the kernel goes into the cell at once (limits.applyLimit). Socket options follow after the report, with the next
// tick, or before the next write of an idle leg (setChangedOptions).
//
// # Being on the tick
//
//	           beginWrite, Observe: set onTick, tell the shard
//	┌──────┐ ──────────────────────────────────────────────▶ ┌─────────┐
//	│ idle │                                                  │ on tick │ polled, or visited when its cell has news
//	└──────┘ ◀────────────────────────────────────────────── └─────────┘
//	           tryRetire: a poll found nothing underway
//	           removeFromTick: the observation ends
//
// Writers and the tick agree on this without a lock. A writer first raises writersInside or writeCount and then looks
// at onTick. tryRetire first clears onTick and then looks at the counts. As Go's atomics are sequentially consistent,
// either the writer finds onTick cleared and sets it again, or tryRetire finds the write and sets it. Forbidden: to
// look at onTick before the count is raised; and to clear onTick, while the leg is observed, without looking at the
// counts again.
type sender struct {
	socket
	shard *shard // set by the first Enforce or Observe

	writersInside atomic.Int32
	writeCount    atomic.Uint32
	onTick        atomic.Bool
	inOptionsList atomic.Bool
	observed      atomic.Bool
	writeClosed   atomic.Bool
	enforced      atomic.Pointer[cellReporter] // nil: the kernel does not enforce the window
	limits        atomic.Pointer[limits]       // nil: neither enforced nor observed ever

	accepted atomic.Int64
	roomStep atomic.Int64 // bytes; 0: the socket is not asked for room
	roomLeft atomic.Int64

	mu            sync.Mutex
	observer      func(flow.Report) // nil: nothing is reported
	infoReporter  *infoReporter     // makes the reports while the kernel does not enforce the window
	closed        bool
	dialled       bool // not accepted; newLeg sets it
	lowatSet      bool // TCP_NOTSENT_LOWAT is set though no limit is in force; the carrier's goroutine alone uses this
	enforces      datapath.Hold
	envelope      string // the socket's congestion control; empty: not read yet
	systemControl string // its congestion control before Enforce
	missing       []string
	errors        uint64 // failed readings and refused options

	status     tcpStatus // of the last TCP_INFO
	statusMark int64     // accepted when status was read, plus 1; 0: never read

	writer writer

	// Only the tick touches these.
	nextPoll   cc.Time // when to poll again, or to confirm
	progressAt cc.Time // when something happened last
	bulkStreak uint32  // polls in a row that were polledBulk, gaps aside
	gapStreak  uint32  // polls in a row that were polledGap
	seenWrites uint32  // writeCount at the last poll
	listed     bool    // in one of the shard's lists
}

// Enforce implements datapath.Conn.
func (s *sender) Enforce(want datapath.Hold, shard int) datapath.Hold {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0
	}
	s.endObservation()
	if want == 0 {
		return 0
	}
	s.systemControl = s.congestionName()
	s.envelope = s.systemControl
	s.dp.placeOnShard(s, shard)
	switch {
	case want&datapath.HoldWindow == 0:
		s.enforces = datapath.HoldRate
	case s.enforceWindow():
		s.enforces = datapath.HoldAll
	default:
		s.setEnvelope()
	}
	var cell *bpf.Cell
	if h := s.enforced.Load(); h != nil {
		cell = h.cell
	}
	s.ensureLimits().beginEnforcing(cell, s.enforces)
	return s.enforces
}

// ensureLimits returns the leg's limits, and makes them if there are none yet. mu is held.
func (s *sender) ensureLimits() *limits {
	if s.limits.Load() == nil {
		s.limits.Store(&limits{})
	}
	return s.limits.Load()
}

// enforceWindow asks the kernel to enforce the window, and reports whether it does. mu is held.
func (s *sender) enforceWindow() bool {
	if s.dp.enforcer == nil {
		return false
	}
	h, err := s.dp.enforcer.bindCell(s, s.shard.index, s.accepted.Load(), s.systemControl)
	if err != nil {
		s.addMissing(err.Error())
		return false
	}
	s.enforced.Store(h)
	s.envelope = EBPF
	return true
}

// setEnvelope sets the envelope below a window that the relay enforces. mu is held.
func (s *sender) setEnvelope() {
	name := s.dp.envelope
	if name == "" || name == s.envelope {
		return
	}
	if err := s.setCongestion(name); err != nil {
		s.addMissing(envelopeRefused(name, err))
		return
	}
	s.envelope = name
}

// addMissing adds to what Info names as missing. It copies the datapath's list, which all legs share.
func (s *sender) addMissing(words string) {
	s.missing = append(s.missing[:len(s.missing):len(s.missing)], words)
}

// Observe implements datapath.Conn. report may call Apply, and nothing else of the leg.
func (s *sender) Observe(report func(flow.Report)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	if report == nil {
		s.endObservation()
		return
	}
	s.makeLastReport()
	if h := s.enforced.Load(); h != nil {
		h.cell.Read(&h.latest) // if the kernel is writing it, the last reading serves once more
		h.startCountersAt(s.accepted.Load())
	} else {
		s.infoReporter = &infoReporter{}
		if s.readTCPInfo() != nil { // counted in errors
			return
		}
		s.infoReporter.findSYNOffset(&s.infoReporter.info, s.dialled)
		s.infoReporter.startCounting(&s.infoReporter.info)
		s.infoReporter.peer = s.dp.peerClocks.watchLeg(s.LocalAddrPort(), s.remote)
	}
	s.dp.placeOnShard(s, 0)
	s.ensureLimits()
	s.observer = report
	s.observed.Store(true)
	s.sendReport()
	if !s.isDrained() {
		s.addToTick()
	}
}

// makeLastReport makes the last report of an observation, if there is one. mu is held.
func (s *sender) makeLastReport() {
	if s.observer == nil {
		return
	}
	if s.readState() == nil {
		s.sendReport()
	}
	s.observed.Store(false)
	s.observer = nil
	if s.infoReporter != nil {
		s.dp.peerClocks.forgetLeg(s.infoReporter.peer)
	}
	s.removeFromTick()
}

// endObservation ends an observation, and gives the socket the options that it had before Enforce. mu is held.
func (s *sender) endObservation() {
	s.makeLastReport()
	if !s.limits.Load().stopEnforcing() {
		return
	}
	s.enforces = 0
	if h := s.enforced.Load(); h != nil {
		s.dp.enforcer.releaseCell(h)
		s.enforced.Store(nil)
	}
	if s.systemControl != "" && s.systemControl != s.envelope {
		if err := s.setCongestion(s.systemControl); err != nil {
			s.errors++
		} else {
			s.envelope = s.systemControl
		}
	}
	s.errors += defaultSockopts.setOptions(s.raw)
	s.roomStep.Store(0)
	s.missing = s.dp.missing
}

// readState reads the state that sendReport reports. mu is held.
func (s *sender) readState() error {
	h := s.enforced.Load()
	if h == nil {
		return s.readTCPInfo()
	}
	h.cell.Read(&h.latest) // if the kernel is writing it, the last reading serves once more
	return nil
}

// readTCPInfo reads TCP_INFO for status, and for infoReporter if there is one. mu is held.
func (s *sender) readTCPInfo() error {
	mark := s.accepted.Load() + 1
	var own unix.TCPInfo
	info := &own
	if s.infoReporter != nil {
		info = &s.infoReporter.info
	}
	size, err := s.readInfo(info)
	switch {
	case errors.Is(err, net.ErrClosed):
		return err
	case err != nil:
		s.errors++
		return err
	}
	if s.infoReporter != nil {
		s.infoReporter.infoSize, s.infoReporter.finQueued = size, s.writeClosed.Load()
	}
	s.status, s.statusMark = statusOf(info), mark
	return nil
}

// isUnchanged reports whether nothing was underway when TCP_INFO was read, and nothing was written since. Then it need
// not be read again, so that a scrape of ten thousand idle legs makes no system call. mu is held.
func (s *sender) isUnchanged() bool {
	return s.statusMark == s.accepted.Load()+1 && s.status.isDrained()
}

// sendReport reports what readState has read, tells the kernel that it has an answer, and sets socket options that the
// new limit has changed. mu is held.
func (s *sender) sendReport() {
	now, limits := s.dp.clock(), s.limits.Load()
	limits.beginReport()
	if h := s.enforced.Load(); h != nil {
		o := s.dp.enforcer
		o.fallbacks.Add(uint64(h.latest.Fallbacks - h.reported.Fallbacks))
		happened, fresh := o.clockTime(h.latest.At), h.latest.At != h.reported.At
		limit, prev := limits.limitSince(happened)
		fin := s.writeClosed.Load() // read before accepted: all that was written precedes the FIN
		r := h.makeReport(s.accepted.Load(), fin, happened, now, limit, prev)
		limits.updateFromReport(&r, &h.reported, fresh)
		s.observer(r)
		h.cell.Answer(&h.reported) // after the limit that follows from it: sockets that are not answered fall back
		if fresh {
			o.answerTimes.Observe(s.dp.clock().Sub(happened))
		}
	} else {
		r := s.infoReporter.makeReport(&s.infoReporter.info, now)
		r.Peer = s.dp.peerClocks.readingOf(s.infoReporter.peer)
		s.observer(r)
	}
	s.setChangedOptions()
}

// lastReport returns the report that was made last. mu is held.
func (s *sender) lastReport() *flow.Report {
	if h := s.enforced.Load(); h != nil {
		return &h.report
	}
	if s.infoReporter == nil {
		return &flow.Report{}
	}
	return &s.infoReporter.report
}

// isDrained reports whether nothing more will happen to what was written. mu is held.
func (s *sender) isDrained() bool {
	h := s.enforced.Load()
	if h == nil {
		return s.status.isDrained()
	}
	r := &h.report
	return r.Unsent == 0 && r.Acked == r.Written
}

// Apply implements datapath.Conn. The socket options of an idle leg are set before its next write.
func (s *sender) Apply(limit flow.Limit) {
	l := s.limits.Load()
	if l != nil && l.applyLimit(limit, s.dp.clock, &s.accepted) && s.onTick.Load() &&
		s.inOptionsList.CompareAndSwap(false, true) {
		s.shard.enqueueForOptions(s)
	}
}

// setChangedOptions sets the socket options that the newest limit has changed. It reports whether that may have made
// the socket send. mu is held.
func (s *sender) setChangedOptions() (sent bool) {
	do, cell, unsent, ok := s.limits.Load().takeOptions()
	if !ok {
		return false
	}
	if cell != nil {
		s.roomStep.Store(int64(unsent))
	}
	s.errors += do.setOptions(s.raw)
	if do.send {
		cell.Mark() // more has left than was reported
	}
	return do.send
}

// setQueuedOptions calls setChangedOptions. The tick calls it after enqueueForOptions.
func (s *sender) setQueuedOptions() (sent bool) {
	s.inOptionsList.Store(false)
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.closed && s.setChangedOptions()
}

// Write implements net.Conn. Where a task drives the leg it may write less than all, with datapath.ErrWait.
func (s *sender) Write(b []byte) (n int, err error) {
	s.beginWrite()
	defer s.endWrite()
	w := &s.writer
	w.mu.Lock()
	defer w.mu.Unlock()
	for n < len(b) {
		if err := s.waitWritable(); err != nil {
			return n, err
		}
		w.b, w.n, w.err = b[n:s.writeEnd(n, len(b))], 0, nil
		poll := s.raw.Write(w.tryWrite)
		w.b = nil
		s.countAccepted(w.n)
		n += w.n
		if err := s.opFailure("write", poll, w.err); err != nil {
			return n, err
		}
	}
	return n, nil
}

// SendFile writes up to n bytes of a regular file, from its offset on, without copying them (sendfile(2)). It returns
// after the first that the socket takes; 0 without an error is the end of the file.
func (s *sender) SendFile(f *os.File, n int) (sent int, err error) {
	s.beginWrite()
	defer s.endWrite()
	from, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	if err := s.waitWritable(); err != nil {
		return 0, err
	}
	n = s.writeEnd(0, n)
	var poll, call error
	err = from.Control(func(source uintptr) {
		poll = s.raw.Write(func(fd uintptr) bool {
			sent, call = unix.Sendfile(int(fd), int(source), nil, n)
			return !errors.Is(call, unix.EAGAIN)
		})
	})
	sent = max(0, sent)
	s.countAccepted(sent)
	return sent, cmp.Or(err, s.opFailure("sendfile", poll, call))
}

// writer is a write that is underway. It spares each write the allocation of a closure.
type writer struct {
	mu  sync.Mutex // one call at a time
	b   []byte
	n   int
	err error
}

// tryWrite runs inside RawConn.Write.
func (w *writer) tryWrite(fd uintptr) bool {
	w.n, w.err = eventloop.Send(int(fd), w.b)
	return !errors.Is(w.err, unix.EAGAIN)
}

// beginWrite is called before anything that hands bytes to the socket. countAccepted and then endWrite follow.
func (s *sender) beginWrite() {
	if s.observed.Load() {
		s.writersInside.Add(1)
		s.addToTick() // already now: a write may block half-way for long
	}
	if l := s.limits.Load(); l != nil && l.optionsDue.Load() { // a limit was applied while the leg was idle
		s.mu.Lock()
		s.setChangedOptions()
		s.mu.Unlock()
	}
}

// countAccepted counts n bytes that the socket has accepted.
func (s *sender) countAccepted(n int) {
	if n <= 0 {
		return
	}
	s.accepted.Add(int64(n))
	s.writeCount.Add(1)
	s.roomLeft.Add(-int64(n))
	if !s.observed.Load() {
		return
	}
	s.markForPoll()
	if s.shard.slow.Load() {
		s.shard.wakeForLeg(nil)
	}
}

// endWrite ends what beginWrite has begun.
func (s *sender) endWrite() {
	if s.observed.Load() {
		s.writersInside.Add(-1)
		s.markForPoll()
	}
}

// writeEnd returns where a write of the bytes from n to end may stop. waitWritable waits until it may begin.
func (s *sender) writeEnd(n, end int) int {
	if s.roomStep.Load() > 0 {
		return min(end, n+int(max(1, s.roomLeft.Load())))
	}
	return end
}

// waitWritable waits until at least half of roomStep may be written. By itself the kernel looks at TCP_NOTSENT_LOWAT
// only when it begins a buffer of up to 64 KiB, whatever the size of writes. So we ask it once for each roomStep.
func (s *sender) waitWritable() error {
	step := s.roomStep.Load()
	if step == 0 || s.roomLeft.Load() > step/2 {
		return nil
	}
	return s.askForRoom()
}

// askForRoom waits until the socket takes bytes. A roomStep of them may then be written.
func (s *sender) askForRoom() error {
	if err := s.raw.Write(hasRoom); err != nil {
		return s.opFailure("write", err, nil)
	}
	s.roomLeft.Store(s.roomStep.Load())
	return nil
}

// limitToRoom waits until the socket takes bytes, and returns how many of n it takes: in its send buffer, and unsent.
// Further bytes would wait in the caller's buffer or pipe, for long if the peer does not read.
func (s *sender) limitToRoom(n int) (int, error) {
	if err := s.askForRoom(); err != nil {
		return n, err
	}
	room := n
	_ = s.raw.Visit(func(fd int) error {
		if vars, err := memoryInfo(fd); err == nil {
			room = int(vars[sendBufferSize]) - int(vars[sendQueued])
		}
		most := s.limits.Load().maxUnsent()
		if most == 0 { // no limit decides what the leg has in flight
			most = maxUnsent
			if !s.lowatSet {
				s.lowatSet = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, most) == nil
			}
		}
		if unsent, err := unix.IoctlGetInt(fd, unix.SIOCOUTQNSD); err == nil {
			room = min(room, most-unsent)
		}
		return nil
	})
	return min(n, max(room, datapath.SmallBuffer)), nil
}

// CloseWrite implements datapath.Conn.
func (s *sender) CloseWrite() error {
	s.writeClosed.Store(true)
	err := s.raw.Visit(func(fd int) error { return eventloop.Shutdown(fd, unix.SHUT_WR) })
	return s.opFailure("shutdown", nil, err)
}

// closeSocket makes a last report and closes the leg, with the linger time of the first call.
func (s *sender) closeSocket(linger int) error {
	s.mu.Lock()
	if !s.closed {
		h := s.enforced.Load()
		if (s.observer == nil || h != nil) && !s.isUnchanged() {
			_ = s.readTCPInfo() // for Info
		}
		s.makeLastReport()
		s.endEnforcing()
		if linger == lingerReset || !s.status.closed { // else nothing is left to be delivered
			_ = s.raw.Visit(func(fd int) error { return setLinger(fd, linger) })
		}
	}
	s.mu.Unlock()
	return s.raw.Close()
}

// endEnforcing marks the leg as closed and ends its limits. Reno delivers what is underway. mu is held.
func (s *sender) endEnforcing() {
	s.closed = true
	s.limits.Load().stopEnforcing()
	if h := s.enforced.Load(); h != nil {
		s.dp.enforcer.releaseCell(h)
	}
}

// markForPoll makes the tick visit an enforced leg, although its socket may say nothing for long.
func (s *sender) markForPoll() {
	if h := s.enforced.Load(); h != nil {
		h.cell.Mark()
	}
}

// addToTick makes the tick serve the leg until nothing of what was written is underway.
func (s *sender) addToTick() {
	if s.onTick.Load() || !s.onTick.CompareAndSwap(false, true) {
		return
	}
	if s.enforced.Load() != nil {
		s.shard.enforcedBusy.Add(1)
	}
	s.shard.wakeForLeg(s)
	if !s.observed.Load() { // the observation ended in between
		s.removeFromTick()
	}
}

// removeFromTick ends what addToTick began. The shard drops the leg from its list at the next tick.
func (s *sender) removeFromTick() {
	if s.onTick.CompareAndSwap(true, false) && s.enforced.Load() != nil {
		s.shard.enforcedBusy.Add(-1)
	}
}

// tryRetire calls removeFromTick unless a writer is active. The type's comment says why the counts are read twice. It
// reports whether the leg is off the tick; if a writer has put it on again, the shard will list it again.
func (s *sender) tryRetire() (left bool) {
	if s.writersInside.Load() != 0 || s.writeCount.Load() != s.seenWrites {
		return false
	}
	s.removeFromTick()
	if s.writersInside.Load() == 0 && s.writeCount.Load() == s.seenWrites || !s.onTick.CompareAndSwap(false, true) {
		return true
	}
	if s.enforced.Load() != nil {
		s.shard.enforcedBusy.Add(1)
	}
	return false
}

// outcome is what a poll found.
type outcome uint8

const (
	polledQuiet outcome = iota // nothing happened since the last poll
	polledBulk                 // much moved, and the window was not full
	polledGap                  // nothing moved, after polledBulk
	polledBusy                 // something moved
	polledIdle                 // nothing more will happen until the next write
	polledGone                 // the tick need not poll the leg until it is written to
)

// A bulk leg is one on which much moves although its window is not full: its source or its receiver holds it back.
// What its window would be matters little then, and polling it every millisecond is most of what it costs. After
// bulkPolls polls of bulkBytes each it is polled every bulkPause, until its window is full. A source that writes about
// once a tick leaves out a poll now and then. Up to gapPolls such polls in a row do not end the streak.
const (
	bulkBytes = 32 << 10
	bulkPolls = 20
	bulkPause = 4 * Tick
	gapPolls  = 3
)

// isBulk reports whether the leg is polled every bulkPause. The tick calls it.
func (s *sender) isBulk() bool { return s.bulkStreak >= bulkPolls }

// pollLeg polls the leg, and updates what decides when it is polled next. The tick calls it.
func (s *sender) pollLeg(now cc.Time) outcome {
	if writes := s.writeCount.Load(); s.seenWrites != writes {
		s.seenWrites, s.progressAt = writes, now
	}
	o := s.pollSocket()
	switch o {
	case polledBulk:
		s.bulkStreak++
		s.gapStreak, s.progressAt = 0, now
		return o
	case polledGap:
		s.gapStreak++
		return o
	case polledBusy:
		s.progressAt = now
	case polledIdle:
		if s.tryRetire() {
			o = polledGone
		}
	case polledGone:
		s.removeFromTick()
	}
	s.bulkStreak, s.gapStreak = 0, 0
	return o
}

// pollSocket reads the socket's state and reports it.
func (s *sender) pollSocket() outcome {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.observer == nil {
		return polledGone
	}
	before := *s.lastReport()
	if err := s.readState(); err != nil {
		if errors.Is(err, net.ErrClosed) {
			return polledGone
		}
		return polledQuiet
	}
	s.sendReport()
	drained := s.isDrained()
	o := s.compareReports(&before, drained)
	if drained && o != polledIdle {
		s.markForPoll() // the cell may have no more news
	}
	return o
}

// compareReports compares the newest report with the one before. mu is held.
func (s *sender) compareReports(before *flow.Report, drained bool) outcome {
	after := s.lastReport()
	moved := after.Written - before.Written
	switch {
	case moved >= bulkBytes && !s.windowIsFull(after.Written-before.Acked):
		return polledBulk
	case moved == 0 && drained: // after a poll in which something moved, more mostly follows
		if s.bulkStreak > 0 && s.gapStreak < gapPolls {
			return polledGap
		}
		return polledIdle
	case before.Written == after.Written && before.Acked == after.Acked && before.Unsent == after.Unsent &&
		before.Pipe == after.Pipe && before.Lost == after.Lost && before.Timeouts == after.Timeouts:
		return polledQuiet
	}
	return polledBusy
}

// windowIsFull reports whether the window holds the leg back. Where the relay enforces it, used is how many bytes of
// it the relay had used by the last poll. mu is held.
func (s *sender) windowIsFull(used cc.Bytes) bool {
	r := s.lastReport()
	if s.enforced.Load() != nil {
		return r.Unsent > 0 && !r.RwndFull
	}
	return used+2*r.MSS > s.limits.Load().currentLimit().Cwnd
}

// pacedRest returns how long the unsent bytes take at the pacing rate, up to maxConfirm.
func (s *sender) pacedRest() time.Duration {
	s.mu.Lock()
	unsent := s.lastReport().Unsent
	s.mu.Unlock()
	if rate := s.limits.Load().currentLimit().PacingRate; unsent > 0 && rate > 0 {
		return min(rate.TimeFor(unsent), maxConfirm)
	}
	return 0
}

// confirmArrivals asks TCP_INFO whether all has arrived although the cell does not say so. If it has, the tick reports
// that.
func (s *sender) confirmArrivals() {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.enforced.Load()
	if h == nil || s.observer == nil || s.isDrained() {
		return
	}
	accepted := s.accepted.Load() // read before the socket says that it has nothing left
	if s.readTCPInfo() == nil && s.status.isDrained() && !s.status.closed {
		h.confirmArrival(accepted)
		h.cell.Mark()
	}
}

package ccp

import (
	"errors"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// A flow is announced repeatedly until the agent answers. The delays double from minCreateDelay to maxCreateDelay,
// because an agent built on portus starts the flow anew with each announcement, and may need more time to answer.
const (
	minCreateDelay = 100 * time.Millisecond
	maxCreateDelay = 30 * time.Second
	fullQueueDelay = 5 * time.Millisecond // after an announcement for which the agent's queue had no room
	afterFailing   = time.Second          // after the flow's program has failed
)

// Flow is the algorithm that an agent decides: it runs the agent's program for each
// acknowledgement and loss, and the fallback while there is no agent or no program.
//
//	announced ── program ──▶ steered ◀── late answer ── suspended
//	    ▲                    │     └─ stalled, silent ──▶    │
//	    └── gone, program ───┘                               │
//	    └── gone, Ready of the agent, silent for long ───────┘
//
// All methods are called with the lock of the flow's group held, except stageDecision and wakeGroup, which other
// goroutines call. The agent's lock guards id, and mu guards staged.
//
// A suspended flow keeps its number and its program, which continues to report while the fallback decides. So a slow
// agent loses none of its state.
type Flow struct {
	agent     *Agent // nil: the fallback decides alone
	cfg       cc.Config
	fallback  cc.Spec
	waker     func(cc.Time)
	maxWindow float64       // packets
	silence   time.Duration // how long the agent may leave all reports unanswered

	standby   cc.Algorithm // decides while the agent does not; nil: the agent does
	suspended bool         // standby decides, and the agent knows the flow
	ctl       cc.Control   // limits that the agent has asked for
	allowance allowance
	resumed   cc.Bytes // bound of a resumed flow's window, until it reaches the one of ctl; 0: none
	machine   machine
	epoch     uint64  // Agent.epoch when the flow was announced; 0: it was not
	starts    uint64  // Agent.starts when the agent last decided
	now       cc.Time // of the current event

	createDelay time.Duration // from the next Create to the one after it
	createAt    cc.Time       // when the next Create is due; 0: none is

	mss       cc.Bytes
	rtt       time.Duration // newest sample
	rates     cc.FlightRates
	rate      cc.Rate // newest sample
	acked     packets
	marked    packets
	asked     cc.Time  // first report since the agent last decided; 0: none
	failed    cc.Time  // since when each run has been aborted; 0: the last was not
	aborted   int      // runs since then
	fields    []uint64 // scratch: of a report
	out       []byte   // scratch: a message
	reports   uint64
	dropped   uint64
	decisions uint64
	fallbacks uint64

	id uint32 // guarded by the agent's mutex; a flow's own calls may read it

	mu     sync.Mutex
	staged staged
}

// staged is a decision of the agent that the flow's next event puts into force.
type staged struct {
	any     bool     // there is a decision
	program *Program // nil: the current one stays
	n       int      // of updates
	updates [maxUpdates]Update
}

// packets converts bytes to packets, and carries the remainder over to the next conversion.
type packets struct{ rest cc.Bytes }

// packetsOf returns n bytes in packets of mss bytes, rounded to the nearest with what earlier calls left over.
func (p *packets) packetsOf(n, mss cc.Bytes) uint64 {
	p.rest += n
	whole := max(0, (p.rest+mss/2)/mss)
	p.rest -= whole * mss
	return uint64(whole)
}

// newFlow returns a flow for which the fallback decides until a program of the agent a does; nil: for ever.
func newFlow(cfg cc.Config, a *Agent) *Flow {
	fallback, err := cc.Lookup(fallbackNames()[int(cfg.Params["fallback"])])
	if err != nil {
		panic(err) // it was in the list
	}
	f := &Flow{
		agent: a, cfg: cfg, fallback: fallback, waker: cfg.Wake, mss: cfg.MSS,
		maxWindow: cfg.Params["max_window"], silence: time.Duration(cfg.Params["silence"] * float64(time.Second)),
		createDelay: minCreateDelay,
	}
	f.cfg.Params, _ = fallback.Resolve(nil) // defaults never fail
	f.standby = fallback.New(f.cfg)
	if a != nil {
		a.openFlow(f)
	}
	return f
}

// wakeGroup makes the flow manager run the flow soon. Other goroutines than the group's call it.
func (f *Flow) wakeGroup(now cc.Time) {
	if f.waker != nil {
		f.waker(now)
	}
}

// OnAck runs the program.
func (f *Flow) OnAck(a cc.Ack) {
	f.readState(a.State)
	if a.RTT > 0 {
		f.rtt = a.RTT
	}
	if a.DeliveryRate > 0 {
		f.rate = a.DeliveryRate
	}
	f.rates.Add(a, a.SRTT)
	f.allowance.addAck(a)
	f.raiseResumed(a.Acked)
	f.chooseDecider(a.State)
	if f.standby != nil {
		f.standby.OnAck(a)
		if !f.suspended {
			return
		}
	}
	r := f.machine.regs[slotPrimitives:]
	r[primBytesAcked], r[primPacketsAcked] = uint64(a.Acked), f.acked.packetsOf(a.Acked, f.mss)
	r[primECNBytes], r[primECNPackets] = uint64(a.Marked), f.marked.packetsOf(a.Marked, f.mss)
	r[primLostPackets], r[primTimeout] = 0, 0
	f.runProgram(a.State)
}

// OnLoss runs the program.
func (f *Flow) OnLoss(l cc.Loss) {
	f.readState(l.State)
	f.chooseDecider(l.State)
	if f.standby != nil {
		f.standby.OnLoss(l)
		if !f.suspended {
			return
		}
	}
	r := f.machine.regs[slotPrimitives:]
	r[primBytesAcked], r[primPacketsAcked], r[primECNBytes], r[primECNPackets] = 0, 0, 0, 0
	r[primLostPackets], r[primTimeout] = uint64((l.Lost+f.mss-1)/f.mss), boolValue(l.Timeout)
	f.runProgram(l.State)
}

// OnTick looks for decisions of the agent, and runs the fallback's timer.
func (f *Flow) OnTick(s cc.State) {
	f.readState(s)
	f.chooseDecider(s)
	if f.standby != nil {
		if due := f.standby.Control().NextTick; due != 0 && due <= s.Now {
			f.standby.OnTick(s)
		}
	}
}

// readState sets the time and the segment size from the state of an event.
func (f *Flow) readState(s cc.State) {
	f.now = max(f.now, s.Now) // members of a group report in any order within a tick
	if s.MSS > 0 {
		f.mss = s.MSS
	}
}

// Control returns the limits of the agent or of the fallback.
func (f *Flow) Control() cc.Control {
	if f.standby == nil {
		ctl := f.allowance.limitControl(f.ctl, cc.InitialCwndPackets*f.mss)
		if f.resumed > 0 {
			ctl.Cwnd = min(ctl.Cwnd, f.resumed)
		}
		return ctl
	}
	ctl := f.standby.Control()
	ctl.Phase = "fallback"
	if f.createAt != 0 && (ctl.NextTick == 0 || f.createAt < ctl.NextTick) {
		ctl.NextTick = f.createAt
	}
	return ctl
}

// Inspect returns the values of Spec.Internals.
func (f *Flow) Inspect() cc.Internals {
	in := cc.Internals{2: float64(f.reports), float64(f.dropped), float64(f.decisions), float64(f.fallbacks)}
	if f.standby == nil {
		in[0], in[1] = 1, float64(f.machine.program.id)
	}
	return in
}

// Close closes the flow at the agent.
func (f *Flow) Close() {
	if f.agent == nil {
		return
	}
	if f.standby == nil {
		f.agent.counters.steered.Add(^uint64(0))
	}
	f.closeAtAgent()
	f.agent.closeFlow(f)
}

// closeAtAgent closes the flow at the agent, if it was announced to one that is still there.
func (f *Flow) closeAtAgent() {
	if f.epoch != 0 && f.epoch == f.agent.epoch.Load() {
		f.out = Measure{Flow: f.id}.Append(f.out[:0])
		_ = f.agent.sendMessage(f.out) // if it is lost, the agent only keeps some memory
	}
}

// chooseDecider puts decisions of the agent into force, and switches between the agent and the fallback.
func (f *Flow) chooseDecider(s cc.State) {
	if f.agent == nil {
		return
	}
	if f.standby == nil {
		if why, should := f.shouldFallBack(s); should {
			f.fallBack(s, why)
		}
	}
	if f.suspended && f.isForgotten(s) {
		f.renumberFlow()
	}
	f.applyStaged(s.Now) // before announceFlow, since another Create would make the agent start the flow anew
	if f.standby != nil && !f.suspended {
		f.announceFlow(s)
		f.applyStaged(s.Now) // in virtual time the answer is there
	}
}

// announceFlow sends a Create if one is due.
func (f *Flow) announceFlow(s cc.State) {
	epoch := f.agent.epoch.Load()
	if epoch != f.epoch {
		f.epoch, f.createDelay, f.createAt = epoch, minCreateDelay, s.Now
	}
	if epoch == 0 {
		f.createAt = 0
		return
	}
	if s.Now < f.createAt {
		return
	}
	if unread := cc.Time(f.agent.unread.Load()); unread != 0 && s.Now.Sub(unread) > Patience(s.SRTT) {
		f.createAt = s.Now.Add(minCreateDelay) // the agent does not read at present
		return
	}
	f.out = Create{
		Flow: f.id, InitialCwnd: clampToUint32(f.initialWindow()), MSS: clampToUint32(f.mss), Algorithm: f.agent.algorithm,
		Local: f.cfg.Ends.From, Remote: f.cfg.Ends.To,
	}.Append(f.out[:0])
	if err := f.agent.sendMessage(f.out); err != nil {
		f.createAt = s.Now.Add(fullQueueDelay)
		return
	}
	f.createAt = s.Now.Add(f.createDelay)
	f.createDelay = min(2*f.createDelay, maxCreateDelay)
}

// initialWindow returns the window that the agent starts with. It is small, since some agents never go below it.
func (f *Flow) initialWindow() cc.Bytes { return min(f.cfg.InitialCwnd, cc.InitialCwndPackets*f.mss) }

// stageDecision stores a decision until the flow's next event. A program replaces earlier decisions.
// Without one, its updates are added to the earlier ones.
func (f *Flow) stageDecision(p *Program, updates []Update) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st := &f.staged
	st.any = true
	if p != nil {
		st.program, st.n = p, 0
	}
	for _, u := range updates {
		u.Register = namedRegister(u.Class, u.Index)
		i := 0
		for i < st.n && st.updates[i].Register != u.Register {
			i++
		}
		if i == len(st.updates) {
			continue
		}
		st.updates[i] = u
		st.n = max(st.n, i+1)
	}
}

// applyStaged puts the stored decision into force.
func (f *Flow) applyStaged(now cc.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st := &f.staged
	if !st.any {
		return
	}
	st.any = false
	if f.suspended {
		f.resumeFlow()
	}
	if st.program != nil {
		f.startProgram(st.program, now)
	}
	if f.standby == nil {
		for _, u := range st.updates[:st.n] {
			f.setRegister(u)
		}
		f.decisions++
		f.asked, f.starts = 0, f.agent.starts.Load()
	}
	st.program, st.n = nil, 0
}

// startProgram lets the agent's program decide from now on.
func (f *Flow) startProgram(p *Program, now cc.Time) {
	if f.standby != nil {
		f.ctl = cc.Control{Cwnd: f.initialWindow(), Phase: "agent"}
		f.standby, f.createAt, f.resumed = nil, 0, 0
		f.agent.counters.steered.Add(1)
	}
	f.machine.resetProgram(p, microseconds(now))
	f.failed = 0
}

// setRegister sets a register. A register that the program does not have is ignored.
func (f *Flow) setRegister(u Update) {
	switch {
	case u.Class == ClassControl:
		if slot, ok := f.machine.program.control[u.Index]; ok {
			f.machine.regs[slot] = u.Value
		}
	case u.Class == ClassImplicit && u.Index == implicitCwnd && u.Value > 0:
		f.setCwnd(u.Value)
	case u.Class == ClassImplicit && u.Index == implicitRate && u.Value > 0:
		f.setRate(u.Value)
	}
}

// minWindow is in segments. With a window of one, each segment waits for the receiver's delayed acknowledgement, 40
// ms or more. Agents without a minimum of their own compute such windows on short paths.
const minWindow = 2

// setCwnd sets the agent's window, between minWindow and max_window.
func (f *Flow) setCwnd(v uint64) {
	least := minWindow * f.mss
	most := max(least, cc.Bytes(f.maxWindow*float64(f.mss)))
	f.ctl.Cwnd = max(least, min(cc.Bytes(min(v, uint64(cc.MaxCwnd))), most))
}

// minRate is in segments per second. At a byte per second it would take minutes until the next acknowledgement, and so
// until the report that the agent answers with another rate.
const minRate = 2

// setRate sets the agent's rate in bytes per second, cut to 32 bits as by libccp; 0: no limit.
func (f *Flow) setRate(v uint64) {
	rate := uint64(uint32(v))
	if rate > 0 {
		rate = max(rate, minRate*uint64(f.mss))
	}
	f.ctl.PacingRate = cc.Rate(8 * rate)
}

// clockStart is the time of agents at our time 0. Agents were made for a kernel's clock, which is hours ahead, and
// subtract windows of seconds from it without a sign.
const clockStart = cc.Time(time.Hour)

// microseconds returns a time by the clock of agents.
func microseconds(t cc.Time) uint64 { return uint64(max(t, 0)+clockStart) / uint64(time.Microsecond) }

// runProgram sets the primitives of the flow's state and runs the program. The caller has set those of the event.
func (f *Flow) runProgram(s cc.State) {
	r := f.machine.regs
	p := r[slotPrimitives:]
	p[primNow] = microseconds(f.now)
	p[primBytesInFlight] = uint64(max(s.Inflight, 0))
	p[primPacketsInFlight] = uint64(max(s.Inflight+f.mss/2, 0) / f.mss)
	p[primRTT] = noRTT
	if f.rtt > 0 {
		p[primRTT] = uint64(max(f.rtt/time.Microsecond, 1))
	}
	p[primRateOutgoing], p[primRateIncoming] = uint64(f.rate/8), uint64(f.rate/8)
	if sent, received, ok := f.rates.Rates(s.SRTT, f.mss); ok {
		p[primRateOutgoing], p[primRateIncoming] = uint64(sent), uint64(received)
	}
	inForce := f.Control()
	cwnd, rate := uint64(inForce.Cwnd), uint64(inForce.PacingRate/8)
	r[implicitCwnd], r[implicitRate] = cwnd, rate
	if !f.machine.runOnce(microseconds(f.now)) {
		f.agent.counters.aborted.Add(1)
		if f.failed == 0 {
			f.failed, f.aborted = s.Now, 0
		}
		f.aborted++
		return
	}
	f.failed = 0
	if f.standby == nil && r[implicitCwnd] > 0 && r[implicitCwnd] != cwnd {
		f.setCwnd(r[implicitCwnd])
	}
	if f.standby == nil && r[implicitRate] > 0 && r[implicitRate] != rate {
		f.setRate(r[implicitRate])
	}
	if r[implicitReport] != 0 {
		f.sendReport(s.Now)
	}
}

// sendReport sends the report's fields. If there is no room for it, the program goes on folding, and the next report
// includes this one.
func (f *Flow) sendReport(now cc.Time) {
	f.fields = f.fields[:0]
	for _, slot := range f.machine.program.reports {
		f.fields = append(f.fields, f.machine.regs[slot])
	}
	f.out = Measure{Flow: f.id, Program: f.machine.program.id, Fields: f.fields}.Append(f.out[:0])
	err := f.agent.sendMessage(f.out)
	if errors.Is(err, ErrBusy) {
		f.dropped++
		f.agent.counters.dropped.Add(1)
		return
	}
	if err != nil {
		return // the next event notices
	}
	f.machine.renewVolatile()
	f.reports++
	f.agent.counters.reports.Add(1)
	if f.asked == 0 {
		f.asked = now
	}
	f.applyStaged(now) // in virtual time the answer is there
}

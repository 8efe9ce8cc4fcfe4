package ccp

import (
	"errors"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// How often a flow is announced until the agent answers: soon where its queue was full. An agent built
// on portus begins the flow anew with each announcement, so one that answers late is left more and more time.
const (
	createSoon  = 5 * time.Millisecond
	createFirst = 100 * time.Millisecond
	createLast  = 30 * time.Second

	// afterFailing is when a flow is announced again after its program has failed.
	afterFailing = time.Second
)

// Flow is the algorithm that an agent decides: it runs the agent's program for each
// acknowledgement and loss, and the fallback while there is no agent or no program.
//
//	announced ── program ──▶ steered ◀── late answer ── suspended
//	    ▲                    │     └─ stalled, silent ──▶    │
//	    └── gone, program ───┘                               │
//	    └── gone, Ready of the agent, silent for long ───────┘
//
// All methods are called with the lock of the flow's group held, but for stageDecision and wakeGroup, which other
// goroutines call.
// Two fields have locks of their own: id that of the agent, staged the flow's mu.
//
// A suspended flow keeps its number and its program, which goes on reporting while the fallback decides. So an agent
// that was slow loses none of its state.
type Flow struct {
	agent    *Agent // nil: there is none at all
	cfg      cc.Config
	fallback cc.Spec
	waker    func(cc.Time)
	most     float64 // packets
	silence  time.Duration

	standby   cc.Algorithm // decides while the agent does not; nil: the agent does
	suspended bool         // standby decides, and the agent knows the flow
	ctl       cc.Control   // what the agent has asked for
	allowance allowance
	resumed   cc.Bytes // largest window of a resumed flow, until that is what the agent asks for; 0: not bounded
	machine   machine
	epoch     uint64 // of the agent's connection to which the flow was announced; 0: to none
	starts    uint64 // Agent.starts when the agent last decided
	at        cc.Time
	retry     time.Duration // to the next Create
	create    cc.Time       // when it is due; 0: none is

	mss       cc.Bytes
	rtt       time.Duration // newest sample
	rates     cc.FlightRates
	rate      cc.Rate // newest sample
	acked     packets
	marked    packets
	asked     cc.Time // first report since the agent was last heard; 0: none
	failed    cc.Time // since when each run has been aborted; 0: the last was not
	aborted   int     // runs since then
	fields    []uint64
	out       []byte
	reports   uint64
	dropped   uint64
	decisions uint64
	fallbacks uint64

	id uint32 // guarded by the agent's mutex; a flow's own calls may read it

	mu     sync.Mutex // guards what has come and not been looked at yet
	staged staged
}

// staged is what the agent has decided and the next run begins with.
type staged struct {
	any     bool
	program *Program // nil: the present one
	n       int
	updates [maxUpdates]Update
}

// packets counts bytes in packets, each rest with the next.
type packets struct{ rest cc.Bytes }

// packetsOf returns n bytes in packets of mss bytes, rounded to the nearest with what earlier calls left over.
func (p *packets) packetsOf(n, mss cc.Bytes) uint64 {
	p.rest += n
	whole := max(0, (p.rest+mss/2)/mss)
	p.rest -= whole * mss
	return uint64(whole)
}

// newFlow returns a flow that its fallback decides, until a program of the agent a does; nil: there is no agent at
// all.
func newFlow(cfg cc.Config, a *Agent) *Flow {
	fallback, err := cc.Lookup(fallbackNames()[int(cfg.Params["fallback"])])
	if err != nil {
		panic(err) // it was in the list
	}
	f := &Flow{
		agent: a, cfg: cfg, fallback: fallback, waker: cfg.Wake, mss: cfg.MSS,
		most: cfg.Params["max_window"], silence: time.Duration(cfg.Params["silence"] * float64(time.Second)),
		retry: createFirst,
	}
	f.cfg.Params, _ = fallback.Resolve(nil) // the defaults go together
	f.standby = fallback.New(f.cfg)
	if a != nil {
		a.openFlow(f)
	}
	return f
}

// wakeGroup has the flow manager run the flow soon, at now, from another goroutine than its group's.
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

// OnTick looks whether the agent is there and what it has said.
func (f *Flow) OnTick(s cc.State) {
	f.readState(s)
	f.chooseDecider(s)
	if f.standby != nil {
		if due := f.standby.Control().NextTick; due != 0 && due <= s.Now {
			f.standby.OnTick(s)
		}
	}
}

// readState takes over the time and the segment size that each call of the algorithm brings.
func (f *Flow) readState(s cc.State) {
	f.at = max(f.at, s.Now) // members of a group report in any order within a tick
	if s.MSS > 0 {
		f.mss = s.MSS
	}
}

// Control returns the limits of whoever decides.
func (f *Flow) Control() cc.Control {
	if f.standby == nil {
		ctl := f.allowance.limit(f.ctl, cc.InitialCwndPackets*f.mss)
		if f.resumed > 0 {
			ctl.Cwnd = min(ctl.Cwnd, f.resumed)
		}
		return ctl
	}
	ctl := f.standby.Control()
	ctl.Phase = "fallback"
	if f.create != 0 && (ctl.NextTick == 0 || f.create < ctl.NextTick) {
		ctl.NextTick = f.create
	}
	return ctl
}

// Inspect shows who decides.
func (f *Flow) Inspect() cc.Internals {
	in := cc.Internals{2: float64(f.reports), float64(f.dropped), float64(f.decisions), float64(f.fallbacks)}
	if f.standby == nil {
		in[0], in[1] = 1, float64(f.machine.program.id)
	}
	return in
}

// Close has the agent forget the flow.
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
		_ = f.agent.sendMessage(f.out) // lost, it costs the agent some memory
	}
}

// chooseDecider finds out who decides now, and takes in what the agent has said.
func (f *Flow) chooseDecider(s cc.State) {
	if f.agent == nil {
		return
	}
	if f.standby == nil {
		if why, over := f.agentIsOver(s); over {
			f.fallBack(s, why)
		}
	}
	if f.suspended && f.isForgotten(s) {
		f.renumber()
	}
	f.applyStaged(s.Now) // where an answer has come another announcement would make the agent begin anew
	if f.standby != nil && !f.suspended {
		f.announceFlow(s)
		f.applyStaged(s.Now) // in virtual time the answer is there
	}
}

// announceFlow tells the agent of the flow, until it answers.
func (f *Flow) announceFlow(s cc.State) {
	epoch := f.agent.epoch.Load()
	if epoch != f.epoch {
		f.epoch, f.retry, f.create = epoch, createFirst, s.Now
	}
	if epoch == 0 {
		f.create = 0
		return
	}
	if s.Now < f.create {
		return
	}
	if unread := cc.Time(f.agent.unread.Load()); unread != 0 && s.Now.Sub(unread) > Patience(s.SRTT) {
		f.create = s.Now.Add(createFirst) // no agent would read it
		return
	}
	f.out = Create{
		Flow: f.id, InitialCwnd: clampToUint32(f.firstWindow()), MSS: clampToUint32(f.mss), Algorithm: f.agent.algorithm,
		Local: f.cfg.Ends.From, Remote: f.cfg.Ends.To,
	}.Append(f.out[:0])
	if err := f.agent.sendMessage(f.out); err != nil {
		f.create = s.Now.Add(createSoon)
		return
	}
	f.create = s.Now.Add(f.retry)
	f.retry = min(2*f.retry, createLast)
}

// firstWindow is what an agent starts from: some never go below it.
func (f *Flow) firstWindow() cc.Bytes { return min(f.cfg.InitialCwnd, cc.InitialCwndPackets*f.mss) }

// stageDecision keeps a decision until the flow's next event. A program replaces what was decided
// before; registers are set one by one.
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

// applyStaged puts into force what the agent has decided.
func (f *Flow) applyStaged(now cc.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	st := &f.staged
	if !st.any {
		return
	}
	st.any = false
	if f.suspended {
		f.resume()
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
		f.ctl = cc.Control{Cwnd: f.firstWindow(), Phase: "agent"}
		f.standby, f.create, f.resumed = nil, 0, 0
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

// leastWindow is in segments. A window of one waits for the receiver's delayed acknowledgement with
// each segment, 40 ms or more; agents get there on short paths by arithmetic without a least window.
const leastWindow = 2

// setCwnd keeps a window within what the rule lets an agent have.
func (f *Flow) setCwnd(v uint64) {
	least := leastWindow * f.mss
	most := max(least, cc.Bytes(f.most*float64(f.mss)))
	f.ctl.Cwnd = max(least, min(cc.Bytes(min(v, uint64(cc.MaxCwnd))), most))
}

// leastRate is in segments per second. At a byte per second the next acknowledgement, and with it the report that
// the agent could answer with another rate, would come after minutes.
const leastRate = 2

// setRate takes bytes per second; 32 bits of them, as libccp does. 0 is no limit.
func (f *Flow) setRate(v uint64) {
	rate := uint64(uint32(v))
	if rate > 0 {
		rate = max(rate, leastRate*uint64(f.mss))
	}
	f.ctl.PacingRate = cc.Rate(8 * rate)
}

// clockStart is what the time of agents begins with. They subtract windows of seconds from it without a sign, and a
// kernel's clock, for which they were made, is hours up.
const clockStart = cc.Time(time.Hour)

// microseconds is a time as agents see it.
func microseconds(t cc.Time) uint64 { return uint64(max(t, 0)+clockStart) / uint64(time.Microsecond) }

// runProgram runs the program on the primitives, after the caller has set those of the event.
func (f *Flow) runProgram(s cc.State) {
	r := f.machine.regs
	p := r[slotPrimitives:]
	p[primNow] = microseconds(f.at)
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
	if !f.machine.runOnce(microseconds(f.at)) {
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

// sendReport sends what the program has folded. One that finds no room is part of the next.
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

package ccp

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/penstock-net/penstock/cc"
)

// ErrBusy is what a Transmit returns where there is no room for a message at present.
var ErrBusy = errors.New("the agent's queue is full")

// maxPrograms bounds what an agent may install.
const maxPrograms = 256

// Transmit sends one message to an agent, as one datagram. It must not block and not keep
// b. ErrBusy: there is no room now; any other error: no agent reads there any more.
type Transmit func(b []byte) error

// Agent is an agent as its datapath sees it: its programs and the flows it steers. Its
// methods may be called from any goroutine; those that call Wake of flows, which are
// Connect, Lost and Receive, with no lock of a flow's group held.
//
// Who touches what. A flow's own calls come with the lock of its group held; mu is taken after it.
//
//	epoch     Connect sets it once its Ready is sent; Lost and a failed message clear it; flows compare it with theirs
//	unread    the datapath sets it; flows look at it to know that the agent is stalled
//	starts    Receive counts a Ready; a flow that has seen another number and gets no answer takes its state for lost
//	counters  anyone
//	last, nextFlow, flows, programs   under mu; a Program never changes once it is in the map
type Agent struct {
	// Inline says that answers come in while Transmit runs, as in virtual time. Flows are
	// not woken then: they look for answers after each report. Set it before the first flow.
	Inline bool

	name      string
	algorithm string // in each Create
	transmit  Transmit

	epoch    atomic.Uint64 // of the connection; 0: there is none
	unread   atomic.Int64  // cc.Time since when a message waits to be read; 0: none does
	starts   atomic.Uint64 // times that the agent has said Ready: it has begun anew
	counters counters

	mu       sync.Mutex // taken after that of a group
	last     uint64     // newest epoch
	nextFlow uint32
	flows    map[uint32]*Flow
	programs map[uint32]*Program
}

// counters are what has happened, for metrics.
type counters struct {
	reports, dropped, decisions, aborted, steered atomic.Uint64
	refused                                       [refusals]atomic.Uint64
	fallbacks                                     [reasons]atomic.Uint64
}

// refusal is why a message of the agent was not heeded.
type refusal int

const (
	malformed      refusal = iota // its bytes are no message, or install no program that can run
	noSuchFlow                    // it is about a flow that there is none of, as one that has just ended
	noSuchProgram                 // it sets a program that was not installed
	unexpectedKind                // it is of the other direction, or of a version to come
	refusals
)

var refusalNames = [refusals]string{"malformed", "no_such_flow", "no_such_program", "unexpected_kind"}

// Counters are what an agent's flows have seen since the start.
type Counters struct {
	Flows     int               // that would be steered
	Steered   int               // that are
	Programs  int               // that are installed
	Reports   uint64            // sent
	Dropped   uint64            // reports that found no room; the next one has what they would have told
	Decisions uint64            // messages that set a flow's program or registers
	Refused   map[string]uint64 // messages that were not heeded, by reason
	Aborted   uint64            // runs of programs that ended in arithmetic without a result
	Fallbacks map[string]uint64 // by reason
}

// NewAgent returns an agent that is not connected yet. Its flows ask for an algorithm
// by that name, if it is not empty.
func NewAgent(name, algorithm string, t Transmit) (*Agent, error) {
	if len(algorithm) > MaxName {
		return nil, fmt.Errorf("ccp: the name of an algorithm has %d bytes; it may have %d", len(algorithm), MaxName)
	}
	return &Agent{
		name: name, algorithm: algorithm, transmit: t,
		flows: map[uint32]*Flow{}, programs: map[uint32]*Program{},
	}, nil
}

// Connect says that an agent is there, a new one as far as anybody knows: what an earlier
// one installed is forgotten, and flows are announced to it.
func (a *Agent) Connect(now cc.Time, datapath uint32) error {
	a.mu.Lock()
	a.last++
	epoch := a.last
	clear(a.programs)
	a.unread.Store(0)
	a.mu.Unlock()
	if err := a.transmit(Ready{datapath}.Append(nil)); err != nil {
		return err
	}
	a.epoch.Store(epoch) // only now, as the Ready has the agent forget what was announced before
	a.wakeAll(now)
	return nil
}

// Lost reports that the agent is gone: flows go on without it.
func (a *Agent) Lost(now cc.Time) {
	a.epoch.Store(0)
	a.wakeAll(now)
}

// Unread says since when a message has waited to be read; 0: none does.
func (a *Agent) Unread(since cc.Time) { a.unread.Store(int64(since)) }

// Connected reports whether an agent is there.
func (a *Agent) Connected() bool { return a.epoch.Load() != 0 }

// wakeAll lets every flow look at what has changed. Flows are woken without the lock, since each takes that of its
// group.
func (a *Agent) wakeAll(now cc.Time) {
	a.mu.Lock()
	flows := slices.Collect(maps.Values(a.flows))
	a.mu.Unlock()
	for _, f := range flows {
		f.wakeGroup(now)
	}
}

// sendMessage transmits a message. One that no agent reads ends the connection.
func (a *Agent) sendMessage(b []byte) error {
	epoch := a.epoch.Load()
	if epoch == 0 {
		return errGone
	}
	err := a.transmit(b)
	if err != nil && !errors.Is(err, ErrBusy) {
		a.epoch.CompareAndSwap(epoch, 0)
	}
	return err
}

// errGone is the error of a message while no agent is connected.
var errGone = errors.New("no agent is there")

// Receive takes a datagram of the agent. An error wraps ErrMalformed, and what is behind
// it in the datagram is not looked at; messages about flows and programs that there are
// none of are late, and only counted.
func (a *Agent) Receive(now cc.Time, datagram []byte) error {
	for len(datagram) > 0 {
		m, rest, err := Next(datagram)
		if err == nil {
			err = a.takeMessage(now, m)
		}
		if err != nil {
			a.CountMalformed()
			return fmt.Errorf("ccp: agent %q: %w", a.name, err)
		}
		datagram = rest
	}
	return nil
}

// CountMalformed counts a message that was malformed, as Receive does. It is for those that cannot be handed to it.
func (a *Agent) CountMalformed() { a.counters.refused[malformed].Add(1) }

// takeMessage acts on one message. Kinds that an agent does not send are counted and ignored.
func (a *Agent) takeMessage(now cc.Time, m Message) error {
	switch m.Kind {
	case KindInstall:
		in, err := m.Install()
		if err != nil {
			return err
		}
		return a.installProgram(in)
	case KindChange, KindUpdate:
		c, err := m.Change()
		if err != nil {
			return err
		}
		a.decideFlow(now, c)
	case KindReady: // the agent has begun anew, and knows no flow
		a.starts.Add(1)
		if !a.Inline {
			a.wakeAll(now)
		}
	default:
		a.counters.refused[unexpectedKind].Add(1)
	}
	return nil
}

// installProgram verifies a program and keeps it for the flows that will name it. A program of a number that is
// known replaces the former one; flows that run that keep it.
func (a *Agent) installProgram(in Install) error {
	p, err := in.Verify()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.id == 1 { // numbers count from 1: the agent has started anew
		clear(a.programs)
	}
	if a.programs[p.id] == nil && len(a.programs) == maxPrograms {
		return fmt.Errorf("%w: %w: %d programs are installed, which is the most", ErrMalformed, ErrProgram, maxPrograms)
	}
	a.programs[p.id] = p
	return nil
}

// decideFlow hands a decision to its flow.
func (a *Agent) decideFlow(now cc.Time, c Change) {
	a.mu.Lock()
	f, p := a.flows[c.Flow], a.programs[c.Program]
	a.mu.Unlock()
	switch {
	case f == nil:
		a.counters.refused[noSuchFlow].Add(1)
		return
	case c.Program != 0 && p == nil:
		a.counters.refused[noSuchProgram].Add(1)
		return
	}
	a.counters.decisions.Add(1)
	f.stageDecision(p, c.Updates)
	if !a.Inline {
		f.wakeGroup(now)
	}
}

// openFlow gives a flow a number that no message in flight is about.
func (a *Agent) openFlow(f *Flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.flows, f.id)
	for a.nextFlow++; a.nextFlow == 0 || a.flows[a.nextFlow] != nil; a.nextFlow++ {
	}
	f.id = a.nextFlow
	a.flows[f.id] = f
}

// closeFlow forgets a flow: later messages about its number are counted as late.
func (a *Agent) closeFlow(f *Flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.flows, f.id)
}

// Counters returns what there is and what has happened.
func (a *Agent) Counters() Counters {
	a.mu.Lock()
	flows, programs := len(a.flows), len(a.programs)
	a.mu.Unlock()
	c := &a.counters
	out := Counters{
		Flows: flows, Programs: programs, Steered: int(c.steered.Load()),
		Reports: c.reports.Load(), Dropped: c.dropped.Load(), Decisions: c.decisions.Load(),
		Refused: map[string]uint64{}, Aborted: c.aborted.Load(), Fallbacks: map[string]uint64{},
	}
	for i := range c.refused {
		out.Refused[refusalNames[i]] = c.refused[i].Load()
	}
	for i := range c.fallbacks {
		out.Fallbacks[reasonNames[i]] = c.fallbacks[i].Load()
	}
	return out
}

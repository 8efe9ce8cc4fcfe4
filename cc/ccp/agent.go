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

// ErrBusy is the error of a Transmit that has no room for a message at present.
var ErrBusy = errors.New("the agent's queue is full")

// maxPrograms bounds the programs that an agent may install.
const maxPrograms = 256

// Transmit sends one message to an agent, as one datagram. It must not block and not keep
// b. ErrBusy: there is no room now; any other error: no agent reads there any more.
type Transmit func(b []byte) error

// Agent is the datapath's side of an agent: its programs and the flows that it steers. Its methods may be called from
// any goroutine. Connect, Disconnect and Receive wake flows, so no lock of a flow's group may be held then.
//
// Who touches what. A flow's own calls come with the lock of its group held; mu is taken after it.
//
//	epoch     Connect sets it after the Ready; Disconnect and a failed message clear it; flows compare it with theirs
//	unread    the datapath sets it; flows read it to see whether the agent is stalled
//	starts    Receive counts a Ready; a flow that saw another count and gets no answer is unknown to the agent
//	counters  anyone
//	last, nextFlow, flows, programs   under mu; a Program never changes once it is in the map
type Agent struct {
	// Inline says that answers are received while Transmit runs, as in virtual time. Then flows are
	// not woken, and look for answers after each report. Set it before the first flow.
	Inline bool

	name      string
	algorithm string // in each Create
	transmit  Transmit

	epoch    atomic.Uint64 // of the connection; 0: there is none
	unread   atomic.Int64  // cc.Time since when a message waits to be read; 0: none does
	starts   atomic.Uint64 // times that the agent has sent Ready, which it does when it starts
	counters counters

	mu       sync.Mutex // taken after that of a group
	last     uint64     // newest epoch
	nextFlow uint32
	flows    map[uint32]*Flow
	programs map[uint32]*Program
}

// counters count events for metrics.
type counters struct {
	reports, dropped, decisions, aborted, steered atomic.Uint64
	refused                                       [refusals]atomic.Uint64
	fallbacks                                     [reasons]atomic.Uint64
}

// refusal is why a message of the agent had no effect.
type refusal int

const (
	malformed      refusal = iota // its bytes are no message, or its program cannot run
	noSuchFlow                    // its flow does not exist, perhaps because it has just ended
	noSuchProgram                 // it sets a program that was not installed
	unexpectedKind                // its kind is for the other direction, or unknown
	refusals
)

var refusalNames = [refusals]string{"malformed", "no_such_flow", "no_such_program", "unexpected_kind"}

// Counters are the state and the counters of an agent's flows. Counters begin at the start of the process.
type Counters struct {
	Flows     int               // flows of the agent
	Steered   int               // flows that the agent steers now
	Programs  int               // installed programs
	Reports   uint64            // sent reports
	Dropped   uint64            // reports that found no room; the flow's next report includes them
	Decisions uint64            // messages that set a flow's program or registers
	Refused   map[string]uint64 // messages without effect, by reason
	Aborted   uint64            // runs of programs that ended in arithmetic without a result
	Fallbacks map[string]uint64 // by reason
}

// NewAgent returns an agent that is not connected yet. Its flows ask it for the algorithm, unless that
// is empty.
func NewAgent(name, algorithm string, t Transmit) (*Agent, error) {
	if len(algorithm) > MaxName {
		return nil, fmt.Errorf("ccp: the name of an algorithm has %d bytes; it may have %d", len(algorithm), MaxName)
	}
	return &Agent{
		name: name, algorithm: algorithm, transmit: t,
		flows: map[uint32]*Flow{}, programs: map[uint32]*Program{},
	}, nil
}

// Connect begins a connection to an agent. It forgets earlier programs, since the agent may be a new
// process, and flows are announced to it.
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
	a.epoch.Store(epoch) // after the Ready, because at a Ready the agent forgets flows announced before
	a.wakeAll(now)
	return nil
}

// Disconnect ends the connection. Flows continue under their fallback.
func (a *Agent) Disconnect(now cc.Time) {
	a.epoch.Store(0)
	a.wakeAll(now)
}

// SetUnread sets since when a message to the agent has been unread; 0: none is.
func (a *Agent) SetUnread(since cc.Time) { a.unread.Store(int64(since)) }

// IsConnected reports whether an agent is connected.
func (a *Agent) IsConnected() bool { return a.epoch.Load() != 0 }

// wakeAll makes every flow look for changes. It does not hold mu then, since each flow takes the lock of its group.
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

// Receive handles a datagram of the agent. Errors wrap ErrMalformed; the rest of the datagram is not
// read then. Messages about flows and programs that do not exist are late, and only counted.
func (a *Agent) Receive(now cc.Time, datagram []byte) error {
	for len(datagram) > 0 {
		m, rest, err := Next(datagram)
		if err == nil {
			err = a.handleMessage(now, m)
		}
		if err != nil {
			a.CountMalformed()
			return fmt.Errorf("ccp: agent %q: %w", a.name, err)
		}
		datagram = rest
	}
	return nil
}

// CountMalformed counts a malformed message that cannot be passed to Receive, for example because of its length.
func (a *Agent) CountMalformed() { a.counters.refused[malformed].Add(1) }

// handleMessage handles one message. Kinds that an agent does not send are counted and ignored.
func (a *Agent) handleMessage(now cc.Time, m Message) error {
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
	case KindReady: // the agent has started, and knows no flow
		a.starts.Add(1)
		if !a.Inline {
			a.wakeAll(now)
		}
	default:
		a.counters.refused[unexpectedKind].Add(1)
	}
	return nil
}

// installProgram verifies a program and stores it by its number. Flows that run a former program of that number keep
// running it.
func (a *Agent) installProgram(in Install) error {
	p, err := in.Verify()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if p.id == 1 { // agents count from 1, so this one has started anew
		clear(a.programs)
	}
	if a.programs[p.id] == nil && len(a.programs) == maxPrograms {
		return fmt.Errorf("%w: %w: %d programs are installed, which is the most", ErrMalformed, ErrProgram, maxPrograms)
	}
	a.programs[p.id] = p
	return nil
}

// decideFlow passes a decision to its flow.
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

// openFlow gives a flow a new number, so that messages in flight are not about it.
func (a *Agent) openFlow(f *Flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.flows, f.id)
	for a.nextFlow++; a.nextFlow == 0 || a.flows[a.nextFlow] != nil; a.nextFlow++ {
	}
	f.id = a.nextFlow
	a.flows[f.id] = f
}

// closeFlow removes a flow. Later messages about its number are counted as late.
func (a *Agent) closeFlow(f *Flow) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.flows, f.id)
}

// Counters returns the state and the counters.
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

package ccpagent

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/penstock-net/penstock/cc/ccp"
)

// Set are registers with the values that they get: Cwnd (bytes), Rate (bytes/s), and the
// variables of the program that are not in its Report.
type Set map[string]uint64

// Flow is a flow of a datapath.
type Flow struct {
	InitialCwnd uint32         // bytes
	MSS         uint32         // bytes
	Algorithm   string         // that the datapath asks for; empty: the agent's choice
	Remote      netip.AddrPort // the other end, as far as the datapath tells; IPv4 alone

	peer       *peer
	id         uint32
	program    *program
	controller Controller
}

// Run has the datapath run a program from now on, with registers set.
func (f *Flow) Run(name string, set Set) {
	p := f.peer.agent.programs[name]
	if p == nil {
		f.peer.agent.failf("there is no program %q to run", name)
		return
	}
	f.program = p
	f.sendDecision(p.number, set)
}

// Update sets registers of the program that runs.
func (f *Flow) Update(set Set) { f.sendDecision(0, set) }

func (f *Flow) sendDecision(program uint32, set Set) {
	if f.program == nil {
		f.peer.agent.failf("a flow was updated that runs no program")
		return
	}
	c := ccp.Change{Flow: f.id, Program: program}
	for _, name := range slices.Sorted(maps.Keys(set)) {
		r, ok := f.program.Registers[name]
		if !ok {
			f.peer.agent.failf("program %q has no register %q to set", f.program.name, name)
			return
		}
		c.Updates = append(c.Updates, ccp.Update{Register: r, Value: set[name]})
	}
	f.peer.sendMessage(c.Append(nil))
}

// Report is what a flow's program has folded.
type Report struct {
	flow    *Flow
	program *program // that has reported: the flow may run another by now
	values  []uint64
}

// Program is the name of the program.
func (r Report) Program() string { return r.program.name }

// Field is the value of one of the program's Report, named without that word.
func (r Report) Field(name string) uint64 {
	i := slices.Index(r.program.Fields, name)
	if i < 0 {
		r.flow.peer.agent.failf("program %q reports no field %q", r.Program(), name)
		return 0
	}
	return r.values[i]
}

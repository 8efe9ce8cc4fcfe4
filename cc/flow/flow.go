package flow

import "github.com/penstock-net/penstock/cc"

// Flow is one sending direction of one connection.
type Flow struct{}

// Take asks to send want bytes and accounts for what it grants in the same
// step. Grants are whole segments unless want is smaller.
func (f *Flow) Take(now cc.Time, want cc.Bytes) Grant { return Grant{} }

// Report tells what became of the bytes and returns the limits now in force.
// Stale and repeated reports are ignored.
func (f *Flow) Report(r Report) Limit { return Limit{} }

// Snapshot returns the flow's present state.
func (f *Flow) Snapshot() Snapshot { return Snapshot{} }

// Close leaves the macroflow; what was in flight no longer counts.
func (f *Flow) Close(now cc.Time) {}

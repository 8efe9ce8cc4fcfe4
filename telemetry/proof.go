package telemetry

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/telemetry/compare"
)

const (
	// turnsOfProof is how many turns a proof has: half of them are left to the kernel.
	turnsOfProof = 24
	// The shortest and the longest time of a proof. In a shorter one few turns have a download of their own.
	minProof, maxProof = 30 * time.Second, time.Hour
)

// The sides of a proof.
const (
	managedSide   = "managed"
	unmanagedSide = "left to the kernel"
)

// proof compares managed and unmanaged connections of one host, which take turns in time. Chance decides the order
// within each pair of turns, so that what changes with time affects both sides alike.
type proof struct {
	host     string
	begin    time.Time
	turn     time.Duration
	seed     uint64
	recorder compare.Recorder
	ended    atomic.Bool
	result   compare.Result // once it has ended
}

// turnAt returns the number of the turn that now falls into.
func (p *proof) turnAt(now time.Time) int { return int(now.Sub(p.begin) / p.turn) }

// isUnmanaged reports whether connections that begin in a turn are left to the kernel.
func (p *proof) isUnmanaged(turn int) bool {
	first := rand.New(rand.NewPCG(p.seed, uint64(turn/2))).Uint64()&1 == 1 //nolint:gosec // an order
	return (turn%2 == 0) == first
}

// sideOfTurn returns the side of a turn.
func (p *proof) sideOfTurn(turn int) string {
	if p.isUnmanaged(turn) {
		return unmanagedSide
	}
	return managedSide
}

// observeTurn records a second if only connections of one side were busy in it, and that side has its turn.
func (p *proof) observeTurn(now time.Time, sides []string, add func(*compare.Unit)) {
	turn := p.turnAt(now)
	if side, ok := onlyOne(sides); ok && side == p.sideOfTurn(turn) {
		p.recorder.Observe(now, side, fmt.Sprint("turn ", turn), add)
	}
}

// compareSides returns what the managed side has gained so far.
func (p *proof) compareSides(now time.Time) compare.Result {
	return p.recorder.Compare(now, managedSide, unmanagedSide, "turns")
}

// Proof is the state of a proof.
type Proof struct {
	Host    string         `json:"host"`
	Seconds float64        `json:"seconds"`    // since it began
	Of      float64        `json:"of_seconds"` // how long it lasts
	Ended   bool           `json:"ended"`
	Turn    string         `json:"turn,omitempty"` // which side has its turn; empty: it has ended
	Result  compare.Result `json:"result"`
}

// sideOf returns the side of a proof that a connection belongs to.
func sideOf(f *proxy.FlowInfo) string {
	if f.Down.Algorithm == policy.Unmanaged {
		return unmanagedSide
	}
	return managedSide
}

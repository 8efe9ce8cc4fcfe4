package telemetry

import (
	"maps"
	"sync"
)

// tally counts requests by what became of them. The zero value is ready, and safe for
// concurrent use.
type tally[Outcome comparable] struct {
	mu sync.Mutex
	n  map[Outcome]uint64 // nil before the first
}

// countOutcome counts n requests that ended in o.
func (t *tally[Outcome]) countOutcome(o Outcome, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n == nil {
		t.n = map[Outcome]uint64{}
	}
	t.n[o] += uint64(n)
}

// outcomeCounts returns how many there were of each outcome. Outcomes in all are there from the start, with 0, because
// Prometheus computes no rate from a series that begins with its first event.
func (t *tally[Outcome]) outcomeCounts(all ...Outcome) map[Outcome]uint64 {
	out := map[Outcome]uint64{}
	for _, o := range all {
		out[o] = 0
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	maps.Copy(out, t.n)
	return out
}

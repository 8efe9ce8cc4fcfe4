package telemetry

import (
	"maps"
	"sync"
)

// tally counts requests by what became of them. The zero value is ready, and safe for
// concurrent use.
type tally[Outcome comparable] struct {
	mu sync.Mutex
	n  map[Outcome]uint64
}

func (t *tally[Outcome]) countOutcome(o Outcome, n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.n == nil {
		t.n = map[Outcome]uint64{}
	}
	t.n[o] += uint64(n)
}

// outcomeCounts returns how many there were of each, of those in all even if there were none.
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

package proxy

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

// path is a source's, whose bounds are noted.
type path struct {
	rtt    time.Duration
	bounds []cc.Bytes
}

func (p *path) LeastRTT() time.Duration { return p.rtt }

func (p *path) LimitReceive(n cc.Bytes) bool {
	p.bounds = append(p.bounds, n)
	return n < 32<<20
}

// What a stalled reader's server can have sent is bounded, unless its path is one that needs more.
func TestASourceTakesInNoMoreThanItsPathNeeds(t *testing.T) {
	const mb = 1e6
	for _, row := range []struct {
		name        string
		rtt         time.Duration
		rate        float64 // bytes a second
		least, most int64   // at the end
	}{
		{"next to it, as fast as it goes", 50 * time.Microsecond, 2000 * mb, calmInflow, calmInflow},
		{"on a local network", 2 * time.Millisecond, 110 * mb, calmInflow, calmInflow},
		{"far away, and slow", 150 * time.Millisecond, 1 * mb, calmInflow, calmInflow},
		{"far away", 100 * time.Millisecond, 12 * mb, 4 << 20, 8 << 20},
		{"very far away, and fast", 200 * time.Millisecond, 110 * mb, 32 << 20, 32 << 20},
	} {
		p := &path{rtt: row.rtt}
		in := &inflow{from: p, bound: 256 << 10}
		now, written := cc.Time(1), 0.0
		bounded := true
		for range 60_000 { // a millisecond each
			now = now.Add(time.Millisecond)
			// The window lets no more come in a round trip than half of the bound.
			written += min(row.rate, float64(in.bound)/2/row.rtt.Seconds()) / 1000
			if bounded {
				bounded = in.growIfNeeded(func() cc.Time { return now }, int64(written))
			}
		}
		assert.GreaterOrEqual(t, in.bound, row.least, row.name)
		assert.LessOrEqual(t, in.bound, row.most, row.name)
		assert.Equal(t, row.most < 32<<20, bounded, row.name)
		assert.IsIncreasing(t, p.bounds, row.name)
	}
}

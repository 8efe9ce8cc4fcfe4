package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestPathWatch(t *testing.T) {
	const steps = 10
	type ways struct{ there, back time.Duration } // above their least
	for _, tt := range []struct {
		name  string
		after func(round, packet int) ways
		grown bool
	}{
		{"both ways", func(int, int) ways { return ways{20 * ms, 19 * ms} }, true},
		{"the way there alone, as behind a queue", func(int, int) ways { return ways{20 * ms, 0} }, false},
		{"the way back alone, as beside an upload", func(int, int) ways { return ways{0, 20 * ms} }, false},
		{"by less than a sixteenth", func(int, int) ways { return ways{1 * ms, 1 * ms} }, false},
		{"the way there by half as much again", func(int, int) ways { return ways{30 * ms, 20 * ms} }, false},
		{"a queue that grows", func(r, _ int) ways { return ways{time.Duration(14+5*r) * ms, 20 * ms} }, false},
		{"a queue of bursts", func(_, i int) ways { return ways{time.Duration(15+i) * ms, 19 * ms} }, false},
	} {
		w := pathWatch{mostThere: -1, lastBack: 7 * ms} // an older rise says nothing
		now, grown := Time(time.Second), false
		for round := range steps {
			for i := range steps {
				at := ways{1 * ms, 0}
				if round > 1 {
					at = tt.after(round-2, i)
				}
				rtt := 20*ms + at.there + at.back
				now = now.Add(rtt / steps)
				a := Ack{State: State{Now: now, SRTT: rtt}, RTT: rtt, Sent: Sent{At: now.Add(-rtt)}}
				grown = grown || w.hasGrown(a, at.there, 7*ms+at.back)
			}
		}
		assert.Equal(t, tt.grown, grown, tt.name)
	}
}

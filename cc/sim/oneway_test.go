package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/flow"
)

// heard is an acknowledgement as the algorithm was told of it, and how long it truly
// waited on its way back.
type heard struct {
	at, rtt, least time.Duration
	told, waited   time.Duration
	known          bool
}

// listen plays s and returns the acknowledgements that the algorithm was told of. No two
// of them may arrive at the same time.
func listen(t *testing.T, s Scenario) (all []heard) {
	t.Helper()
	waits := map[time.Duration]time.Duration{} // by when acknowledgements arrive
	s.Watch = func(p Packet) {
		if p.Up {
			waits[p.Arrives] = p.Departs - p.At
		}
	}
	require.NoError(t, s.Check())
	w := newWorld(s)
	w.manager.Trace = func(e flow.Event) {
		at := e.State.Now.Sub(w.origin)
		if wait, ok := waits[at]; ok && e.Kind == flow.KindAck && e.RTT > 0 {
			all = append(all, heard{at, e.RTT, e.State.MinRTT, e.Reverse, wait, e.State.OneWay})
		}
	}
	w.plan()
	w.run()
	require.NoError(t, w.err)
	require.NotEmpty(t, all)
	return all
}

// busyUplink is a link with queues on both ways: that of acknowledgements comes and goes
// with what the algorithm lets out.
func busyUplink(algorithm string, tick time.Duration, skew float64) Scenario {
	s := path(40*ms, 100, algorithm)
	s.Transport, s.Up.Rate, s.Duration, s.Warmup = Kernel, 190e3, 40*time.Second, 0
	s.Timestamps, s.ClockSkew = tick, skew
	return s
}

func TestQueueOnTheWayBackIsTold(t *testing.T) {
	for _, algorithm := range []string{"cubic", "penstock"} {
		for _, tick := range []time.Duration{time.Microsecond, ms, 4 * ms, 10 * ms} {
			for _, skew := range []float64{0, 300, -300} {
				known, most := 0, time.Duration(0)
				over, under, least := time.Duration(0), time.Duration(0), time.Hour
				for _, h := range listen(t, busyUplink(algorithm, tick, skew)) {
					least, most = min(least, h.waited), max(most, h.told)
					if !h.known {
						require.Zero(t, h.told)
						continue
					}
					known++
					queue := min(h.waited-least, h.rtt-h.least)
					over, under = max(over, h.told-queue), max(under, queue-h.told)
				}
				t.Logf("%s, %v, %v: %d known, up to %v, off by %v to %v", algorithm, tick, skew, known, most, -under,
					over)
				assert.NotZero(t, known)
				assert.LessOrEqual(t, over, 3*ms)
				// Where neither queue is ever empty, nothing shows the clock's skew.
				assert.LessOrEqual(t, under, 2*tick+16*ms)
			}
		}
	}
}

func TestNoTimestampsNoWayBack(t *testing.T) {
	for _, h := range listen(t, busyUplink("copa", NoTimestamps, 0)) {
		require.False(t, h.known)
		require.Zero(t, h.told)
	}
}

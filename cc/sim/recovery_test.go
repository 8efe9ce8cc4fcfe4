package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// RFC 6298 §5: the timer that fires before the answer to what it sent is back can
// only learn of the longer round trip by staying backed off.
func TestTimerLearnsALongerRoundTrip(t *testing.T) {
	r, err := Run(Scenario{
		Down:    LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond},
		Up:      LinkConfig{Delay: 10 * time.Millisecond},
		Changes: []Change{{At: 5 * time.Second, Delay: time.Second}},
		Flows:   []FlowConfig{{Algorithm: "static", Params: cc.Params{"cwnd_packets": 100}}}, Duration: 65 * time.Second,
	})
	require.NoError(t, err)
	f := r.Flows[0]
	assert.Less(t, f.Timeouts, 10)
	for s := 10; s+1 < len(f.PerSecond); s += 2 {
		assert.InEpsilon(t, float64(100*cc.DefaultMSS),
			float64((f.PerSecond[s] + f.PerSecond[s+1]).BytesIn(time.Second)), 0.05, "a window in two seconds, "+
				"from second %d", s)
	}
}

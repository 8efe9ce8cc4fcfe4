package bench

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/labtest"
)

// What the link says comes out at the algorithm: it knows the link's capacity,
// which no sender could have measured before it has filled it.
func TestTheLinkTellsTheProxyOfItself(t *testing.T) {
	labtest.Need(t)
	plan := testPlan(t)
	var err error
	plan.Senders, err = ParseSenders([]string{"pbe"}, nil)
	require.NoError(t, err)
	plan.Hints = 10 * time.Millisecond
	s, err := newScene(t.Context(), labtest.Penstock(t), plan, plan.Trials()[0])
	require.NoError(t, err)
	defer func() { assert.NoError(t, s.close()) }()
	require.NoError(t, s.awaitData(t.Context()))

	var internals map[string]float64
	require.Eventually(t, func() bool {
		f, err := flowOf(t.Context(), s.proxy, s.remote)
		if err != nil || f.Down.Control == nil {
			return false
		}
		text, err := json.Marshal(f.Down.Control.Internals)
		return err == nil && json.Unmarshal(text, &internals) == nil && internals["capacity_mbit"] > 0
	}, 20*time.Second, 10*time.Millisecond, "the algorithm never hears of the link")
	assert.InDelta(t, 12*1448./1500, internals["capacity_mbit"], 0.01)
	require.NoError(t, s.feeder.stop())
	s.feeder = nil

	err = s.proxy.Hint(t.Context(), edge.HostHint{}, time.Now())
	assert.ErrorContains(t, err, `host is "invalid IP"`, "what the proxy refuses is told")
}

func TestASimulatedRunHasHintsToo(t *testing.T) {
	plan := testPlan(t)
	var err error
	plan.Senders, err = ParseSenders([]string{"pbe@sim"}, nil)
	require.NoError(t, err)
	plan.Hints = 10 * time.Millisecond
	b := Bench{}
	results, err := b.Run(t.Context(), plan, func(Result) error { return nil })
	require.NoError(t, err)
	require.Len(t, results, 1)
	assert.InDelta(t, 10, results[0].Hints, 1e-9)
	assert.Greater(t, results[0].Utilisation, 0.9)
	assert.Less(t, results[0].Queueing.P95, 12.0, "which tells the rate, and is tried for more now and then")
}

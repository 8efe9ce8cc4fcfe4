package stage

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/netlab"
)

func TestDepartures(t *testing.T) {
	assert.Nil(t, departures(netlab.Sending{}, 0, time.Second, 0), "nothing was sent")

	s := netlab.Sending{MSS: 1000}
	for i := range 11 { // every millisecond, but for the last
		s.Steps = append(s.Steps, netlab.Step{
			At: time.Duration(5+i) * time.Millisecond, Payload: 1000, Size: 1052,
			Inflight: 4000, Pipe: 3000,
		})
	}
	s.Steps[3].Again = true
	s.Steps[10].At += 2 * time.Millisecond
	s.Steps = append(s.Steps, netlab.Step{At: time.Second, Payload: 1000, Inflight: 90_000})

	d := departures(s, 7, 100*time.Millisecond, 8_000_000)
	require.NotNil(t, d)
	assert.Equal(t, 11, d.Packets, "of the run, which begins with the first")
	assert.Equal(t, 1, d.Again)
	assert.Equal(t, 7, d.Missed)
	assert.Equal(t, Occupancy{P50: 4, P95: 4, Max: 4}, d.Inflight)
	assert.Equal(t, Occupancy{P50: 3, P95: 3, Max: 3}, d.Pipe)
	assert.Equal(t, Tails{P5: 1000, P50: 1000, P95: 3000}, d.Gaps)
	assert.InDelta(t, 1000, d.IdealGap, 1e-9)
	require.NotNil(t, d.Ratio)
	assert.InDelta(t, 1, d.Ratio.P50, 1e-9)
	assert.InDelta(t, 3, d.Ratio.P95, 1e-9)

	d = departures(s, 0, 100*time.Millisecond, 0)
	assert.Nil(t, d.Ratio, "there is no rate to hold it against")
	assert.Zero(t, d.IdealGap)
}

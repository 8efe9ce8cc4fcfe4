package proxy

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/policy"
)

// advertiser is a leg to which a peer sends at 12 Mbit/s over 20 ms.
type advertiser struct {
	now    *cc.Time
	looks  int
	err    error
	window cc.Bytes
}

func (a *advertiser) Arrivals() (flow.Arrivals, error) {
	a.looks++
	return flow.Arrivals{
		Received: cc.Rate(12e6).BytesIn(a.now.Sub(0)), RTT: 20 * time.Millisecond, Window: 30e3, MSS: 1448,
	}, a.err
}

func (a *advertiser) Advertise(n cc.Bytes) error {
	a.window = n
	return nil
}

// held has a leg held by penstock for so many reads, one in a tenth of a millisecond.
func held(leg *advertiser, now *cc.Time) (*holding, func(reads int)) {
	leg.now = now
	h := &holding{
		leg: leg, flows: &flow.Manager{}, clock: func() cc.Time { return *now }, log: slog.New(slog.DiscardHandler),
		terms: flow.Terms{Group: "a", Algorithm: "penstock"},
	}
	return h, func(reads int) {
		for range reads {
			*now = now.Add(100 * time.Microsecond)
			h.read(int64(cc.Rate(12e6).BytesIn(now.Sub(0))))
		}
	}
}

func TestAWindowIsHeldOnceMuchHasCome(t *testing.T) {
	var now cc.Time
	leg := &advertiser{}
	h, read := held(leg, &now)
	read(400) // 60 kB
	assert.Zero(t, leg.looks, "a short request is left alone")
	assert.Equal(t, HoldingInfo{Algorithm: "penstock"}, h.info())
	read(1000)
	assert.InDelta(t, 100, leg.looks, 5, "one look in a millisecond")
	info := h.info()
	assert.True(t, info.Held)
	assert.Equal(t, leg.window, info.Flow.Share)
	assert.Positive(t, leg.window)

	require.NoError(t, h.reconsider(now, flow.Terms{Algorithm: policy.Unmanaged}))
	read(20)
	assert.Zero(t, leg.window, "the transport has its own back")
	assert.False(t, h.info().Held)
	looks := leg.looks
	read(20)
	assert.Equal(t, looks, leg.looks)

	require.NoError(t, h.reconsider(now, flow.Terms{Group: "a", Algorithm: "vegas"}))
	read(20)
	assert.Positive(t, leg.window)
	assert.Equal(t, "vegas", h.info().Flow.Algorithm)
	h.close(now)
	looks = leg.looks
	read(20)
	assert.Equal(t, looks, leg.looks, "a closed leg is not looked at")
	assert.Empty(t, h.flows.Snapshots())
}

func TestAWindowThatCannotBeHeldSaysWhy(t *testing.T) {
	var now cc.Time
	leg := &advertiser{}
	h, read := held(leg, &now)
	read(1000)
	require.Positive(t, leg.window)
	leg.err = errors.New("the clock has gone")
	read(20)
	assert.Equal(t, HoldingInfo{Algorithm: "penstock", Why: "the clock has gone"}, h.info())
	assert.Zero(t, leg.window)
	assert.Empty(t, h.flows.Snapshots())
	looks := leg.looks
	read(100)
	assert.Equal(t, looks, leg.looks, "it is not asked again")

	h.leg, h.why = nil, errNoAdvertiser
	assert.Equal(t, errNoAdvertiser.Error(), h.info().Why)
}

package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestEpochReactsOncePerRoundTrip(t *testing.T) {
	var e epoch
	loss := func(now, sent Time) Loss { return Loss{State: State{Now: now}, SentAt: sent} }
	assert.True(t, e.beginEpoch(loss(100, 50)), "the first loss")
	assert.False(t, e.beginEpoch(loss(110, 60)), "it left before the reaction")
	assert.False(t, e.beginEpoch(loss(200, 100)), "it left at the reaction")
	assert.True(t, e.beginEpoch(loss(210, 101)), "it left after the reaction")
	assert.False(t, e.beginEpoch(loss(300, 210)), "the second reaction counts now")
	assert.False(t, e.covers(211))
	assert.True(t, e.covers(210))
}

func TestRoundEndsWhenABytePastItsStartIsAcknowledged(t *testing.T) {
	var r round
	ack := func(now, sent Time, srtt time.Duration) Ack {
		return Ack{State: State{Now: now, SRTT: srtt}, Sent: Sent{At: sent}}
	}
	assert.True(t, r.endsWith(ack(100, 50, 0)), "the first acknowledgement")
	assert.False(t, r.endsWith(ack(120, 70, 0)))
	assert.False(t, r.endsWith(ack(149, 99, 0)))
	assert.True(t, r.endsWith(ack(150, 100, 0)), "it left with the round's start")
	assert.False(t, r.endsWith(ack(199, 0, 50)), "without a record it left a smoothed round trip ago")
	assert.True(t, r.endsWith(ack(200, 0, 50)))
}

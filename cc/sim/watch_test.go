package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestWatchSeesEveryPacket(t *testing.T) {
	s := Scenario{
		Down: LinkConfig{Rate: 12_000_000, Delay: 10 * time.Millisecond, QueuePackets: 5, Loss: 0.02},
		Up:   LinkConfig{Delay: 15 * time.Millisecond, Loss: 0.1}, Duration: 5 * time.Second, Seed: 1,
		Flows: []FlowConfig{{Algorithm: "reno"}, {Algorithm: "cubic", Start: time.Second}},
	}
	unwatched, err := Run(s)
	require.NoError(t, err)
	var last time.Duration
	var carried cc.Bytes
	dropped := map[Drop]int{}
	data, acks, lostAcks := 0, 0, 0
	s.Watch = func(p Packet) {
		assert.GreaterOrEqual(t, p.At, last, "in the order in which they are sent")
		last = p.At
		switch {
		case p.Up && p.Dropped == DropNone:
			acks++
			assert.Equal(t, p.At+15*time.Millisecond, p.Arrives)
		case p.Up:
			lostAcks++
			assert.Zero(t, p.Departs)
		default:
			data++
			dropped[p.Dropped]++
			if p.Dropped == DropNone {
				assert.Equal(t, p.Departs+10*time.Millisecond, p.Arrives)
				if p.Departs < s.Duration {
					carried += p.Size
				}
			}
		}
	}
	watched, err := Run(s)
	require.NoError(t, err)
	assert.Equal(t, unwatched, watched, "watching changes nothing")
	assert.Equal(t, watched.Flows[0].Packets+watched.Flows[1].Packets, data)
	assert.Equal(t, watched.Carried, carried)
	assert.Equal(t, watched.Drops, dropped[DropQueue])
	assert.Equal(t, watched.Losses, dropped[DropLoss])
	assert.Positive(t, watched.Drops)
	assert.Positive(t, acks)
	assert.Positive(t, lostAcks)
}

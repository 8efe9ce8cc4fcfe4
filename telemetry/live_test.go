package telemetry

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

func sumLive(src Source) live {
	l := newLive()
	src.Snapshot(l.countFlow)
	return l
}

// A connection has up to four windows of ours.
func TestWindowsThatPeersAreLetSendInAreCountedByThemselves(t *testing.T) {
	held := proxy.HoldingInfo{
		Algorithm: "penstock", Held: true, Flow: flow.Snapshot{Algorithm: "penstock", Cwnd: 50e3, Members: 2},
	}
	f := proxy.FlowInfo{
		State: proxy.StateOpen,
		Down:  proxy.DirectionInfo{Algorithm: "copa", Managed: true, Flow: flow.Snapshot{Cwnd: 30e3, Inflight: 20e3}},
		Up:    proxy.DirectionInfo{Algorithm: "none", Read: 9, Written: 5, Receive: held},
	}
	l := sumLive(&still{flows: []proxy.FlowInfo{f, f}})
	assert.Equal(t, map[controlKey]*control{
		{"copa", "down"}:            {flows: 2, window: 60e3, inflight: 40e3},
		{"penstock", "from_client"}: {flows: 2, window: 50e3},
	}, l.control)
	assert.EqualValues(t, 8, l.buffered["up"])
}

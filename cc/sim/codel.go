package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// codelTarget is how long packets may stand in a CoDel queue (RFC 8289 §4.2).
const codelTarget = 5 * time.Millisecond

// codel is CoDel (RFC 8289) with ECN. Less than a packet behind another is no queue.
type codel struct {
	passive
	flow.CoDel
}

func newCoDel() *codel {
	return &codel{CoDel: flow.CoDel{Target: codelTarget, Spare: OpportunityBytes}}
}

func (c *codel) judge(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement {
	if c.Signals(now, now.Sub(p.at), lanes.each[lane].bytes) {
		return signals
	}
	return passes
}

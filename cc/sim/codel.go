package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// codelTarget is how long packets may stand in a CoDel queue (RFC 8289 §4.2).
const codelTarget = 5 * time.Millisecond

// codel is CoDel (RFC 8289) with ECN. Less than a packet behind another is no queue.
type codel struct{ flow.CoDel }

func newCoDel() *codel { return &codel{flow.CoDel{Target: codelTarget, Spare: OpportunityBytes}} }

func (c *codel) lane(uint32, Codepoint) int                          { return 0 }
func (c *codel) admit(cc.Time, int, waitingPacket, *lanes) judgement { return passes }
func (c *codel) settle(cc.Time, *lanes)                              {}
func (c *codel) pick(cc.Time, *lanes) int                            { return 0 }

func (c *codel) judge(now cc.Time, lane int, p waitingPacket, lanes *lanes) judgement {
	if c.Signals(now, now.Sub(p.at), lanes.each[lane].bytes) {
		return signals
	}
	return passes
}

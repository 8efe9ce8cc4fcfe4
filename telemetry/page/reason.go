package page

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Severity is how much a host needs the attention of an operator.
type Severity string

// The severities, from the greatest.
const (
	Bad  Severity = "bad"
	Warn Severity = "warn"
	Well Severity = "" // nothing is wrong
	Idle Severity = "idle"
)

// Queueing delays from which a host is in trouble. In a call people notice the first, and cannot talk with the second.
const (
	longQueue     = 100 * time.Millisecond
	veryLongQueue = 250 * time.Millisecond
)

// rank orders severities.
func (s Severity) rank() int { return slices.Index([]Severity{Idle, Well, Warn, Bad}, s) }

// limitSentences say what limits a group without a long queue.
var limitSentences = map[flow.LimitedBy]string{
	flow.LimitedByApplication: "has all that it asks for",
	flow.LimitedByCwnd:        "fills its link",
	flow.LimitedByPacing:      "gets the rate of its window",
	flow.LimitedByTransport:   "waits for the window of TCP itself",
	flow.LimitedByReceiver:    "takes no more: its receive window",
}

// queueCauses say why a group has a long queue, by what limits it.
var queueCauses = map[flow.LimitedBy]string{
	flow.LimitedByApplication: "others fill it, since it asks for less",
	flow.LimitedByCwnd:        "it fills the link itself",
	flow.LimitedByPacing:      "it drains at the rate of the window",
	flow.LimitedByTransport:   "TCP itself holds back",
	flow.LimitedByReceiver:    "its receive window is the limit",
}

// explainGroup says in words what is wrong with a group, or else what holds it back.
func explainGroup(g *flow.Group, udp *HeldUDP) (string, Severity) {
	busyUDP := udp != nil && udp.BusyFlows > 0
	switch {
	case g.Active > 0 && g.SRTT > 0 && g.QueueingDelay >= longQueue:
		cause := queueCauses[g.LimitedBy]
		ownQueue := g.Inflight > g.DeliveryRate.BytesIn(g.MinRTT+g.QueueingDelay/2) // half of the queue, at least
		if ownQueue && g.LimitedBy == flow.LimitedByApplication {
			cause = queueCauses[flow.LimitedByCwnd]
		}
		if g.RivalRate > g.DeliveryRate/10 {
			cause = rateWords(g.RivalRate) + " go there past its window"
		}
		severity := Warn
		if g.QueueingDelay >= veryLongQueue {
			severity = Bad
		}
		return "long queue: " + cause, severity
	case g.HintDoubt == flow.HintTooHigh:
		return "hints state more than arrives", Warn
	case g.HintDoubt == flow.HintTooLow:
		return "hints state less than arrives", Warn
	case busyUDP && udp.AcknowledgedBy == "none":
		return "UDP passes: nothing acknowledges it", Warn
	case g.Active > 0 && g.Capped:
		return "held below its window by a limit", Well
	case g.Active > 0:
		return limitSentences[g.LimitedBy], Well
	case busyUDP:
		return "UDP alone", Well
	case g.Members > 0:
		return "idle", Idle
	}
	return "no connection", Idle
}

// rateWords writes a rate in Mbit/s.
func rateWords(r cc.Rate) string { return fmt.Sprintf("%.1f Mbit/s", float64(r)/1e6) }

// limitWords are what holds a flow back, in words.
var limitWords = map[flow.LimitedBy]string{
	flow.LimitedByApplication: "sender idle",
	flow.LimitedByCwnd:        "window",
	flow.LimitedByPacing:      "pacing",
	flow.LimitedByTransport:   "TCP itself",
	flow.LimitedByReceiver:    "receiver",
}

package ccp

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Family is the first word of the algorithms' names: ccp:NAME is what agent NAME decides.
const Family = "ccp"

// init makes every name ccp:NAME known to the registry. Which agents there are is known only where a proxy is
// configured.
func init() {
	cc.RegisterFamily(Family, func(name string) (cc.Spec, error) {
		if err := CheckName(name); err != nil {
			return cc.Spec{}, err
		}
		return specFor(name, nil), nil
	})
}

// CheckName says what is wrong with the name of an agent.
func CheckName(name string) error {
	for _, c := range []byte(name) {
		if !(c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '-' || c == '_') {
			return fmt.Errorf("%q is no agent's name; it has lower-case letters, digits, - and _", name)
		}
	}
	if name == "" || len(name) > 32 {
		return fmt.Errorf("%q is no agent's name; write 1 to 32 letters, as in ccp:reno", name)
	}
	return nil
}

// Spec is the algorithm that a decides. Where no agent is given at all, as by the
// registry, the fallback decides alone.
func (a *Agent) Spec() cc.Spec { return specFor(a.name, a) }

// specFor describes the algorithm ccp:name. With a nil agent the fallback decides alone, as in the registry's lists.
func specFor(name string, a *Agent) cc.Spec {
	return cc.Spec{
		Name: Family + ":" + name,
		About: "What an agent in another process decides, by the messages and programs of the congestion " +
			"control plane; while none is there, the fallback.",
		Source: "Narayan, The Design and Implementation of a Congestion Control Plane, MIT 2019; libccp, portus",
		Params: []cc.Param{
			{
				Name: "fallback", About: "algorithm while the agent is not there, is silent or sends nonsense",
				Default: float64(slices.Index(fallbackNames(), cc.Default)), Choices: fallbackNames(),
			},
			{
				Name: "max_window", About: "window that the agent cannot exceed", Unit: "packets",
				Default: 65536, Min: 2, Max: 1e6,
			},
			{
				Name: "silence", About: "how long an agent may leave all reports of a flow unanswered", Unit: "s",
				Default: 30, Min: 0.1, Max: 3600,
			},
		},
		Needs: []cc.Signal{cc.NeedsRTT, cc.NeedsRate, cc.NeedsLoss, cc.NeedsSent, cc.NeedsPacing},
		Internals: []cc.Internal{
			{Name: "steered", About: "1 while the agent decides, 0 while the fallback does"},
			{Name: "program", About: "the agent's number of the program that runs"},
			{Name: "reports", About: "reports sent to the agent"},
			{Name: "dropped", About: "reports for which the agent's queue had no room"},
			{Name: "decisions", About: "messages of the agent that took effect"},
			{Name: "fallbacks", About: "times that the fallback took over"},
		},
		New: func(cfg cc.Config) cc.Algorithm { return newFlow(cfg, a) },
	}.Answering()
}

// fallbackNames are the algorithms that need no agent: those that are registered.
func fallbackNames() []string {
	var names []string
	for _, s := range cc.Specs() {
		names = append(names, s.Name)
	}
	return names
}

// reason is why a fallback took over.
type reason int

const (
	gone    reason = iota // no agent reads there any more
	stalled               // a message waits unread for too long
	silent                // reports are read and not answered
	failing               // the program's arithmetic has no result
	reasons
)

var reasonNames = [reasons]string{"gone", "stalled", "silent", "program"}

// Patience is how long a message may wait unread: three round trips, and no less than a
// busy machine may take to give a process its turn.
func Patience(srtt time.Duration) time.Duration { return max(3*srtt, leastPatience) }

const leastPatience = 100 * time.Millisecond

// leastAborted is how many runs in a row have to be aborted until a program counts as failing: after one that was,
// nothing may come for long, as where a timer has fired.
const leastAborted = 8

package ccp

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Family is the first word of the algorithms' names: ccp:NAME is what agent NAME decides.
const Family = "ccp"

// init registers every name ccp:NAME, because only the configuration of a proxy tells which agents there are.
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

// Spec returns the algorithm with which flows follow the agent.
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

// fallbackNames returns the algorithms that need no agent: the registered ones.
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
	gone    reason = iota // no agent is connected, or it has started anew
	stalled               // a message has been unread for too long
	silent                // reports are read and not answered
	failing               // the program's arithmetic has no result
	reasons
)

var reasonNames = [reasons]string{"gone", "stalled", "silent", "program"}

// Patience returns how long a message may be unread: three round trips, and no less than a process may
// wait for a processor on a busy machine.
func Patience(srtt time.Duration) time.Duration { return max(3*srtt, minPatience) }

const minPatience = 100 * time.Millisecond

// minAborted is how many runs in a row must be aborted until a program counts as failing. One is not enough, because
// the next run may come late, for example after a retransmission timeout.
const minAborted = 8

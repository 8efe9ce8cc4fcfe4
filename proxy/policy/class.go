package policy

import (
	"fmt"
	"maps"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// janus is the algorithm that has parameters for a class.
const janus = "janus"

// CheckClass checks the class against the rates, and returns the configuration key to which an error belongs.
func (t Terms) CheckClass() (key string, err error) {
	switch {
	case t.Class > flow.Guarantee:
		return "class", fmt.Errorf("there is no class %d", t.Class)
	case t.Target < 0:
		return "target", fmt.Errorf("%v is negative", t.Target)
	case t.MinRate < 0:
		return "min_rate", fmt.Errorf("%v is negative", t.MinRate)
	case t.Target > 0 && t.Class != flow.Guarantee:
		return "target", fmt.Errorf("a flow of class %v has no target; add class: %v, or leave target out", t.Class,
			flow.Guarantee)
	case t.Target > 0 && t.MinRate > t.Target:
		return "min_rate", fmt.Errorf("%v is above the target, which is %v", t.MinRate, t.Target)
	case t.MaxRate > 0 && t.Target > t.MaxRate:
		return "target", fmt.Errorf("%v is more than max_rate lets pass, which is %v", t.Target, t.MaxRate)
	case t.MaxRate > 0 && t.MinRate > t.MaxRate:
		return "min_rate", fmt.Errorf("%v is more than max_rate lets pass, which is %v", t.MinRate, t.MaxRate)
	case t.ConnectionRate > 0 && t.Target > t.ConnectionRate:
		return "target", fmt.Errorf("%v is more than connection_rate lets pass, which is %v", t.Target,
			t.ConnectionRate)
	case t.ConnectionRate > 0 && t.MinRate > t.ConnectionRate:
		return "min_rate", fmt.Errorf("%v is more than connection_rate lets pass, which is %v", t.MinRate,
			t.ConnectionRate)
	case !(t.HintCap >= 0 && t.HintCap <= 1): // NaN is neither
		return "hint_cap", fmt.Errorf("%v is no part of a capacity; write a number above 0, up to 1, or 0 for no cap",
			t.HintCap)
	}
	if t.janusKeepsClass() {
		for _, name := range []string{"class", "target_mbit", "min_mbit"} {
			if _, given := t.Params[name]; given {
				return "class", fmt.Errorf("%v, and janus is given %s as well; leave one of them out", t.Class, name)
			}
		}
	}
	return "", nil
}

// janusKeepsClass reports whether Janus keeps to the class instead of the flow manager. Where each flow has a window
// of its own, the flow manager divides no window.
func (t Terms) janusKeepsClass() bool {
	return t.Algorithm == janus && t.Group.by == byFlow && t.Class != flow.Bulk
}

// passClassToJanus turns the class into parameters of Janus where Janus keeps to it, by its distributed rule (TMC 2018
// §5).
func (t *Terms) passClassToJanus() {
	if !t.janusKeepsClass() {
		return
	}
	params := maps.Clone(t.Params)
	if params == nil {
		params = cc.Params{}
	}
	params["class"] = float64(t.Class) // janus has them in the same order
	if t.Class == flow.Guarantee {
		params["target_mbit"], params["min_mbit"] = t.Target.Mbps(), t.MinRate.Mbps()
	}
	t.Params, t.Class, t.Target, t.MinRate = params, flow.Bulk, 0, 0
}

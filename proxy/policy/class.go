package policy

import (
	"fmt"
	"maps"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// janus is the algorithm that keeps to a class by itself.
const janus = "janus"

// CheckClass finds what does not go together in what a flow is promised, and
// names it by its key in the configuration.
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
	if t.isDistributed() {
		for _, name := range []string{"class", "target_mbit", "min_mbit"} {
			if _, given := t.Params[name]; given {
				return "class", fmt.Errorf("%v, and janus is given %s as well; leave one of them out", t.Class, name)
			}
		}
	}
	return "", nil
}

// isDistributed reports whether the class is Janus' own matter: each flow has a
// window for itself, so that no flow sees all that share the link.
func (t Terms) isDistributed() bool {
	return t.Algorithm == janus && t.Group.by == byFlow && t.Class != flow.Bulk
}

// resolveClasses gives classes to who keeps to them.
func (r *Rule) resolveClasses() {
	r.Down.resolveClass()
	r.Up.resolveClass()
}

// resolveClass hands the class to Janus where it has to find its part of the link by
// its distributed rule (TMC 2018 §5); all else is the flow manager's.
func (t *Terms) resolveClass() {
	if !t.isDistributed() {
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

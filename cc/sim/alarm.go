package sim

import "github.com/penstock-net/penstock/cc"

// alarm calls do at the planned time. At most one time is planned.
type alarm struct {
	w  *world
	at cc.Time // cc.Never: it is not planned
	do func()
}

func (w *world) alarm(do func()) alarm { return alarm{w, cc.Never, do} }

// planBy plans the call for a moment, unless it is planned for an earlier one. The call itself comes later, so
// the manager may use planBy from within its own calls.
func (a *alarm) planBy(at cc.Time) {
	if at >= a.at {
		return
	}
	a.at = at
	a.w.at(at, func() {
		if a.at == at { // else an earlier one took its place
			a.at = cc.Never
			a.do()
		}
	})
}

package sim

import "github.com/penstock-net/penstock/cc"

// alarm is a call that is planned for one moment at a time.
type alarm struct {
	w  *world
	at cc.Time // cc.Never: it is not planned
	do func()
}

func (w *world) alarm(do func()) alarm { return alarm{w, cc.Never, do} }

// by plans the call for a moment, unless it comes before. It only plans, so that it may be called from within the
// manager.
func (a *alarm) by(at cc.Time) {
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

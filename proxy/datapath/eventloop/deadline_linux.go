package eventloop

import "time"

// Deadline is a time at which a loop calls a function, unless CancelDeadline comes first. The zero value is ready for
// StartDeadline. Only the loop's goroutine uses it.
type Deadline struct {
	at    time.Time
	run   func() // nil: the deadline was not started, or is over
	index int    // in deadlines.all
}

// deadlineSlack is how late a deadline may be, so that one timer serves several: runExpired goes over all deadlines.
const deadlineSlack = 10 * time.Millisecond

// deadlines are the deadlines of a loop. One timer serves all of them. It is set for the earliest, and set again only
// once it has expired. So a deadline that is cancelled in time, as most are, costs no timer.
type deadlines struct {
	all     []*Deadline
	timer   *time.Timer // nil: there was no deadline yet
	timerAt time.Time   // when timer expires; zero: it does not run
}

// StartDeadline makes the loop call run after that time, up to deadlineSlack late, unless CancelDeadline comes first.
// x must not be in use.
func (l *Loop) StartDeadline(x *Deadline, after time.Duration, run func()) {
	d := &l.deadlines
	x.at, x.run, x.index = currentTime().Add(after), run, len(d.all)
	d.all = append(d.all, x)
	if d.timerAt.IsZero() || x.at.Before(d.timerAt) {
		l.setTimer(x.at)
	}
}

// CancelDeadline ends a deadline without a call. It does nothing if the deadline is over.
func (l *Loop) CancelDeadline(x *Deadline) {
	if x.run == nil {
		return
	}
	d := &l.deadlines
	last := len(d.all) - 1
	d.all[x.index] = d.all[last]
	d.all[x.index].index = x.index
	d.all[last] = nil
	d.all = d.all[:last]
	x.run = nil
}

// setTimer has the timer expire at that time. Its function runs on a goroutine of Go's, so it hands over to the loop.
func (l *Loop) setTimer(at time.Time) {
	d := &l.deadlines
	d.timerAt = at
	after := at.Sub(currentTime())
	if d.timer == nil {
		d.timer = time.AfterFunc(after, func() { l.Do(l.runExpired) })
		return
	}
	d.timer.Reset(after)
}

// runExpired calls the functions of the deadlines that have passed, and sets the timer for the rest.
func (l *Loop) runExpired() {
	d := &l.deadlines
	at := currentTime()
	var earliest time.Time
	var due []*Deadline
	for _, x := range d.all {
		switch {
		case !x.at.After(at):
			due = append(due, x)
		case earliest.IsZero() || x.at.Before(earliest):
			earliest = x.at
		}
	}
	d.timerAt = time.Time{}
	if !earliest.IsZero() {
		if soonest := at.Add(deadlineSlack); earliest.Before(soonest) {
			earliest = soonest
		}
		l.setTimer(earliest)
	}
	for _, x := range due {
		if run := x.run; run != nil && !x.at.After(at) { // an earlier function may have cancelled it, or started it again
			l.CancelDeadline(x)
			run()
		}
	}
}

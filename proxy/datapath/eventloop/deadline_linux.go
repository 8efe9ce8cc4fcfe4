package eventloop

import "time"

// Deadline is when a loop is to do something. Only the loop's goroutine uses it.
type Deadline struct {
	at    time.Time
	run   func() // nil: nothing is expected
	index int    // in deadlines.all
}

// together is how late a deadline may be for others to come with it: each look goes over all of them.
const deadlineSlack = 10 * time.Millisecond

// deadlines are those of a loop. One timer serves all of them. It is set for the earliest, and
// set anew only once it has expired, so that a deadline which is met in time costs no timer.
type deadlines struct {
	all     []*Deadline
	timer   *time.Timer // nil: there was no deadline yet
	timerAt time.Time   // when timer expires; zero: it does not run
}

// Expect has run be called on the loop's goroutine after so long, unless Forget comes first.
func (l *Loop) Expect(x *Deadline, after time.Duration, run func()) {
	d := &l.deadlines
	x.at, x.run, x.index = currentTime().Add(after), run, len(d.all)
	d.all = append(d.all, x)
	if d.timerAt.IsZero() || x.at.Before(d.timerAt) {
		l.setTimer(x.at)
	}
}

// Forget ends what Expect began, if it has not ended yet.
func (l *Loop) Forget(x *Deadline) {
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

// setTimer has the timer expire at that time.
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

// runExpired runs what is due.
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
		if run := x.run; run != nil && !x.at.After(at) { // one before it may have forgotten it, or set it anew
			l.Forget(x)
			run()
		}
	}
}

func currentTime() time.Time { return time.Now() } //nolint:forbidigo // what is waited for happens in real time

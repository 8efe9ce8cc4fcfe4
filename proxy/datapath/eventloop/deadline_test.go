//go:build linux

package eventloop

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestDeadlinesComeUnlessTheyAreForgotten(t *testing.T) {
	loops := start(t, 1)
	l := loops.all[0]
	came := make(chan string, 10)
	var met, late, hour Deadline
	l.Do(func() {
		l.StartDeadline(&hour, time.Hour, func() { came <- "an hour" })
		l.StartDeadline(&met, time.Millisecond, func() { came <- "met" })
		l.StartDeadline(&late, 2*time.Millisecond, func() {
			came <- "late"
			l.StartDeadline(&late, 0, func() { came <- "again" })
		})
		l.CancelDeadline(&met)
		l.CancelDeadline(&met)
	})
	assert.Equal(t, "late", <-came)
	assert.Equal(t, "again", <-came)
	done := make(chan struct{})
	l.Do(func() {
		defer close(done)
		assert.Equal(t, []*Deadline{&hour}, l.deadlines.all)
		assert.Equal(t, hour.at, l.deadlines.timerAt, "the timer is set for what is left")
		l.CancelDeadline(&hour)
		assert.Empty(t, l.deadlines.all)
	})
	<-done
	assert.Empty(t, came)
}

func TestDeadlinesThatAreNearComeTogether(t *testing.T) {
	l := start(t, 1).all[0]
	done := make(chan struct{})
	l.Do(func() {
		defer close(done)
		var due, near, far Deadline
		l.StartDeadline(&due, 0, func() {})
		l.StartDeadline(&near, time.Millisecond, func() {})
		l.StartDeadline(&far, time.Hour, func() {})
		before := currentTime()
		l.runExpired()
		assert.GreaterOrEqual(t, l.deadlines.timerAt.Sub(before), deadlineSlack)
		assert.True(t, l.deadlines.timerAt.Before(far.at))
		l.CancelDeadline(&near)
		l.runExpired()
		assert.Equal(t, far.at, l.deadlines.timerAt)
		l.CancelDeadline(&far)
	})
	<-done
}

func TestADeadlineForgottenByOneThatIsDueAsWellDoesNotCome(t *testing.T) {
	l := start(t, 1).all[0]
	came := make(chan int)
	l.Do(func() {
		var one, two Deadline
		n := 0
		l.StartDeadline(&one, 0, func() {
			n++
			l.CancelDeadline(&two)
		})
		l.StartDeadline(&two, 0, func() {
			n++
			l.CancelDeadline(&one)
		})
		l.runExpired()
		came <- n
	})
	assert.Equal(t, 1, <-came)
}

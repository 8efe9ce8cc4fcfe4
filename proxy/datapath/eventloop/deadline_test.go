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
		l.Expect(&hour, time.Hour, func() { came <- "an hour" })
		l.Expect(&met, time.Millisecond, func() { came <- "met" })
		l.Expect(&late, 2*time.Millisecond, func() {
			came <- "late"
			l.Expect(&late, 0, func() { came <- "again" })
		})
		l.Forget(&met)
		l.Forget(&met)
	})
	assert.Equal(t, "late", <-came)
	assert.Equal(t, "again", <-came)
	done := make(chan struct{})
	l.Do(func() {
		defer close(done)
		assert.Equal(t, []*Deadline{&hour}, l.deadlines.all)
		assert.Equal(t, hour.at, l.deadlines.timerAt, "the timer is set for what is left")
		l.Forget(&hour)
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
		l.Expect(&due, 0, func() {})
		l.Expect(&near, time.Millisecond, func() {})
		l.Expect(&far, time.Hour, func() {})
		before := currentTime()
		l.runExpired()
		assert.GreaterOrEqual(t, l.deadlines.timerAt.Sub(before), deadlineSlack)
		assert.True(t, l.deadlines.timerAt.Before(far.at))
		l.Forget(&near)
		l.runExpired()
		assert.Equal(t, far.at, l.deadlines.timerAt)
		l.Forget(&far)
	})
	<-done
}

func TestADeadlineForgottenByOneThatIsDueAsWellDoesNotCome(t *testing.T) {
	l := start(t, 1).all[0]
	came := make(chan int)
	l.Do(func() {
		var one, two Deadline
		n := 0
		l.Expect(&one, 0, func() {
			n++
			l.Forget(&two)
		})
		l.Expect(&two, 0, func() {
			n++
			l.Forget(&one)
		})
		l.runExpired()
		came <- n
	})
	assert.Equal(t, 1, <-came)
}

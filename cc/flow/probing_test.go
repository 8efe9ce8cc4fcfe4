package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

func TestAHostThatDoesNotAnswerIsAskedLessOften(t *testing.T) {
	var p Probing
	var asked []time.Duration
	for now := cc.Time(0); now < cc.Time(time.Minute); now = now.Add(time.Second) {
		if p.Ask(now) {
			asked = append(asked, time.Duration(now))
		}
	}
	assert.Equal(t, []time.Duration{0, time.Second, 2 * time.Second, 32 * time.Second}, asked)
	p = ProbingLater(0)
	assert.False(t, p.Ask(cc.Time(ProbeLater)-1))
	assert.True(t, p.Ask(cc.Time(ProbeLater)))
}

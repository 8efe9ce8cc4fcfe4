package cc

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestLossLog(t *testing.T) {
	var l lossLog
	assert.Zero(t, l.lostSince(0))
	lose := func(at int, n Bytes) { l.addLoss(Loss{State: State{Now: Time(at) * Time(ms), SRTT: 32 * ms}, Lost: n}) }
	lose(10, 3)
	lose(20, 4)
	lose(21, 5) // less than a sixteenth of a round trip later
	for at, want := range map[int]Bytes{5: 12, 9: 12, 10: 9, 19: 9, 20: 0, 30: 0} {
		assert.Equal(t, want, l.lostSince(Time(at)*Time(ms)), "since %d ms", at)
	}
	for i := range 100 {
		lose(30+2*i, 1)
	}
	assert.EqualValues(t, 1, l.lostSince(Time(227)*Time(ms)))
	assert.EqualValues(t, 31, l.lostSince(0), "what is longer ago than the log is forgotten")
}

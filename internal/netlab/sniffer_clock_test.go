//go:build linux

package netlab

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
)

func TestAWallClockThatIsSetDoesNotMovePackets(t *testing.T) {
	const ms = int64(time.Millisecond)
	began := time.Now().Add(-100 * time.Millisecond) // the record's clock reads 100 ms
	for name, s := range map[string]*Sniffer{
		"set back 40 ms": {began: began, before: 1000 * ms, ahead: 960 * ms, looked: 90 * time.Millisecond},
		"set on 40 ms":   {began: began, before: 1000 * ms, ahead: 1040 * ms, looked: 90 * time.Millisecond},
	} {
		assert.Equal(t, 92*time.Millisecond, s.at(92*ms+s.before), "%s, before it was", name)
		assert.Equal(t, 98*time.Millisecond, s.at(98*ms+s.ahead), "%s, afterwards", name)
	}
	s := &Sniffer{began: began, before: 1000 * ms, ahead: 1000*ms + 5000, looked: 90 * time.Millisecond}
	assert.Equal(t, 95*time.Millisecond, s.at(95*ms+s.ahead), "a clock that is slewed")
}

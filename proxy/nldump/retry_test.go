package nldump

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/vishvananda/netlink"
)

func TestADumpThatChangesInterruptIsRepeated(t *testing.T) {
	other := errors.New("other")
	for _, tt := range []struct {
		interrupted int // the first so many times
		then        error
		calls       int
		want        error
	}{
		{0, nil, 1, nil},
		{3, nil, 4, nil},
		{1, other, 2, other},
		{1000, nil, 11, netlink.ErrDumpInterrupted},
	} {
		calls := 0
		all, err := Retry(func() ([]int, error) {
			if calls++; calls <= tt.interrupted {
				return []int{calls}, netlink.ErrDumpInterrupted
			}
			return []int{calls}, tt.then
		})
		assert.ErrorIs(t, err, tt.want)
		assert.Equal(t, tt.calls, calls)
		assert.Equal(t, []int{calls}, all, "the last answer")
	}
}

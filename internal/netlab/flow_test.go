//go:build linux

package netlab

import (
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestPacketsOfOneFlowHaveOneNumber(t *testing.T) {
	four := make([]byte, 40)
	four[0], four[9], four[15], four[19], four[21], four[23] = 0x45, 6, 1, 2, 80, 90
	six := make([]byte, 60)
	six[0], six[6], six[23], six[39], six[41], six[43] = 0x60, 17, 1, 2, 80, 90
	for name, b := range map[string][]byte{"IPv4": four, "IPv6": six} {
		before := flowOf(b)
		longer := append(append([]byte{}, b...), 1, 2, 3)
		longer[1] = 3 // its ECN field
		assert.Equal(t, before, flowOf(longer), name)
		for _, at := range map[string][]int{"IPv4": {9, 15, 19, 21, 23}, "IPv6": {6, 23, 39, 41, 43}}[name] {
			other := append([]byte{}, b...)
			other[at]++
			assert.NotEqual(t, before, flowOf(other), "%s: byte %d", name, at)
		}
	}
	assert.Equal(t, flowOf(nil), flowOf([]byte{0x45, 0, 0}), "what is no packet")
}

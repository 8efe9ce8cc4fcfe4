//go:build linux

package kernel

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
)

// Go's allocator has pieces of 448 and of 480 bytes.
func TestALegIsSmall(t *testing.T) {
	assert.LessOrEqual(t, unsafe.Sizeof(Conn{}), uintptr(448))
}

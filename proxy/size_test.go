package proxy

import (
	"testing"
	"unsafe"

	"github.com/stretchr/testify/assert"
)

// An idle connection is this, its two legs, and little more. Go's allocator has pieces of 1792 and of
// 2048 bytes; one with pointers in it takes 8 more.
func TestAConnectionIsSmall(t *testing.T) {
	assert.LessOrEqual(t, unsafe.Sizeof(connection{}), uintptr(1792-8))
}

package sim

import (
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// Algorithms returns the algorithms that a simulated flow can run, sorted by name: all
// but none, which leaves the window to a kernel.
func Algorithms() []cc.Spec {
	return slices.DeleteFunc(cc.Specs(), func(s cc.Spec) bool {
		return FlowConfig{Algorithm: s.Name}.check() != nil
	})
}

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

// KernelParams are the settings with which an algorithm sends as Linux's own of that name; nil: the defaults do.
// Neither is paced, as Linux paces CUBIC and Reno under the fq qdisc alone.
func KernelParams(algorithm string) cc.Params {
	if algorithm != "cubic" {
		return nil
	}
	return cc.Params{"hystart": 2, "pre_loss_growth": 1}
}

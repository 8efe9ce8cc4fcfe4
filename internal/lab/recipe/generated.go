package recipe

import (
	"sync"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// generatedMost is what the traces that are kept may carry together, in bytes: in memory it is a
// two-hundredth of it.
const generatedMost = 4e9

// generated are traces that were drawn. Each run of an experiment names its trace, and many name the same.
var generated struct {
	mu    sync.Mutex
	kept  map[drawn]*sim.Trace
	bytes cc.Bytes // that they carry
}

type drawn struct {
	model string
	seed  uint64
}

// drawTrace draws the trace of a built-in model and a seed, and calls it name.
func drawTrace(model string, seed uint64, name string) (*sim.Trace, error) {
	m, err := sim.Model(model)
	if err != nil {
		return nil, err
	}
	generated.mu.Lock()
	defer generated.mu.Unlock()
	t := generated.kept[drawn{model, seed}]
	if t == nil {
		if t, err = m.Generate(seed, sim.GeneratedLength); err != nil {
			return nil, err
		}
		n := t.MeanRate().BytesIn(t.Duration())
		if generated.bytes += n; generated.kept == nil || generated.bytes > generatedMost {
			generated.kept, generated.bytes = map[drawn]*sim.Trace{}, n
		}
		generated.kept[drawn{model, seed}] = t
	}
	named := *t
	named.Name = name
	return &named, nil
}

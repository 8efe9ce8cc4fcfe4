package recipe

import (
	"fmt"
	"sync"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// generatedMost bounds the bytes that all kept traces carry together. A trace takes about a two-hundredth of
// what it carries in memory.
const generatedMost = 4e9

// generated caches traces, since many runs of an experiment name the same one.
var generated struct {
	mu    sync.Mutex
	kept  map[string]*sim.Trace // by model and seed
	bytes cc.Bytes              // that they carry
}

// drawTrace draws the trace of a built-in model and a seed, and calls it name.
func drawTrace(model string, seed uint64, name string) (*sim.Trace, error) {
	m, err := sim.Model(model)
	if err != nil {
		return nil, err
	}
	generated.mu.Lock()
	defer generated.mu.Unlock()
	key := fmt.Sprintf("%s:%d", model, seed)
	t := generated.kept[key]
	if t == nil {
		if t, err = m.Generate(seed, sim.GeneratedLength); err != nil {
			return nil, err
		}
		n := t.MeanRate().BytesIn(t.Duration())
		if generated.bytes += n; generated.kept == nil || generated.bytes > generatedMost {
			generated.kept, generated.bytes = map[string]*sim.Trace{}, n
		}
		generated.kept[key] = t
	}
	named := *t
	named.Name = name
	return &named, nil
}

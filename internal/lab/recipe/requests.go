package recipe

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// requests is how long, in ms, each request took that began after the warm-up, of a flow or of all that
// one key of the file makes ("flow 1", "flow 2"); one that has not ended took until the end. Sizes, if there are two,
// are above how many bytes and up to how many its flow asks for.
func (r Run) requests(flow string, sizes ...any) (all []float64, err error) {
	bounds, err := numbers(sizes)
	if err != nil || len(bounds) != 0 && len(bounds) != 2 {
		return nil, fmt.Errorf("expected two sizes in bytes, above the first and up to the second, or none")
	}
	begun, err := r.begun(flow, bounds...)
	for _, q := range begun {
		all = append(all, r.took(q))
	}
	return all, err
}

// begun are those requests.
func (r Run) begun(flow string, sizes ...float64) (all []sim.Object, err error) {
	found := false
	for i, a := range r.Record.Actors {
		if a.Name != flow && !strings.HasPrefix(a.Name, flow+" ") {
			continue
		}
		found = true
		if len(sizes) > 0 {
			if size := float64(r.Stage.Actors[i].Size); size <= sizes[0] || size > sizes[1] {
				continue
			}
		}
		for _, q := range a.Requests {
			if q.At >= r.Stage.Warmup {
				all = append(all, q)
			}
		}
	}
	if !found {
		_, err = r.index(flow)
	}
	return all, err
}

// took is how long, in ms, a request took, or had taken at the end of the run.
func (r Run) took(q sim.Object) float64 {
	return record.Millis(cmp.Or(q.Took, r.Stage.Duration-q.At))
}

// rpm is a flow's round trips per minute (draft-ietf-ippm-responsiveness): how many of its requests fit
// into a minute one after the other, by the mean of the fastest 95 %. One that has not ended counts once it has
// taken longer than any that has: what the end of the run cut short is no fast one.
func (r Run) rpm(flow string) (float64, error) {
	begun, err := r.begun(flow)
	if err != nil || len(begun) == 0 {
		return math.NaN(), err
	}
	longest := slices.MaxFunc(begun, func(a, b sim.Object) int { return cmp.Compare(a.Took, b.Took) }).Took
	var all []float64
	for _, q := range begun {
		if q.Took > 0 || r.Stage.Duration-q.At >= longest {
			all = append(all, r.took(q))
		}
	}
	slices.Sort(all)
	all = all[:max(1, len(all)*95/100)]
	sum := 0.0
	for _, ms := range all {
		sum += ms
	}
	return 60_000 * float64(len(all)) / sum, nil
}

// pages is, for each n, how long in ms the slowest nth request took among the flows with names that begin with
// prefix.
func (r Run) pages(prefix string) (all []float64, err error) {
	for i, a := range r.Record.Actors {
		if !strings.HasPrefix(a.Name, prefix) {
			continue
		}
		for n, q := range a.Requests {
			if n >= len(all) {
				all = append(all, 0)
			}
			all[n] = max(all[n], r.took(q))
			if q.At+r.Stage.Actors[i].Every >= r.Stage.Duration { // its last may not have had the time
				all = all[:n]
				break
			}
		}
	}
	return all, nil
}

package bench

import (
	"slices"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
)

// table is the results that belong side by side: one path, several senders.
type table struct {
	experiment string
	path       string
	losses     []float64 // probabilities of random loss that occur, in order of first appearance
	rows       []row
}

// row is all runs of one sender on one path with one probability of loss.
type row struct {
	sender  string
	kernel  bool
	virtual bool
	loss    float64
	results []record.Run
}

// tables sorts results into tables and rows, both in order of first appearance.
// With apart each probability of loss has a table of its own.
func tables(results []record.Run, apart bool) []table {
	var all []table
	for _, r := range results {
		key := r.Way(apart)
		i := slices.IndexFunc(all, func(t table) bool { return t.path == key && t.experiment == r.Experiment })
		if i < 0 {
			i = len(all)
			all = append(all, table{experiment: r.Experiment, path: key})
		}
		all[i].addRun(r)
	}
	for i := range all {
		if t := &all[i]; len(t.losses) == 1 {
			t.path = t.rows[0].results[0].Way(true)
		}
	}
	return all
}

func (t *table) addRun(r record.Run) {
	if !slices.Contains(t.losses, r.Loss) {
		t.losses = append(t.losses, r.Loss)
	}
	i := slices.IndexFunc(t.rows, func(w row) bool { return w.sender == r.Name && w.loss == r.Loss })
	if i < 0 {
		i = len(t.rows)
		t.rows = append(t.rows, row{sender: r.Name, kernel: r.Kernel != "" && !r.Virtual, virtual: r.Virtual, loss: r.Loss})
	}
	t.rows[i].results = append(t.rows[i].results, r)
}

// rowsByLoss are the rows by probability of loss.
func (t table) rowsByLoss() [][]row {
	blocks := make([][]row, len(t.losses))
	for _, w := range t.rows {
		i := slices.Index(t.losses, w.loss)
		blocks[i] = append(blocks[i], w)
	}
	return blocks
}

// countedRuns returns the runs with figures that stand.
func (w row) countedRuns() []record.Run {
	return slices.DeleteFunc(slices.Clone(w.results), func(r record.Run) bool { return r.Discarded != "" })
}

// spreadOf summarises one figure over the runs that count; false when none does.
func (w row) spreadOf(figure func(record.Run) float64) (figures.Spread, bool) {
	var values []float64
	for _, r := range w.countedRuns() {
		values = append(values, figure(r))
	}
	if len(values) == 0 {
		return figures.Spread{}, false
	}
	return figures.SpreadOf(values), true
}

// baseline is the sender that the others are compared with: the first of the
// kernel's with a run that counts; empty: there is none.
func (t table) baseline() string {
	for _, w := range t.rows {
		if w.kernel && len(w.countedRuns()) > 0 {
			return w.sender
		}
	}
	return ""
}

// findRow is the sender's row with that probability of loss, if a run in it counts.
func (t table) findRow(sender string, loss float64) *row {
	i := slices.IndexFunc(t.rows, func(w row) bool {
		return w.sender == sender && w.loss == loss && len(w.countedRuns()) > 0
	})
	if i < 0 {
		return nil
	}
	return &t.rows[i]
}

package bench

import "slices"

// Spread is a median with the range around it.
type Spread struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
}

// spread summarises values, of which there is at least one. The median of an
// even number is the mean of the middle two.
func spread(values []float64) Spread {
	v := slices.Sorted(slices.Values(values))
	n := len(v)
	return Spread{Median: (v[(n-1)/2] + v[n/2]) / 2, Min: v[0], Max: v[n-1]}
}

// table is the results that belong side by side: one path, several senders.
type table struct {
	path   string
	losses []float64 // probabilities of random loss that occur, in order of first appearance
	rows   []row
}

// row is all runs of one sender on one path with one probability of loss.
type row struct {
	sender  string
	kernel  bool
	virtual bool
	loss    float64
	results []Result
}

// tables sorts results into tables and rows, both in order of first appearance.
// With apart each probability of loss has a table of its own.
func tables(results []Result, apart bool) []table {
	var all []table
	for _, r := range results {
		key := r.path(apart)
		i := slices.IndexFunc(all, func(t table) bool { return t.path == key })
		if i < 0 {
			i = len(all)
			all = append(all, table{path: key})
		}
		all[i].add(r)
	}
	for i := range all {
		if t := &all[i]; len(t.losses) == 1 {
			t.path = t.rows[0].results[0].path(true)
		}
	}
	return all
}

func (t *table) add(r Result) {
	if !slices.Contains(t.losses, r.Loss) {
		t.losses = append(t.losses, r.Loss)
	}
	i := slices.IndexFunc(t.rows, func(w row) bool { return w.sender == r.Sender && w.loss == r.Loss })
	if i < 0 {
		i = len(t.rows)
		t.rows = append(t.rows, row{sender: r.Sender, kernel: r.Kernel != "", virtual: r.Virtual(), loss: r.Loss})
	}
	t.rows[i].results = append(t.rows[i].results, r)
}

// blocks are the rows by probability of loss.
func (t table) blocks() [][]row {
	blocks := make([][]row, len(t.losses))
	for _, w := range t.rows {
		i := slices.Index(t.losses, w.loss)
		blocks[i] = append(blocks[i], w)
	}
	return blocks
}

// counted returns the runs whose figures stand.
func (w row) counted() []Result {
	return slices.DeleteFunc(slices.Clone(w.results), func(r Result) bool { return r.Discarded != "" })
}

// of summarises one figure over the runs that count; false when none does.
func (w row) of(figure func(Result) float64) (Spread, bool) {
	var values []float64
	for _, r := range w.counted() {
		values = append(values, figure(r))
	}
	if len(values) == 0 {
		return Spread{}, false
	}
	return spread(values), true
}

// baseline is the sender that the others are compared with: the first of the
// kernel's with a run that counts; empty: there is none.
func (t table) baseline() string {
	for _, w := range t.rows {
		if w.kernel && len(w.counted()) > 0 {
			return w.sender
		}
	}
	return ""
}

// find is the sender's row with that probability of loss, if a run in it counts.
func (t table) find(sender string, loss float64) *row {
	i := slices.IndexFunc(t.rows, func(w row) bool { return w.sender == sender && w.loss == loss && len(w.counted()) > 0 })
	if i < 0 {
		return nil
	}
	return &t.rows[i]
}

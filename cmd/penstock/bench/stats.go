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
	path string
	rows []row
}

// row is all runs of one sender on one path.
type row struct {
	sender  string
	kernel  bool
	results []Result
}

// tables sorts results into tables and rows, both in order of first appearance.
func tables(results []Result) []table {
	var all []table
	for _, r := range results {
		key := r.path()
		i := slices.IndexFunc(all, func(t table) bool { return t.path == key })
		if i < 0 {
			i = len(all)
			all = append(all, table{path: key})
		}
		rows := &all[i].rows
		j := slices.IndexFunc(*rows, func(w row) bool { return w.sender == r.Sender })
		if j < 0 {
			j = len(*rows)
			*rows = append(*rows, row{sender: r.Sender, kernel: r.Kernel != ""})
		}
		(*rows)[j].results = append((*rows)[j].results, r)
	}
	return all
}

// counted returns the runs whose figures stand.
func (w row) counted() []Result {
	return slices.DeleteFunc(slices.Clone(w.results), func(r Result) bool { return r.Spoilt != "" })
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

// baseline is the first kernel sender with a run that counts; nil: there is none.
func (t table) baseline() *row {
	for i := range t.rows {
		if t.rows[i].kernel && len(t.rows[i].counted()) > 0 {
			return &t.rows[i]
		}
	}
	return nil
}

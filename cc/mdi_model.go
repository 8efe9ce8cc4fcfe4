package cc

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// MDIEpoch is one epoch of a flow that is to be imitated, as MDIRecorder records it.
type MDIEpoch struct {
	Change   float64 // of the delay, as relativeChange returns it
	Previous float64 // the delay's change of an epoch before
	Level    float64 // binary logarithm of the delay over the least round trip
	Window   float64 // after the epoch's decision, in packets
}

// MDIAxis is one side of a model's grid: changes from Min to Max in steps.
type MDIAxis struct{ Min, Max, Step float64 }

// MDIGrid is what a model tells apart.
type MDIGrid struct {
	Window, Delay MDIAxis // changes as relativeChange returns them
	// Level is the binary logarithm of the newest delay over the least round trip. Step 0: a state has the delay's
	// change of an epoch ago in its place, as MDI was published.
	Level MDIAxis
}

// DefaultMDIGrid is of whether the delay falls, stays or rises, which is what Verus acts on. Most of its windows
// change by less than a step, which addCount counts in parts.
var DefaultMDIGrid = MDIGrid{
	Window: MDIAxis{-18, 18, 3}, Delay: MDIAxis{-0.5, 0.5, 0.5}, Level: MDIAxis{0, 4, 0.5},
}

// MDIModel holds how probable each next change of the window is, for each state and each newest change of the delay.
// A state is a level of the delay (or its previous change) and the window's previous change.
type MDIModel struct {
	Grid MDIGrid
	// Down and Up are the medians of the ratios of successive windows where the delay rose, or fell, by more than the
	// grid has; 0: not known. A grid with levels takes such changes for its largest, so it needs none.
	Down, Up float64

	rows    int       // states; a state is the index of its level, times the windows, plus that of its window
	columns int       // newest changes of the delay × next changes of the window
	p       []float64 // rows × columns, row by row
	nearest []int32   // rows × delays: the state that lends its block; −1: all are empty
}

const (
	// of the value before, in the logarithm: below it a change would have no weight, or a negative one
	mdiLeastLog  = 1.1
	mdiLeastP    = 0.001 // what is less probable is noise of the training
	mdiMaxStates = 1200  // bounds what a file may make us allocate
)

// relativeChange is the change from before to now in percent, weighted by magnitude.
func relativeChange(now, before float64) float64 {
	return (now/before*100 - 100) * math.Log10(max(before, mdiLeastLog))
}

// applyChange is the inverse: what before becomes with the change v.
func applyChange(v, before float64) float64 {
	return (v/math.Log10(max(before, mdiLeastLog)) + 100) * before / 100
}

// valueCount is how many values the axis has.
func (a MDIAxis) valueCount() int { return int(math.Round((a.Max-a.Min)/a.Step)) + 1 }

// nearestIndex is that of the value nearest to v.
func (a MDIAxis) nearestIndex(v float64) int {
	return int(math.Round((min(max(v, a.Min), a.Max) - a.Min) / a.Step))
}

func (a MDIAxis) valueAt(i int) float64 { return a.Min + float64(i)*a.Step }

// coversValue reports whether v rounds to a value of the axis.
func (a MDIAxis) coversValue(v float64) bool { return v >= a.Min-a.Step/2 && v < a.Max+a.Step/2 }

func (a MDIAxis) checkAxis(name string) error {
	n := (a.Max - a.Min) / a.Step
	switch {
	case math.IsNaN(n) || math.IsInf(n, 0) || a.Step <= 0 || a.Max < a.Min || n > mdiMaxStates:
		return fmt.Errorf("the %s changes from %v to %v in steps of %v are no grid", name, a.Min, a.Max, a.Step)
	case math.Abs(n-math.Round(n)) > 1e-6:
		return fmt.Errorf("the %s changes do not reach from %v to %v in whole steps of %v", name, a.Min, a.Max, a.Step)
	case a.Min > 0 || a.Max < 0:
		return fmt.Errorf("the %s changes from %v to %v leave out 0", name, a.Min, a.Max)
	}
	return nil
}

// Check returns what is wrong with the grid.
func (g MDIGrid) Check() error {
	if err := g.Window.checkAxis("window's"); err != nil {
		return err
	}
	if err := g.Delay.checkAxis("delay's"); err != nil {
		return err
	}
	if g.hasLevels() {
		if err := g.Level.checkAxis("level's"); err != nil {
			return err
		}
	}
	for _, a := range []MDIAxis{g.Delay, g.stateAxis()} {
		if n := g.Window.valueCount() * a.valueCount(); n > mdiMaxStates {
			return fmt.Errorf("a grid of %d states is larger than the %d there may be", n, mdiMaxStates)
		}
	}
	return nil
}

// hasLevels reports whether states have levels of the delay.
func (g MDIGrid) hasLevels() bool { return g.Level.Step != 0 }

// stateAxis returns what the states tell apart beside the window's change.
func (g MDIGrid) stateAxis() MDIAxis {
	if g.hasLevels() {
		return g.Level
	}
	return g.Delay
}

// newMDIModel returns a model without any probabilities.
func newMDIModel(g MDIGrid) (*MDIModel, error) {
	if err := g.Check(); err != nil {
		return nil, err
	}
	windows := g.Window.valueCount()
	m := &MDIModel{Grid: g, rows: g.stateAxis().valueCount() * windows, columns: g.Delay.valueCount() * windows}
	m.p = make([]float64, m.rows*m.columns)
	return m, nil
}

// stateIndex returns the row of an epoch's level, or previous delay's change, and the window's previous change.
func (m *MDIModel) stateIndex(e MDIEpoch, window float64) int {
	v := e.Previous
	if m.Grid.hasLevels() {
		v = e.Level
	}
	return m.Grid.stateAxis().nearestIndex(v)*m.Grid.Window.valueCount() + m.Grid.Window.nearestIndex(window)
}

// nextWindowProbabilities returns the distribution of the window's next change in a state, given the index of the
// newest change of the delay.
func (m *MDIModel) nextWindowProbabilities(state, delay int) []float64 {
	n := m.Grid.Window.valueCount()
	at := state*m.columns + delay*n
	return m.p[at : at+n]
}

// TrainMDI learns a model from runs of the algorithm that it is to imitate, in
// epochs of 5 ms.
func TrainMDI(g MDIGrid, runs ...[]MDIEpoch) (*MDIModel, error) {
	m, err := newMDIModel(g)
	if err != nil {
		return nil, fmt.Errorf("cc: train mdi: %w", err)
	}
	learned := 0
	var falls, rises []float64 // ratios of windows beyond the edges
	for _, run := range runs {
		for k := 2; k < len(run); k++ {
			e := run[k]
			if !run[k-2].isValid() || !run[k-1].isValid() || !e.isValid() {
				continue
			}
			before := relativeChange(run[k-1].Window, run[k-2].Window)
			next := relativeChange(e.Window, run[k-1].Window)
			switch {
			case g.hasLevels():
			case e.Change > g.Delay.Max:
				falls = append(falls, e.Window/run[k-1].Window)
				continue
			case e.Change < g.Delay.Min:
				rises = append(rises, e.Window/run[k-1].Window)
				continue
			case !g.Delay.coversValue(e.Previous) || !g.Window.coversValue(before) || !g.Window.coversValue(next):
				continue
			}
			g.Window.addCount(m.nextWindowProbabilities(m.stateIndex(e, before), g.Delay.nearestIndex(e.Change)), next)
			learned++
		}
	}
	if learned == 0 {
		return nil, fmt.Errorf("cc: train mdi: the %d runs hold no three successive epochs within the grid", len(runs))
	}
	m.Down, m.Up = medianOf(falls), medianOf(rises)
	m.eachBlock(func(counts []float64) { // divided once: a second rounding could leave less than mdiLeastP
		least := mdiLeastP * sumOf(counts)
		for i, n := range counts {
			if n < least {
				counts[i] = 0
			}
		}
		normaliseBlock(counts)
	})
	m.findNearest()
	return m, nil
}

// addCount counts v once, in parts for the two values around it, so that their mean is v. Rounding would lose the
// changes of less than half a step, which are most.
func (a MDIAxis) addCount(counts []float64, v float64) {
	at := (min(max(v, a.Min), a.Max) - a.Min) / a.Step
	i := min(int(at), len(counts)-1)
	counts[i] += 1 - (at - float64(i))
	if i+1 < len(counts) {
		counts[i+1] += at - float64(i)
	}
}

func (e MDIEpoch) isValid() bool {
	for _, v := range []float64{e.Change, e.Previous, e.Level} {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return false
		}
	}
	return e.Window > 0 && !math.IsInf(e.Window, 0)
}

// medianOf returns 0 for none. It sorts its argument.
func medianOf(v []float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[len(v)/2]
}

func (m *MDIModel) eachBlock(do func([]float64)) {
	for s := range m.rows {
		for d := range m.Grid.Delay.valueCount() {
			do(m.nextWindowProbabilities(s, d))
		}
	}
}

func sumOf(v []float64) (s float64) {
	for _, x := range v {
		s += x
	}
	return s
}

// normaliseBlock scales a distribution to 1; an empty one stays so.
func normaliseBlock(b []float64) {
	if s := sumOf(b); s > 0 {
		for i := range b {
			b[i] /= s
		}
	}
}

// findNearest finds, for each block, the state that stands in for it where it
// is empty: among the states with a block for the same next delay, the one with
// the most similar changes.
func (m *MDIModel) findNearest() {
	windows, delays := m.Grid.Window.valueCount(), m.Grid.Delay.valueCount()
	m.nearest = make([]int32, m.rows*delays)
	type place struct{ row, delay, window int }
	filled := make([]place, 0, m.rows)
	for d := range delays {
		filled = filled[:0]
		for s := range m.rows {
			if slices.ContainsFunc(m.nextWindowProbabilities(s, d), func(p float64) bool { return p > 0 }) {
				filled = append(filled, place{s, s / windows, s % windows})
				m.nearest[s*delays+d] = int32(s)
			} else {
				m.nearest[s*delays+d] = -1
			}
		}
		for s := range m.rows {
			stand := &m.nearest[s*delays+d]
			if *stand >= 0 {
				continue
			}
			delay, window, least := s/windows, s%windows, math.Inf(1)
			for _, f := range filled {
				far := math.Abs(float64(delay-f.delay))*m.Grid.stateAxis().Step +
					math.Abs(float64(window-f.window))*m.Grid.Window.Step
				if far < least {
					*stand, least = int32(f.row), far
				}
			}
		}
	}
}

// drawChange draws the window's next change in a state, given the next delay's, with
// u uniform from 0 to less than 1. Where nothing like it was seen, it is 0.
func (m *MDIModel) drawChange(state int, delay, u float64) float64 {
	d := m.Grid.Delay.nearestIndex(delay)
	stand := m.nearest[state*m.Grid.Delay.valueCount()+d]
	if stand < 0 {
		return 0
	}
	cumulated, last := 0.0, 0
	for i, p := range m.nextWindowProbabilities(int(stand), d) {
		if p == 0 {
			continue
		}
		cumulated += p
		last = i
		if cumulated > u {
			break
		}
	}
	return m.Grid.Window.valueAt(last)
}

// Write writes the model as text: comments, the grid (number, least, largest and
// step of the window's changes, then of the delay's), one line of probabilities
// for each state, and at the end what was learned beyond the grid.
func (m *MDIModel) Write(w io.Writer, comments ...string) error {
	b := bufio.NewWriter(w)
	for _, c := range comments {
		fmt.Fprintf(b, "# %s\n", strings.ReplaceAll(c, "\n", "\n# "))
	}
	g := m.Grid
	axes := []MDIAxis{g.Window, g.Delay, g.Level}
	if !g.hasLevels() {
		axes = axes[:2]
	}
	var line []byte
	for _, a := range axes {
		line = fmt.Appendf(line, "%d,%v,%v,%v,", a.valueCount(), a.Min, a.Max, a.Step)
	}
	line[len(line)-1] = '\n'
	b.Write(line) //nolint:errcheck // Flush returns it
	for s := range m.rows {
		line = line[:0]
		for i, p := range m.p[s*m.columns : (s+1)*m.columns] {
			if i > 0 {
				line = append(line, ',')
			}
			line = strconv.AppendFloat(line, p, 'g', 4, 64)
		}
		b.Write(append(line, '\n')) //nolint:errcheck // Flush returns it
	}
	fmt.Fprintf(b, "edges,%.6g,%.6g\n", m.Down, m.Up)
	if err := b.Flush(); err != nil {
		return fmt.Errorf("cc: write mdi model: %w", err)
	}
	return nil
}

// ReadMDI reads a model as Write writes it, or as the authors of MDI have
// published theirs, which lack comments and edges.
func ReadMDI(r io.Reader) (*MDIModel, error) {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	var m *MDIModel
	line, row, edges := 0, 0, false
	for s.Scan() {
		line++
		text := strings.TrimSpace(s.Text())
		var err error
		rest, isEdges := strings.CutPrefix(text, "edges,")
		switch {
		case text == "" || text[0] == '#':
		case m == nil:
			m, err = readMDIGrid(text)
		case edges:
			err = fmt.Errorf("there is something behind the edges")
		case row < m.rows:
			err = readNumbers(text, m.p[row*m.columns:(row+1)*m.columns], "probabilities of a state")
			row++
		case isEdges:
			var e [2]float64
			err = readNumbers(rest, e[:], "edges")
			m.Down, m.Up, edges = e[0], e[1], true
		default:
			err = fmt.Errorf("there are more than the %d states of its grid", m.rows)
		}
		if err != nil {
			return nil, fmt.Errorf("cc: mdi model: line %d: %w", line, err)
		}
	}
	switch {
	case s.Err() != nil:
		return nil, fmt.Errorf("cc: mdi model: line %d: %w", line+1, s.Err())
	case m == nil:
		return nil, fmt.Errorf("cc: mdi model: it is empty")
	case row < m.rows:
		return nil, fmt.Errorf("cc: mdi model: it has %d states, but its grid has %d", row, m.rows)
	}
	m.eachBlock(func(b []float64) {
		const rounding = 1e-3 // of a file, which is left as it is
		if math.Abs(sumOf(b)-1) > rounding {
			normaliseBlock(b)
		}
	})
	m.findNearest()
	return m, nil
}

// readMDIGrid reads the first line: four numbers of the window's changes, of the delay's, and, with levels, of them.
func readMDIGrid(text string) (*MDIModel, error) {
	fields := strings.Split(text, ",")
	if len(fields) != 8 && len(fields) != 12 {
		return nil, fmt.Errorf("a grid has 8 numbers, or 12 with levels, not %d", len(fields))
	}
	var g MDIGrid
	var counts [3]float64
	for i, f := range fields {
		x, err := strconv.ParseFloat(strings.TrimSpace(f), 64)
		if err != nil {
			return nil, fmt.Errorf("%q is not a number", f)
		}
		a := []*MDIAxis{&g.Window, &g.Delay, &g.Level}[i/4]
		*[]*float64{&counts[i/4], &a.Min, &a.Max, &a.Step}[i%4] = x
	}
	if len(fields) == 12 && g.Level.Step == 0 {
		return nil, errors.New("the levels' step is 0")
	}
	m, err := newMDIModel(g)
	if err != nil {
		return nil, err
	}
	for i, a := range []MDIAxis{g.Window, g.Delay, g.Level}[:len(fields)/4] {
		if counts[i] != float64(a.valueCount()) {
			return nil, fmt.Errorf("the grid is said to have %v values from %v to %v, but has %d", counts[i], a.Min,
				a.Max, a.valueCount())
		}
	}
	return m, nil
}

// readNumbers reads exactly as many as into has; none is negative, or too large
// to be added up.
func readNumbers(text string, into []float64, what string) error {
	i := 0
	for f := range strings.SplitSeq(text, ",") {
		if i == len(into) {
			return fmt.Errorf("there are more than %d %s", len(into), what)
		}
		if f == "0" { // most are
			i++
			continue
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(f), 64)
		if err != nil || !(v >= 0 && v <= 1e9) {
			return fmt.Errorf("%q is not one of the %s", f, what)
		}
		into[i] = v
		i++
	}
	if i < len(into) {
		return fmt.Errorf("there are %d %s, but should be %d", i, what, len(into))
	}
	return nil
}

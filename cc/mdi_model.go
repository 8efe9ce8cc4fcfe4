package cc

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// MDIEpoch is one epoch of a flow that is to be imitated.
type MDIEpoch struct {
	// longest round trip sampled in it, in milliseconds; without a sample, the time since the last acknowledgement if
	// that is longer than the previous epoch's
	Delay  float64
	Window float64 // after its decision, in packets
}

// MDIAxis is one side of a model's grid: changes from Min to Max in steps.
type MDIAxis struct{ Min, Max, Step float64 }

// MDIGrid is what a model tells apart, in changes as mdiChange has them.
type MDIGrid struct{ Window, Delay MDIAxis }

// DefaultMDIGrid is that of the authors' training scripts; their published
// models have a coarser one.
var DefaultMDIGrid = MDIGrid{Window: MDIAxis{-20, 20, 2}, Delay: MDIAxis{-10, 10, 2}}

// MDIModel holds, for each pair of a delay's and a window's change, and each
// change of the next delay, how probable each next change of the window is.
type MDIModel struct {
	Grid MDIGrid
	// Down and Up are the medians of the ratios of successive windows where the
	// delay rose, or fell, by more than the grid has; 0: not known.
	Down, Up float64

	states  int       // windows × delays; a state is its delay's index · windows + its window's
	p       []float64 // states × states, row by row; each block of windows is one next delay's
	nearest []int32   // states × delays: the state that lends its block; −1: all are empty
}

const (
	// of the value before, in the logarithm: below it a change would have no weight, or a negative one
	mdiLeastLog  = 1.1
	mdiLeastP    = 0.02 // what is less probable is noise of the training
	mdiMaxStates = 1200 // bounds what a file may make us allocate
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

// Check tells what is wrong with the grid.
func (g MDIGrid) Check() error {
	if err := g.Window.checkAxis("window's"); err != nil {
		return err
	}
	if err := g.Delay.checkAxis("delay's"); err != nil {
		return err
	}
	if n := g.Window.valueCount() * g.Delay.valueCount(); n > mdiMaxStates {
		return fmt.Errorf("a grid of %d states is larger than the %d there may be", n, mdiMaxStates)
	}
	return nil
}

// newMDIModel is one without any probabilities.
func newMDIModel(g MDIGrid) (*MDIModel, error) {
	if err := g.Check(); err != nil {
		return nil, err
	}
	m := &MDIModel{Grid: g, states: g.Window.valueCount() * g.Delay.valueCount()}
	m.p = make([]float64, m.states*m.states)
	return m, nil
}

// stateIndex is the row of a delay's and a window's change.
func (m *MDIModel) stateIndex(delay, window float64) int {
	return m.Grid.Delay.nearestIndex(delay)*m.Grid.Window.valueCount() + m.Grid.Window.nearestIndex(window)
}

// nextWindowProbabilities is the distribution of the next window's change in a state, given the
// index of the next delay's.
func (m *MDIModel) nextWindowProbabilities(state, delay int) []float64 {
	n := m.Grid.Window.valueCount()
	at := state*m.states + delay*n
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
			if !run[k-2].isValid() || !run[k-1].isValid() || !run[k].isValid() {
				continue
			}
			delay, window := run[k-1].changesSince(run[k-2])
			nextDelay, nextWindow := run[k].changesSince(run[k-1])
			switch {
			case nextDelay > g.Delay.Max:
				falls = append(falls, run[k].Window/run[k-1].Window)
				continue
			case nextDelay < g.Delay.Min:
				rises = append(rises, run[k].Window/run[k-1].Window)
				continue
			case !g.Delay.coversValue(delay) || !g.Window.coversValue(window) || !g.Window.coversValue(nextWindow):
				continue
			}
			counts := m.nextWindowProbabilities(m.stateIndex(delay, window), g.Delay.nearestIndex(nextDelay))
			counts[g.Window.nearestIndex(nextWindow)]++
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

func (e MDIEpoch) isValid() bool {
	return e.Delay > 0 && e.Window > 0 && !math.IsInf(e.Delay, 0) && !math.IsInf(e.Window, 0)
}

// changesSince is what has changed.
func (e MDIEpoch) changesSince(before MDIEpoch) (delay, window float64) {
	return relativeChange(e.Delay, before.Delay), relativeChange(e.Window, before.Window)
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
	for s := range m.states {
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
	m.nearest = make([]int32, m.states*delays)
	type place struct{ row, delay, window int }
	filled := make([]place, 0, m.states)
	for d := range delays {
		filled = filled[:0]
		for s := range m.states {
			if slices.ContainsFunc(m.nextWindowProbabilities(s, d), func(p float64) bool { return p > 0 }) {
				filled = append(filled, place{s, s / windows, s % windows})
				m.nearest[s*delays+d] = int32(s)
			} else {
				m.nearest[s*delays+d] = -1
			}
		}
		for s := range m.states {
			stand := &m.nearest[s*delays+d]
			if *stand >= 0 {
				continue
			}
			delay, window, least := s/windows, s%windows, math.Inf(1)
			for _, f := range filled {
				far := math.Abs(float64(delay-f.delay))*m.Grid.Delay.Step + math.Abs(float64(window-f.window))*m.Grid.Window.Step
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
	fmt.Fprintf(b, "%d,%v,%v,%v,%d,%v,%v,%v\n", g.Window.valueCount(), g.Window.Min, g.Window.Max, g.Window.Step,
		g.Delay.valueCount(), g.Delay.Min, g.Delay.Max, g.Delay.Step)
	var line []byte
	for s := range m.states {
		line = line[:0]
		for i, p := range m.p[s*m.states : (s+1)*m.states] {
			if i > 0 {
				line = append(line, ',')
			}
			line = strconv.AppendFloat(line, p, 'g', 6, 64)
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
		case row < m.states:
			err = readNumbers(text, m.p[row*m.states:(row+1)*m.states], "probabilities of a state")
			row++
		case isEdges:
			var e [2]float64
			err = readNumbers(rest, e[:], "edges")
			m.Down, m.Up, edges = e[0], e[1], true
		default:
			err = fmt.Errorf("there are more than the %d states of its grid", m.states)
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
	case row < m.states:
		return nil, fmt.Errorf("cc: mdi model: it has %d states, but its grid has %d", row, m.states)
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

func readMDIGrid(text string) (*MDIModel, error) {
	var v [8]float64
	fields := strings.Split(text, ",")
	if len(fields) != len(v) {
		return nil, fmt.Errorf("a grid has %d numbers, not %d", len(v), len(fields))
	}
	for i, f := range fields {
		x, err := strconv.ParseFloat(strings.TrimSpace(f), 64)
		if err != nil {
			return nil, fmt.Errorf("%q is not a number", f)
		}
		v[i] = x
	}
	m, err := newMDIModel(MDIGrid{Window: MDIAxis{v[1], v[2], v[3]}, Delay: MDIAxis{v[5], v[6], v[7]}})
	if err != nil {
		return nil, err
	}
	if v[0] != float64(m.Grid.Window.valueCount()) || v[4] != float64(m.Grid.Delay.valueCount()) {
		return nil, fmt.Errorf("the grid is said to have %v by %v values, but has %d by %d", v[0], v[4],
			m.Grid.Window.valueCount(), m.Grid.Delay.valueCount())
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

package cc

import (
	"math/bits"
	"sort"
)

// The delay profile of Verus (SIGCOMM 2015 §4.2): which delay each sending
// window was met with, and the smooth, non-decreasing curve through it.
//
//	delay │            × ╱           ×  a measured point, an EWMA per window
//	      │        × _╱ ×            ─  penalised least squares, made monotone;
//	      │  ___×_─╯×                   beyond the last point, its slope goes on
//	      └──────────────── window
//
// Windows are kept one by one up to profileExact, then in steps of at most
// 0.4 %. Memory follows the window in use: 8 bytes for each step up to twice
// that, 16 KiB at the most, whatever the largest window.

const (
	profileMaxWindow = 40000 // packets; yzaki/verus MAX_W_DELAY_CURVE
	profileExact     = 512   // packets
	profileOctave    = profileExact / 2
	profileSteps     = 2104  // the last, of profileMaxWindow−1
	profileKeep      = 0.875 // weight of what a point was before; yzaki/verus
	profileMinPoints = 5     // fewer do not make a curve
	// profilePerKnot is how many windows share a basis function (yzaki/verus);
	// K is bounded by profileMinKnots and profileMaxKnots.
	profilePerKnot  = 15
	profileMinKnots = 5
	profileMaxKnots = 200
	// profilePenalty weighs the second differences of the coefficients, per point
	// of a knot: ±5 ms of noise leave less than 2 ms over 200 windows, and the
	// knee where a queue begins is less than 5 ms off.
	profilePenalty = 0.3

	profileMinSlope = 0.01 // ms per packet, beyond the last point
	profileReach    = 4    // a quarter of what was measured, beyond it, may be tried
)

type delayProfile struct {
	points []float32 // ms, by step; 0: not measured
	curve  []float32 // ms, by step up to that of last
	count  int       // points measured
	top    int       // largest window measured
	last   int       // the curve's largest measured window; 0: there is no curve
	slope  float64   // ms per packet, beyond it
}

// profileStep is the place of a window.
func profileStep(w int) int {
	if w < profileExact {
		return w
	}
	octave := bits.Len(uint(w)) - bits.Len(uint(profileExact))
	return profileExact + octave*profileOctave + (w-profileExact<<octave)>>(octave+1)
}

// profileWindow is the middle of the windows that share a step, and how many do.
func profileWindow(step int) (middle, width float64) {
	if step < profileExact {
		return float64(step), 1
	}
	octave, i := (step-profileExact)/profileOctave, (step-profileExact)%profileOctave
	width = float64(int(2) << octave)
	return float64(int(profileExact)<<octave) + float64(i)*width + (width-1)/2, width
}

// profileIndex keeps a window within the profile.
func profileIndex(w float64) int { return int(min(max(w, 1), profileMaxWindow-1)) }

// reserveWindows makes room for windows up to w.
func (p *delayProfile) reserveWindows(w float64) {
	need := profileStep(profileIndex(w)) + 1
	if need <= len(p.points) {
		return
	}
	n := max(64, len(p.points))
	for n < need {
		n *= 2
	}
	n = min(n, profileStep(profileMaxWindow-1)+1)
	points, curve := make([]float32, n), make([]float32, n)
	copy(points, p.points)
	copy(curve, p.curve)
	p.points, p.curve = points, curve
}

// addPoint takes in that window w was met with this delay, in ms. A window that
// there is no room for is not remembered.
func (p *delayProfile) addPoint(w, delay float64) {
	i := profileStep(profileIndex(w))
	if i >= len(p.points) || delay <= 0 {
		return
	}
	p.top = max(p.top, profileIndex(w))
	if p.points[i] == 0 {
		p.points[i] = float32(delay)
		p.count++
	} else {
		p.points[i] = float32(profileKeep*float64(p.points[i]) + (1-profileKeep)*delay)
	}
}

// dropFrom drops all points from window w on.
func (p *delayProfile) dropFrom(w float64) {
	p.top = min(p.top, max(0, profileIndex(w)-1))
	for i := profileStep(profileIndex(w)); i < len(p.points); i++ {
		if p.points[i] != 0 {
			p.points[i] = 0
			p.count--
		}
	}
}

func (p *delayProfile) reset() {
	clear(p.points)
	p.count, p.top, p.last = 0, 0, 0
}

func (p *delayProfile) isFitted() bool { return p.last != 0 }

// fitCurve draws the curve anew and reports whether there are enough points for it.
// base, in ms, stands for the delay of a single packet while that is unknown.
func (p *delayProfile) fitCurve(base float64) bool {
	if p.count < profileMinPoints {
		return false
	}
	top := len(p.points) - 1
	for p.points[top] == 0 {
		top--
	}
	middle, _ := profileWindow(top)
	var s spline
	s.setRange(1, middle)
	if p.points[1] == 0 {
		s.addPoint(1, base)
	}
	for i := 1; i <= top; i++ {
		if p.points[i] != 0 {
			w, _ := profileWindow(i)
			s.addPoint(w, float64(p.points[i]))
		}
	}
	s.solveCoefficients(profilePenalty)
	for i := 1; i <= top; i++ {
		w, _ := profileWindow(i)
		p.curve[i] = float32(s.valueAt(w))
	}
	makeMonotone(p.curve[1 : top+1])
	p.last = int(middle)
	before := max(1, int(middle-(middle-1)/float64(s.pieceCount())))
	p.slope = max(profileMinSlope, (p.delayAt(p.last)-p.delayAt(before))/float64(max(1, p.last-before)))
	return true
}

// delayAt is the delay of window w, in ms.
func (p *delayProfile) delayAt(w int) float64 {
	w = max(w, 1)
	beyond := 0.0
	if w > p.last {
		w, beyond = p.last, float64(w-p.last)*p.slope
	}
	i := profileStep(w)
	d := float64(p.curve[i])
	if w < profileExact {
		return d + beyond
	}
	// Between the middles of two steps.
	middle, _ := profileWindow(i)
	j := i + 1
	if float64(w) < middle {
		j = i - 1
	}
	if j > profileStep(p.last) {
		return d + beyond
	}
	other, _ := profileWindow(j)
	return d + (float64(p.curve[j])-d)*(float64(w)-middle)/(other-middle) + beyond
}

// largestToTry is the largest window that may be tried: a quarter above what has
// been measured. Where the curve is flat, its slope would lead anywhere.
func (p *delayProfile) largestToTry() int {
	return min(p.top+max(1, p.top/profileReach), profileMaxWindow-1)
}

// windowForDelay returns the largest window with at most this delay, in ms: one less
// than the least from 2 on that exceeds it, or the farthest.
func (p *delayProfile) windowForDelay(delay float64) int {
	return 1 + sort.Search(p.largestToTry()-1, func(i int) bool { return p.delayAt(i+2) > delay })
}

// spline is a cubic B-spline over equal pieces, fitted by least squares with a
// penalty on the second differences of its coefficients.
type spline struct {
	lo, scale float64 // the place of x is (x−lo)·scale
	n, points int     // coefficients, points added
	normal    [profileMaxKnots][4]float64
	c         [profileMaxKnots]float64 // the right side, then the coefficients
}

func (s *spline) pieceCount() int { return s.n - 3 }

func (s *spline) setRange(lo, hi float64) {
	s.n = min(max(int(hi/profilePerKnot), profileMinKnots), profileMaxKnots)
	s.lo, s.scale = lo, float64(s.pieceCount())/(hi-lo)
}

// basisAt returns the first of the four coefficients that matter at x, and by how much each does.
func (s *spline) basisAt(x float64) (first int, b [4]float64) {
	t := (x - s.lo) * s.scale
	first = min(max(int(t), 0), s.n-4)
	t -= float64(first)
	u := 1 - t
	return first, [4]float64{
		u * u * u / 6,
		(3*t*t*t - 6*t*t + 4) / 6,
		(3*u*u*u - 6*u*u + 4) / 6,
		t * t * t / 6,
	}
}

func (s *spline) addPoint(x, y float64) {
	first, b := s.basisAt(x)
	for i := range b {
		s.c[first+i] += b[i] * y
		for j := i; j < len(b); j++ {
			s.normal[first+i][j-i] += b[i] * b[j]
		}
	}
	s.points++
}

// solveCoefficients turns the sums of add into coefficients.
func (s *spline) solveCoefficients(penalty float64) {
	weight := penalty * float64(s.points) / float64(s.n)
	second := [3]float64{1, -2, 1}
	for first := range s.n - 2 {
		for i := range second {
			for j := i; j < len(second); j++ {
				s.normal[first+i][j-i] += weight * second[i] * second[j]
			}
		}
	}
	// LDLᵀ within the band. Two different points make the matrix definite.
	for i := range s.n {
		for k := 1; k < 4 && i+k < s.n; k++ {
			f := s.normal[i][k] / s.normal[i][0]
			for j := k; j < 4 && i+j < s.n; j++ {
				s.normal[i+k][j-k] -= f * s.normal[i][j]
			}
			s.c[i+k] -= f * s.c[i]
		}
	}
	for i := s.n - 1; i >= 0; i-- {
		for k := 1; k < 4 && i+k < s.n; k++ {
			s.c[i] -= s.normal[i][k] * s.c[i+k]
		}
		s.c[i] /= s.normal[i][0]
	}
}

func (s *spline) valueAt(x float64) float64 {
	first, b := s.basisAt(x)
	y := 0.0
	for i := range b {
		y += b[i] * s.c[first+i]
	}
	return y
}

// makeMonotone replaces y, from step 1 on, by the non-decreasing sequence nearest
// to it: neighbours that violate the order are pooled (PAV).
func makeMonotone(y []float32) {
	// Blocks: their means are in y[:n], their last steps here.
	var ends [profileSteps]int16
	n := 0
	upTo := func(k int) float64 { // windows up to the end of the k-th block
		if k == 0 {
			return 0.5
		}
		w, width := profileWindow(int(ends[k-1]))
		return w + width/2
	}
	for i := range y {
		y[n], ends[n] = y[i], int16(i+1)
		for n > 0 && y[n-1] > y[n] {
			a, b := upTo(n)-upTo(n-1), upTo(n+1)-upTo(n)
			y[n-1] = float32((a*float64(y[n-1]) + b*float64(y[n])) / (a + b))
			ends[n-1] = ends[n]
			n--
		}
		n++
	}
	for k := n - 1; k >= 0; k-- { // a block never begins before its mean's place
		begin := 0
		if k > 0 {
			begin = int(ends[k-1])
		}
		mean := y[k]
		for i := begin; i < int(ends[k]); i++ {
			y[i] = mean
		}
	}
}

package cc

import (
	"math"
	"math/cmplx"
	"time"

	"gonum.org/v1/gonum/dsp/fourier"
)

// Elastic cross traffic reacts to our pulses at their frequency, which shows in its spectrum. Constants and
// rules are those of the authors' nimbus. Its averages over reports each 5 ms are converted to looks each
// nimbusLook samples.

const (
	nimbusGrid    = 10 * time.Millisecond // between samples of the histories
	nimbusLook    = 5                     // samples between looks at the spectrum
	nimbusPulseHz = 5.0                   // in both modes, as in the paper
	nimbusWindow  = 512                   // samples: the power of two from 5 s on
	nimbusLagMost = 128                   // samples by which cross traffic may answer late
	nimbusHistory = nimbusWindow + nimbusLagMost

	elasticityStart   = 1.0
	elasticityGain    = 0.05 // weight of a new look
	elasticityVisible = 0.25 // of the pulse in received: if cross traffic shows less of it, a look is capped
	elasticityCapped  = 3.0  // the cap
	elasticityTooFew  = 0.1  // of the capacity: less cross traffic counts as none
	elasticityTooMany = 0.9  // of the capacity: more cross traffic crowds us out
	elasticityOwn     = 2.0  // times the other peaks that the pulse must reach in received
	elasticityCrowded = 6.0  // value of a look when we are crowded out
	elasticityBlind   = 3.0  // value of a look when the pulse does not reach elasticityOwn
)

// pulseRate is what is sent beyond the rate, at the given phase from 0 to 1, of a
// pulse of height a: half a sine in a quarter of the time, and a shallow one
// below 0 in the rest that takes it back.
func pulseRate(phase, a float64) float64 {
	if phase < 0.25 {
		return a * math.Sin(4*math.Pi*phase)
	}
	return -a / 3 * math.Sin(2*math.Pi*(phase-0.25)*2/3)
}

// pulseIntegral is how much has been sent beyond the rate since the pulse began: its
// integral, 0 again at the end.
func pulseIntegral(phase, a float64) float64 {
	most := a / (2 * math.Pi * nimbusPulseHz)
	if phase < 0.25 {
		return most / 2 * (1 - math.Cos(4*math.Pi*phase))
	}
	return most / 2 * (1 + math.Cos(4*math.Pi/3*(phase-0.25)))
}

// elasticity watches cross traffic for the pulse.
type elasticity struct {
	value float64 // average over the looks
	eta   float64 // at the last one

	ring    [nimbusHistory]nimbusSample // on the grid
	head, n int                         // index of the oldest; how many there are

	fft     *fourier.FFT
	samples []float64
	coeffs  []complex128
}

type nimbusSample struct {
	cross, received float64 // bytes/s
	lag             int     // samples until cross traffic answers what is sent now: two round trips
}

func newElasticity() elasticity {
	return elasticity{
		value:   elasticityStart,
		fft:     fourier.NewFFT(nimbusWindow),
		samples: make([]float64, nimbusWindow),
		coeffs:  make([]complex128, nimbusWindow/2+1),
	}
}

// reset forgets what was seen.
func (e *elasticity) reset() { e.value, e.eta, e.head, e.n = elasticityStart, 0, 0, 0 }

func (e *elasticity) sampleAt(i int) *nimbusSample { return &e.ring[(e.head+i)%nimbusHistory] }

// addSample takes the next sample.
func (e *elasticity) addSample(cross, received float64, rtt time.Duration) {
	if e.n == nimbusHistory {
		e.head = (e.head + 1) % nimbusHistory
		e.n--
	}
	e.n++
	lag := min(2*rtt/nimbusGrid, nimbusLagMost)
	*e.sampleAt(e.n - 1) = nimbusSample{cross, received, int(lag)}
}

// receivedAgo returns the rate at which bytes arrived k samples ago, or as long ago as
// is known.
func (e *elasticity) receivedAgo(k int) float64 {
	if e.n == 0 {
		return 0
	}
	return e.sampleAt(max(0, e.n-1-k)).received
}

// updateElasticity compares the spectra of cross traffic and of what arrives, of a link of
// capacity mu in bytes per second.
func (e *elasticity) updateElasticity(mu float64) {
	if e.n < nimbusHistory {
		return
	}
	first := e.n - nimbusWindow - e.sampleAt(e.n-1).lag
	for i := range e.samples {
		e.samples[i] = e.sampleAt(first + i).received
	}
	arrives, arrivesElse := e.pulsePeaks()
	recent := 0.0
	for i := range e.samples {
		e.samples[i] = e.sampleAt(min(first+i+e.sampleAt(first+i).lag, e.n-1)).cross
		if i >= nimbusWindow*3/4 {
			recent += e.samples[i] / (nimbusWindow / 4)
		}
	}
	shows, showsElse := e.pulsePeaks()
	e.eta = elasticityOf(shows, showsElse, arrives)
	look := e.eta
	switch {
	case recent < elasticityTooFew*mu:
		e.value = 0
		return
	case recent > elasticityTooMany*mu:
		look = elasticityCrowded
	case arrives < elasticityOwn*arrivesElse:
		look = elasticityBlind
	}
	e.value += elasticityGain * (look - e.value)
}

// elasticityOf returns the peak of cross traffic at the pulse's frequency over its peak elsewhere. It is
// capped where the pulse in our received rate is much larger, because then our own pulse is what shows.
func elasticityOf(shows, showsElse, arrives float64) float64 {
	const tiny = 1e-9 // bytes/s; a spectrum without noise is one of a model
	e := shows / max(showsElse, tiny)
	if shows < elasticityVisible*arrives {
		e = min(e, elasticityCapped) * shows / arrives / elasticityVisible
	}
	return min(e, maxEta)
}

// maxEta keeps a spectrum without noise from deciding for ever.
const maxEta = 10.0

// pulsePeaks returns the largest amplitude of samples around the pulse's frequency,
// and between there and its first harmonic.
func (e *elasticity) pulsePeaks() (around, beside float64) {
	mean := 0.0
	for _, v := range e.samples {
		mean += v / nimbusWindow
	}
	for i := range e.samples {
		e.samples[i] -= mean
	}
	e.coeffs = e.fft.Coefficients(e.coeffs, e.samples)
	const f = nimbusPulseHz
	return e.peakBetween(f-0.5, f+0.5), e.peakBetween(f+1.5, 2*f-0.5)
}

// peakBetween is the largest amplitude between two frequencies in hertz.
func (e *elasticity) peakBetween(from, to float64) float64 {
	span := nimbusWindow * nimbusGrid.Seconds() // one bin is 1/span
	most := 0.0
	for k := int(math.Ceil(from * span)); k <= int(to*span); k++ {
		most = max(most, cmplx.Abs(e.coeffs[k]))
	}
	return most
}

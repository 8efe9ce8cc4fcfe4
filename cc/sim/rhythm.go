package sim

import (
	"math"
	"math/rand/v2"
	"sort"
	"time"
)

// rhythm is when an application works, in turns with rests; times count from its
// start, at which it works.
type rhythm struct {
	on, off   time.Duration // one of them 0: it never rests
	rng       *rand.Rand    // nil: on and off are the times; else their means, exponentially distributed
	stretches []stretch     // of work, with rng, as far as anybody has looked
}

// stretch is a time of work.
type stretch struct {
	from, to time.Duration
	before   time.Duration // worked until from
}

// rhythmStream keeps the draws of applications apart from those of other users
// of the seed.
const rhythmStream = 0x72687974686d

// worked returns for how much of the time up to since the application worked;
// and, within a rest, when it goes on.
func (r *rhythm) worked(since time.Duration) (worked, resumes time.Duration) {
	s := r.until(since)
	if since < s.from {
		return s.before, s.from
	}
	return s.before + since - s.from, 0
}

// until returns the stretch that is under way at a time or, if it rests then, the next.
func (r *rhythm) until(at time.Duration) stretch {
	return r.find(func(s stretch) bool { return s.to > at })
}

// elapsed is the inverse of worked: when the application has worked for d.
func (r *rhythm) elapsed(d time.Duration) time.Duration {
	if d <= 0 {
		return d
	}
	s := r.find(func(s stretch) bool { return s.before+(s.to-s.from) >= d })
	return s.from + d - s.before
}

// find returns the first stretch for which enough holds, as it does for all
// after that one.
func (r *rhythm) find(enough func(stretch) bool) stretch {
	n := 1
	for !enough(r.stretch(n - 1)) {
		n *= 2
	}
	return r.stretch(sort.Search(n-1, func(i int) bool { return enough(r.stretch(i)) }))
}

// stretch returns the stretch of a number from 0. One beyond the longest run never ends, which keeps the list short.
func (r *rhythm) stretch(n int) stretch {
	switch {
	case r.on == 0 || r.off == 0:
		return stretch{to: math.MaxInt64}
	case r.rng == nil:
		from := time.Duration(int64(n) * int64(r.on+r.off))
		return stretch{from: from, to: from + r.on, before: time.Duration(int64(n) * int64(r.on))}
	}
	length := func(mean time.Duration) time.Duration {
		return max(time.Microsecond, time.Duration(r.rng.ExpFloat64()*float64(mean)))
	}
	for last := len(r.stretches) - 1; last < n; last++ {
		var s stretch
		if last >= 0 {
			before := r.stretches[last]
			if before.to == math.MaxInt64 {
				return before
			}
			s.from = before.to + length(r.off)
			s.before = before.before + before.to - before.from
		}
		if s.to = s.from + length(r.on); s.from > maxDuration {
			s.to = math.MaxInt64
		}
		r.stretches = append(r.stretches, s)
	}
	return r.stretches[n]
}

// Turn is a time in which an application works, counted from the run's start.
type Turn struct{ From, To time.Duration }

// Turns returns when the application of flow number i works, counted from 0, in a
// run with that seed, from its start until it stops or the run ends.
func (f FlowConfig) Turns(i int, seed uint64, end time.Duration) (all []Turn) {
	if f.Stop > 0 {
		end = min(end, f.Stop)
	}
	r := newRhythm(f, i, seed)
	for at := time.Duration(0); at < end-f.Start; {
		s := r.until(at)
		if f.Start+s.from >= end {
			break
		}
		all = append(all, Turn{f.Start + s.from, min(s.to, end-f.Start) + f.Start})
		at = s.to
	}
	return all
}

// newRhythm is that of flow number i.
func newRhythm(f FlowConfig, i int, seed uint64) rhythm {
	r := rhythm{on: f.On, off: f.Off}
	if f.Random {
		r.rng = rand.New(rand.NewPCG(seed^rhythmStream, uint64(i)))
	}
	return r
}

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
	switch {
	case r.on == 0 || r.off == 0:
		return since, 0
	case r.rng != nil:
		s := r.find(func(s stretch) bool { return s.to > since })
		if since < s.from {
			return s.before, s.from
		}
		return s.before + since - s.from, 0
	}
	period := r.on + r.off
	cycles, within := int64(since/period), since%period
	if within >= r.on {
		return times(cycles+1, r.on), times(cycles+1, period)
	}
	return times(cycles, r.on) + within, 0
}

func times(n int64, d time.Duration) time.Duration { return time.Duration(n) * d }

// elapsed is the inverse of worked: when the application has worked for d.
func (r *rhythm) elapsed(d time.Duration) time.Duration {
	switch {
	case r.on == 0 || r.off == 0 || d <= 0:
		return d
	case r.rng != nil:
		s := r.find(func(s stretch) bool { return s.before+(s.to-s.from) >= d })
		return s.from + d - s.before
	}
	return d + times(int64((d-1)/r.on), r.off)
}

// find returns the first stretch for which enough holds, as it does for all
// after that one.
func (r *rhythm) find(enough func(stretch) bool) stretch {
	i := sort.Search(len(r.stretches), func(i int) bool { return enough(r.stretches[i]) })
	if i < len(r.stretches) {
		return r.stretches[i]
	}
	for {
		if n := len(r.stretches); n > 0 && r.stretches[n-1].to == math.MaxInt64 {
			return r.stretches[n-1]
		}
		if s := r.draw(); enough(s) {
			return s
		}
	}
}

// draw adds a stretch. One beyond the longest run never ends, which keeps the
// list short.
func (r *rhythm) draw() (s stretch) {
	length := func(mean time.Duration) time.Duration {
		return max(time.Microsecond, time.Duration(r.rng.ExpFloat64()*float64(mean)))
	}
	if n := len(r.stretches); n > 0 {
		last := r.stretches[n-1]
		s.from = last.to + length(r.off)
		s.before = last.before + last.to - last.from
	}
	s.to = s.from + length(r.on)
	if s.from > maxDuration {
		s.to = math.MaxInt64
	}
	r.stretches = append(r.stretches, s)
	return s
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
	for at := time.Duration(0); f.Start+at < end; {
		from, to := r.stretchAt(at)
		if f.Start+from >= end {
			break
		}
		all = append(all, Turn{f.Start + from, min(f.Start+to, end)})
		at = to
	}
	return all
}

// stretchAt is when it works, at that time or, if it rests then, next.
func (r *rhythm) stretchAt(at time.Duration) (from, to time.Duration) {
	switch {
	case r.on == 0 || r.off == 0:
		return 0, math.MaxInt64 / 2
	case r.rng != nil:
		s := r.find(func(s stretch) bool { return s.to > at })
		return s.from, s.to
	}
	from = at.Truncate(r.on + r.off)
	if at >= from+r.on {
		from += r.on + r.off
	}
	return from, from + r.on
}

// newRhythm is that of flow number i.
func newRhythm(f FlowConfig, i int, seed uint64) rhythm {
	r := rhythm{on: f.On, off: f.Off}
	if f.Random {
		r.rng = rand.New(rand.NewPCG(seed^rhythmStream, uint64(i)))
	}
	return r
}

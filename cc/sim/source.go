package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// source is the application at the sending end: it tells how much there is to
// send.
type source struct {
	cfg     FlowConfig
	started cc.Time
	rhythm  rhythm
	taken   cc.Bytes
	asked   cc.Bytes // where a client asks for what it wants: so far
}

// newSource returns the source of flow number i, which opens at started.
func newSource(cfg FlowConfig, i int, started cc.Time, seed uint64) source {
	return source{cfg: cfg, started: started, rhythm: newRhythm(cfg, i, seed)}
}

// available returns how many bytes may be taken now, whole segments unless they
// are the last; and, when there are none, when there will be (cc.Never: not by
// the clock alone).
func (s *source) available(now cc.Time) (n cc.Bytes, next cc.Time) {
	left := cc.MaxCwnd
	switch {
	case s.cfg.hasClient():
		left = s.asked - s.taken
	case s.cfg.Bytes > 0:
		left = s.cfg.Bytes - s.taken
	}
	if left <= 0 {
		return 0, cc.Never
	}
	worked, resumes := s.rhythm.worked(now.Sub(s.started))
	if s.cfg.Rate == 0 {
		if resumes > 0 {
			return 0, s.started.Add(resumes)
		}
		return left, 0
	}
	quantum := min(left, cc.DefaultMSS)
	made := s.cfg.Rate.BytesIn(worked) - s.taken
	if made >= quantum {
		return min(left, made/quantum*quantum), 0
	}
	return 0, s.started.Add(s.next(s.taken + quantum))
}

// next returns when the application has produced that many bytes, counted from its start.
func (s *source) next(produced cc.Bytes) time.Duration {
	return s.rhythm.elapsed(s.cfg.Rate.TimeFor(produced))
}

// done reports whether all there ever will be has been taken.
func (s *source) done() bool {
	return s.cfg.Bytes > 0 && !s.cfg.hasClient() && s.taken >= s.cfg.Bytes
}

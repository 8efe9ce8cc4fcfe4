package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// source is the application: it tells how much there is to send.
type source struct {
	cfg     FlowConfig
	started cc.Time
	taken   cc.Bytes
}

// available returns how many bytes may be taken now, whole segments unless they
// are the last; and, when there are none, when there will be (cc.Never: never).
func (s *source) available(now cc.Time) (n cc.Bytes, next cc.Time) {
	left := cc.MaxCwnd
	if s.cfg.Bytes > 0 {
		left = s.cfg.Bytes - s.taken
	}
	if left <= 0 {
		return 0, cc.Never
	}
	worked, resumes := s.worked(now.Sub(s.started))
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
	return 0, s.started.Add(s.elapsed(s.cfg.Rate.TimeFor(s.taken + quantum)))
}

// worked returns for how much of the time since the start the application
// produced; and, within a pause, when it goes on, counted from the start.
func (s *source) worked(since time.Duration) (worked, resumes time.Duration) {
	if s.cfg.On == 0 || s.cfg.Off == 0 {
		return since, 0
	}
	period := s.cfg.On + s.cfg.Off
	cycles, within := int64(since/period), since%period
	if within >= s.cfg.On {
		return times(cycles+1, s.cfg.On), times(cycles+1, period)
	}
	return times(cycles, s.cfg.On) + within, 0
}

func times(n int64, d time.Duration) time.Duration { return time.Duration(n) * d }

// elapsed is the inverse of worked: when the application has produced for d.
func (s *source) elapsed(d time.Duration) time.Duration {
	if s.cfg.On == 0 || s.cfg.Off == 0 || d <= 0 {
		return d
	}
	return d + times(int64((d-1)/s.cfg.On), s.cfg.Off)
}

// done reports whether all there ever was has been taken.
func (s *source) done() bool { return s.cfg.Bytes > 0 && s.taken >= s.cfg.Bytes }

package proxy

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

// logged is a log of which lines are taken one by one.
type logged struct{ bytes.Buffer }

func (l *logged) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
}

func (l *logged) take() []string {
	defer l.Reset()
	return strings.FieldsFunc(l.String(), func(r rune) bool { return r == '\n' })
}

func TestALimitThatIsMetIsToldOnceAMinute(t *testing.T) {
	var out logged
	now := cc.Time(time.Second)
	s := &Server{env: environment{
		Parts: Parts{Log: out.log(), Clock: func() cc.Time { return now }}, limits: limiter{global: 3},
	}}
	line := func(listener, reason, times, raise string) string {
		return `level=WARN msg="a limit is met" listener=` + listener + " reason=" + reason + " times=" + times + " raise=" + raise
	}
	s.countMetLimit("lan", RejectedSourceLimit)
	assert.Equal(t, []string{line("lan", "source_limit", "1", "limits.per_source")}, out.take(), "at once")
	for range 500 {
		s.countMetLimit("lan", RejectedSourceLimit)
	}
	s.limitsMet.warnOfAll(s.env.Log, now)
	assert.Empty(t, out.take())
	s.countMetLimit("dmz", RejectedSourceLimit)
	assert.Equal(t, []string{line("dmz", "source_limit", "1", "limits.per_source")}, out.take(), "each listener")
	s.countMetLimit("lan", RejectedGlobalLimit)
	assert.Equal(t, []string{line("lan", "limit", "1", `"LimitNOFILE (ulimit -n)"`)}, out.take(), "each reason")
	s.countMetLimit("lan", RejectedDialRefused)
	assert.Empty(t, out.take(), "which is no limit")

	now = now.Add(limitLogPeriod)
	s.limitsMet.warnOfAll(s.env.Log, now)
	assert.Equal(t, []string{line("lan", "source_limit", "500", "limits.per_source")}, out.take(),
		"a minute later, and no other that was not met again")
	now = now.Add(10 * limitLogPeriod)
	s.limitsMet.warnOfAll(s.env.Log, now)
	assert.Empty(t, out.take())
	s.env.limits.configured = true
	s.countMetLimit("lan", RejectedGlobalLimit)
	assert.Equal(t, []string{line("lan", "limit", "1", "limits.connections")}, out.take())
}

func TestALimitThatIsOnlyCountedIsToldAsWell(t *testing.T) {
	var out logged
	var l limitLog
	met := metLimit{"vpn", limitSessions}
	now := cc.Time(time.Second)
	follow := func(count uint64) int {
		now = now.Add(limitLogPeriod)
		l.addGrowth(out.log(), now, met, count)
		return len(out.take())
	}
	assert.Equal(t, 0, follow(0))
	assert.Equal(t, 1, follow(7))
	assert.Equal(t, 0, follow(7))
	assert.Equal(t, 0, follow(2), "of another tunnel by now")
	assert.Equal(t, 1, follow(3))
}

package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

const mss = cc.DefaultMSS

// path drives one or more flows the way a datapath would, in virtual time:
// what is taken is written and on the wire at once, in order.
type path struct {
	t   *testing.T
	mgr *Manager
	now cc.Time
}

// leg is one flow on a path and what its transport knows.
type leg struct {
	*Flow
	p     *path
	r     Report
	woken int
}

func newPath(t *testing.T) *path {
	return &path{t: t, mgr: &Manager{}, now: cc.Time(time.Second)}
}

func (p *path) open(terms Terms) *leg {
	p.t.Helper()
	l := &leg{p: p}
	f, err := p.mgr.Open(p.now, terms, func() { l.woken++ })
	require.NoError(p.t, err)
	l.Flow = f
	l.r.MSS = mss
	return l
}

func (p *path) wait(d time.Duration) { p.now = p.now.Add(d) }

// send takes up to n bytes and puts what is granted on the wire.
func (l *leg) send(n cc.Bytes) cc.Bytes {
	g := l.Take(l.p.now, n)
	l.r.Written += g.Bytes
	l.r.Pipe += g.Bytes
	return g.Bytes
}

// ack lets n bytes arrive, in order.
func (l *leg) ack(n cc.Bytes) Limit {
	l.r.Acked += n
	l.r.Pipe -= n
	return l.report()
}

func (l *leg) report() Limit {
	l.r.At = l.p.now
	return l.Report(l.r)
}

// inflight checks the flow's own count against the transport's.
func (l *leg) inflight() cc.Bytes { return l.Snapshot().Inflight }

func static(packets float64) Terms {
	return Terms{Group: "host", Host: addr("192.0.2.1"), Algorithm: "static", Params: cc.Params{"cwnd_packets": packets}}
}

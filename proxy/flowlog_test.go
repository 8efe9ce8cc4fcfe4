package proxy

import (
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/logqueue"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
)

func TestAFloodOfConnectionsIsNoFloodOfLines(t *testing.T) {
	var l flowLog
	now := cc.Time(1)
	for range linesAtOnce {
		skipped, ok := l.takeLine(now, false)
		assert.True(t, ok)
		assert.Zero(t, skipped)
	}
	for range 7 {
		_, ok := l.takeLine(now, false)
		assert.False(t, ok)
	}
	skipped, ok := l.takeLine(now, true)
	assert.True(t, ok, "all are wanted")
	assert.EqualValues(t, 7, skipped)

	written := 0
	for range 10_000 { // in 10 s
		now = now.Add(time.Millisecond)
		if skipped, ok = l.takeLine(now, false); ok {
			written++
			assert.LessOrEqual(t, skipped, uint64(20))
		}
	}
	assert.InDelta(t, 10*linesPerSecond, written, 2)
	now = now.Add(time.Minute)
	skipped, ok = l.takeLine(now, false)
	assert.True(t, ok)
	assert.Less(t, skipped, uint64(10))
}

// At level debug all are written; what that took must not be owed once it is over.
func TestLinesAtLevelDebugAreNotMissingLater(t *testing.T) {
	var l flowLog
	now := cc.Time(1)
	for range 100 * linesAtOnce { // at once
		_, ok := l.takeLine(now, true)
		assert.True(t, ok)
	}
	now = now.Add(time.Second)
	written := 0
	for range 2 * linesPerSecond {
		if _, ok := l.takeLine(now, false); ok {
			written++
		}
	}
	assert.Equal(t, linesPerSecond, written)
}

// unread is a log that nobody reads, and what lets its writer go.
func unread() (*slog.Logger, func() error) {
	nobody, end := io.Pipe()
	queue := &logqueue.Writer{To: end}
	queue.Detach(func(int) {})
	return slog.New(slog.NewTextHandler(queue, &slog.HandlerOptions{Level: slog.LevelDebug})), nobody.Close
}

// crowd is a way in to which connections come at once.
type crowd struct {
	Listener
	connections int
}

func (c crowd) Serve(take func(datapath.Conn)) error {
	for range c.connections {
		take(unwanted{from{addr: "192.0.2.1"}})
	}
	return net.ErrClosed
}

type unwanted struct{ from }

func (unwanted) Reset() error { return nil }

func TestRefusalsThatNobodyReadsDoNotPileUp(t *testing.T) {
	log, end := unread()
	s := &Server{env: environment{
		Parts: Parts{Log: log, Clock: func() cc.Time { return 1 }}, limits: limiter{global: 1, active: 1},
	}}
	s.env.inForce.Store(&settings{cfg: config.Default()})
	e := &openListener{Listener: crowd{connections: 10_000}}
	e.now.Store(&listenerState{openListener: e, listenerTotals: newListenerTotals()})
	require.NoError(t, s.acceptFrom(e))
	assert.EqualValues(t, 10_000, e.now.Load().refused.copyCounts()[RejectedGlobalLimit])
	assert.NoError(t, end())
}

func TestARuleThatAsksForANameDoesNotWaitForWhoReadsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, end := unread()
		in := &settings{cfg: config.Default()}
		var err error
		in.policy, err = in.cfg.Policy()
		require.NoError(t, err)
		c := &connection{
			relay: relay{env: &environment{Parts: Parts{Log: log}}}, listener: &listenerState{}, decidedBy: in,
			client: leg{conn: from{addr: "192.0.2.1"}},
		}
		assert.Nil(t, c.applyNameVerdict())
		assert.NoError(t, end())
	})
}

package proxy

import (
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath"
)

func TestAFloodOfConnectionsIsNoFloodOfLines(t *testing.T) {
	var l lines
	now := cc.Time(1)
	for range linesAtOnce {
		skipped, ok := l.take(now, false)
		l.written()
		assert.True(t, ok)
		assert.Zero(t, skipped)
	}
	for range 7 {
		_, ok := l.take(now, false)
		assert.False(t, ok)
	}
	skipped, ok := l.take(now, true)
	assert.True(t, ok, "all are wanted")
	assert.EqualValues(t, 7, skipped)

	written := 0
	for range 10_000 { // in 10 s
		now = now.Add(time.Millisecond)
		if skipped, ok = l.take(now, false); ok {
			written++
			l.written()
			assert.LessOrEqual(t, skipped, uint64(20))
		}
	}
	assert.InDelta(t, 10*linesPerSecond, written, 2)
	now = now.Add(time.Minute)
	skipped, ok = l.take(now, false)
	assert.True(t, ok)
	assert.Less(t, skipped, uint64(10))
}

// At level debug all are written; what that took must not be owed once it is over.
func TestLinesAtLevelDebugAreNotMissingLater(t *testing.T) {
	var l lines
	now := cc.Time(1)
	for range 100 * linesAtOnce { // at once
		_, ok := l.take(now, true)
		assert.True(t, ok)
		l.written()
	}
	now = now.Add(time.Second)
	written := 0
	for range 2 * linesPerSecond {
		if _, ok := l.take(now, false); ok {
			written++
		}
	}
	assert.Equal(t, linesPerSecond, written)
}

// stuck is the log of a process whose standard error nobody reads.
type stuck struct{ until chan struct{} }

func (s stuck) Write(b []byte) (int, error) {
	<-s.until
	return len(b), nil
}

func TestLinesThatNobodyReadsDoNotPileUp(t *testing.T) {
	now, reading := cc.Time(1), make(chan struct{})
	log := slog.New(slog.NewTextHandler(stuck{reading}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s := &Server{log: log, clock: func() cc.Time { return now }, setters: newSetters()}
	s.inForce.Store(&settings{cfg: config.Default()})
	ends := func() (line []slog.Attr) {
		now = now.Add(time.Second)
		if line = s.line(slog.Int("id", 1)); line != nil {
			s.write(slog.LevelInfo, "flow closed", line)
		}
		return line
	}
	for range linesWaiting {
		require.NotNil(t, ends())
	}
	for range 10 {
		require.Nil(t, ends())
	}
	close(reading)
	s.setters.end()
	assert.Contains(t, s.line(slog.Int("id", 2)), slog.Uint64("skipped", 10))
}

// crowd is a way in to which connections come at once.
type crowd struct {
	Way
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
	reading := make(chan struct{})
	log := slog.New(slog.NewTextHandler(stuck{reading}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	s := &Server{log: log, clock: func() cc.Time { return 1 }, setters: newSetters(), limits: limiter{global: 1, active: 1}}
	s.inForce.Store(&settings{cfg: config.Default()})
	e := &entrance{Way: crowd{connections: linesWaiting + 10}}
	e.now.Store(&listenerState{entrance: e, listenerTotals: newListenerTotals()})
	require.NoError(t, s.accept(e))
	assert.EqualValues(t, linesWaiting+10, e.now.Load().refused.snapshot()[RejectedGlobalLimit])
	assert.EqualValues(t, 10, s.lines.skipped)
	close(reading)
	s.setters.end()
}

func TestARuleThatAsksForANameDoesNotWaitForWhoReadsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reading := make(chan struct{})
		log := slog.New(slog.NewTextHandler(stuck{reading}, &slog.HandlerOptions{Level: slog.LevelDebug}))
		s := &Server{log: log, clock: func() cc.Time { return 1 }, setters: newSetters()}
		in := &settings{cfg: config.Default()}
		var err error
		in.policy, err = in.cfg.Policy()
		require.NoError(t, err)
		s.inForce.Store(in)
		c := &connection{srv: s, listener: &listenerState{}, decidedBy: in, accepted: from{addr: "192.0.2.1"}}
		assert.Nil(t, c.decide())
		close(reading)
		s.setters.end()
	})
}

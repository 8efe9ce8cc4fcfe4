// Package datapathtest is the conformance suite of datapath.Conn: what the relay relies on,
// whatever transport is below. It tests no speed.
package datapathtest

import (
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// patience bounds every wait; only a hang reaches it.
const patience = time.Minute

// Pair returns two legs connected to each other and a datapath each, or one in common, that lives
// until the test ends. Closing the legs is the suite's part.
type Pair func(t *testing.T) (a, b datapath.Conn)

// Mute has everything lost from now on that comes to c from its peer.
type Mute func(t *testing.T, c datapath.Conn)

// row is one check.
type row struct {
	name string
	run  func(suite)
}

// Run checks one datapath. mute may be nil where it enforces no windows.
func Run(t *testing.T, pair Pair, mute Mute) {
	t.Helper()
	run(t, pair, mute, append([]row{
		{"bytes arrive intact both ways at once", suite.bothWays},
		{"a half-close ends one direction only", suite.halfClose},
		{"nothing is left undelivered once all has been read", suite.delivered},
		{"a reset is seen as one", suite.reset},
		{"reports grow and add up", suite.reports},
		{"what was written before Observe is not reported", suite.lateObserve},
		{"a stalled reader shows as unsent bytes", suite.stalledReader},
		{"no report follows Close", suite.afterClose},
		{"closing under load ends everything", suite.closeUnderLoad},
		{"an enforced rate is kept", suite.rate},
		{"an enforced rate is kept that changes", suite.changedRate},
		{"an enforced window is kept", suite.window},
		{"an enforced window changes at any time", suite.changedWindow},
		{"a carrier moves every byte", suite.carry},
		{"an idle carrier is ended by a deadline", suite.idleCarrier},
	}, held...))
}

func run(t *testing.T, pair Pair, mute Mute, rows []row) {
	t.Helper()
	for _, test := range rows {
		t.Run(test.name, func(t *testing.T) {
			// First in, last out: the datapath's own clean-up runs before it.
			t.Cleanup(func() { assert.NoError(t, need.Leaks()) })
			test.run(suite{t, pair, mute})
		})
	}
}

// suite is one check underway.
type suite struct {
	*testing.T
	pair Pair
	mute Mute
}

// connect returns a pair that is closed with the test.
func (s suite) connect() (a, b datapath.Conn) {
	s.Helper()
	a, b = s.pair(s.T)
	for _, c := range []datapath.Conn{a, b} {
		require.NoError(s, c.SetDeadline(in(patience)))
		s.Cleanup(func() { _ = c.Close() })
	}
	return a, b
}

// in returns a deadline: sockets know real time only.
func in(d time.Duration) time.Time { return time.Now().Add(d) } //nolint:forbidigo // see above

// payload returns n bytes that repeat nowhere near a buffer's size.
func payload(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	_, _ = r.Read(b)
	return b
}

// observer collects the reports of a leg.
type observer struct {
	holds   datapath.Hold
	mu      sync.Mutex
	changed *sync.Cond
	reports []flow.Report
	inside  bool
	overlap bool
	closed  bool
	late    int
}

// observe has a leg keep to a limit, as far as it can, and collects its reports.
func observe(c datapath.Conn, limit flow.Limit) *observer {
	return observeHolding(c, datapath.HoldAll, limit)
}

// observeRate is observe of a leg that keeps the rate: alone, where it does not keep it with a
// window.
func observeRate(c datapath.Conn, limit flow.Limit) *observer {
	want := datapath.HoldAll
	if c.Enforce(want, 0)&datapath.HoldRate == 0 {
		want = datapath.HoldRate
	}
	return observeHolding(c, want, limit)
}

func observeHolding(c datapath.Conn, want datapath.Hold, limit flow.Limit) *observer {
	o := &observer{holds: c.Enforce(want, 0)}
	o.changed = sync.NewCond(&o.mu)
	c.Apply(limit)
	c.Observe(o.report)
	return o
}

func (o *observer) report(r flow.Report) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.overlap = o.overlap || o.inside
	if o.closed {
		o.late++
	}
	o.inside = true
	o.reports = append(o.reports, r)
	o.inside = false
	o.changed.Broadcast()
}

// until waits for a report and returns it.
func (o *observer) until(t *testing.T, what string, ok func(flow.Report) bool) flow.Report {
	t.Helper()
	expired := time.AfterFunc(patience, func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.closed = true
		o.changed.Broadcast()
	})
	defer expired.Stop()
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		var last flow.Report
		if n := len(o.reports); n > 0 {
			if last = o.reports[n-1]; ok(last) {
				return last
			}
		}
		if o.closed {
			require.FailNow(t, "no report says "+what, "the last one is %+v", last)
		}
		o.changed.Wait()
	}
}

// all returns what was reported, after checking what holds for every report.
func (o *observer) all(t *testing.T) []flow.Report {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	assert.False(t, o.overlap, "report ran twice at a time")
	var before flow.Report
	for i, r := range o.reports {
		grew := r.At >= before.At && r.Written >= before.Written && r.Acked >= before.Acked && r.Lost >= before.Lost &&
			r.Marked >= before.Marked && r.Timeouts >= before.Timeouts
		bounded := r.Acked <= r.Written && r.Newest <= r.Written && r.Unsent >= 0
		if !grew || !bounded || r.Newest != 0 && r.Newest < r.Acked {
			assert.Fail(t, "reports contradict each other", "report %d after %+v is %+v", i, before, r)
			break
		}
		before = r
	}
	return o.reports
}

// arrived says whether n bytes are through and nothing is left behind.
func arrived(n int) func(flow.Report) bool {
	return func(r flow.Report) bool {
		return r.Acked == cc.Bytes(n) && r.Written == cc.Bytes(n) && r.Unsent == 0 && r.Pipe <= 0
	}
}

// inBackground runs f and returns a wait for its error.
func inBackground(f func() error) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return func() error { return <-done }
}

func send(c datapath.Conn, data []byte) error {
	if _, err := c.Write(data); err != nil {
		return err
	}
	return c.CloseWrite()
}

func (s suite) bothWays() {
	a, b := s.connect()
	oa, ob := observe(a, flow.Limit{Cwnd: cc.MaxCwnd}), observe(b, flow.Limit{Cwnd: cc.MaxCwnd})
	down, up := payload(3<<20, 1), payload(2<<20, 2)

	sentDown := inBackground(func() error { return send(a, down) })
	sentUp := inBackground(func() error { return send(b, up) })
	gotUp := make(chan []byte, 1)
	readUp := inBackground(func() error {
		got, err := io.ReadAll(a)
		gotUp <- got
		return err
	})
	got, err := io.ReadAll(b)
	require.NoError(s, err)
	require.NoError(s, sentDown())
	require.NoError(s, sentUp())
	require.NoError(s, readUp())
	assert.Equal(s, sha256.Sum256(down), sha256.Sum256(got))
	assert.Equal(s, sha256.Sum256(up), sha256.Sum256(<-gotUp))

	oa.until(s.T, "everything arrived", arrived(len(down)))
	ob.until(s.T, "everything arrived", arrived(len(up)))
	oa.all(s.T)
	ob.all(s.T)
}

func (s suite) halfClose() {
	a, b := s.connect()
	require.NoError(s, send(a, []byte("question")))
	got, err := io.ReadAll(b)
	require.NoError(s, err)
	require.Equal(s, "question", string(got))

	require.NoError(s, send(b, []byte("answer")))
	got, err = io.ReadAll(a)
	require.NoError(s, err)
	assert.Equal(s, "answer", string(got))
	_, err = a.Write([]byte("more"))
	assert.Error(s, err, "after CloseWrite")
}

func (s suite) delivered() {
	a, b := s.connect()
	sent := inBackground(func() error { return send(a, payload(1<<20, 5)) })
	n, err := io.Copy(io.Discard, struct{ io.Reader }{b})
	require.NoError(s, err)
	require.EqualValues(s, 1<<20, n)
	require.NoError(s, sent())
	require.Eventually(s, func() bool {
		n, err := a.Undelivered()
		return err == nil && n == 0
	}, patience, time.Millisecond, "its end too")
}

func (s suite) reset() {
	a, b := s.connect()
	_, err := a.Write([]byte("x"))
	require.NoError(s, err)
	_, err = io.ReadFull(b, make([]byte, 1))
	require.NoError(s, err)

	require.NoError(s, a.Reset())
	_, err = b.Read(make([]byte, 1))
	assert.ErrorIs(s, err, syscall.ECONNRESET)
	assert.Error(s, a.Close(), "it is closed already")
}

func (s suite) reports() {
	a, b := s.connect()
	o := observe(a, flow.Limit{Cwnd: cc.MaxCwnd})
	first := o.until(s.T, "a start", func(flow.Report) bool { return true })
	assert.Zero(s, first.Written)
	assert.Zero(s, first.Acked)

	data := payload(4<<20, 3)
	wrote := inBackground(func() error { return send(a, data) })
	got, err := io.ReadAll(b)
	require.NoError(s, err)
	require.NoError(s, wrote())
	require.Equal(s, sha256.Sum256(data), sha256.Sum256(got))

	last := o.until(s.T, "everything arrived", arrived(len(data)))
	assert.Positive(s, last.MSS)
	assert.Positive(s, len(o.all(s.T)), "reports")
	assert.Zero(s, a.Info().Unsent)
	assert.NotEmpty(s, a.Info().Tier)
	assert.Zero(s, a.Info().SignalErrors)

	// The end of the stream is no byte, whenever it is acknowledged.
	_, err = b.Write([]byte("y"))
	require.NoError(s, err)
	_, err = io.ReadFull(a, make([]byte, 1))
	require.NoError(s, err)
	require.NoError(s, a.Close())
	for _, r := range o.all(s.T) {
		assert.LessOrEqual(s, r.Acked, cc.Bytes(len(data)))
		assert.LessOrEqual(s, r.Written, cc.Bytes(len(data)))
	}
}

func (s suite) lateObserve() {
	for _, swap := range []bool{false, true} { // the end that dialled, and the one that accepted
		a, b := s.connect()
		if swap {
			a, b = b, a
		}
		_, err := a.Write([]byte("greeting"))
		require.NoError(s, err)
		o := observe(a, flow.Limit{Cwnd: cc.MaxCwnd})
		_, err = a.Write([]byte("body"))
		require.NoError(s, err)
		_, err = io.ReadFull(b, make([]byte, len("greetingbody")))
		require.NoError(s, err)
		o.until(s.T, "the body arrived", arrived(len("body")))
		for _, r := range o.all(s.T) {
			assert.LessOrEqual(s, r.Written, cc.Bytes(len("body")))
		}
	}
}

func (s suite) stalledReader() {
	a, b := s.connect()
	o, n := s.stallReader(a, b, func() {})
	o.until(s.T, "everything arrived", arrived(n))
	o.all(s.T)
}

// stallReader has b not read until the window is full, and read all n bytes once before has run.
func (s suite) stallReader(a, b datapath.Conn, before func()) (o *observer, n int) {
	o = observe(a, flow.Limit{Cwnd: cc.MaxCwnd})
	data := payload(32<<20, 4) // more than buffers on the way hold
	wrote := inBackground(func() error { return send(a, data) })
	o.until(s.T, "the receiver holds it back", func(r flow.Report) bool { return r.RwndFull && r.Unsent > 0 })
	before()
	got, err := io.ReadAll(b)
	require.NoError(s, err)
	require.NoError(s, wrote())
	require.Equal(s, sha256.Sum256(data), sha256.Sum256(got))
	return o, len(data)
}

func (s suite) afterClose() {
	a, b := s.connect()
	oa, ob := observe(a, flow.Limit{Cwnd: cc.MaxCwnd}), observe(b, flow.Limit{Cwnd: cc.MaxCwnd})
	_, err := a.Write(payload(64<<10, 5))
	require.NoError(s, err)
	require.NoError(s, a.Close())
	oa.mu.Lock()
	oa.closed = true
	oa.mu.Unlock()

	// The other end's reports show that the datapath has gone on.
	_, err = io.Copy(io.Discard, b)
	require.NoError(s, err)
	for range 3 {
		_, err = b.Write([]byte("z"))
		if err != nil {
			break // the closed end may answer with a reset
		}
	}
	ob.until(s.T, "time passed", func(flow.Report) bool { return true })
	require.NoError(s, b.Close())
	oa.mu.Lock()
	defer oa.mu.Unlock()
	assert.Zero(s, oa.late, "reports after Close")
}

func (s suite) closeUnderLoad() {
	var all sync.WaitGroup
	for range 8 {
		a, b := s.connect()
		oa, ob := observe(a, flow.Limit{Cwnd: cc.MaxCwnd}), observe(b, flow.Limit{Cwnd: cc.MaxCwnd})
		for _, c := range []datapath.Conn{a, b} {
			all.Go(func() {
				buf := make([]byte, 64<<10)
				for {
					if _, err := c.Write(buf); err != nil {
						return
					}
				}
			})
			all.Go(func() { _, _ = io.Copy(io.Discard, struct{ io.Reader }{c}) })
			all.Go(func() {
				for range 100 {
					_ = c.Info()
				}
			})
		}
		oa.until(s.T, "bytes arrive", func(r flow.Report) bool { return r.Acked > 256<<10 })
		ob.until(s.T, "bytes arrive", func(r flow.Report) bool { return r.Acked > 256<<10 })
		all.Go(func() { _ = a.Reset() })
		all.Go(func() { _ = b.Close() })
	}
	all.Wait()
}

func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

//go:build linux

package kernel

import (
	"cmp"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

func TestTheSocketIsToldOnlyWhatMoved(t *testing.T) {
	for name, row := range map[string]struct {
		has, rate cc.Rate
		want      bool
	}{
		"unlimited stays unlimited":        {0, 0, false},
		"a first rate":                     {0, 1_000_000, true},
		"a rate is lifted":                 {1_000_000, 0, true},
		"two percent up is within bounds":  {1_000_000, 1_020_000, false},
		"three percent up":                 {1_000_000, 1_030_000, true},
		"three percent down":               {1_000_000, 970_000, true},
		"two percent down is within bound": {1_000_000, 980_000, false},
	} {
		assert.Equal(t, row.want, rateMoved(row.has, row.rate), name)
	}
	assert.EqualValues(t, uint(math.MaxUint), pacingOption(0))
	assert.EqualValues(t, 125_000, pacingOption(1_000_000))
	assert.EqualValues(t, 1, pacingOption(7), "a rate is never rounded to none")

	assert.Equal(t, minUnsent, unsentFor(2*mss))
	assert.Equal(t, 50_000, unsentFor(100_000))
	assert.Equal(t, maxUnsent, unsentFor(cc.MaxCwnd))
	assert.True(t, unsentMoved(0, minUnsent))
	assert.False(t, unsentMoved(100_000, 149_000))
	assert.True(t, unsentMoved(100_000, 151_000))
	assert.False(t, unsentMoved(100_000, 50_000))
	assert.True(t, unsentMoved(100_000, 49_000))
}

func TestAPauseGrowsWithTheSilence(t *testing.T) {
	for silence, want := range map[time.Duration]time.Duration{
		0: Tick, 127 * Tick / 2: Tick, 64 * Tick: Tick, 128 * Tick: 2 * Tick, 640 * Tick: 10 * Tick,
		5 * time.Second: 64 * Tick,
	} {
		assert.Equal(t, want, pollPause(silence), "after %v", silence)
	}
}

func TestAWiderWindowCountsForWhatWasWrittenUnderIt(t *testing.T) {
	h := hands{now}
	var l limits
	l.beginEnforcing(nil, datapath.HoldRate)
	var taken atomic.Int64
	apply := func(segments cc.Bytes) {
		h.now++
		taken.Add(1000)
		l.applyLimit(flow.Limit{Cwnd: segments * mss}, h.clock, &taken)
	}
	check := func(reading cc.Time, window cc.Bytes, before prevWindow) {
		t.Helper()
		limit, was := l.limitSince(reading)
		assert.Equal(t, window*mss, limit.Cwnd)
		assert.Equal(t, before, was)
	}
	apply(10)
	check(now, 10, prevWindow{})
	apply(12)
	check(now, 12, prevWindow{})
	apply(4)
	check(now, 4, prevWindow{12 * mss, 3000})
	apply(6)
	check(now, 6, prevWindow{12 * mss, 3000})
	apply(5)
	check(now, 5, prevWindow{12 * mss, 5000})
	check(h.now, 5, prevWindow{12 * mss, 5000}) // the newest reading was when it was lowered
	h.now++
	check(h.now, 5, prevWindow{})
	apply(3)
	check(h.now-1, 3, prevWindow{5 * mss, 6000})
}

// TestAWiderWindowOfABlockedLegIsUsedAtOnce counts when settle has the kernel send.
func TestAWiderWindowOfABlockedLegIsUsedAtOnce(t *testing.T) {
	needsEBPF(t)
	d := still(t, Config{Envelope: EBPF, Cells: 1})
	a, _ := d.pair(t, loopback4)
	a.Enforce(datapath.HoldAll, 0)
	l := a.limits.Load()
	at := uint64(1)
	// said is what the socket says, and what comes of that before settle.
	said := func(packets uint32, pipe, unsent cc.Bytes, rwndFull bool, limit cc.Bytes) {
		at++
		l.beginReport()
		s := bpf.Seen{Cwnd: packets, At: at, SrttUs: 100_000}
		l.updateFromReport(&flow.Report{MSS: mss, Pipe: pipe, Unsent: unsent, RwndFull: rwndFull}, &s, true)
		a.Apply(flow.Limit{Cwnd: limit})
	}
	settle := func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.setChangedOptions()
	}
	a.Apply(flow.Limit{Cwnd: 80 * mss})
	settle()
	for name, row := range map[string]struct {
		blocked, rwndFull bool
		pipe              cc.Bytes // in segments; 0: the window
		// windows in segments; pushed is to be used now; want: the one that was, 0: none
		reported, pushed, want cc.Bytes
	}{
		"a raise waits for the next acknowledgement": {blocked: true, reported: 90},
		"one that is to be used now does not":        {blocked: true, reported: 80, pushed: 81, want: 81},
		"none is one":                                {blocked: true, reported: 80, pushed: 0},
		"nothing waits":                              {reported: 80, pushed: 200},
		"the receiver holds it back":                 {blocked: true, rwndFull: true, reported: 200},
		"the pacing rate holds it back":              {blocked: true, pipe: 50, reported: 80, pushed: 200},
		"the last third is kept for later":           {blocked: true, pipe: 54, reported: 80, pushed: 81, want: 81},
		"a narrower one":                             {blocked: true, reported: 80, pushed: 40},
		"a report comes before what was pushed":      {blocked: true, reported: 80, pushed: 81, want: 81},
		"it has been lowered, and is raised by one":  {blocked: true, reported: 40, pushed: 41, want: 41},
	} {
		t.Run(name, func(t *testing.T) {
			unsent := cc.Bytes(0)
			if row.blocked {
				unsent = 100 * mss
			}
			said(80, cmp.Or(row.pipe, 80)*mss, unsent, row.rwndFull, row.reported*mss)
			sent := settle()
			if row.pushed > 0 {
				a.Apply(flow.Limit{Cwnd: row.pushed * mss, Now: true})
				sent = settle()
			}
			assert.Equal(t, row.want > 0, sent)
			assert.False(t, settle(), "once")
			a.Apply(flow.Limit{Cwnd: 80 * mss})
			l.windowBlocked, l.sendNow = false, false
			settle()
		})
	}
	assert.Equal(t, 1, a.option(t, unix.IPPROTO_TCP, unix.TCP_NODELAY))
}

func TestOnlyWhatIsNotPacedHasNoRate(t *testing.T) {
	for rate, want := range map[cc.Rate]uint64{0: 0, -1: 0, 1: 1, 8: 1, 15: 1, 16: 2, 1e9: 125e6} {
		assert.Equal(t, want, bytesPerSecond(rate), "%d bits per second", rate)
	}
}

func TestWhatMayWaitUnsentLastsSomeMilliseconds(t *testing.T) {
	for name, row := range map[string]struct {
		limit flow.Limit
		srtt  time.Duration
		want  int
	}{
		"a window per round trip": {flow.Limit{Cwnd: 1_000_000}, 100 * time.Millisecond, 100_000},
		"a pacing rate below that": {
			flow.Limit{Cwnd: 1_000_000, PacingRate: 40e6},
			100 * time.Millisecond,
			50_000,
		},
		"a pacing rate above that": {
			flow.Limit{Cwnd: 1_000_000, PacingRate: 800e6},
			100 * time.Millisecond,
			100_000,
		},
		"some segments at least":         {flow.Limit{Cwnd: 5_000}, 100 * time.Millisecond, minSegments * mss},
		"so many of a closed one":        {flow.Limit{}, 100 * time.Millisecond, minSegments * mss},
		"at most what ever waits":        {flow.Limit{Cwnd: cc.MaxCwnd}, time.Millisecond, maxUnsent},
		"before there is a round trip":   {flow.Limit{Cwnd: 30_000}, 0, 30_000},
		"a rate before a round trip":     {flow.Limit{Cwnd: 30_000, PacingRate: 24_000_000}, 0, 30_000},
		"no bound before a round trip":   {flow.Limit{Cwnd: cc.MaxCwnd}, 0, maxUnsent},
		"a short round trip at any rate": {flow.Limit{Cwnd: 100_000}, 50 * time.Microsecond, maxUnsent},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, row.want, unsentBelow(row.limit, row.srtt, mss))
		})
	}
}

// TestTheSocketOnlySpreadsWhatTheRelayLetsOut tells a rate that the socket has to keep from one that
// the relay keeps.
func TestTheSocketOnlySpreadsWhatTheRelayLetsOut(t *testing.T) {
	const rate = cc.Rate(8_000_000) // bits per second
	for _, row := range []struct {
		want, holds datapath.Hold
		bytes       int
	}{
		{want: datapath.HoldRate, holds: datapath.HoldRate, bytes: 1_000_000},
		{want: datapath.HoldAll, holds: 0, bytes: pacingHeadroom * 1_000_000},
	} {
		a, _ := still(t, Config{}).pair(t, loopback4)
		assert.Equal(t, row.holds, a.Enforce(row.want, 0))
		a.Apply(flow.Limit{Cwnd: cc.MaxCwnd, PacingRate: rate})
		a.mu.Lock()
		a.setChangedOptions()
		a.mu.Unlock()
		assert.Equal(t, row.bytes, a.option(t, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE))
	}
}

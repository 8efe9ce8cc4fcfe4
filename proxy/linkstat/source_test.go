package linkstat

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

const patience = time.Minute

var start = time.Now()

func clock() cc.Time { return cc.Time(time.Second + time.Since(start)) }

// heard is what a source has told.
type heard struct {
	t      *testing.T
	source *Source

	mu    sync.Mutex
	hints []cc.Hint
	where []netip.Prefix
	log   need.Output
}

func (h *heard) take(p netip.Prefix, hint cc.Hint) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hints, h.where = append(h.hints, hint), append(h.where, p)
	return 1
}

// last is the newest hint; false: there is none.
func (h *heard) last() (cc.Hint, netip.Prefix, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n := len(h.hints)
	if n == 0 {
		return cc.Hint{}, netip.Prefix{}, false
	}
	return h.hints[n-1], h.where[n-1], true
}

// forget drops what was heard until now.
func (h *heard) forget() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.hints, h.where = nil, nil
}

// meanArrival is that of the hints of the last while; false: there are not yet
// hints for so long.
func (h *heard) meanArrival(while time.Duration) (mean float64, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	n, sum := 0, 0.0
	for i := len(h.hints) - 1; i >= 0; i-- {
		if h.hints[len(h.hints)-1].At.Sub(h.hints[i].At) > while {
			return sum / float64(n), true
		}
		n++
		sum += float64(h.hints[i].ArrivalRate)
	}
	return 0, false
}

// listen runs a source in the namespace until the test ends.
func (ns namespace) listen(t *testing.T, cfg Config) *heard {
	t.Helper()
	h := &heard{t: t}
	cfg.Clock, cfg.Hint, cfg.Log = clock, h.take, slog.New(slog.NewTextHandler(&h.log, nil))
	if cfg.Interface == "" {
		cfg.Interface = near
	}
	cfg.Interval = cmp.Or(cfg.Interval, 20*time.Millisecond)
	ns.do(t, func() (err error) {
		h.source, err = Open(cfg)
		return err
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.source.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		h.source.Close()
	})
	return h
}

// until waits for a hint.
func (h *heard) until(what string, ok func(cc.Hint) bool) (hint cc.Hint) {
	h.t.Helper()
	require.Eventually(h.t, func() bool {
		var told bool
		hint, _, told = h.last()
		return told && ok(hint)
	}, patience, time.Millisecond, what)
	return hint
}

// flood writes as much as the connection takes.
func flood(from, to *net.TCPConn) {
	go func() { _, _ = io.Copy(io.Discard, to) }()
	go func() { _, _ = io.Copy(struct{ io.Writer }{from}, zeros{}) }()
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

func TestAShapedLinkTellsItsRateItsRoomAndWhatArrives(t *testing.T) {
	const (
		rate  = 5_000_000
		queue = 100_000
	)
	router, host := joined(t)
	router.shape(t, near, tbf(rate, queue))
	h := router.listen(t, Config{Users: func(prefixes []netip.Prefix) Users {
		assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("10.9.7.0/24")}, prefixes)
		return Users{Flows: 3, Hosts: 2}
	}})
	idle := h.until("a rate of what arrives", func(h cc.Hint) bool { return h.ArrivalRate > 0 })
	_, where, _ := h.last()
	assert.Equal(t, netip.MustParsePrefix("10.9.7.0/24"), where, "whose path it is")
	assert.EqualValues(t, rate, idle.LinkRate)
	assert.EqualValues(t, rate*1448/1514/2, idle.Capacity, "two hosts divide it")
	assert.Equal(t, 3, idle.Flows)
	assert.InDelta(t, queue, int(idle.QueueRoom), 200, "nothing waits, but for what IPv6 has to say")

	// A sender that is slower than the link.
	const paced = 3_000_000
	from, to := connect(t, router, host)
	pace(t, from, paced)
	flood(from, to)
	require.Eventually(t, func() bool { // which begins with a burst
		mean, ok := h.meanArrival(time.Second)
		return ok && mean > paced*0.9 && mean < paced*1.1
	}, patience, 10*time.Millisecond, "what arrives is what it sends")

	// One that takes what it can get.
	pace(t, from, 1_000_000_000)
	h.until("the queue fills", func(h cc.Hint) bool { return h.QueueRoom < queue/2 && h.ArrivalRate > rate })
	h.until("the queue is full", func(h cc.Hint) bool { return h.QueueRoom < queue/10 })
}

// pace bounds what a connection sends, in bit/s.
func pace(t *testing.T, c *net.TCPConn, bits int) {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, bits/8)
	}))
	require.NoError(t, err)
}

func TestAQueueOfClassesTellsTheirRateAndTheirLeavesLimit(t *testing.T) {
	router, _ := joined(t)
	router.shape(t, near, func(attrs netlink.QdiscAttrs) netlink.Qdisc {
		q := netlink.NewHtb(attrs)
		q.Defcls = 0x10
		return q
	})
	router.do(t, func() error {
		link, err := netlink.LinkByName(near)
		if err != nil {
			return err
		}
		top := netlink.NewHtbClass(
			netlink.ClassAttrs{
				LinkIndex: link.Attrs().Index, Parent: netlink.MakeHandle(1, 0),
				Handle: netlink.MakeHandle(1, 1),
			},
			netlink.HtbClassAttrs{Rate: 8_000_000, Ceil: 8_000_000},
		)
		leaf := netlink.NewHtbClass(
			netlink.ClassAttrs{
				LinkIndex: link.Attrs().Index, Parent: netlink.MakeHandle(1, 1),
				Handle: netlink.MakeHandle(1, 0x10),
			},
			netlink.HtbClassAttrs{Rate: 1_000_000, Ceil: 8_000_000},
		)
		if err := netlink.ClassAdd(top); err != nil {
			return err
		}
		return netlink.ClassAdd(leaf)
	})
	h := router.listen(t, Config{})
	hint := h.until("a hint", func(cc.Hint) bool { return true })
	assert.EqualValues(t, 8_000_000, hint.LinkRate, "of the class at the top, not of what is below it")
	assert.InDelta(t, 1000*1514, int(hint.QueueRoom), 3*1514,
		"of the leaf: as many packets as the interface's queue is long")
}

func TestAFairQueueTellsItsRoom(t *testing.T) {
	router, _ := joined(t)
	router.shape(t, near, func(attrs netlink.QdiscAttrs) netlink.Qdisc {
		q := netlink.NewFqCodel(attrs)
		q.Limit = 600
		return q
	})
	h := router.listen(t, Config{})
	hint := h.until("a hint", func(cc.Hint) bool { return true })
	assert.InDelta(t, 600*1514, int(hint.QueueRoom), 3*1514)
}

func TestALinkWithoutAQueueCountsWhatItSends(t *testing.T) {
	router, host := joined(t)
	h := router.listen(t, Config{
		Capacity: 30_000_000, Interval: 10 * time.Millisecond,
		Prefixes: []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")},
	})
	hint := h.until("a hint", func(h cc.Hint) bool { return h.ArrivalRate > 0 })
	_, where, _ := h.last()
	assert.Equal(t, netip.MustParsePrefix("0.0.0.0/0"), where)
	assert.EqualValues(t, 30_000_000, hint.LinkRate, "as was said; the device itself says more")
	assert.Zero(t, hint.QueueRoom, "not known")
	flood(connect(t, router, host))
	h.until("what arrives", func(h cc.Hint) bool { return h.ArrivalRate > 10_000_000 })
}

func TestAnInterfaceThatGoesAndComesAgain(t *testing.T) {
	router, host := joined(t)
	router.shape(t, near, tbf(5_000_000, 100_000))
	h := router.listen(t, Config{})
	h.until("a hint", func(h cc.Hint) bool { return h.LinkRate == 5_000_000 })
	require.True(t, h.source.Stats().Up)

	router.do(t, func() error {
		link, err := netlink.LinkByName(near)
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	})
	require.Eventually(t, func() bool { return !h.source.Stats().Up }, patience, time.Millisecond)
	require.Eventually(t, func() bool { return h.source.Stats().Errors >= 2 }, patience, time.Millisecond, "it "+
		"tries again")
	h.forget()

	join(t, router, host)
	router.shape(t, near, tbf(7_000_000, 100_000))
	h.until("hints from its successor", func(h cc.Hint) bool { return h.LinkRate == 7_000_000 })
	require.Eventually(t, func() bool {
		return strings.Count(h.log.String(), "hints from the "+
			"interface") == 3
	}, patience, time.Millisecond)
	assert.Equal(t, 1, strings.Count(h.log.String(), "no hints from the interface"),
		"once for each change, however often it is tried")
	assert.Equal(t, Stats{
		Interface: near, Up: true, Readings: h.source.Stats().Readings,
		Errors: h.source.Stats().Errors,
	}, h.source.Stats())
}

func TestAQueueThatIsReplacedIsNoticedAtOnce(t *testing.T) {
	router, _ := joined(t)
	h := router.listen(t, Config{Interval: 5 * time.Millisecond})
	h.until("a hint", func(cc.Hint) bool { return true })
	router.shape(t, near, tbf(5_000_000, 100_000))
	h.until("the new rate", func(h cc.Hint) bool { return h.LinkRate == 5_000_000 && h.QueueRoom > 0 })
}

func TestWhatCannotBeASource(t *testing.T) {
	for _, tt := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "no interface"},
		{Config{Interface: near}, "no interval"},
	} {
		_, err := Open(tt.cfg)
		assert.ErrorContains(t, err, tt.want)
	}
}

func TestAnInterfaceThatVanishesWhileAllAreAskedIsLeftOut(t *testing.T) {
	router, _ := joined(t)
	router.do(t, func() error {
		m, err := openMachine()
		if err != nil {
			return err
		}
		defer m.closeSockets()
		gone := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "gone0", Index: 1 << 20, Flags: net.FlagUp}}
		link, err := netlink.LinkByName(near)
		if err != nil {
			return err
		}
		there, err := m.describeInterfaces([]netlink.Link{gone, link})
		if assert.Len(t, there, 1) {
			assert.Equal(t, near, there[0].Name)
		}
		return err
	})
}

// BenchmarkReading is what one reading of a shaped interface costs, and finding
// out about it, which is done once a second.
func BenchmarkReading(b *testing.B) {
	router, _ := joined(b)
	router.shape(b, near, tbf(5_000_000, 100_000))
	var m *machine
	router.do(b, func() (err error) {
		m, err = openMachine()
		return err
	})
	defer m.closeSockets()
	d, err := m.describeDevice(near)
	require.NoError(b, err)
	b.Run("of a queue", func(b *testing.B) {
		for b.Loop() {
			if _, err := m.readQueue(d, 0); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("of all about an interface", func(b *testing.B) {
		for b.Loop() {
			if _, err := m.describeDevice(near); err != nil {
				b.Fatal(err)
			}
		}
	})
}

package flow

import (
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestGroupsTellOfEveryGroup(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(static(10)), p.open(static(10))
	b.send(mss)
	other := reno()
	other.Group = "aaa"
	other.Host = addr("192.0.2.9")
	p.open(other).Close(p.now)
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 7e6})

	a.send(100 * mss) // 9, of the 5 that it is due
	p.wait(20 * time.Millisecond)
	groups := p.mgr.Groups(p.now)
	require.Len(t, groups, 2, "in the order of their names")
	first, g := groups[0], groups[1]
	assert.NotEqual(t, first.Key, g.Key)
	assert.Equal(t, "aaa", first.Name)
	assert.Zero(t, first.Members)
	assert.Equal(t, 20*time.Millisecond, first.Idle)
	assert.Equal(t, []netip.Addr{addr("192.0.2.9")}, first.Hosts, "one that lingers knows where it led")

	assert.Equal(t, "host", g.Name)
	assert.Equal(t, "static", g.Algorithm)
	assert.Equal(t, "static", g.Phase)
	assert.Equal(t, []netip.Addr{addr("192.0.2.1")}, g.Hosts)
	assert.Equal(t, 2, g.Members)
	assert.Equal(t, 2, g.Active)
	assert.Equal(t, 10*mss, g.Cwnd)
	assert.Equal(t, 10*mss, g.Inflight)
	assert.Equal(t, 4*mss, g.Lent)
	assert.Zero(t, g.Unused)
	assert.EqualValues(t, 7e6, g.Hint.Capacity)

	a.ack(9 * mss)
	b.ack(mss)
	a.Take(p.now, mss)
	g = p.mgr.Groups(p.now)[1]
	assert.Equal(t, 20*time.Millisecond, g.MinRTT)
	assert.Equal(t, 10*mss, g.Delivered)
	assert.Equal(t, 9*mss, g.Unused, "nobody waits")
	assert.Zero(t, g.Lent)
	assert.Equal(t, 1, g.Active)
	assert.Positive(t, g.DeliveryRate)
}

func TestAlgorithmsAreToldWhatTheirOthersDeliver(t *testing.T) {
	p := newTestbed(t)
	var told cc.Bytes
	p.trace = func(e Event) { told = e.State.EdgeDelivered }
	deliver := func(group, algorithm string) {
		l := p.open(Terms{Group: group, Algorithm: algorithm})
		l.send(3 * mss)
		l.ack(3 * mss)
	}
	deliver("one", "copa")
	require.Equal(t, 3*mss, told)
	deliver("two", "copa")
	require.Equal(t, 6*mss, told, "those of another group count")
	deliver("three", "reno")
	require.Equal(t, 3*mss, told, "those under another algorithm do not")
}

func TestAHintForAPrefixReachesWhoLeadsNowhereElse(t *testing.T) {
	p := newTestbed(t)
	open := func(group, host string) *leg {
		return p.open(Terms{Group: group, Host: addr(host), Algorithm: "reno"})
	}
	open("a", "192.0.2.1")
	open("lan", "192.0.2.1")
	open("lan", "192.0.2.77")
	wide := open("wide", "192.0.2.2")
	away := open("wide", "198.51.100.1")
	open("mapped", "::ffff:192.0.2.3")
	open("six", "2001:db8::1%lan0")
	p.open(Terms{Group: "unknown", Algorithm: "reno"})

	hint := func(prefix string) int { return p.mgr.Hint(to(prefix), cc.Hint{At: p.now}) }
	assert.Equal(t, 1, hint("192.0.2.1"), "a, but not the whole of lan")
	assert.Equal(t, 3, hint("192.0.2.0/24"), "each once")
	assert.Equal(t, 3, hint("::ffff:192.0.2.0/120"), "however it is written")
	assert.Equal(t, 4, hint("0.0.0.0/0"))
	assert.Equal(t, 1, hint("2001:db8::/32"))
	assert.Zero(t, hint("203.0.113.0/24"))

	away.Close(p.now)
	assert.Equal(t, 4, hint("192.0.2.0/24"), "where members went that have left does not matter")
	wide.Close(p.now)
	assert.Equal(t, 3, hint("192.0.2.0/24"), "but without any it is as wide as it was")
	assert.Equal(t, 4, hint("0.0.0.0/0"))
}

func TestANewGroupHearsTheNewestFreshHintOfItsHost(t *testing.T) {
	p := newTestbed(t)
	wide := reno()
	wide.Group = "wide"
	p.open(wide)
	wide.Host = addr("192.0.2.2")
	p.open(wide)
	p.open(static(10))
	p.mgr.Hint(to("192.0.2.0/24"), cc.Hint{At: p.now, Capacity: 1})
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 5})
	p.wait(time.Millisecond)
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 6})

	heard := func(group string) *cc.Hint {
		late := reno()
		late.Group = group
		p.open(late)
		for _, g := range p.mgr.Groups(p.now) {
			if g.Name == group {
				return g.Hint
			}
		}
		return nil
	}
	require.NotNil(t, heard("late"))
	assert.EqualValues(t, 6, heard("later").Capacity, "of those that lead there alone")
	p.wait(freshHint + time.Millisecond)
	assert.Nil(t, heard("too late"))
}

func TestHintsMovesGroupsAndClosesMayRunAtOnce(t *testing.T) {
	mgr := Manager{}
	const rounds = 300
	var wg sync.WaitGroup
	at := func(n int) cc.Time { return cc.Time(n+1) * cc.Time(time.Millisecond) }
	for k := range 3 {
		wg.Go(func() {
			for n := range rounds {
				terms := Terms{
					Group: "g", Host: hostAt((n + k) % 5), Algorithm: "reno", HintCap: float64(n % 2),
					Target: cc.Rate(n % 3),
				}
				f, err := mgr.Open(at(n), terms, Leg{})
				if !assert.NoError(t, err) {
					return
				}
				g := f.Take(at(n), 4*mss)
				r := Report{
					At: at(n), Written: g.Bytes, Acked: g.Bytes, MSS: mss,
					RTT: time.Duration(1+n%7) * 10 * time.Millisecond,
				}
				f.Report(r)
				terms.Group, terms.Host = []string{"g", "h"}[n%2], hostAt(n%4)
				assert.NoError(t, f.Move(at(n), terms))
				f.Close(at(n))
			}
		})
		wg.Go(func() {
			for n := range rounds {
				mgr.Hint(to("10.0.0.0/8"), cc.Hint{At: at(n), Capacity: 1e6, Flows: 3})
				mgr.Hint(netip.PrefixFrom(hostAt(n%5), 32), cc.Hint{At: at(n), Capacity: 2e6})
				mgr.Tick(0, at(n))
				for _, g := range mgr.Groups(at(n)) {
					assert.GreaterOrEqual(t, g.Inflight, cc.Bytes(0))
					assert.LessOrEqual(t, g.Active, g.Members)
				}
			}
		})
	}
	wg.Wait()
	for _, g := range mgr.Groups(at(rounds)) {
		assert.Zero(t, g.Members)
		assert.Zero(t, g.Inflight)
	}
}

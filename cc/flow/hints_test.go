package flow

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// to is a prefix, or that of a single address.
func to(s string) netip.Prefix {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p
	}
	return netip.PrefixFrom(addr(s), addr(s).BitLen())
}

// listener is an algorithm that notes what the network says.
type listener struct {
	heard []cc.Hint
	none  int // events without a hint
}

// listening makes the algorithm of l's group one that notes hints.
func listening(l *leg) *listener {
	a := &listener{}
	l.group().mu.Lock()
	defer l.group().mu.Unlock()
	l.group().algorithm, l.group().mss = a, mss
	l.group().adoptControl(l.p.now)
	return a
}

func (a *listener) note(s cc.State) {
	if s.Hint == nil {
		a.none++
		return
	}
	a.heard = append(a.heard, *s.Hint)
}

func (a *listener) OnAck(e cc.Ack)    { a.note(e.State) }
func (a *listener) OnLoss(l cc.Loss)  { a.note(l.State) }
func (a *listener) OnTick(s cc.State) { a.note(s) }

func (a *listener) Control() cc.Control {
	return cc.Control{Cwnd: 10 * mss, NextTick: cc.Time(5 * time.Second), Phase: "listening"}
}

func TestEveryEventCarriesTheNewestHint(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	a := listening(l)
	l.send(4 * mss)
	p.wait(time.Millisecond)
	l.ack(mss)
	assert.Equal(t, 1, a.none, "nothing was said yet")

	assert.Equal(t, 1, p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 7e6}))
	p.wait(time.Millisecond)
	l.ack(mss)
	l.r.Lost = mss
	l.report()
	p.wait(cc.Time(5 * time.Second).Sub(p.now))
	require.Len(t, a.heard, 3, "an acknowledgement, a loss, a tick")
	for _, h := range a.heard {
		assert.EqualValues(t, 7e6, h.Capacity)
	}
}

func TestAHintOlderThanTheLastIsIgnored(t *testing.T) {
	p := newTestbed(t)
	l := p.open(static(10))
	a := listening(l)
	l.send(4 * mss)
	for i, h := range []cc.Hint{{At: p.now, Capacity: 2}, {At: p.now - 1, Capacity: 1}, {At: p.now, Capacity: 3}} {
		p.mgr.Hint(to("192.0.2.1"), h)
		p.wait(time.Millisecond)
		l.ack(mss)
		assert.Equal(t, []cc.Rate{2, 2, 3}[i], a.heard[i].Capacity)
	}
}

func TestAHintIsForItsHostAlone(t *testing.T) {
	p := newTestbed(t)
	one := p.open(static(10))
	same := p.open(Terms{Group: "host", Host: addr("192.0.2.1"), Algorithm: "reno"})
	other := p.open(Terms{Group: "other", Host: addr("192.0.2.2"), Algorithm: "static"})
	for _, l := range []*leg{one, same, other} {
		listening(l)
	}
	require.Equal(t, 2, p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 5}))
	for _, l := range []*leg{one, same, other} {
		l.send(mss)
		l.ack(mss)
	}
	assert.Len(t, one.group().algorithm.(*listener).heard, 1)
	assert.Len(t, same.group().algorithm.(*listener).heard, 1, "whatever its algorithm")
	assert.Empty(t, other.group().algorithm.(*listener).heard)
}

func TestAGroupThatComesLaterKnowsWhatOthersOfItsHostHaveHeard(t *testing.T) {
	p := newTestbed(t)
	p.open(static(10))
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 5})
	late := p.open(Terms{Group: "host", Host: addr("192.0.2.1"), Algorithm: "reno"})
	a := listening(late)
	late.send(mss)
	late.ack(mss)
	require.Len(t, a.heard, 1)
}

func TestHintsForUnknownHostsAreNotKept(t *testing.T) {
	p := newTestbed(t)
	assert.Zero(t, p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 5}))
	l := p.open(static(10))
	for i := range 1000 {
		assert.Zero(t, p.mgr.Hint(to(fmt.Sprintf("198.51.%d.%d", i/250, i%250)), cc.Hint{At: p.now}))
	}
	assert.Len(t, p.mgr.hosts, 1)

	l.Close(p.now)
	p.wait(memoryLasts)
	assert.Equal(t, 1, p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now}), "it lingers")
	p.wait(time.Second)
	p.open(Terms{Group: "other", Host: addr("192.0.2.2"), Algorithm: "static"})
	assert.Zero(t, p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now}), "it is forgotten with its last group")
	assert.Len(t, p.mgr.hosts, 1)
}

func TestHintsMayComeFromAnyGoroutine(t *testing.T) {
	var mgr Manager
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			for i := range 500 {
				mgr.Hint(to(fmt.Sprintf("192.0.2.%d", i%2)), cc.Hint{At: cc.Time(i), Capacity: cc.Rate(i)})
			}
		})
		wg.Go(func() {
			for i := range 100 {
				now := cc.Time(i + 1)
				host := addr(fmt.Sprintf("192.0.2.%d", i%2))
				f, err := mgr.Open(now, Terms{Group: host.String(), Host: host, Algorithm: "reno"}, Leg{})
				if !assert.NoError(t, err) {
					return
				}
				g := f.Take(now, mss)
				f.Report(Report{At: now, Written: g.Bytes, Acked: g.Bytes, MSS: mss})
				f.Close(now)
				if k == 0 {
					mgr.Tick(0, now)
				}
			}
		})
	}
	wg.Wait()
	assert.Len(t, mgr.hosts, 2)
	assert.Equal(t, 1, mgr.Hint(to("192.0.2.0"), cc.Hint{At: 1000, Capacity: 9}))
	for _, r := range mgr.hosts[addr("192.0.2.0")] {
		assert.EqualValues(t, 9, r.group.hints.newest.Capacity)
	}
}

func TestAHintAllocatesNothing(t *testing.T) {
	p := newTestbed(t)
	p.open(static(10))
	at, host := p.now, to("192.0.2.1")
	assert.Zero(t, testing.AllocsPerRun(1000, func() {
		at++
		p.mgr.Hint(host, cc.Hint{At: at, Capacity: cc.Rate(at)})
	}))
}

// hostAt is the i-th host.
func hostAt(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i + 1)}) }

// checked is a hintCheck of a path of 40 ms at which acknowledgements come each
// millisecond.
type checked struct {
	hintCheck
	now   cc.Time
	total cc.Bytes
}

// run lets d pass with that rate delivered and that queue. A hint comes each
// 10 ms, and the sender tries to use all of it.
func (c *checked) run(d time.Duration, told, delivered cc.Rate, queue time.Duration) {
	for end := c.now.Add(d); c.now < end; c.now = c.now.Add(time.Millisecond) {
		if c.now/cc.Time(time.Millisecond)%10 == 0 {
			c.addClaim(&cc.Hint{At: c.now, Capacity: told}, 0)
		}
		c.total += delivered.BytesIn(time.Millisecond)
		rtt := 40*time.Millisecond + queue
		c.onAck(hintEvidence{now: c.now, forwardRTT: rtt, srtt: rtt, delivered: c.total, usedPart: 1})
	}
}

func TestAHintIsBelievedAtOnce(t *testing.T) {
	c := &checked{now: cc.Time(time.Second)}
	for _, told := range []cc.Rate{10e6, 100e6, 1e6, 50e6} {
		c.addClaim(&cc.Hint{Capacity: told}, 0)
		assert.Equal(t, told, c.correctedHint(cc.Hint{Capacity: told}).Capacity)
	}
	c.run(time.Second, 10e6, 10e6, 0)
	c.run(time.Second, 100e6, 10e6, 0)
	assert.EqualValues(t, 100e6, c.believedRate(c.claimed), "less is delivered, but no queue stands")
	c.run(150*time.Millisecond, 100e6, 10e6, 30*time.Millisecond)
	assert.EqualValues(t, 100e6, c.believedRate(c.claimed), "what left before the hint is still on its way")
}

func TestAHintThatIsTooHighIsCutToWhatIsDelivered(t *testing.T) {
	c := &checked{now: cc.Time(time.Second)}
	c.run(time.Second, 10e6, 10e6, 0)
	c.run(300*time.Millisecond, 100e6, 10e6, 30*time.Millisecond)
	assert.InEpsilon(t, cutTo*10e6, float64(c.believedRate(c.claimed)), 0.01)
	assert.Empty(t, c.certainDoubt(), "it is to show first that the queue drains")
	part := c.correctedHint(cc.Hint{Capacity: 100e6, FairShare: 50e6, LinkRate: 200e6, Flows: 3})
	assert.InEpsilon(t, 2*float64(part.FairShare), float64(part.Capacity), 0.01)
	assert.InEpsilon(t, 2*float64(part.Capacity), float64(part.LinkRate), 0.01)
	assert.Equal(t, 3, part.Flows)
	assert.Zero(t, part.ArrivalRate, "what is not known stays so")

	c.run(100*time.Millisecond, 100e6, cutTo*10e6, 0)
	assert.Equal(t, HintTooHigh, c.certainDoubt())
	c.addClaim(&cc.Hint{Capacity: 1e6}, 0)
	assert.EqualValues(t, 1e6, c.believedRate(c.claimed), "less is believed at once")
	c.run(10*time.Second, 10e6, 10e6, 0)
	assert.Empty(t, c.certainDoubt(), "what it says is so again")
}

func TestACutThatDrainsNothingIsTakenBack(t *testing.T) {
	c := &checked{now: cc.Time(time.Second)}
	c.run(time.Second, 10e6, 10e6, 0)
	cut := 0
	for range 600 { // another's queue: sending less gets less
		c.run(100*time.Millisecond, 10e6, c.believedRate(10e6)/2, 60*time.Millisecond)
		assert.Empty(t, c.certainDoubt())
		if c.trial.cut {
			cut++
		}
	}
	assert.Positive(t, cut)
	assert.Less(t, cut, 60, "ever more rarely")
}

func TestAHintThatIsTooLowIsFoundOut(t *testing.T) {
	c := &checked{now: cc.Time(time.Second)}
	for range 400 {
		c.run(10*time.Millisecond, 1e6, min(10e6, c.believedRate(1e6)), 0)
	}
	assert.Equal(t, HintTooLow, c.certainDoubt())
	assert.Greater(t, c.believedRate(1e6), cc.Rate(5e6))
	for range 100 {
		const rtt = 20 * time.Millisecond
		stands := max(0, cc.Rate(10e6).TimeFor(c.believedRate(1e6).BytesIn(rtt))-rtt)
		c.run(10*time.Millisecond, 1e6, min(10e6, c.believedRate(1e6)), stands)
	}
	assert.InDelta(t, 11e6, float64(c.believedRate(1e6)), 6e6)
}

func TestAHintThatIsRightIsTriedEverMoreRarely(t *testing.T) {
	c := &checked{now: cc.Time(time.Second)}
	tried := 0
	for range 6000 {
		c.run(10*time.Millisecond, 10e6, min(10e6, c.believedRate(10e6)), 0)
		assert.Empty(t, c.certainDoubt())
		if c.trial.rise && c.believedRate(10e6) > 10e6 {
			tried++
		}
	}
	assert.Positive(t, tried)
	assert.Less(t, tried, 6000/100)
}

func TestOthersOfTheHostTakeTheirPartOfAHint(t *testing.T) {
	p := newTestbed(t)
	a, b := p.open(capped(1000, 1)).warm(), p.open(Terms{
		Group: "other", Host: addr("192.0.2.1"), Algorithm: "static", Params: cc.Params{"cwnd_packets": 10},
	}).warm()
	b.group().hints.check.intervalStart, b.group().hints.check.deliveredRate = p.now, 4e6
	p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 10e6})
	assert.EqualValues(t, 6e6, a.group().hints.check.claimed)
	assert.EqualValues(t, 10e6, b.group().hints.check.claimed, "nothing is delivered to the other")
}

func TestWhoseHintsAreDoubtedIsToldOnce(t *testing.T) {
	p := newTestbed(t)
	var news []HintNews
	p.mgr.HintNews = func(n HintNews) { news = append(news, n) }
	l := p.open(capped(1000, 1)).warm()
	// A link of 10 Mbit/s with hints of 40: the window is what leaves at 40 in 40 ms.
	const segment = 1158 * time.Microsecond // at 10 Mbit/s
	free, arrives := p.now, []cc.Time{}
	for end := p.now.Add(3 * time.Second); p.now < end; p.wait(time.Millisecond) {
		if p.now/cc.Time(time.Millisecond)%10 == 0 {
			p.mgr.Hint(to("192.0.2.1"), cc.Hint{At: p.now, Capacity: 40e6})
			p.wait(0)
		}
		for n := l.send(1000 * mss); n >= mss; n -= mss {
			free = max(free, p.now).Add(segment)
			arrives = append(arrives, free.Add(40*time.Millisecond))
		}
		for len(arrives) > 0 && arrives[0] <= p.now {
			arrives = arrives[1:]
			l.ack(mss)
		}
	}
	if assert.Len(t, news, 1) {
		assert.Equal(t, "host", news[0].Group)
		assert.Equal(t, HintTooHigh, news[0].Doubt)
		assert.EqualValues(t, 40e6, news[0].Claimed)
		assert.InEpsilon(t, 10e6, float64(news[0].Delivered), 0.15)
	}
	g := p.mgr.Groups(p.now)[0]
	assert.Equal(t, HintTooHigh, g.HintDoubt)
	assert.InDelta(t, 0.25, g.Believed, 0.1)
	assert.EqualValues(t, 40e6, g.Hint.Capacity, "as it was told")
}

// FuzzHintCheck: whatever hints state and the path delivers, a rate that is known stays known and is
// not more than it may be, and a hint that nothing contradicts is believed.
func FuzzHintCheck(f *testing.F) {
	f.Add(uint64(1), uint16(500))
	f.Add(uint64(7), uint16(5000))
	f.Fuzz(func(t *testing.T, seed uint64, steps uint16) {
		r := rand.New(rand.NewPCG(seed, 0))
		c := &checked{now: 1}
		for range min(steps, 5000) {
			c.now = c.now.Add(time.Duration(r.Int64N(int64(100 * time.Millisecond))))
			h := cc.Hint{
				Capacity: cc.Rate(r.Int64N(2) * r.Int64N(1e15)), FairShare: cc.Rate(r.Int64N(2) * r.Int64N(1e15)),
				LinkRate: cc.Rate(r.Int64N(2) * r.Int64N(1e15)), ArrivalRate: cc.Rate(r.Int64N(2) * r.Int64N(1e15)),
			}
			c.addClaim(&h, cc.Rate(r.Int64N(1e12)))
			c.total += cc.Bytes(r.Int64N(1e6))
			c.onAck(hintEvidence{
				now: c.now, forwardRTT: time.Duration(r.Int64N(1e9)), srtt: time.Duration(r.Int64N(1e9)), delivered: c.total,
				usedPart: max(0.01, r.Float64()), unbound: r.Int64N(3) == 0,
			})
			got := c.correctedHint(h)
			told := [...]cc.Rate{h.Capacity, h.FairShare, h.LinkRate}
			for i, believed := range [...]cc.Rate{got.Capacity, got.FairShare, got.LinkRate} {
				if told := told[i]; (told > 0) != (believed > 0) || believed < 0 {
					t.Fatalf("rate %d of %v is %v", i, told, believed)
				}
				if !c.tooHigh && !c.tooLow && believed != told[i] {
					t.Fatalf("nothing is doubted, but %v is %v", told[i], believed)
				}
			}
		}
	})
}

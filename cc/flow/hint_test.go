package flow

import (
	"fmt"
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

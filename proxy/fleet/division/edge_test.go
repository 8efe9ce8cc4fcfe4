package division

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

const mbit = cc.Rate(1_000_000)

// fleet is edges in virtual time, with messages between them that take time and are lost.
type fleet struct {
	*rand.Rand
	now    cc.Time
	key    Key
	names  []string // in the order of edges
	edges  map[string]*Edge
	demand map[string]cc.Rate // of the flows at an edge; 0: there are none
	passed map[string]cc.Bytes
	weight map[string]int
	loss   float64       // part of the messages
	delay  time.Duration // at most
	cut    func(a, b string) bool

	ungranted map[string]cc.Time // when an edge was last without a grant
	queue     []packet
	check     func() // after each step; nil: none
}

type packet struct {
	at       cc.Time
	from, to string
	data     []byte
}

// step is the resolution of virtual time.
const step = 10 * time.Millisecond

func newFleet(seed uint64, n int) *fleet {
	f := &fleet{
		Rand: rand.New(rand.NewPCG(seed, 1)), now: cc.Time(time.Hour), key: Key{"host", 20 * mbit},
		edges: map[string]*Edge{}, demand: map[string]cc.Rate{}, passed: map[string]cc.Bytes{}, weight: map[string]int{},
		ungranted: map[string]cc.Time{}, delay: 100 * time.Millisecond, cut: func(string, string) bool { return false },
	}
	for i := range n {
		f.names = append(f.names, fmt.Sprintf("edge-%d", i))
	}
	for _, name := range f.names {
		f.edges[name] = NewEdge(name)
		for _, other := range f.names {
			f.edges[name].AddMember(f.now, other)
		}
	}
	return f
}

// run lets time pass. An edge that is not in f.edges is dead.
func (f *fleet) run(d time.Duration) {
	for end := f.now.Add(d); f.now < end; {
		f.now = f.now.Add(step)
		for i, name := range f.names {
			e := f.edges[name]
			if e == nil {
				continue
			}
			f.passed[name] += min(f.demand[name], e.Rate(f.now, f.key)).BytesIn(step)
			if f.now.Add(time.Duration(i)*3*step)%cc.Time(Period) != 0 {
				continue
			}
			var uses []Use
			if f.demand[name] > 0 {
				uses = []Use{{Key: f.key, Passed: f.passed[name], Weight: f.weight[name]}}
			}
			out := e.Exchange(f.now, uses)
			for _, to := range f.names {
				if out[to] == nil {
					continue
				}
				for _, data := range out[to].AppendPackets(nil) {
					if f.Float64() >= f.loss && !f.cut(name, to) {
						at := f.now.Add(time.Duration(f.Int64N(int64(f.delay) + 1)))
						f.queue = append(f.queue, packet{at, name, to, data})
					}
				}
			}
		}
		f.queue = slices.DeleteFunc(f.queue, func(p packet) bool {
			if p.at > f.now {
				return false
			}
			if m, err := ParsePacket(p.data); err != nil {
				panic(err)
			} else if e := f.edges[p.to]; e != nil && !f.cut(p.from, p.to) {
				e.Receive(f.now, p.from, m)
			}
			return true
		})
		if f.check != nil {
			f.check()
		}
	}
}

// inForce returns what edges with flows may send by grants, and by floors. An edge that was without a grant within a
// lease counts with up to its floor: until then others may use what it is granted.
func (f *fleet) inForce() (granted, floors cc.Rate) {
	for name, e := range f.edges {
		if f.demand[name] == 0 {
			f.ungranted[name] = f.now
			continue
		}
		rate, floor := e.Rate(f.now, f.key), cc.Rate(0)
		if l := e.limits[f.key]; l == nil || l.expires <= f.now || !e.isQuorum {
			f.ungranted[name] = f.now
		}
		if f.now.Sub(f.ungranted[name]) <= Lease {
			floor = min(rate, e.floorOf(f.key))
		}
		granted, floors = granted+rate-floor, floors+floor
	}
	return granted, floors
}

// sentIn returns what each edge sends on average while time passes.
func (f *fleet) sentIn(d time.Duration) map[string]cc.Rate {
	before := map[string]cc.Bytes{}
	for name, n := range f.passed {
		before[name] = n
	}
	f.run(d)
	out := map[string]cc.Rate{}
	for _, name := range f.names {
		out[name] = cc.RateOf(f.passed[name]-before[name], d)
	}
	return out
}

func sum(rates map[string]cc.Rate) (all cc.Rate) {
	for _, r := range rates {
		all += r
	}
	return all
}

func TestGrantsNeverExceedTheLimitWhileConnected(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		f := newFleet(rapid.Uint64().Draw(rt, "seed"), rapid.IntRange(1, 5).Draw(rt, "edges"))
		f.delay = time.Duration(rapid.IntRange(0, 100).Draw(rt, "delay")) * time.Millisecond
		f.loss = rapid.Float64Range(0, 0.1).Draw(rt, "loss")
		f.check = func() {
			granted, _ := f.inForce()
			require.LessOrEqual(rt, granted, f.key.Max)
		}
		for range rapid.IntRange(1, 6).Draw(rt, "changes") {
			name := rapid.SampledFrom(f.names).Draw(rt, "edge")
			f.demand[name] = cc.Rate(rapid.IntRange(0, 40).Draw(rt, "demand")) * mbit
			f.weight[name] = rapid.IntRange(0, 4).Draw(rt, "weight")
			f.run(time.Duration(rapid.IntRange(100, 2000).Draw(rt, "ms")) * time.Millisecond)
		}
		if wanted := min(f.key.Max, sum(f.demand)); wanted > 0 && f.loss < 0.05 { // and nothing is wasted
			f.run(2 * time.Second)
			assert.GreaterOrEqual(rt, float64(sum(f.sentIn(3*time.Second))), 0.8*float64(wanted))
		}
	})
}

func TestHostOverTwoEdgesGetsWhatItHasOverOne(t *testing.T) {
	for _, row := range []struct {
		name   string
		demand []cc.Rate // of the edges
		weight []int
		want   []float64 // parts of the limit
	}{
		{"one edge alone has all", []cc.Rate{40 * mbit, 0, 0}, []int{1, 1, 1}, []float64{1, 0, 0}},
		{"two that want all have equal parts", []cc.Rate{40 * mbit, 40 * mbit, 0}, []int{1, 1, 1}, []float64{0.5, 0.5, 0}},
		{"weights count", []cc.Rate{40 * mbit, 40 * mbit, 0}, []int{3, 1, 1}, []float64{0.75, 0.25, 0}},
		{"what one leaves is the other's", []cc.Rate{4 * mbit, 40 * mbit, 0}, []int{1, 1, 1}, []float64{0.2, 0.77, 0}},
		{"three", []cc.Rate{40 * mbit, 40 * mbit, 40 * mbit}, []int{1, 1, 1}, []float64{0.333, 0.333, 0.333}},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := newFleet(1, 3)
			f.loss = 0.1
			for i, name := range f.names {
				f.demand[name], f.weight[name] = row.demand[i], row.weight[i]
			}
			f.run(2 * time.Second)
			sent := f.sentIn(20 * time.Second)
			for i, name := range f.names {
				assert.InDelta(t, row.want[i], float64(sent[name])/float64(f.key.Max), 0.05, name)
			}
			assert.InDelta(t, 1, float64(sum(sent))/float64(f.key.Max), 0.1)
			t.Logf("%v of %v", sum(sent), f.key.Max)
		})
	}
}

func TestPartitionExceedsTheLimitByFloorsAtMost(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 6).Draw(rt, "edges")
		f := newFleet(rapid.Uint64().Draw(rt, "seed"), n)
		f.loss = rapid.Float64Range(0, 0.1).Draw(rt, "loss")
		side := map[string]bool{}
		for _, name := range f.names {
			f.demand[name] = cc.Rate(rapid.IntRange(0, 40).Draw(rt, "demand")) * mbit
			side[name] = rapid.Bool().Draw(rt, "side")
		}
		f.run(2 * time.Second)
		f.check = func() {
			granted, floors := f.inForce()
			require.LessOrEqual(rt, granted, f.key.Max)
			require.LessOrEqual(rt, floors, f.key.Max)
		}
		f.cut = func(a, b string) bool { return side[a] != side[b] }
		f.run(forgetAfter + 5*time.Second) // beyond what the larger side remembers
		f.cut = func(string, string) bool { return false }
		f.run(3 * time.Second)
	})
}

func TestEdgesOfADeadOwnerHaveANewOneWithinALease(t *testing.T) {
	f := newFleet(3, 3)
	for _, name := range f.names {
		f.demand[name] = 40 * mbit
	}
	f.run(3 * time.Second)
	owner := f.edges[f.names[0]].findOwner(f.key)
	f.demand[owner] = 0
	delete(f.edges, owner)
	for _, e := range f.edges { // its process has ended, which whoever connects to it learns
		e.RemoveMember(f.now, owner)
	}
	f.run(Lease)
	granted, floors := f.inForce()
	assert.InDelta(t, 1, float64(granted+floors)/float64(f.key.Max), 0.1)
	f.run(Lease)
	granted, floors = f.inForce()
	assert.Zero(t, floors)
	assert.InDelta(t, 1, float64(granted)/float64(f.key.Max), 0.01)
}

func TestSilentMembersAreMissedAndComeBack(t *testing.T) {
	f := newFleet(4, 2)
	first, second := f.names[0], f.names[1]
	f.demand[first], f.demand[second] = 40*mbit, 40*mbit
	f.run(2 * time.Second)
	f.cut = func(string, string) bool { return true }
	f.run(2 * time.Second)
	// One of two is half of all: the first by name decides, and the other one keeps to its floor.
	assert.Equal(t, 20*mbit, f.edges[first].Rate(f.now, f.key))
	assert.Equal(t, 10*mbit, f.edges[second].Rate(f.now, f.key))
	f.run(2 * forgetAfter)
	assert.Equal(t, 10*mbit, f.edges[second].Rate(f.now, f.key), "who does not decide forgets no member")
	members, decides := f.edges[first].Members(f.now)
	assert.Len(t, members, 1)
	assert.True(t, decides)

	f.cut = func(string, string) bool { return false }
	f.run(2 * time.Second)
	sent := f.sentIn(2 * time.Second)
	assert.InDelta(t, 10, sent[first].Mbps(), 1)
	assert.InDelta(t, 10, sent[second].Mbps(), 1)
}

func TestOldMessagesChangeNothing(t *testing.T) {
	e := NewEdge("a")
	now := cc.Time(time.Hour)
	e.AddMember(now, "b")
	e.AddMember(now, "c")
	k := Key{"host", 30 * mbit}
	for e.findOwner(k) != "b" {
		k.Group += "x"
	}
	e.Receive(now, "b", &Message{At: 500})
	e.Exchange(now, []Use{{Key: k}})
	grant := func(at, heard cc.Time, rate cc.Rate) {
		e.Receive(now, "b", &Message{At: at, Heard: heard, Grants: []Grant{{k, rate}}})
	}
	grant(499, now, 20*mbit)
	assert.Equal(t, 10*mbit, e.Rate(now, k), "it is older than the newest")
	grant(501, now.Add(-Lease), 20*mbit)
	assert.Equal(t, 10*mbit, e.Rate(now, k), "the report that it answers is a lease ago")
	grant(502, now.Add(Lease), 20*mbit)
	assert.Equal(t, 10*mbit, e.Rate(now, k), "the report that it answers is in the future")
	grant(503, now, 200*mbit)
	assert.Equal(t, 30*mbit, e.Rate(now, k), "no grant exceeds the limit")
	e.Receive(now, "a", &Message{At: 504, Heard: now, Grants: []Grant{{k, 5 * mbit}}})
	e.Receive(now, "c", &Message{At: 504, Heard: now, Grants: []Grant{{k, 5 * mbit}}})
	assert.Equal(t, 30*mbit, e.Rate(now, k), "neither owns the limit")
	assert.Equal(t, 10*mbit, e.Rate(now.Add(Lease), k), "a grant ends with its lease, and the floor is left")
}

// TestAClockThatIsBehindAfterARestart starts an edge again, whose machine has lost its clock. The other one is second
// by name, so that it forgets nobody.
func TestAClockThatIsBehindAfterARestart(t *testing.T) {
	k := Key{Group: "host", Max: 1_000_000}
	uses := []Use{{Key: k, Held: true}}
	a, b := NewEdge("a"), NewEdge("b")
	now, behind := cc.Time(time.Hour), time.Duration(0)
	exchange := func(d time.Duration) (shared bool) {
		for end := now.Add(d); now < end; now = now.Add(Period) {
			uses[0].Passed += 10_000
			at := now.Add(-behind)
			fromA, fromB := a.Exchange(at, uses)["b"], b.Exchange(now, uses)["a"]
			if fromA != nil {
				b.Receive(now, "a", fromA)
			}
			if fromB != nil {
				a.Receive(at, "b", fromB)
			}
			if a.Rate(at, k)+b.Rate(now, k) > k.Max {
				t.Errorf("%v + %v", a.Rate(at, k), b.Rate(now, k))
			}
			limitA, limitB := a.Limits(at), b.Limits(now)
			shared = len(limitA) == 1 && limitA[0].Leased && len(limitB) == 1 && limitB[0].Leased
		}
		return shared
	}
	a.AddMember(now, "b")
	b.AddMember(now, "a")
	require.True(t, exchange(2*time.Second))
	a, behind = NewEdge("a"), 30*time.Minute
	a.AddMember(now.Add(-behind), "b")
	require.True(t, exchange(5*time.Second))
}

// TestALateEdgeOfLargeWritesGetsItsPart has an edge begin while another has all. Its first part passes one write in a
// second, and nothing in the other periods.
func TestALateEdgeOfLargeWritesGetsItsPart(t *testing.T) {
	const write = cc.Bytes(64 << 10)
	k := Key{Group: "host", Max: 20_000_000}
	a, b := NewEdge("a"), NewEdge("b")
	now := cc.Time(time.Hour)
	a.AddMember(now, "b")
	b.AddMember(now, "a")
	late, freeAt := Use{Key: k}, now.Add(3*time.Second)
	full := Use{Key: k, Held: true}
	for end := now.Add(10 * time.Second); now < end; now = now.Add(Period) {
		full.Passed += b.Rate(now, k).BytesIn(Period)
		var uses []Use
		if now >= end.Add(-7*time.Second) {
			for freeAt <= now {
				late.Passed += write
				freeAt = freeAt.Add(a.Rate(now, k).TimeFor(write))
			}
			late.Held = true
			uses = []Use{late}
		}
		fromA, fromB := a.Exchange(now, uses)["b"], b.Exchange(now, []Use{full})["a"]
		b.Receive(now, "a", fromA)
		a.Receive(now, "b", fromB)
	}
	assert.InEpsilon(t, float64(k.Max/2), float64(a.Rate(now, k)), 0.1)
	assert.InEpsilon(t, float64(k.Max/2), float64(b.Rate(now, k)), 0.1)
}

// TestReportsOfOnePeriodAreBounded has an edge report without end.
func TestReportsOfOnePeriodAreBounded(t *testing.T) {
	e, k := NewEdge("a"), Key{Group: "host", Max: 1_000_000}
	now := cc.Time(time.Hour)
	for i := range 10_000 {
		m := &Message{At: now.Add(time.Duration(i)), Reports: []Report{{Key: k, Rate: k.Max - cc.Rate(i)}}}
		e.Receive(now, "b", m)
	}
	c := e.ledgers[k].claims["b"]
	assert.LessOrEqual(t, len(c.promises), maxPromises)
	assert.Equal(t, k.Max, c.promised())
}

func TestOwnersAreSpread(t *testing.T) {
	f := newFleet(5, 4)
	e := f.edges[f.names[0]]
	before, count := map[Key]string{}, map[string]int{}
	for i := range 1000 {
		k := Key{fmt.Sprintf("192.0.2.%d", i), 20 * mbit}
		before[k] = e.findOwner(k)
		count[before[k]]++
	}
	for name, n := range count {
		assert.InDelta(t, 250, n, 60, name)
	}
	e.RemoveMember(f.now, f.names[3])
	for k, owner := range before {
		if owner != f.names[3] {
			assert.Equal(t, owner, e.findOwner(k), "a member that goes moves no limits but its own")
		}
	}
}

func TestBoundsOfMembersAndLimits(t *testing.T) {
	e := NewEdge("a")
	for i := range MaxMembers - 1 {
		require.True(t, e.AddMember(1, fmt.Sprint(i)))
	}
	assert.False(t, e.AddMember(1, "one too many"))
	assert.True(t, e.AddMember(2, "0"), "a member that has come back")
	uses := make([]Use, maxLimits+10)
	for i := range uses {
		uses[i] = Use{Key: Key{fmt.Sprint(i), mbit}}
	}
	e.Exchange(1, uses)
	assert.Len(t, e.limits, maxLimits)
}

func FuzzParsePacket(f *testing.F) {
	k := Key{"host", 20 * mbit}
	m := &Message{At: 7, Heard: 5, Reports: []Report{{k, 1, 2, 3, 4, 5}}, Grants: []Grant{{k, 9}}}
	f.Add(m.AppendPackets(nil)[0])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParsePacket(data)
		if err != nil {
			return
		}
		again := m.AppendPackets(nil)
		require.NotEmpty(t, again)
		e := NewEdge("a")
		e.AddMember(1, "b")
		e.Receive(cc.Time(time.Hour), "b", m)
		for _, r := range m.Reports {
			assert.LessOrEqual(t, e.Rate(cc.Time(time.Hour), r.Key), r.Max)
		}
		e.Exchange(cc.Time(time.Hour), nil)
	})
}

func TestPacketsAreBounded(t *testing.T) {
	m := &Message{At: cc.Time(time.Hour), Heard: 1, View: 9}
	for i := range 100 {
		m.Reports = append(m.Reports, Report{Key{fmt.Sprintf("2001:db8::%d", i), 20 * mbit}, mbit, mbit, 1, mbit, 1})
		m.Grants = append(m.Grants, Grant{Key{fmt.Sprintf("2001:db8::%d", i), 20 * mbit}, mbit})
	}
	back := Message{At: m.At, Heard: m.Heard, View: m.View}
	for _, p := range m.AppendPackets(nil) {
		require.LessOrEqual(t, len(p), MaxPacket)
		part, err := ParsePacket(p)
		require.NoError(t, err)
		require.Equal(t, Message{At: m.At, Heard: m.Heard, View: m.View},
			Message{At: part.At, Heard: part.Heard, View: part.View})
		back.Reports, back.Grants = append(back.Reports, part.Reports...), append(back.Grants, part.Grants...)
	}
	assert.Equal(t, *m, back)
	for _, bad := range [][]byte{
		nil,
		{1},
		{1, 1, 3},
		{1, 1, 0, 0, 0, 0, 3},
		{1, 1, 0, 0, 0, 0, kindGrant, 200},
		{1, 1, 0, 0, 0, 0, kindGrant, 0, 0, 0},
		make([]byte, MaxPacket+1),
	} {
		_, err := ParsePacket(bad)
		assert.Error(t, err, "%v", bad)
	}
}

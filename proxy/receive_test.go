package proxy

import (
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/policy"
)

// advertiser is a leg to which a peer sends at 12 Mbit/s over 20 ms, with a queue from then
// on that it has one.
type advertiser struct {
	datapath.Conn
	now    *cc.Time
	queue  time.Duration
	looks  int
	err    error
	window cc.Bytes
}

func (a *advertiser) Arrivals() (flow.Arrivals, error) {
	a.looks++
	return flow.Arrivals{
		Received: cc.Rate(12e6).BytesIn(a.now.Sub(0)), RTT: 20*time.Millisecond + a.queue, Window: 30e3, MSS: 1448,
	}, a.err
}

func (a *advertiser) Advertise(n cc.Bytes) error {
	a.window = n
	return nil
}

// held has a leg held by penstock for so many reads, one in a tenth of a millisecond.
func held(conn datapath.Conn, now *cc.Time) (*direction, func(reads int)) {
	clock := func() cc.Time { return *now }
	env := &environment{Parts: Parts{Flows: &flow.Manager{}, Clock: clock, Log: slog.New(slog.DiscardHandler)}}
	d := &direction{
		relay: &relay{env: env}, src: &leg{conn: conn}, receives: &flow.Terms{Group: "a", Algorithm: "penstock"},
	}
	return d, func(reads int) {
		for range reads {
			*now = now.Add(100 * time.Microsecond)
			d.onArrived(int64(cc.Rate(12e6).BytesIn(now.Sub(0))))
		}
	}
}

func TestAWindowIsHeldOnceMuchHasCome(t *testing.T) {
	var now cc.Time
	leg := &advertiser{now: &now}
	d, read := held(leg, &now)
	read(400) // 60 kB
	assert.Zero(t, leg.looks, "a short request is left alone")
	assert.Equal(t, HoldingInfo{Algorithm: "penstock"}, d.receiveInfo())
	read(100)
	leg.queue, leg.looks = leastQueue, 0
	read(1000)
	assert.InDelta(t, 100, leg.looks, 5, "one look in a millisecond")
	info := d.receiveInfo()
	assert.True(t, info.Held && info.InForce)
	assert.Equal(t, leg.window, info.Flow.Share)
	assert.Positive(t, leg.window)

	reconsider := func(terms flow.Terms) bool {
		moved, err := d.applyReceiveTerms(&terms)
		require.NoError(t, err)
		return moved
	}
	assert.True(t, reconsider(flow.Terms{Algorithm: policy.Unmanaged}))
	assert.False(t, reconsider(flow.Terms{Algorithm: policy.Unmanaged}), "nothing changes")
	read(20)
	assert.Zero(t, leg.window, "the transport has its own back")
	assert.False(t, d.receiveInfo().Held)
	looks := leg.looks
	read(20)
	assert.Equal(t, looks, leg.looks)

	assert.True(t, reconsider(flow.Terms{Group: "a", Algorithm: "vegas"}))
	read(20)
	assert.Positive(t, leg.window)
	assert.Equal(t, "vegas", d.receiveInfo().Flow.Algorithm)
	d.receive.closeFlow(now)
	looks = leg.looks
	read(20)
	assert.Equal(t, looks, leg.looks, "a closed leg is not looked at")
	assert.Zero(t, countMembers(d.receive.parts.Flows.Groups(now)))
}

// What stands in no queue has nothing to gain; what it costs to look is little.
func TestAWindowIsTheTransportsOwnWhereNoQueueIsSeen(t *testing.T) {
	var now cc.Time
	leg := &advertiser{now: &now}
	d, read := held(leg, &now)
	second := func() { read(10_000) }
	second()
	leg.queue, leg.looks = leastQueue-1, 0
	second()
	assert.InDelta(t, 250, leg.looks, 5, "one look in four milliseconds")
	assert.Zero(t, leg.window)
	assert.True(t, d.receiveInfo().Held)
	assert.False(t, d.receiveInfo().InForce)

	leg.queue = leastQueue
	second()
	assert.Equal(t, d.receiveInfo().Flow.Share, leg.window)
	assert.Positive(t, leg.window)
	leg.queue = 0
	for range 4 {
		second()
	}
	assert.Positive(t, leg.window, "a window that empties the queue stays")
	second()
	second()
	assert.Zero(t, leg.window)
	assert.False(t, d.receiveInfo().InForce)
}

// A path that wavers has no queue for that.
func TestAQueueIsSeenByThePathsLength(t *testing.T) {
	h := &receiveControl{}
	h.addRTTSample(1, 640*time.Millisecond)
	h.addRTTSample(2, 659*time.Millisecond)
	assert.Zero(t, h.queueSeenAt)
	h.addRTTSample(3, 660*time.Millisecond)
	assert.EqualValues(t, 3, h.queueSeenAt)
	h.addRTTSample(4, 0)
	assert.EqualValues(t, 3, h.queueSeenAt, "that is no round trip")
}

func TestAWindowThatCannotBeHeldSaysWhy(t *testing.T) {
	var now cc.Time
	leg := &advertiser{now: &now}
	d, read := held(leg, &now)
	read(1000)
	leg.queue = leastQueue
	read(1000)
	require.Positive(t, leg.window)
	leg.err = errors.New("the clock has gone")
	read(20)
	assert.Equal(t, HoldingInfo{Algorithm: "penstock", Why: "the clock has gone"}, d.receiveInfo())
	assert.Zero(t, leg.window)
	assert.Zero(t, countMembers(d.receive.parts.Flows.Groups(now)))
	looks := leg.looks
	read(100)
	assert.Equal(t, looks, leg.looks, "it is not asked again")

	d, read = held(struct{ datapath.Conn }{}, &now)
	read(1)
	assert.Equal(t, errNoAdvertiser.Error(), d.receiveInfo().Why)
}

// path is a source's, whose bounds are noted.
type path struct {
	rtt    time.Duration
	bounds []cc.Bytes
}

func (p *path) LeastRTT() time.Duration { return p.rtt }

func (p *path) LimitReceive(n cc.Bytes) bool {
	p.bounds = append(p.bounds, n)
	return n < 32<<20
}

// What a stalled reader's server can have sent is bounded, unless its path is one that needs more.
func TestASourceTakesInNoMoreThanItsPathNeeds(t *testing.T) {
	const mb = 1e6
	for _, row := range []struct {
		name        string
		rtt         time.Duration
		rate        float64 // bytes a second
		least, most int64   // at the end
	}{
		{"next to it, as fast as it goes", 50 * time.Microsecond, 2000 * mb, usualInflow, usualInflow},
		{"on a local network", 2 * time.Millisecond, 110 * mb, usualInflow, usualInflow},
		{"far away, and slow", 150 * time.Millisecond, 1 * mb, usualInflow, usualInflow},
		{"far away", 100 * time.Millisecond, 12 * mb, 4 << 20, 8 << 20},
		{"very far away, and fast", 200 * time.Millisecond, 110 * mb, 32 << 20, 32 << 20},
	} {
		p := &path{rtt: row.rtt}
		in := &inflow{from: p, bound: 256 << 10}
		now, written := cc.Time(1), 0.0
		bounded := true
		for range 60_000 { // a millisecond each
			now = now.Add(time.Millisecond)
			// The window lets no more come in a round trip than half of the bound.
			written += min(row.rate, float64(in.bound)/2/row.rtt.Seconds()) / 1000
			if bounded {
				bounded = in.growIfNeeded(func() cc.Time { return now }, int64(written))
			}
		}
		assert.GreaterOrEqual(t, in.bound, row.least, row.name)
		assert.LessOrEqual(t, in.bound, row.most, row.name)
		assert.Equal(t, row.most < 32<<20, bounded, row.name)
		assert.IsIncreasing(t, p.bounds, row.name)
	}
}

// countMembers returns the number of flows in all groups.
func countMembers(groups []flow.Group) (n int) {
	for _, g := range groups {
		n += g.Members
	}
	return n
}

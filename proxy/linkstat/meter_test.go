package linkstat

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

const (
	ms    = time.Millisecond
	frame = cc.Bytes(1514)
)

// at is a reading of one queue some milliseconds after the start.
func at(millis int, r reading) reading {
	r.at = cc.Time(time.Second + time.Duration(millis)*ms)
	r.queue = queueID{link: 2, handle: 0x10000, kind: "tbf"}
	return r
}

func TestArrivalRateIsWhatLeavesAndWhatWaitsAndWhatIsDropped(t *testing.T) {
	for _, tt := range []struct {
		name     string
		interval time.Duration
		readings []reading
		want     cc.Rate // bit/s
	}{
		{"one reading tells nothing", 20 * ms, []reading{at(0, reading{sent: 1000})}, 0},
		{
			"nothing comes: known, and next to nothing", 20 * ms,
			[]reading{at(0, reading{sent: 1000}), at(40, reading{sent: 1000})},
			1,
		},
		{
			"25 kB leave in 40 ms: 5 Mbit/s", 20 * ms,
			[]reading{at(0, reading{}), at(20, reading{sent: 12_500}), at(40, reading{sent: 25_000})},
			5_000_000,
		},
		{
			"as much again piles up", 20 * ms,
			[]reading{
				at(0, reading{}), at(20, reading{sent: 12_500, backlog: 12_500}),
				at(40, reading{sent: 25_000, backlog: 25_000}),
			},
			10_000_000,
		},
		{
			"a queue that drains takes off", 20 * ms,
			[]reading{at(0, reading{backlog: 20_000}), at(40, reading{sent: 25_000})},
			1_000_000,
		},
		{
			"10 packets are dropped, each as large as those that left: 1250 bytes", 20 * ms,
			[]reading{at(0, reading{}), at(40, reading{sent: 25_000, packets: 20, dropped: 10})},
			7_500_000,
		},
		{
			"all are dropped: as large as they can be", 20 * ms,
			[]reading{at(0, reading{}), at(40, reading{dropped: 10})},
			cc.RateOf(10*frame, 40*ms),
		},
		{
			"counters wrap around", 20 * ms,
			[]reading{
				at(0, reading{packets: 1<<32 - 10, dropped: 1<<32 - 5}),
				at(40, reading{sent: 25_000, packets: 10, dropped: 5}),
			},
			7_500_000,
		},
		{
			"only the last 40 ms count", 20 * ms,
			[]reading{
				at(0, reading{}), at(20, reading{sent: 100_000}), at(40, reading{sent: 100_000}),
				at(60, reading{sent: 125_000}),
			},
			5_000_000,
		},
		{
			"but two intervals where these are longer", 100 * ms,
			[]reading{at(0, reading{}), at(100, reading{sent: 125_000}), at(200, reading{sent: 125_000})},
			5_000_000,
		},
		{
			"what was delayed counts over the time it took", 20 * ms,
			[]reading{at(0, reading{}), at(20, reading{sent: 12_500}), at(400, reading{sent: 250_000})},
			5_000_000,
		},
		{
			"a queue that begins anew tells nothing yet", 20 * ms,
			[]reading{at(0, reading{sent: 50_000}), at(20, reading{sent: 75_000}), at(40, reading{sent: 1000})},
			0,
		},
	} {
		m := newMeter(tt.interval)
		for _, r := range tt.readings {
			m.addReading(r)
		}
		assert.Equal(t, tt.want, m.arrivalRate(frame), tt.name)
	}
}

func TestAnotherQueueBeginsAnew(t *testing.T) {
	m := newMeter(20 * ms)
	m.addReading(at(0, reading{sent: 1000}))
	m.addReading(at(40, reading{sent: 2000}))
	require.NotZero(t, m.arrivalRate(frame))
	other := at(60, reading{sent: 1 << 30})
	other.queue.handle++
	m.addReading(other)
	assert.Zero(t, m.arrivalRate(frame))
}

func TestArrivalRateOfAnySeriesIsWhatCame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		interval := time.Duration(rapid.IntRange(5, 200).Draw(t, "interval")) * ms
		m := newMeter(interval)
		now := cc.Time(time.Second)
		var sent, came cc.Bytes
		type total struct {
			at   cc.Time
			came cc.Bytes
		}
		var totals []total
		for range rapid.IntRange(2, 60).Draw(t, "readings") {
			in := frame * cc.Bytes(rapid.IntRange(0, 100).Draw(t, "in"))
			came += in
			out := cc.Bytes(rapid.Int64Range(0, int64(came-sent)).Draw(t, "out"))
			sent += out
			m.addReading(reading{at: now, sent: sent, backlog: came - sent})
			totals = append(totals, total{now, came})
			now = now.Add(interval + time.Duration(rapid.IntRange(0, 30).Draw(t, "late"))*ms)
		}
		last := totals[len(totals)-1]
		got := m.arrivalRate(frame)
		least := m.readings[0].at
		if span := last.at.Sub(least); len(totals)*int(interval) > 2*int(m.window) {
			assert.GreaterOrEqual(t, span, m.window, "over at least the window")
		}
		for _, first := range totals {
			if first.at == least {
				assert.Equal(t, knownValue(cc.RateOf(last.came-first.came, last.at.Sub(first.at))), got)
			}
		}
		assert.LessOrEqual(t, len(m.readings), 2+int(m.window/interval), "what is kept is bounded")
	})
}

func TestRoomIsWhatTheLimitLeaves(t *testing.T) {
	waits := reading{backlog: 30_000, waiting: 20}
	for _, tt := range []struct {
		name  string
		limit limit
		want  cc.Bytes
	}{
		{"no limit is known", limit{}, 0},
		{"in bytes", limit{bytes: 100_000}, 70_000},
		{"in packets: each may be full", limit{packets: 100}, 80 * frame},
		{"both: the lesser", limit{bytes: 31_000, packets: 100}, 1000},
		{"full: known, and next to nothing", limit{bytes: 30_000}, 1},
		{"more than full", limit{packets: 10}, 1},
	} {
		assert.Equal(t, tt.want, tt.limit.freeRoom(waits, frame), tt.name)
	}
}

func TestHostsDivideTheLink(t *testing.T) {
	m := newMeter(20 * ms)
	m.addReading(at(0, reading{}))
	m.addReading(at(40, reading{sent: 25_000, backlog: 10_000}))
	l := link{rate: 15_140_000, mtu: 1500, limit: limit{bytes: 50_000}}

	h := l.makeHint(m, Users{Flows: 8, Hosts: 2})
	assert.Equal(t, cc.Hint{
		At:       cc.Time(time.Second + 40*ms),
		LinkRate: 15_140_000, Capacity: 7_240_000, FairShare: 7_240_000, // 1448 of 1514 bytes are payload
		ArrivalRate: 7_000_000, QueueRoom: 40_000, Flows: 8,
	}, h)
	assert.EqualValues(t, 14_480_000, l.makeHint(m, Users{}).Capacity, "all of it for whoever comes first")
	unknown := link{mtu: 1500}.makeHint(m, Users{Flows: 1, Hosts: 1})
	assert.Zero(t, unknown.LinkRate)
	assert.Zero(t, unknown.Capacity)
	assert.Zero(t, unknown.QueueRoom)
}

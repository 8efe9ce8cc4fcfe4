//go:build linux

package netlab

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

func TestALinkTellsOfItself(t *testing.T) {
	zero := cc.Time(time.Second)
	at := func(ms int) cc.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }
	w := watch{cfg: sim.LinkConfig{Rate: 12e6, QueuePackets: 20}, zero: zero}

	h := w.hint(at(100))
	assert.EqualValues(t, 12e6, h.LinkRate)
	assert.EqualValues(t, 12e6*1448/1500, h.Capacity)
	assert.Equal(t, h.Capacity, h.FairShare)
	assert.EqualValues(t, 1, h.ArrivalRate, "nothing comes, which is known")
	assert.EqualValues(t, 20*1500, h.QueueRoom)

	for i := range 30 { // one each millisecond, to leave two later
		w.note(&entry{at: at(100 + i), departs: at(102 + 2*i), size: 1500})
	}
	w.note(&entry{at: at(129), size: 1500, drop: sim.DropQueue})
	w.note(&entry{at: at(129), size: 1500, drop: sim.DropLoss})
	w.note(&entry{at: at(129), departs: at(400), size: 1500, dir: Up})
	h = w.hint(at(130))
	assert.Equal(t, cc.RateOf(31*1500, sim.HintWindow), h.ArrivalRate,
		"what is dropped for want of room has come; what the radio lost has not")
	assert.EqualValues(t, 5*1500, h.QueueRoom, "15 of 30 have left by then")
	assert.EqualValues(t, 1448, h.RadioLost)

	h = w.hint(at(170))
	assert.EqualValues(t, 1, h.ArrivalRate)
	assert.EqualValues(t, 20*1500, h.QueueRoom, "all have left")
	assert.EqualValues(t, 1448, h.RadioLost, "cumulative")
	assert.Empty(t, w.recent)
}

// Of a link that several hosts share, each hears the same but for what the radio
// lost of its own.
func TestALinkOfSeveralHostsTellsOfItself(t *testing.T) {
	zero := cc.Time(time.Second)
	at := func(ms int) cc.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }
	w := watch{cfg: sim.LinkConfig{Rate: 12e6}, zero: zero, host: 1, shared: true}
	for host := range uint16(3) {
		w.note(&entry{at: at(90), departs: at(91), size: 1500, host: host})
		w.note(&entry{at: at(90), size: 1500, host: host, drop: sim.DropLoss})
	}
	h := w.hint(at(100))
	assert.Equal(t, 3, h.Flows)
	assert.Zero(t, h.Share, "left open")
	assert.EqualValues(t, 1448, h.RadioLost)
	assert.EqualValues(t, 12e6, h.LinkRate)
	assert.InDelta(t, 12e6*1448/1500/3, float64(h.FairShare), 1)
}

func TestALinkThatPausesTellsSo(t *testing.T) {
	trace, err := sim.ReadTrace("pause", strings.NewReader("1\n2\n100\n"))
	require.NoError(t, err)
	zero := cc.Time(time.Second)
	w := watch{cfg: sim.LinkConfig{Trace: trace, QueueBytes: 3000}, zero: zero}
	assert.EqualValues(t, 1, w.hint(zero.Add(90*time.Millisecond)).Capacity)
	assert.Equal(t, cc.RateOf(2*1500, 10*time.Millisecond), w.hint(zero.Add(10*time.Millisecond)).LinkRate,
		"no more than it has been there for")
	w.note(&entry{at: zero.Add(91 * time.Millisecond), departs: zero.Add(100 * time.Millisecond), size: 3000})
	assert.EqualValues(t, 1, w.hint(zero.Add(95*time.Millisecond)).QueueRoom,
		"full, which is not the same as not knowing")
}

func TestAMonitorFollowsAPath(t *testing.T) {
	c := newCellular(t, twelve(250))
	m := c.Path.Monitor(0)
	_, ok := m.Hint()
	assert.False(t, ok, "it has not started")
	out, in := connect(t, c.Client, c.Server, c.ServerAddr.V4)
	c.Path.StartOnData()
	_, err := in.Write(make([]byte, 200_000))
	require.NoError(t, err)
	for n := 0; n < 200_000; {
		k, err := out.Read(make([]byte, 1<<16))
		require.NoError(t, err)
		n += k
	}
	r := settled(t, c.Path)
	h, ok := m.Hint()
	require.True(t, ok)
	assert.EqualValues(t, 12e6, h.LinkRate)
	assert.EqualValues(t, 250*1500, h.QueueRoom)
	assert.GreaterOrEqual(t, m.next, int64(r.Down.Sent+r.Up.Sent))
}

// The record of a managed queue has what has left it; what waits there is there all the same.
func TestAMonitorSeesWhatWaitsInAManagedQueue(t *testing.T) {
	cfg := twelve(250)
	cfg.Down.Rate, cfg.Down.AQM = 100e3, sim.CoDel // 114 ms for each datagram
	c := newCellular(t, cfg)
	m := c.Path.Monitor(0)
	sink := listenUDP(t, c, c.Hosts[0].V4)
	c.Path.Start()
	send(t, c.Server, sink, 20, 1400)
	var h cc.Hint
	require.Eventually(t, func() bool {
		var ok bool
		h, ok = m.Hint()
		return ok && h.Flows == 1 && h.QueueRoom < 240*1500
	}, 10*time.Second, milli)
	assert.Greater(t, h.ArrivalRate, h.LinkRate, "they come faster than they leave")
}

func TestWhatWaitsHasCome(t *testing.T) {
	zero := cc.Time(time.Second)
	w := watch{cfg: sim.LinkConfig{Rate: 12e6, QueuePackets: 20}, shared: true, zero: zero}
	w.note(&entry{at: zero.Add(1), departs: zero.Add(milli), size: 1500})
	now := zero.Add(sim.HintWindow)
	h := w.hint(now, entry{at: now.Add(-milli), departs: cc.Never, size: 1500, host: 1},
		entry{at: zero, departs: cc.Never, size: 1500, host: 2})
	assert.EqualValues(t, 18*1500, h.QueueRoom)
	assert.Equal(t, 3, h.Flows)
	assert.Equal(t, cc.RateOf(3000, sim.HintWindow), h.ArrivalRate, "one that has left, and one that has not")
	h = w.hint(now.Add(sim.HintWindow))
	assert.EqualValues(t, 20*1500, h.QueueRoom, "who waits is told anew each time")
	assert.Equal(t, 1, h.Flows)
}

package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// copaAt returns a Copa flow past slow start with the given window, on a path
// whose least round trip is 50 ms and whose standing one is given.
func copaAt(t *testing.T, ref string, cwnd float64, standing time.Duration) (*path, *copa) {
	t.Helper()
	p := newPath(t, ref)
	c := as[*copa](p)
	p.srtt = 50 * ms
	p.Ack(0, 50*ms)
	p.Wait(40 * ms)
	p.Ack(0, standing)
	c.slowStart = false
	c.cwnd = cwnd
	c.resetVelocity(p.state.Now)
	c.lossSince = p.state.Now
	require.Equal(t, 50*ms, c.minRTT.extreme())
	require.Equal(t, standing, c.standing.extreme())
	return p, c
}

func TestCopaSteps(t *testing.T) {
	_, c := copaAt(t, "copa:delta=0.5", 51, 52*ms)
	assert.InDelta(t, 52, c.targetWindow(), 1e-9, "dq 2 ms at 52 ms gives a target of 52 packets")
	_, c = copaAt(t, "copa:delta=0.5", 51, 50*ms)
	assert.Equal(t, infinite, c.targetWindow(), "dq 0 gives none")
	_, c = copaAt(t, "copa:delta=0.5", 51, 50*ms+time.Microsecond)
	assert.Equal(t, infinite, c.targetWindow(), "1 µs counts as 0")

	for _, tt := range []struct {
		name     string
		cwnd     float64
		n        float64
		velocity float64
		want     float64
	}{
		{"51 packets, target 52: up by 1/(0.5·51)", 51, 1, 1, 0.0392},
		{"53 packets, target 52: down by 1/(0.5·53)", 53, 1, 1, -0.0377},
		{"velocity 4 makes it four times as much", 40, 1, 4, 0.2},
		{"ten packets in one event count ten times", 40, 10, 1, 0.5},
		{"half a packet counts half", 40, 0.5, 1, 0.025},
		{"but many do not carry it past the target by more than one would", 51.9, 50, 1, 0.1},
		{"nor below", 52.1, 50, 1, -0.1},
		{"velocity is capped at delta·cwnd: one packet per acknowledgement", 40, 1, 64, 1},
	} {
		p, c := copaAt(t, "copa:delta=0.5", tt.cwnd, 52*ms)
		c.velocity, c.dir = tt.velocity, rising
		p.Ack(tt.n, 52*ms)
		assert.InDelta(t, tt.want, c.cwnd-tt.cwnd, 1e-3, tt.name)
	}

	p, c := copaAt(t, "copa:delta=0.5", 2.3, 500*ms)
	p.Ack(2, 500*ms)
	assert.InDelta(t, 2, c.cwnd, 0, "two packets are the least")
}

func TestCopaPacing(t *testing.T) {
	p := newPath(t, "copa")
	assert.Zero(t, p.alg.Control().PacingRate, "no rate before the first sample")
	p, _ = copaAt(t, "copa", 52, 52*ms)
	assert.InDelta(t, 2000*8*1448, float64(p.alg.Control().PacingRate), 8,
		"52 packets at 52 ms leave at 2000 per second")
}

func TestCopaDoublesNoFurtherThanThePathIsKnownToCarry(t *testing.T) {
	p := newPath(t, "copa:delta=0.02")
	c := as[*copa](p)
	c.ssthresh = 40
	p.Round(50 * ms)
	p.Round(50 * ms)
	assert.InDelta(t, 40, p.Cwnd(), 0.01)
	p.Ack(1, 50*ms)
	assert.False(t, c.slowStart)
	assert.InDelta(t, 41.25, p.Cwnd(), 0.01, "from there by steps of 1/delta over the window")
	c.restart()
	assert.Zero(t, c.ssthresh, "a path that fell silent is not known any more")
}

func TestCopaSlowStart(t *testing.T) {
	p := newPath(t, "copa:delta=0.5")
	c := as[*copa](p)
	assert.InDelta(t, 10, p.Cwnd(), 0)
	p.Round(50 * ms)
	assert.InDelta(t, 20, p.Cwnd(), 0.01, "doubles per round trip without a queue")
	p.Wait(50 * ms)
	p.Ack(20, 50*ms)
	assert.InDelta(t, 40, p.Cwnd(), 0.01, "and when one event covers the window")
	assert.Equal(t, "slow_start", p.alg.Control().Phase)

	p.Wait(60 * ms)
	p.Ack(10, 60*ms)
	assert.False(t, c.slowStart, "10 ms of queue at delta 0.5 is a target of 12: over")
	assert.Equal(t, copaSettleRounds, c.compete.settle, "mode switching waits for the start's queue to drain")
	assert.InDelta(t, 39.5, p.Cwnd(), 0.01, "and the same acknowledgement already takes a step")
	p.Wait(60 * ms)
	p.Ack(1, 50*ms)
	assert.False(t, c.slowStart, "for good")
}

func TestCopaVelocity(t *testing.T) {
	p, c := copaAt(t, "copa:delta=0.5", 1000, 50*ms)
	p.Ack(1, 50*ms)
	var got []float64
	for range 7 {
		got = append(got, c.velocity)
		p.Wait(50 * ms)
		p.Ack(1, 50*ms)
	}
	assert.Equal(t, []float64{1, 1, 1, 1, 2, 4, 8}, got, "doubles from the third round trip that kept its direction")

	p.Wait(30 * ms) // less than a round trip
	p.Ack(1, 100*ms)
	p.Wait(30 * ms)
	before := c.cwnd
	p.Ack(1, 100*ms)
	assert.InDelta(t, 1, c.velocity, 0, "a step in the other direction takes it back at once")
	assert.Equal(t, falling, c.dir)
	assert.Zero(t, c.agreed)
	assert.InDelta(t, before-1/(0.5*before), c.cwnd, 1e-9)

	p, c = copaAt(t, "copa:delta=0.5", 1000, 50*ms)
	c.velocity, c.dir, c.agreed = 1, rising, 2
	c.snapCwnd = 1100
	p.Wait(50 * ms)
	p.Ack(1, 50*ms)
	assert.Equal(t, falling, c.dir, "a round trip that ended lower")
	assert.Zero(t, c.agreed)

	p, c = copaAt(t, "copa:delta=0.5", 2, 500*ms)
	for range 10 {
		p.Wait(50 * ms)
		p.Ack(1, 500*ms)
	}
	assert.InDelta(t, 1, c.velocity, 0, "no momentum is gathered at the floor")
}

func TestCopaUnusedWindow(t *testing.T) {
	p := newPath(t, "copa")
	p.idle = true
	for range 100 {
		p.Wait(50 * ms)
		p.Ack(2, 50*ms)
	}
	assert.InDelta(t, 10, p.Cwnd(), 0, "slow start waits for the application")

	p, c := copaAt(t, "copa", 100, 50*ms)
	p.idle = true
	for range 20 {
		p.Wait(50 * ms)
		p.Ack(2, 50*ms)
	}
	assert.InDelta(t, 100, p.Cwnd(), 0, "and so does growth")
	assert.InDelta(t, 1, c.velocity, 0)

	p.Ack(10, 50*ms)
	p.state.CwndLimited = true
	p.state.Inflight = 30 * DefaultMSS
	p.alg.OnAck(Ack{State: p.state, Acked: 10 * DefaultMSS, RTT: 50 * ms})
	assert.InDelta(t, 100, p.Cwnd(), 0, "40 of 100 packets in flight are too few, whatever else is said")
	p.state.Inflight = 40 * DefaultMSS
	p.alg.OnAck(Ack{State: p.state, Acked: 10 * DefaultMSS, RTT: 50 * ms})
	grown := p.Cwnd()
	assert.Greater(t, grown, 100.0, "50 are enough")
	p.state.CwndLimited = false
	p.state.Inflight = 90 * DefaultMSS
	p.alg.OnAck(Ack{State: p.state, Acked: 10 * DefaultMSS, RTT: 50 * ms})
	assert.InDelta(t, grown, p.Cwnd(), 0, "unless something else than the window holds the sender back")
}

func TestCopaSamples(t *testing.T) {
	p, c := copaAt(t, "copa:delta=0.5", 60, 52*ms)
	p.Wait(40 * ms)
	p.Ack(1, 0)
	assert.InDelta(t, 60-1/(0.5*60), c.cwnd, 1e-9, "without a sample the last known delay stands")
	p.Wait(11 * ms)
	before := c.cwnd
	p.Ack(1, 0)
	assert.InDelta(t, before, c.cwnd, 0, "for one round trip")

	p, c = copaAt(t, "copa:delta=0.5", 60, 50*ms)
	p.Wait(50 * ms)
	p.state.Inflight = 0
	p.alg.OnAck(Ack{State: p.state, Acked: DefaultMSS, RTT: 90 * ms})
	assert.InDelta(t, 60, c.cwnd, 0, "a lone segment's delayed acknowledgement is no queue")
	assert.Equal(t, 50*ms, c.standing.extreme())

	p, c = copaAt(t, "copa:delta=0.5", 60, 60*ms)
	for range 200 { // 10.1 s in all
		p.Wait(50 * ms)
		p.Ack(1, 60*ms)
	}
	assert.Equal(t, 60*ms, c.minRTT.extreme(), "the least round trip is forgotten after 10 s")

	p = newPath(t, "copa")
	p.Ack(0, time.Second)
	for range 15 {
		p.Wait(time.Second)
		p.Ack(1, 1100*ms)
	}
	assert.Equal(t, time.Second, as[*copa](p).minRTT.extreme(), "but not before 20 of itself")
}

func TestCopaHeavyLoss(t *testing.T) {
	p, c := copaAt(t, "copa:delta=0.5", 60, 50*ms)
	c.velocity = 8
	p.Ack(14, 50*ms)
	p.Lose(7)
	p.Wait(99 * ms)
	before := c.cwnd
	p.Ack(0, 50*ms)
	assert.InDelta(t, before, c.cwnd, 0, "judged over two round trips")
	p.Wait(ms)
	p.Ack(0, 50*ms)
	assert.InDelta(t, 0.7*before, c.cwnd, 1e-9, "7 of 21 lost are more than 30 %")
	assert.InDelta(t, 1, c.velocity, 0, "without the momentum to undo it")
	before = c.cwnd
	p.Lose(30)
	assert.InDelta(t, before, c.cwnd, 0, "once per period")

	p, c = copaAt(t, "copa:delta=0.5", 60, 50*ms)
	p.Ack(15, 50*ms)
	p.Lose(6)
	p.Wait(100 * ms)
	before = c.cwnd
	p.Ack(0, 50*ms)
	assert.InDelta(t, before, c.cwnd, 0, "6 of 21 are not")

	p, c = copaAt(t, "copa:delta=0.5", 60, 50*ms)
	p.Lose(20)
	p.Wait(100 * ms)
	p.Ack(0, 50*ms)
	assert.InDelta(t, 60, c.cwnd, 0, "20 packets are too few to judge")

	p = newPath(t, "copa")
	p.srtt = 50 * ms
	p.Ack(1, 50*ms)
	p.Wait(100 * ms)
	p.Lose(20)
	assert.InDelta(t, 7.7, p.Cwnd(), 0.01)
	assert.False(t, as[*copa](p).slowStart, "it ends slow start, which would double the window again")
}

func TestCopaStartsAnew(t *testing.T) {
	fresh := func(t *testing.T, p *path) {
		t.Helper()
		c := as[*copa](p)
		assert.InDelta(t, 10, p.Cwnd(), 0)
		assert.True(t, c.slowStart)
		assert.Zero(t, c.minRTT.extreme(), "what was known of the path is forgotten")
		assert.Zero(t, p.alg.Control().PacingRate)
		assert.Zero(t, p.alg.Control().NextTick, "nothing to wait for")
	}
	p, _ := copaAt(t, "copa", 60, 52*ms)
	p.Timeout()
	fresh(t, p)

	p, _ = copaAt(t, "copa", 60, 52*ms)
	due := p.alg.Control().NextTick
	assert.Equal(t, p.state.Now.Add(2*time.Second), due, "2 s of silence are too many")
	p.state.Now = due - 1
	p.alg.OnTick(p.state)
	assert.InDelta(t, 60, p.Cwnd(), 0.01)
	p.state.Now = due
	p.alg.OnTick(p.state)
	fresh(t, p)

	p, _ = copaAt(t, "copa", 60, 52*ms)
	p.Wait(3 * time.Second)
	p.Ack(1, 52*ms)
	assert.InDelta(t, 11, p.Cwnd(), 0.01, "the tick's lateness makes no difference")

	p = newPath(t, "copa")
	p.Ack(10, 3*time.Second)
	p.Wait(3 * time.Second)
	p.Ack(20, 3*time.Second)
	assert.InDelta(t, 40, p.Cwnd(), 0.01, "on a path of 3 s they are not")
}

// Bytes that are sent again show no round trip, so no queue either.
func TestCopaGrowsToHalfItsWindowWhileATimeoutsLossesAreSentAgain(t *testing.T) {
	p := newPath(t, "copa")
	for range 5 {
		p.Round(40 * ms)
	}
	before := p.Cwnd()
	require.Greater(t, before, 100.0)
	p.Timeout()
	p.Timeout()
	require.InDelta(t, 10, p.Cwnd(), 1e-3)
	for range 400 {
		p.Wait(ms)
		p.Ack(1, 0)
	}
	assert.InDelta(t, before/2, p.Cwnd(), 1)
}

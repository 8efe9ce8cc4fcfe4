package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// naccPath is a path over which the network speaks.
type naccPath struct {
	*path
	hint Hint
}

// newNaccPath starts NACC as ref says on a path with a round trip of 20 ms, where
// the network says h.
func newNaccPath(t *testing.T, ref string, h Hint) *naccPath {
	t.Helper()
	p := &naccPath{path: newPath(t, ref), hint: h}
	p.srtt = 20 * ms
	p.Say()
	return p
}

// Say lets the network speak, of now.
func (p *naccPath) Say() {
	p.hint.At = p.state.Now
	h := p.hint
	p.state.Hint = &h
}

func (p *naccPath) nacc() *nacc { return as[*nacc](p.path) }

// At starts the window with that many packets, at the first acknowledgement.
func (p *naccPath) At(packets float64) *naccPath {
	p.Ack(0, 20*ms)
	p.nacc().cwnd, p.nacc().cutAt = packets, 0
	return p
}

const naccMbit Rate = 1_000_000

// naccWide is a link on which no bound is near.
var naccWide = Hint{LinkRate: 1000 * naccMbit, ArrivalRate: 5 * naccMbit, QueueRoom: 5 * DefaultMSS, Flows: 1}

func TestNaccBounds(t *testing.T) {
	for _, tt := range []struct {
		name                string
		ref                 string
		share               float64
		lower, upper, limit float64 // packets, packets, Mbit/s
	}{
		{"equations 1 to 3: 54 Mbit/s, 20 ms, 1448 B", "nacc", 0, 10, 24.92, 8.64},
		{
			"equations 9 and 10: priority 4 of 4 and 2, equal traffic", "nacc:application,priority=4", 2. / 3, 40, 49.94,
			8.64,
		},
		{"priority 2 of 4 and 2", "nacc:application,priority=2", 1. / 3, 20, 24.97, 8.64},
		{"priority 2 of 2, 4 and 1", "nacc:application,priority=2", 0.286, 20, 24.27, 8.64},
		{"priority 4 of 2, 4 and 1", "nacc:application,priority=4", 0.571, 40, 48.52, 8.64},
		{"priority 1 of 2, 4 and 1", "nacc:application,priority=1", 0.143, 10, 12.13, 8.64},
		{"no share is known: an equal one", "nacc:application,priority=1", 0, 10, 17.46, 8.64},
		{"a priority above the highest is the highest", "nacc:application,priority=8", 2. / 3, 40, 49.94, 8.64},
		{"a wired link", "nacc:wired", 0, 10, 93.91, 48.6},
	} {
		p := newNaccPath(t, tt.ref, Hint{LinkRate: 54 * naccMbit, ArrivalRate: naccMbit, Flows: 2, Share: tt.share})
		p.Ack(1, 20*ms)
		in := p.nacc().Inspect()
		assert.InDelta(t, tt.lower, in[0], 1e-9, tt.name)
		assert.InDelta(t, tt.upper, in[1], 0.01, tt.name)
		assert.InDelta(t, tt.limit, in[2], 0.001, tt.name)
		assert.Equal(t, "guided", p.alg.Control().Phase)
	}
}

func TestNaccBoundsFollowTheLeastRoundTrip(t *testing.T) {
	p := newNaccPath(t, "nacc", Hint{LinkRate: 54 * naccMbit})
	p.Ack(1, 20*ms)
	p.Wait(20 * ms)
	p.Ack(1, 200*ms)
	assert.InDelta(t, 24.92, p.nacc().upper, 0.01, "a queue does not make room for itself")
}

func TestNaccStaysWithinItsBounds(t *testing.T) {
	p := newNaccPath(t, "nacc", Hint{LinkRate: 54 * naccMbit, ArrivalRate: naccMbit, QueueRoom: 1 << 20})
	for range 10 {
		p.Round(20 * ms)
		p.Say()
	}
	assert.InDelta(t, 24.92, p.Cwnd(), 0.01)
	p.hint.LinkRate = 18 * naccMbit
	p.Say()
	p.Ack(1, 20*ms)
	assert.InDelta(t, 10+18e6*0.16*0.02/11584, p.Cwnd(), 0.01, "a slower link binds at once")

	p = newNaccPath(t, "nacc:application,priority=4", Hint{LinkRate: 54 * naccMbit, Share: 0.5})
	p.Ack(1, 20*ms)
	assert.GreaterOrEqual(t, p.Cwnd(), 40.0, "what a priority guarantees")
}

func TestNaccMakesRoomForNewFlows(t *testing.T) {
	for _, tt := range []struct {
		name         string
		ref          string
		flows        [2]int
		arrival      [2]Rate
		before, want float64
	}{
		{
			"worked number: flows 1 to 2, arrivals 4 to 5 Mbit/s: 0.3, at least 0.5", "nacc",
			[2]int{1, 2},
			[2]Rate{4 * naccMbit, 5 * naccMbit},
			40, 20,
		},
		{"flows unchanged", "nacc", [2]int{2, 2}, [2]Rate{4 * naccMbit, 5 * naccMbit}, 40, 40},
		{"one went", "nacc", [2]int{2, 1}, [2]Rate{4 * naccMbit, 5 * naccMbit}, 40, 40},
		{"9 to 10", "nacc", [2]int{9, 10}, [2]Rate{5 * naccMbit, 5 * naccMbit}, 40, 36},
		{"9 to 10, and a tenth more arrives", "nacc", [2]int{9, 10}, [2]Rate{9 * naccMbit, 10 * naccMbit}, 40, 32},
		{"the count was not known before", "nacc", [2]int{0, 2}, [2]Rate{4 * naccMbit, 5 * naccMbit}, 40, 40},
		{
			"the network shares by priority", "nacc:application",
			[2]int{1, 2},
			[2]Rate{4 * naccMbit, 5 * naccMbit},
			40,
			40,
		},
	} {
		h := naccWide
		h.Flows, h.ArrivalRate = tt.flows[0], tt.arrival[0]
		p := newNaccPath(t, tt.ref, h).At(tt.before)
		p.Wait(ms)
		p.hint.Flows, p.hint.ArrivalRate = tt.flows[1], tt.arrival[1]
		p.Say()
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.want, p.nacc().cwnd, 1e-9, tt.name)
		p.Wait(ms)
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.want, p.nacc().cwnd, 1e-9, "%s: once", tt.name)
	}
}

func TestNaccGrowsByTheRoomInTheQueue(t *testing.T) {
	for _, tt := range []struct {
		name    string
		ref     string
		room    Bytes
		arrival Rate
		want    float64 // packets per round trip
	}{
		{"worked number: 5 packets, 5 Mbit/s, 20 ms", "nacc", 5 * DefaultMSS, 5 * naccMbit, 0.5792},
		{"equation 11: by priority", "nacc:application,priority=3", 5 * DefaultMSS, 5 * naccMbit, 3 * 0.5792},
		{"at most a doubling", "nacc", 1 << 30, 5 * naccMbit, 40},
		{"at most a doubling, at any priority", "nacc:application,priority=4", 1 << 30, 5 * naccMbit, 40},
		{"nothing arrives", "nacc", DefaultMSS, 0, 40},
		{"room not known: as Reno", "nacc", 0, 5 * naccMbit, 1},
	} {
		h := naccWide
		h.QueueRoom, h.ArrivalRate = tt.room, tt.arrival
		p := newNaccPath(t, tt.ref, h).At(40)
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.want, p.nacc().step, 0.001, tt.name)
		p.Ack(4, 20*ms)
		assert.InDelta(t, 40+tt.want/10, p.nacc().cwnd, 0.01, "%s: a tenth of it for a tenth of the window", tt.name)
	}
	p := newNaccPath(t, "nacc", naccWide).At(40)
	p.idle = true
	p.Ack(4, 20*ms)
	assert.InDelta(t, 40, p.nacc().cwnd, 1e-9, "a window that is not used does not grow")
}

func TestNaccYieldsWhenTooMuchArrives(t *testing.T) {
	for _, tt := range []struct {
		name string
		ref  string
		want float64
	}{
		{"equation 5", "nacc", 45},
		{"equation 12: priority 1 of 4", "nacc:application,priority=1", 35},
		{"priority 2 of 4", "nacc:application,priority=2", 40},
		{"the highest priority keeps its window", "nacc:application,priority=4", 50},
	} {
		h := naccWide
		h.ArrivalRate = 161 * naccMbit // the limit is 160
		p := newNaccPath(t, tt.ref, h).At(50)
		p.Wait(ms)
		cut := p.state.Now
		p.Say()
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.want, p.nacc().cwnd, 1e-9, tt.name)
		p.Ack(10, 20*ms)
		p.Wait(5 * ms)
		p.Say()
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.want, p.nacc().cwnd, 1e-9,
			"%s: a report of before the cut could show counts no more; nor does the window grow", tt.name)
		p.Wait(cut.Add(30 * ms).Sub(p.state.Now))
		p.Say()
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.want*tt.want/50, p.nacc().cwnd, 1e-9, "%s: again, a round trip later", tt.name)
	}
}

func TestNaccTellsTheRadiosLossesFromCongestion(t *testing.T) {
	for _, tt := range []struct {
		name      string
		ref       string
		radio     Bytes // reported before the loss
		lost      float64
		late      Bytes // and after
		want, end float64
	}{
		{"the radio lost it", "nacc", DefaultMSS, 1, 0, 30, 30},
		{"the radio lost more", "nacc", 3 * DefaultMSS, 1, 0, 30, 30},
		{"worked number: congestion at 30", "nacc", 0, 1, 0, 27, 27},
		{"more was lost than by the radio", "nacc", DefaultMSS, 2, 0, 27, 27},
		{"the report comes later", "nacc", 0, 2, 2 * DefaultMSS, 27, 30},
		{"the report comes later and explains half", "nacc", 0, 2, DefaultMSS, 27, 27},
		{"one half before and one after", "nacc", DefaultMSS, 2, DefaultMSS, 27, 30},
		{"equation 12: priority 1 of 4", "nacc:application,priority=1", 0, 1, 0, 21, 21},
		{"priority 2 of 4", "nacc:application,priority=2", 0, 1, 0, 24, 24},
		{"the highest priority gives way a little", "nacc:application,priority=8,max_priority=8", 0, 1, 0, 95, 95},
	} {
		before := 30.0
		if tt.want == 95 {
			before = 100 // the lower bound is 80
		}
		p := newNaccPath(t, tt.ref, naccWide).At(before)
		p.Wait(ms)
		p.hint.RadioLost += tt.radio
		p.Say()
		p.Ack(0, 20*ms)
		p.Lose(tt.lost)
		assert.InDelta(t, tt.want, p.nacc().cwnd, 1e-9, tt.name)
		p.Wait(ms)
		p.hint.RadioLost += tt.late
		p.Say()
		p.Ack(0, 20*ms)
		assert.InDelta(t, tt.end, p.nacc().cwnd, 1e-9, tt.name)
	}
}

func TestNaccCutsOncePerRoundTrip(t *testing.T) {
	p := newNaccPath(t, "nacc", naccWide).At(50)
	sent := p.state.Now
	p.Wait(20 * ms)
	p.loseSent(1, sent)
	p.Wait(ms)
	p.loseSent(1, sent.Add(ms))
	assert.InDelta(t, 45, p.nacc().cwnd, 1e-9)
	p.Wait(40 * ms)
	p.Lose(1)
	assert.InDelta(t, 40.5, p.nacc().cwnd, 1e-9)
}

func TestNaccForgetsWhatTheRadioLostLongAgo(t *testing.T) {
	p := newNaccPath(t, "nacc", naccWide).At(30)
	p.hint.RadioLost += 10 * DefaultMSS
	p.Wait(ms)
	p.Say()
	p.Ack(0, 20*ms)
	p.Wait(90 * ms)
	p.Say()
	p.Wait(90 * ms)
	p.Ack(0, 20*ms)
	p.Lose(1)
	assert.InDelta(t, 27, p.nacc().cwnd, 1e-9)
}

func TestNaccLowersItsCeilingUntilTheNextReport(t *testing.T) {
	p := newNaccPath(t, "nacc", Hint{LinkRate: 540 * naccMbit, ArrivalRate: naccMbit, QueueRoom: 1 << 20}).At(150)
	p.Lose(1)
	assert.InDelta(t, 0.9*159.17, p.nacc().upper, 0.01)
	p.Wait(ms)
	p.Say()
	p.Ack(0, 20*ms)
	assert.InDelta(t, 159.17, p.nacc().upper, 0.01)
}

func TestNaccStartsOverAfterATimeout(t *testing.T) {
	p := newNaccPath(t, "nacc", naccWide).At(50)
	p.Timeout()
	assert.InDelta(t, 10, p.Cwnd(), 1e-9)
}

func TestNaccFreezesAndThenFendsForItself(t *testing.T) {
	p := newNaccPath(t, "nacc", naccWide).At(50)
	p.Wait(99 * ms)
	p.Ack(5, 20*ms)
	grown := p.nacc().cwnd
	assert.Greater(t, grown, 50.0, "still news")
	p.Wait(2 * ms)
	p.Ack(5, 20*ms)
	assert.Equal(t, "frozen", p.alg.Control().Phase)
	assert.InDelta(t, grown, p.nacc().cwnd, 1e-9, "three round trips, and 100 ms, without a report")
	p.Wait(20 * ms)
	p.Lose(1)
	assert.InDelta(t, 0.9*grown, p.nacc().cwnd, 1e-9, "losses still count")

	p.Wait(time.Second)
	p.Ack(5, 20*ms)
	assert.Equal(t, "congestion_avoidance", p.alg.Control().Phase, "alone, but not from the start")
	before := p.nacc().cwnd
	p.Ack(before, 20*ms)
	assert.InDelta(t, before+1, p.nacc().cwnd, 0.01)
	p.Wait(20 * ms)
	p.Lose(1)
	assert.InDelta(t, (before+1)/2, p.nacc().cwnd, 0.01)

	p.Wait(ms)
	p.Say()
	p.Ack(0, 20*ms)
	assert.Equal(t, "guided", p.alg.Control().Phase)
}

func TestNaccPatienceGrowsWithTheRoundTrip(t *testing.T) {
	p := newNaccPath(t, "nacc", naccWide)
	p.srtt = 200 * ms
	p.Ack(1, 200*ms)
	p.Wait(599 * ms)
	p.Ack(1, 200*ms)
	assert.Equal(t, "guided", p.alg.Control().Phase)
	p.Wait(2 * ms)
	p.Ack(1, 200*ms)
	assert.Equal(t, "frozen", p.alg.Control().Phase)
}

func TestNaccWithoutHintsIsReno(t *testing.T) {
	for _, h := range []*Hint{nil, {At: 1, Capacity: naccMbit}} { // or with hints that name no rate
		a, b := newPath(t, "nacc"), newPath(t, "reno")
		for i := range 2000 {
			for _, p := range []*path{a, b} {
				p.state.Hint = h
				p.Wait(ms)
				switch {
				case i == 1500:
					p.Timeout()
				case i%400 == 399:
					p.Lose(1)
				default:
					p.Ack(1, 40*ms)
				}
			}
			require.Equal(t, b.alg.Control(), a.alg.Control(), "event %d", i)
		}
	}
}

func TestNaccAnswersEachStepOfTheNetworkWithinARoundTrip(t *testing.T) {
	steady := Hint{LinkRate: 540 * naccMbit, ArrivalRate: 50 * naccMbit, QueueRoom: 20 * DefaultMSS, Flows: 1}
	for _, tt := range []struct {
		name string
		step func(*Hint)
		want float64 // packets, at most, one round trip after the report
	}{
		{"more arrives than the link is good for", func(h *Hint) { h.ArrivalRate = 100 * naccMbit }, 0.9 * 100},
		{"a fifth of the link rate", func(h *Hint) { h.LinkRate /= 5 }, 10 + 108e6*0.16*0.02/11584},
		{"a second flow", func(h *Hint) { h.Flows = 2 }, 0.5*100 + 0.5},
		{"a fifth of the room: growth slows as much", func(h *Hint) { h.QueueRoom /= 5 }, 100 + 0.24/5},
	} {
		p := newNaccPath(t, "nacc", steady).At(100)
		p.Wait(20 * ms)
		p.Say()
		p.Ack(0, 20*ms)
		require.InDelta(t, 100, p.nacc().cwnd, 1e-9)
		require.InDelta(t, 0.23168, p.nacc().step, 1e-5, "20 packets of room, 50 Mbit/s, 20 ms")
		p.Wait(ms)
		tt.step(&p.hint)
		p.Say()
		p.Round(20 * ms)
		assert.LessOrEqual(t, p.nacc().cwnd, tt.want, tt.name)
		assert.LessOrEqual(t, p.nacc().cwnd, p.nacc().upper, tt.name)
	}
}

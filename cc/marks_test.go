package cc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// answeringMarks are the algorithms that have to answer marks by themselves.
func answeringMarks() (refs []string) {
	for _, ref := range variants() {
		name, _, err := Parse(ref)
		if spec, ok := registry[name]; err == nil && ok && spec.Marks != MarksPass {
			refs = append(refs, ref)
		}
	}
	return refs
}

// underway is an algorithm some way into its start, with a queue of 10 ms.
func underway(t *testing.T, ref string) *path {
	t.Helper()
	p := newPath(t, ref)
	p.round(40 * ms)
	for range 3 {
		p.round(50 * ms)
	}
	return p
}

// round is Round with the algorithm's clock.
func (p *path) round(rtt time.Duration) {
	n := max(1, int(p.Cwnd()))
	for range n {
		p.Wait(rtt / time.Duration(n))
		p.tick()
		p.Ack(1, rtt)
	}
}

// asked is what limits and rate let be in flight over a path of 40 ms, in packets.
func (p *path) asked() float64 {
	ctl := p.alg.Control()
	if ctl.PacingRate > 0 {
		return min(p.Cwnd(), p.packets(ctl.PacingRate.BytesIn(40*ms)))
	}
	return p.Cwnd()
}

func (p *path) packets(b Bytes) float64 { return float64(b) / float64(p.state.MSS) }

func (p *path) tick() {
	if next := p.alg.Control().NextTick; next != 0 && next <= p.state.Now {
		p.alg.OnTick(p.state)
	}
}

// RFC 3168 §6.1.2: a mark is answered as a loss would be by a standard sender.
func TestEveryAlgorithmShortensItsWindowAtAMark(t *testing.T) {
	for _, ref := range answeringMarks() {
		t.Run(ref, func(t *testing.T) {
			p := underway(t, ref)
			before := p.asked()
			p.marked = true
			p.Wait(ms)
			p.Ack(1, 50*ms)
			assert.LessOrEqual(t, p.asked(), max(0.75*before, minLossWindow), "of %.1f packets", before)
		})
	}
}

func TestMarksOfOneRoundTripAreOneEvent(t *testing.T) {
	for _, ref := range answeringMarks() {
		t.Run(ref, func(t *testing.T) {
			one, all := underway(t, ref), underway(t, ref)
			one.marked, all.marked = true, true
			for i := range 36 {
				one.Wait(ms)
				all.Wait(ms)
				one.tick()
				all.tick()
				one.Ack(1, 40*ms)
				all.Ack(1, 40*ms)
				one.marked = false
				require.InEpsilon(t, one.Cwnd(), all.Cwnd(), 0.001, "after %d ms", i)
			}
		})
	}
}

func TestUnderPersistentMarksLittleIsInFlight(t *testing.T) {
	for _, ref := range answeringMarks() {
		t.Run(ref, func(t *testing.T) {
			p := underway(t, ref)
			before := p.asked()
			p.marked = true
			for range 12 {
				p.round(40 * ms)
			}
			assert.LessOrEqual(t, p.asked(), 4.0, "of %.1f packets", before)
		})
	}
}

// What answers losses answers a mark in the same way, but for what is lost.
func TestWhereMarksAreLossesTheWindowIsTheSame(t *testing.T) {
	for _, ref := range answeringMarks() {
		if name, _, _ := Parse(ref); registry[name].Marks != MarksAreLosses {
			continue
		}
		t.Run(ref, func(t *testing.T) {
			marked, lossy := underway(t, ref), underway(t, ref)
			marked.marked = true
			marked.Wait(ms)
			marked.Ack(1, 40*ms)
			lossy.Wait(ms)
			lossy.state.Inflight = lossy.alg.Control().Cwnd
			lossy.loseSent(1, lossy.state.Now.Add(-40*ms))
			lossy.Ack(1, 40*ms)
			assert.InDelta(t, lossy.Cwnd(), marked.Cwnd(), 1)
		})
	}
}

func TestCeilingGrowsByAPacketPerRoundTripAndIsLifted(t *testing.T) {
	p := newPath(t, "static:cwnd_packets=40")
	p.Round(40 * ms)
	p.marked = true
	p.Ack(1, 40*ms)
	assert.InDelta(t, 20, p.Cwnd(), 0.1)
	assert.Equal(t, "marked", p.alg.Control().Phase)
	p.marked = false
	p.Round(40 * ms) // what left before the mark
	for i := range 10 {
		before := p.Cwnd()
		p.Round(40 * ms)
		assert.InDelta(t, before+1, p.Cwnd(), 0.1, "round trip %d", i)
	}
	for range 12 {
		p.Round(40 * ms)
	}
	assert.Equal(t, 40.0, p.Cwnd())
	assert.Equal(t, "static", p.alg.Control().Phase)
}

// A few packets at the end of an answer say nothing of what the path carries.
func TestAMarkOfAnIdleSenderLeavesAFirstWindow(t *testing.T) {
	p := newPath(t, "static:cwnd_packets=400")
	p.idle, p.marked = true, true
	p.Ack(1, 40*ms)
	assert.Equal(t, 5.0, p.Cwnd())
}

func TestNoneLeavesMarksToTheTransport(t *testing.T) {
	p := newPath(t, "none")
	p.marked = true
	p.Ack(1, 40*ms)
	assert.Equal(t, MaxCwnd, p.alg.Control().Cwnd)
}

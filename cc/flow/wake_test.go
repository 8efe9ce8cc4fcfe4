package flow

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// steered is an algorithm whose window somebody outside sets.
type steered struct {
	cc.NoTick
	cfg    cc.Config
	set    *cc.Bytes
	cwnd   cc.Bytes
	closed int
}

func (s *steered) OnAck(cc.Ack)        { s.cwnd = *s.set }
func (s *steered) OnLoss(cc.Loss)      {}
func (s *steered) OnTick(cc.State)     { s.cwnd = *s.set }
func (s *steered) Close()              { s.closed++ }
func (s *steered) Control() cc.Control { return cc.Control{Cwnd: s.cwnd, Phase: "steered"} }

// newSteered is a testbed whose algorithm "steered" has a window that set holds.
func newSteered(t *testing.T, set *cc.Bytes) (p *testbed, built *[]*steered) {
	p, built = newTestbed(t), &[]*steered{}
	p.mgr.Lookup = func(name string) (cc.Spec, error) {
		if name != "steered" {
			return cc.Lookup(name)
		}
		return cc.Spec{Name: name, New: func(cfg cc.Config) cc.Algorithm {
			s := &steered{cfg: cfg, set: set, cwnd: cfg.InitialCwnd}
			*built = append(*built, s)
			return s
		}}.Answering(), nil
	}
	return p, built
}

func TestAWokenAlgorithmsLimitsAreInForceAtOnce(t *testing.T) {
	set := 40 * mss
	p, built := newSteered(t, &set)
	l := p.open(Terms{Group: "a", Algorithm: "steered"})
	require.Equal(t, 10*mss, l.send(100*mss))
	require.Zero(t, l.send(mss), "the window is full")
	require.Len(t, *built, 1)
	(*built)[0].cfg.Wake(p.now)
	assert.Equal(t, 40*mss, l.limit.Cwnd)
	assert.Equal(t, 1, l.woken)
	assert.Equal(t, 30*mss, l.send(100*mss))
}

func TestAnAlgorithmIsToldTheEndsOfAFlowThatIsAlone(t *testing.T) {
	ends := cc.Ends{From: netip.MustParseAddrPort("192.0.2.1:443"), To: netip.MustParseAddrPort("10.0.0.7:50000")}
	set := 40 * mss
	for _, row := range []struct {
		terms Terms
		want  cc.Ends
	}{
		{Terms{Alone: true, Ends: &ends}, ends},
		{Terms{}, cc.Ends{To: netip.MustParseAddrPort("10.0.0.7:0")}},
	} {
		p, built := newSteered(t, &set)
		row.terms.Group, row.terms.Algorithm, row.terms.Host = "a", "steered", ends.To.Addr()
		p.open(row.terms).send(mss)
		assert.Equal(t, row.want, (*built)[0].cfg.Ends)
	}
}

func TestASmallRaiseWaitsForAnAcknowledgement(t *testing.T) {
	set := 40 * mss
	p, built := newSteered(t, &set)
	l := p.open(Terms{Group: "a", Algorithm: "steered"})
	require.Equal(t, 10*mss, l.send(100*mss))
	l.raise(t, &set, func() {
		(*built)[0].cfg.Wake(p.now)
	}, raise{40 * mss, true}, raise{44 * mss, false}, raise{50 * mss, true}, raise{49 * mss, false})
}

// raise is a window, and whether what it lets out is to go at once.
type raise struct {
	window cc.Bytes
	now    bool
}

// raise has the algorithm decide on each window, and the leg fill it.
func (l *leg) raise(t *testing.T, set *cc.Bytes, decide func(), all ...raise) {
	t.Helper()
	for _, r := range all {
		*set = r.window
		decide()
		assert.Equal(t, r.window, l.limit.Cwnd)
		assert.Equal(t, r.now, l.limit.Now, r.window)
		l.send(100 * mss)
	}
}

// TestARaiseThatAcknowledgementsDoNotLetOutGoesAtOnce has few packets in flight, as at the end of a draining.
func TestARaiseThatAcknowledgementsDoNotLetOutGoesAtOnce(t *testing.T) {
	set := 10 * mss
	p, _ := newSteered(t, &set)
	l := p.open(Terms{Group: "a", Algorithm: "steered"})
	require.Equal(t, 10*mss, l.send(100*mss))
	l.raise(t, &set, func() {
		p.wait(time.Millisecond)
		l.ack(mss)
	}, raise{18 * mss, false}, raise{40 * mss, true})
}

func TestAnAlgorithmIsClosedOnceItIsGivenUp(t *testing.T) {
	for name, giveUp := range map[string]func(p *testbed, l *leg){
		"moved away": func(p *testbed, l *leg) {
			require.NoError(t, l.Move(p.now, Terms{Group: "a", Algorithm: "reno"}))
		},
		"idle":             func(p *testbed, l *leg) { p.wait(time.Minute) },
		"alone and closed": func(p *testbed, l *leg) { l.Close(p.now) },
		"closed":           func(p *testbed, l *leg) { l.Close(p.now) },
		"closed with bytes in flight": func(p *testbed, l *leg) {
			l.send(2 * mss)
			l.Close(p.now)
		},
	} {
		t.Run(name, func(t *testing.T) {
			set := 40 * mss
			p, built := newSteered(t, &set)
			l := p.open(Terms{Group: "a", Alone: name == "alone and closed", Algorithm: "steered"})
			l.send(2 * mss)
			p.wait(20 * time.Millisecond)
			l.ack(2 * mss)
			require.Zero(t, (*built)[0].closed)
			giveUp(p, l)
			assert.Equal(t, 1, (*built)[0].closed)
			(*built)[0].cfg.Wake(p.now) // late, and about nobody
			assert.Len(t, *built, 1)
		})
	}
}

func TestTheWindowOfAnAlgorithmThatIsGivenUpWithItsLastMemberIsRemembered(t *testing.T) {
	set := 40 * mss
	p, built := newSteered(t, &set)
	terms := Terms{Group: "a", Algorithm: "steered"}
	l, other := p.open(terms), p.open(terms)
	l.send(2 * mss)
	p.wait(20 * time.Millisecond)
	l.ack(2 * mss)
	(*built)[0].cfg.Wake(p.now)
	least := l.Snapshot().MinRTT
	l.Close(p.now)
	require.Zero(t, (*built)[0].closed, "another member is there")
	other.Close(p.now)
	require.Equal(t, 1, (*built)[0].closed)

	p.wait(5 * time.Second)
	groups := p.mgr.Groups(p.now)
	require.Len(t, groups, 1)
	assert.Equal(t, 40*mss, groups[0].Cwnd)
	l = p.open(terms)
	require.Positive(t, l.send(40*mss))
	assert.Equal(t, 40*mss, l.Snapshot().Cwnd)
	require.Len(t, *built, 2)
	assert.Equal(t, 40*mss, (*built)[1].cfg.InitialCwnd)
	assert.Equal(t, 40*mss, (*built)[1].cfg.Ssthresh)
	assert.Equal(t, least, l.Snapshot().MinRTT)
}

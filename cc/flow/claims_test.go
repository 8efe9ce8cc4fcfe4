package flow

import (
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
)

// claiming is a flow to the i-th host with a priority and what it needs.
func claiming(i int, priority float64, target cc.Rate) Terms {
	return Terms{
		Group: string(rune('a' + i)), Host: hostAt(i), Algorithm: "nacc", Target: target,
		Params: cc.Params{"mode": 1, "priority": priority},
	}
}

func TestSharesGoByPriorityAndTraffic(t *testing.T) {
	for _, tt := range []struct {
		name  string
		flows []Terms
		hint  cc.Hint
		want  []float64
	}{
		{
			"priorities 4 and 2, equal traffic",
			[]Terms{claiming(0, 4, 0), claiming(1, 2, 0)},
			cc.Hint{},
			[]float64{2. / 3, 1. / 3},
		},
		{
			"priorities 2, 4 and 1",
			[]Terms{claiming(0, 2, 0), claiming(1, 4, 0), claiming(2, 1, 0)},
			cc.Hint{},
			[]float64{2. / 7, 4. / 7, 1. / 7},
		},
		{
			"1000 B each 10 ms at priority 2, 500 B at 4",
			[]Terms{claiming(0, 2, 800_000), claiming(1, 4, 400_000)},
			cc.Hint{},
			[]float64{0.5, 0.5},
		},
		{
			"traffic that is not known of all is not counted",
			[]Terms{claiming(0, 2, 800_000), claiming(1, 4, 0)},
			cc.Hint{},
			[]float64{1. / 3, 2. / 3},
		},
		{
			"an algorithm without a priority counts as 1",
			[]Terms{claiming(0, 3, 0), {Host: hostAt(1), Algorithm: "reno"}},
			cc.Hint{},
			[]float64{0.75, 0.25},
		},
		{
			"flows of one host add up",
			[]Terms{claiming(0, 1, 0), claiming(0, 1, 0), claiming(1, 2, 0)},
			cc.Hint{},
			[]float64{0.5, 0.5, 0.5},
		},
		{
			"flows that the network counts and we do not see claim 1 each",
			[]Terms{claiming(0, 2, 0)},
			cc.Hint{Flows: 3},
			[]float64{0.5},
		},
		{
			"what the network assigns stays",
			[]Terms{claiming(0, 4, 0), claiming(1, 2, 0)},
			cc.Hint{Share: 0.25},
			[]float64{0.25, 0.25},
		},
	} {
		p := newTestbed(t)
		for _, terms := range tt.flows {
			p.open(terms)
		}
		tt.hint.At = p.now
		p.mgr.Hint(to("10.0.0.0/16"), tt.hint)
		for i, want := range tt.want {
			shares := map[string]float64{}
			for _, g := range p.mgr.Groups(p.now) {
				shares[g.Name] = g.Hint.Share
			}
			assert.InDelta(t, want, shares[tt.flows[i].Group], 1e-9, "%s: flow %d", tt.name, i+1)
		}
	}
}

func TestWhoTellsOfHostsOneByOneDividesByClaims(t *testing.T) {
	p := newTestbed(t)
	p.open(claiming(0, 4, 0))
	p.open(claiming(1, 2, 0))
	all := p.mgr.Claims(to("10.0.0.0/16"))
	assert.InDelta(t, 2./3, p.mgr.Claims(to(hostAt(0).String())).Of(all), 1e-9)
	assert.Zero(t, p.mgr.Claims(to("192.0.2.1")).Of(all))
	assert.Zero(t, Claims{}.Of(Claims{}))
}

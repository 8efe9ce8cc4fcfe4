package policy_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/policy"
)

// decide returns the terms that t gives downloads.
func decide(t *testing.T, terms policy.Terms, f policy.Facts) flow.Terms {
	t.Helper()
	p, err := policy.New([]policy.Rule{{Name: "a", Down: terms}}, policy.Rule{})
	require.NoError(t, err)
	return p.Decide(f).Down
}

func group(t *testing.T, s string) policy.Group {
	t.Helper()
	g, err := policy.ParseGroup(s)
	require.NoError(t, err)
	return g
}

func TestAPromiseReachesTheFlow(t *testing.T) {
	terms := policy.Terms{Algorithm: "fixed", Class: flow.Guarantee, Target: 5e6, MinRate: 5e5, HintCap: .95}
	got := decide(t, terms, policy.Facts{})
	assert.Equal(t, flow.Terms{
		Group: "down||invalid IP", Algorithm: "fixed", Class: flow.Guarantee, Target: 5e6, MinRate: 5e5, HintCap: .95,
	}, got)
}

func TestPromisesThatContradictThemselvesAreNamed(t *testing.T) {
	for name, row := range map[string]struct {
		terms     policy.Terms
		key, says string
	}{
		"a target without a guarantee": {policy.Terms{Target: 1e6}, "target", "add class: guarantee"},
		"more at least than at all": {
			policy.Terms{Class: flow.Guarantee, Target: 1e6, MinRate: 2e6},
			"min_rate",
			"above the target, which is 1mbit",
		},
		"a target out of reach": {
			policy.Terms{Class: flow.Guarantee, Target: 2e6, MaxRate: 1e6},
			"target",
			"more than max_rate lets pass",
		},
		"a floor out of reach": {
			policy.Terms{MinRate: 2e6, MaxRate: 1e6},
			"min_rate",
			"more than max_rate lets pass",
		},
		"a negative target":         {policy.Terms{Class: flow.Guarantee, Target: -1}, "target", "negative"},
		"a negative floor":          {policy.Terms{MinRate: -1}, "min_rate", "negative"},
		"more than the capacity":    {policy.Terms{HintCap: 1.01}, "hint_cap", "up to 1"},
		"no number":                 {policy.Terms{HintCap: math.NaN()}, "hint_cap", "up to 1"},
		"a class that is not there": {policy.Terms{Class: 7}, "class", "no class 7"},
		"Janus told twice": {
			policy.Terms{
				Algorithm: "janus", Group: group(t, "flow"), Class: flow.Guarantee,
				Params: cc.Params{"target_mbit": 3},
			},
			"class", "janus is given target_mbit as well",
		},
	} {
		key, err := row.terms.CheckClass()
		assert.Equal(t, row.key, key, name)
		assert.ErrorContains(t, err, row.says, name)
		_, err = policy.New([]policy.Rule{{Name: "a", Up: row.terms}}, policy.Rule{})
		assert.ErrorContains(t, err, row.says, name)
	}
}

func TestJanusKeepsToAClassWhereItIsAlone(t *testing.T) {
	promised := policy.Terms{
		Algorithm: "janus", Class: flow.Guarantee, Target: 8e6, MinRate: 5e5,
		Params: cc.Params{"tau": 10},
	}
	alone := promised
	alone.Group = group(t, "flow")

	got := decide(t, alone, policy.Facts{})
	assert.Equal(t, cc.Params{"tau": 10, "class": 2, "target_mbit": 8, "min_mbit": .5}, got.Params)
	want := flow.Terms{Group: got.Group, Alone: true, Ends: &cc.Ends{}, Algorithm: "janus", Params: got.Params}
	assert.Equal(t, want, got, "the manager has nobody to divide among")
	assert.Equal(t, cc.Params{"tau": 10}, promised.Params, "what the rule was made from stays")
	spec, err := cc.Lookup("janus")
	require.NoError(t, err)
	assert.Equal(t, "guarantee", spec.Params[0].Choices[2], "the class by its number")
	assert.Equal(t, "delay_sensitive", spec.Params[0].Choices[1])

	got = decide(t, promised, policy.Facts{})
	assert.Equal(t, cc.Params{"tau": 10}, got.Params)
	assert.Equal(t, flow.Guarantee, got.Class, "the manager sees all who share")
	assert.EqualValues(t, 8e6, got.Target)

	alone.Class, alone.Target, alone.MinRate = flow.DelaySensitive, 0, 0
	assert.Equal(t, cc.Params{"tau": 10, "class": 1}, decide(t, alone, policy.Facts{}).Params)
	alone.Class, alone.Params = flow.Bulk, cc.Params{"class": 2, "target_mbit": 3}
	assert.Equal(t, cc.Params{"class": 2, "target_mbit": 3}, decide(t, alone, policy.Facts{}).Params,
		"Janus' own settings go on")
}

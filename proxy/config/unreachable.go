package config

import (
	"fmt"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/proxy/policy"
)

const (
	// maxRulesBefore bounds with how many rules before it a rule is compared, the nearest first.
	maxRulesBefore = 256
	// maxNamed bounds how many rules one warning names.
	maxNamed = 5
)

// unreachableRules warns of rules that never decide about a connection, since a rule before them
// matches all that they match. There is one warning for each rule before them.
func (c *Config) unreachableRules() []string {
	rules := make([]policy.Rule, len(c.Rules))
	for i, r := range c.Rules {
		rules[i] = c.withoutVoidConditions(r).policyRule(policy.Rule{})
	}
	behind := map[int][]string{}
	catchAll := slices.IndexFunc(rules, func(r policy.Rule) bool { return r.MatchesAll() })
	for j := range rules {
		if catchAll >= 0 && j > catchAll {
			behind[catchAll] = append(behind[catchAll], rules[j].Name)
			continue
		}
		for i := j - 1; i >= max(0, j-maxRulesBefore); i-- {
			if rules[i].Covers(&rules[j]) {
				behind[i] = append(behind[i], rules[j].Name)
				break
			}
		}
	}
	var out []string
	for i, r := range rules {
		names := behind[i]
		if len(names) == 0 {
			continue
		}
		what := "all that these rules below it match, so that they are never reached"
		if i == catchAll {
			what = "every connection, so that these rules below it are never reached"
		}
		more := ""
		if n := len(names) - maxNamed; n > 0 {
			names, more = names[:maxNamed], fmt.Sprintf(" and %d more", n)
		}
		out = append(out, fmt.Sprintf("rules[%d]: %s matches %s: %s%s; put it below them, or narrow its match", i, r.Name,
			what, strings.Join(names, ", "), more))
	}
	return out
}

// withoutVoidConditions returns r without the conditions that hold for every connection of this configuration.
func (c *Config) withoutVoidConditions(r Rule) Rule {
	tunnels := slices.ContainsFunc(c.Listeners, func(l Listener) bool { return l.Mode.Tunnels() })
	if !tunnels && r.Match.Protocol == policy.TCP { // nothing else comes in
		r.Match.Protocol = ""
	}
	if !tunnels && slices.Contains(r.Match.Ports, policy.PortRange{First: 1, Last: 65535}) {
		r.Match.Ports = nil
	}
	named := func(l Listener) bool { return slices.Contains(r.Match.Listener, l.Name) }
	if !slices.ContainsFunc(c.Listeners, func(l Listener) bool { return !named(l) }) {
		r.Match.Listener = nil
	}
	return r
}

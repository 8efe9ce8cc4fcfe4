package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// maxCoverPairs bounds how many pairs of entries Covers compares in one field. For longer lists it reports that the
// rule does not cover the other one.
const maxCoverPairs = 1 << 16

// MatchesAll reports whether the rule matches every connection.
func (r *Rule) MatchesAll() bool { return r.Covers(&Rule{Nameless: true}) }

// Covers reports whether the rule matches every connection that next matches, so that next is never
// reached below it. It misses the case that only several entries of a list together cover one entry of next.
func (r *Rule) Covers(next *Rule) bool {
	m, n := &r.Match, &next.Match
	everywhere := matchesAnyAddress(m.Destinations)
	switch {
	case m.Sample.isPart(): // next also matches hosts outside the sample
		return false
	case m.Protocol != "" && m.Protocol != next.onlyProtocol():
		return false
	case !coversAll(m.Listeners, n.Listeners, func(a, b string) bool { return a == b }):
		return false
	case !matchesAnyAddress(m.Sources) && !coversAll(m.Sources, n.Sources, coversPrefix):
		return false
	case !everywhere && !coversAll(m.Destinations, n.Destinations, coversPrefix):
		return false
	case !everywhere && next.Refuse != "" && r.Refuse == "":
		return false // next refuses IPv6 addresses that embed its IPv4 ones, too
	case !coversAll(m.Ports, n.Ports, func(a, b PortRange) bool { return a.First <= b.First && b.Last <= a.Last }):
		return false
	case !coversAll(m.Hosts, n.Hosts, hostMatches):
		return false
	}
	if len(m.ServerNames) == 0 {
		return true
	}
	return (r.Nameless || !next.Nameless) && coversAll(m.ServerNames, n.ServerNames, NamePattern.coversPattern)
}

// onlyProtocol is the only transport that the rule matches; empty: any.
func (r *Rule) onlyProtocol() Protocol {
	if len(r.Match.Hosts) > 0 {
		return TCP // only clients over TCP ask for a host
	}
	return r.Match.Protocol
}

// coversAll reports whether each entry of inner is covered by one of outer. An empty list matches everything.
func coversAll[T any](outer, inner []T, covers func(outer, inner T) bool) bool {
	if len(outer) == 0 {
		return true
	}
	if len(inner) == 0 || len(outer) > maxCoverPairs/len(inner) {
		return false
	}
	for _, b := range inner {
		if !slices.ContainsFunc(outer, func(a T) bool { return covers(a, b) }) {
			return false
		}
	}
	return true
}

// coversPrefix reports whether outer has every address of inner.
func coversPrefix(outer, inner netip.Prefix) bool {
	return outer.Bits() <= inner.Bits() && outer.Contains(inner.Addr())
}

// matchesAnyAddress reports whether a list of prefixes matches the addresses of both families.
func matchesAnyAddress(list []netip.Prefix) bool {
	every := func(is4 bool) bool {
		return slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Bits() == 0 && p.Addr().Is4() == is4 })
	}
	return len(list) == 0 || every(true) && every(false)
}

// coversPattern reports whether p matches every name that q matches.
func (p NamePattern) coversPattern(q NamePattern) bool {
	return p == q || p.below && strings.HasSuffix(q.name, "."+p.name)
}

const (
	// maxRulesBefore bounds with how many rules before it a rule is compared, the nearest first.
	maxRulesBefore = 256
	// maxNamed bounds how many rules one warning names.
	maxNamed = 5
)

// Unreachable returns a warning for each rule that covers rules below it, by the index of the covering rule.
func Unreachable(rules []Rule) map[int]string {
	behind := map[int][]string{}
	catchAll := slices.IndexFunc(rules, func(r Rule) bool { return r.MatchesAll() })
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
	out := map[int]string{}
	for i, names := range behind {
		what := "all that these rules below it match, so that they are never reached"
		if i == catchAll {
			what = "every connection, so that these rules below it are never reached"
		}
		more := ""
		if n := len(names) - maxNamed; n > 0 {
			names, more = names[:maxNamed], fmt.Sprintf(" and %d more", n)
		}
		out[i] = fmt.Sprintf("%s matches %s: %s%s; put it below them, or narrow its match", rules[i].Name, what,
			strings.Join(names, ", "), more)
	}
	return out
}

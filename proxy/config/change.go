package config

import (
	"fmt"
	"reflect"
	"slices"

	"github.com/penstock-net/penstock/proxy/policy"
)

// SetAlgorithm returns c with another algorithm for the connections of a rule, or by
// the defaults where rule is empty: in direction down or up, or in both where that is
// empty. What else c says of them stays. c is not changed; the errors name what is wrong.
func (c Config) SetAlgorithm(rule, direction, algorithm string) (Config, error) {
	name, err := parseAlgorithm(algorithm)
	if err != nil {
		return c, fmt.Errorf("algorithm: %w", err)
	}
	terms := &c.Defaults
	if rule != "" {
		c.Rules = slices.Clone(c.Rules)
		i := slices.IndexFunc(c.Rules, func(r Rule) bool { return r.Name == rule })
		if i < 0 {
			return c, fmt.Errorf("rule: there is none of the name %q", rule)
		}
		if c.Rules[i].Refuse != "" {
			return c, fmt.Errorf("rule: %s refuses connections, so that none has an algorithm", rule)
		}
		terms = &c.Rules[i].Terms
	}
	sides := map[string][]*Direction{"": {&terms.Down, &terms.Up}, "down": {&terms.Down}, "up": {&terms.Up}}[direction]
	if sides == nil {
		return c, fmt.Errorf("direction is %q, but must be down, up, or left out for both", direction)
	}
	for _, d := range sides {
		d.Algorithm, d.Params = name, nil // those beside it are the former algorithm's
	}
	return c, nil
}

// Different names the rules, and the defaults with an empty name, that SetAlgorithm has
// changed since c was file, with what they give now. The rules of both are the same.
func (c Config) Different(file Config) ([]policy.Verdict, error) {
	was, err := file.Routes()
	if err != nil {
		return nil, err
	}
	is, err := c.Routes()
	if err != nil {
		return nil, err
	}
	var out []policy.Verdict
	for i, v := range is {
		own, before := c.Defaults, file.Defaults
		if i < len(c.Rules) {
			own, before = c.Rules[i].Terms, file.Rules[i].Terms
		}
		if !reflect.DeepEqual(own, before) && !reflect.DeepEqual(v, was[i]) {
			out = append(out, v)
		}
	}
	return out, nil
}

package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/policy"
)

// scope is a Direction and where it stands.
type scope struct {
	key string
	Direction
}

// Policy compiles the rules: what decides about connections. The configuration has been
// checked, or the errors name the keys.
func (c *Config) Policy() (*policy.Policy, error) {
	rules, base, err := c.compileTerms()
	if err != nil {
		return nil, err
	}
	p, err := policy.New(rules, base)
	if err != nil {
		return nil, keyErrorf("rules", "%v", err)
	}
	return p, nil
}

// compileTerms are the rules with what each gives, and what holds where none matches.
func (c *Config) compileTerms() (rules []policy.Rule, base policy.Rule, err error) {
	base, err = c.addDirections(policy.Rule{
		SendProxy: c.Defaults.SendProxy.headerVersion(), KeepDSCP: c.Defaults.DSCP == KeepDSCP,
	}, "defaults", nil)
	errs := []error{err}
	rules = make([]policy.Rule, len(c.Rules))
	for i, r := range c.Rules {
		rules[i], err = c.addDirections(r.policyRule(base), fmt.Sprintf("rules[%d]", i), &r.Terms)
		errs = append(errs, withCause("defaults", err))
	}
	return rules, base, errors.Join(errs...)
}

// addDirections adds the terms of both directions to a rule: what t says at key, and
// else the defaults. Where neither says who decides the window that clients are let send
// in, our own algorithm does, unless the direction is left to the kernel.
func (c *Config) addDirections(r policy.Rule, key string, t *Terms) (policy.Rule, error) {
	var errs [2]error
	for i, d := range [...]struct {
		name string
		to   *policy.Terms
	}{{"down", &r.Down}, {"up", &r.Up}} {
		scopes := c.Defaults.scopesOf("defaults", d.name)
		if t != nil {
			scopes = append(scopes, t.scopesOf(key, d.name)...)
		}
		*d.to, errs[i] = mergeScopes(scopes...)
		if d.to == &r.Up && d.to.Receive == "" && d.to.Algorithm != policy.Unmanaged {
			d.to.Receive = cc.Default
		}
	}
	return r, errors.Join(errs[:]...)
}

// policyRule is the rule without its terms; base is what holds where it says nothing.
func (r Rule) policyRule(base policy.Rule) policy.Rule {
	out := policy.Rule{
		Name: r.Name, Refuse: string(r.Refuse), Nameless: r.Undecided == "refuse",
		SendProxy: base.SendProxy, KeepDSCP: base.KeepDSCP,
		Match: policy.Match{
			Protocol:     r.Match.Protocol,
			Listeners:    r.Match.Listener,
			Sources:      r.Match.Source,
			Destinations: r.Match.Destination,
			Ports:        r.Match.Ports,
			Hosts:        r.Match.Host,
			ServerNames:  r.Match.ServerName,
		},
	}
	if r.SendProxy != "" {
		out.SendProxy = r.SendProxy.headerVersion()
	}
	if r.DSCP != "" {
		out.KeepDSCP = r.DSCP == KeepDSCP
	}
	return out
}

// scopesOf are what t says about a direction, the widest first.
func (t Terms) scopesOf(key, direction string) []scope {
	narrow := t.Down
	if direction == "up" {
		narrow = t.Up
	}
	return []scope{{key, t.Direction}, {key + "." + direction, narrow}}
}

// mergeScopes lets each scope override what the wider ones before it said. An
// algorithm brings its own parameters and drops those of another, and a class
// that has no target drops one.
func mergeScopes(scopes ...scope) (policy.Terms, error) {
	t := policy.Terms{Algorithm: policy.Unmanaged}
	var errs []error
	said := map[string]string{} // by key: where what holds was said
	for _, s := range scopes {
		if s.Algorithm != "" {
			name, params, err := cc.Parse(string(s.Algorithm))
			if err != nil {
				return t, errors.Join(append(errs, keyErrorf(s.key+".algorithm", "%v", err))...)
			}
			t.Algorithm, t.Params = name, params
		}
		errs = append(errs, s.addParams(&t), s.addReceive(&t))
		if s.Group != "" {
			g, err := policy.ParseGroup(s.Group)
			if err != nil {
				errs = append(errs, keyErrorf(s.key+".group", "%v", err))
			}
			t.Group = g
		}
		if s.Weight > 0 {
			t.Weight = s.Weight
		}
		if s.Priority != nil {
			t.Priority = *s.Priority
		}
		if s.MaxRate > 0 {
			t.MaxRate = s.MaxRate
		}
		if s.ConnectionRate > 0 {
			t.ConnectionRate = s.ConnectionRate
		}
		errs = append(errs, s.addClass(&t, said))
	}
	if key, err := t.CheckClass(); err != nil {
		errs = append(errs, keyErrorf(said[key]+"."+key, "%v", err))
	}
	return t, errors.Join(errs...)
}

// addClass adds what s promises the flow, and notes in said what it says.
func (s scope) addClass(t *policy.Terms, said map[string]string) error {
	if s.Class != "" {
		c, err := flow.ParseClass(string(s.Class))
		if err != nil {
			return keyErrorf(s.key+".class", "%v", err)
		}
		if c != flow.Guarantee {
			t.Target = 0
		}
		t.Class, said["class"] = c, s.key
	}
	if s.Target > 0 {
		t.Target, said["target"] = s.Target, s.key
	}
	if s.MinRate > 0 {
		t.MinRate, said["min_rate"] = s.MinRate, s.key
	}
	if s.HintCap != nil {
		t.HintCap, said["hint_cap"] = float64(*s.HintCap), s.key
	}
	return nil
}

// addReceive adds the algorithm of the window that the sender is let send in.
func (s scope) addReceive(t *policy.Terms) error {
	if s.Receive == "" {
		return nil
	}
	name, params, err := cc.Parse(string(s.Receive))
	if err != nil {
		return keyErrorf(s.key+".receive", "%v", err)
	}
	spec, err := cc.Lookup(name)
	if err == nil {
		err = spec.CheckReceives()
	}
	if err != nil {
		return keyErrorf(s.key+".receive", "%v", err)
	}
	t.Receive, t.ReceiveParams = name, params
	return nil
}

func (s scope) addParams(t *policy.Terms) error {
	if len(s.Params) == 0 {
		return nil
	}
	spec, err := cc.Lookup(t.Algorithm)
	if err != nil {
		return keyErrorf(s.key+".params", "%v", err)
	}
	params := maps.Clone(t.Params)
	if params == nil {
		params = cc.Params{}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.Params)) {
		v, err := spec.ParseParam(name, string(s.Params[name]))
		if err != nil {
			errs = append(errs, keyErrorf(s.key+".params."+name, "%v", err))
			continue
		}
		params[name] = v
	}
	t.Params = params
	return errors.Join(errs...)
}

// Routes returns what each rule gives in order, and last what the defaults
// give to the rest. Groups are those of a connection about which nothing is known.
func (c *Config) Routes() ([]policy.Verdict, error) {
	p, err := c.Policy()
	if err != nil {
		return nil, err
	}
	return p.Verdicts(), nil
}

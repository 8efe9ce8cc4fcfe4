package config

import (
	"fmt"
	"maps"
	"net/netip"
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
// checked, or the error names the key.
func (c *Config) Policy() (*policy.Policy, error) {
	base := policy.Rule{SendProxy: c.Defaults.SendProxy.version()}
	var err error
	if base.Down, err = merge(c.Defaults.scopes("defaults", "down")...); err != nil {
		return nil, err
	}
	if base.Up, err = merge(c.Defaults.scopes("defaults", "up")...); err != nil {
		return nil, err
	}
	rules := make([]policy.Rule, len(c.Rules))
	for i, r := range c.Rules {
		key := fmt.Sprintf("rules[%d]", i)
		out := policy.Rule{
			Name: r.Name, Refuse: string(r.Refuse), Nameless: r.Undecided == "refuse", SendProxy: base.SendProxy,
			Match: policy.Match{
				Protocol:     policy.Protocol(r.Match.Protocol),
				Listeners:    r.Match.Listener,
				Sources:      Prefixes(r.Match.Source),
				Destinations: Prefixes(r.Match.Destination),
				Hosts:        r.Match.Host,
			},
		}
		for _, p := range r.Match.Ports {
			out.Match.Ports = append(out.Match.Ports, policy.PortRange(p))
		}
		for _, n := range r.Match.ServerName {
			out.Match.ServerNames = append(out.Match.ServerNames, policy.NamePattern(n))
		}
		if r.SendProxy != "" {
			out.SendProxy = r.SendProxy.version()
		}
		if out.Down, err = merge(slices.Concat(c.Defaults.scopes("defaults", "down"), r.scopes(key, "down"))...); err != nil {
			return nil, err
		}
		if out.Up, err = merge(slices.Concat(c.Defaults.scopes("defaults", "up"), r.scopes(key, "up"))...); err != nil {
			return nil, err
		}
		rules[i] = out
	}
	p, err := policy.New(rules, base)
	if err != nil {
		return nil, keyErrorf("rules", "%v", err)
	}
	return p, nil
}

// scopes are what t says about a direction, the widest first.
func (t Terms) scopes(key, direction string) []scope {
	narrow := t.Down
	if direction == "up" {
		narrow = t.Up
	}
	return []scope{{key, t.Direction}, {key + "." + direction, narrow}}
}

// merge lets each scope override what the wider ones before it said. An
// algorithm brings its own parameters and drops those of another, and a class
// that has no target drops one.
func merge(scopes ...scope) (policy.Terms, error) {
	t := policy.Terms{Algorithm: policy.Unmanaged}
	said := map[string]string{} // by key: where what holds was said
	for _, s := range scopes {
		if s.Algorithm != "" {
			name, params, err := cc.Parse(string(s.Algorithm))
			if err != nil {
				return t, keyErrorf(s.key+".algorithm", "%v", err)
			}
			t.Algorithm, t.Params = name, params
		}
		if err := s.params(&t); err != nil {
			return t, err
		}
		if err := s.receive(&t); err != nil {
			return t, err
		}
		if s.Group != "" {
			g, err := policy.ParseGroup(s.Group)
			if err != nil {
				return t, keyErrorf(s.key+".group", "%v", err)
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
			t.MaxRate = cc.Rate(s.MaxRate)
		}
		if s.ConnectionRate > 0 {
			t.ConnectionRate = cc.Rate(s.ConnectionRate)
		}
		if err := s.class(&t, said); err != nil {
			return t, err
		}
	}
	if key, err := t.CheckClass(); err != nil {
		return t, keyErrorf(said[key]+"."+key, "%v", err)
	}
	return t, nil
}

// class adds what s promises the flow, and notes in said what it says.
func (s scope) class(t *policy.Terms, said map[string]string) error {
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
		t.Target, said["target"] = cc.Rate(s.Target), s.key
	}
	if s.MinRate > 0 {
		t.MinRate, said["min_rate"] = cc.Rate(s.MinRate), s.key
	}
	if s.HintCap != nil {
		t.HintCap, said["hint_cap"] = float64(*s.HintCap), s.key
	}
	return nil
}

// receive adds the algorithm of the window that the sender is let send in.
func (s scope) receive(t *policy.Terms) error {
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

func (s scope) params(t *policy.Terms) error {
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
	for _, name := range slices.Sorted(maps.Keys(s.Params)) {
		v, err := spec.ParseParam(name, string(s.Params[name]))
		if err != nil {
			return keyErrorf(s.key+".params."+name, "%v", err)
		}
		params[name] = v
	}
	t.Params = params
	return nil
}

// Prefixes are those of a list.
func Prefixes(list []Prefix) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, p := range list {
		out[i] = netip.Prefix(p)
	}
	return out
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

package config

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/proxy/policy"
)

// CheckReload refuses next if it changes a key that cannot change while the proxy runs. Keys that can have the tag
// reload:"yes", or reload:"sockets" if they can except for tunnels. CheckListenerReload checks the keys of listeners
// that stay open. The error is an *Error.
func (c Config) CheckReload(next Config) error {
	var key string
	compare := func() { key = firstChange("", reflect.ValueOf(c), reflect.ValueOf(next)) }
	if mistake := new(reading).runRecovering(nil, compare); mistake != nil {
		return mistake
	}
	return cannotChange(key)
}

// CheckListenerReload refuses next if it changes a key that cannot change while the listener old is open. next is
// listener i of a configuration, and the same listener as old. The error is an *Error.
func CheckListenerReload(i int, old, next access.Listener) error {
	switch {
	case old.Mode.Tunnels():
		if key := firstChange("", reflect.ValueOf(old), reflect.ValueOf(next)); key != "" {
			return reloadErrorf(fmt.Sprintf("listeners[%d].%s", i, key), "cannot change while the tunnel of listener %q runs; "+
				"put the old value back, restart the proxy, or add a second listener beside it", old.Name)
		}
	case old.KeepClient != next.KeepClient && old.Mode == next.Mode: // the privilege for it may be gone
		return cannotChange(fmt.Sprintf("listeners[%d].keep_client", i))
	}
	key := fmt.Sprintf("listeners[%d].udp.", i) // opening a queue needs privileges that may be gone
	return cannotChange(firstChange(key, reflect.ValueOf(old.UDP), reflect.ValueOf(next.UDP)))
}

// CheckRoom refuses to open next, which is listener i of a configuration, while the tunnel open has its port or
// device. The error is an *Error.
func CheckRoom(i int, open, next access.Listener) error {
	if err := open.CheckRoom(next); err != nil {
		return places(nil).locateError(check.Within(fmt.Sprintf("listeners[%d]", i), err))
	}
	return nil
}

// cannotChange returns the error about a changed key; nil for an empty key.
func cannotChange(key string) error {
	if key == "" {
		return nil
	}
	return reloadErrorf(key, "cannot change while running; put the old value back, or restart the proxy")
}

// reloadErrorf returns an error about a key of a configuration, without a place in the file.
func reloadErrorf(key, format string, args ...any) error {
	return places(nil).locateError(check.Errorf(key, format, args...))
}

// firstChange returns the first key of a section that differs and cannot change while running.
func firstChange(section string, a, b reflect.Value) string {
	for i := range a.NumField() {
		f := a.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		key, x, y := section+name, a.Field(i), b.Field(i)
		switch {
		case f.Tag.Get("reload") == "yes":
		case f.Type.Kind() == reflect.Struct && mayChange(f.Type):
			if changed := firstChange(key+".", x, y); changed != "" {
				return changed
			}
		case f.Type.Kind() == reflect.Slice && x.Len() == y.Len(): // a nil slice equals an empty one
			for j := range x.Len() {
				if mayChange(f.Type.Elem()) {
					if changed := firstChange(fmt.Sprintf("%s[%d].", key, j), x.Index(j), y.Index(j)); changed != "" {
						return changed
					}
				} else if !reflect.DeepEqual(x.Index(j).Interface(), y.Index(j).Interface()) {
					return key
				}
			}
		case !reflect.DeepEqual(x.Interface(), y.Interface()):
			return key
		}
	}
	return ""
}

// mayChange reports whether a section has keys that may change while running.
func mayChange(t reflect.Type) bool {
	if t.Kind() != reflect.Struct {
		return false
	}
	for f := range t.Fields() {
		if f.Tag.Get("reload") != "" || mayChange(f.Type) {
			return true
		}
	}
	return false
}

// SetAlgorithm returns c with another algorithm for the connections of a rule, or of the defaults
// where rule is empty: in direction down or up, or in both where that is empty. All other settings
// stay. c is not changed.
func (c Config) SetAlgorithm(rule, direction, algorithm string) (Config, error) {
	name, err := policy.ParseAlgorithm(algorithm)
	if err != nil {
		return c, fmt.Errorf("algorithm: %w", err)
	}
	terms := &c.Defaults
	if rule != "" {
		c.Rules = slices.Clone(c.Rules)
		i := slices.IndexFunc(c.Rules, func(r policy.RuleSettings) bool { return r.Name == rule })
		if i < 0 {
			return c, fmt.Errorf("rule: there is none of the name %q", rule)
		}
		if c.Rules[i].Refuse != "" {
			return c, fmt.Errorf("rule: %s refuses connections, so that none has an algorithm", rule)
		}
		terms = &c.Rules[i].TermsSettings
	}
	sides := map[string][]*policy.DirectionSettings{
		"": {&terms.Down, &terms.Up}, "down": {&terms.Down}, "up": {&terms.Up},
	}[direction]
	if sides == nil {
		return c, fmt.Errorf("direction is %q, but must be down, up, or left out for both", direction)
	}
	for _, d := range sides {
		d.Algorithm, d.Params = name, nil // the parameters were those of the former algorithm
	}
	return c, nil
}

// StopSample returns c with a sampled rule that matches no host any more.
func (c Config) StopSample(rule string) (Config, error) {
	c.Rules = slices.Clone(c.Rules)
	i := slices.IndexFunc(c.Rules, func(r policy.RuleSettings) bool { return r.Name == rule && r.Match.Sample != 0 })
	if i < 0 {
		return c, fmt.Errorf("rule: there is none of the name %q that has a match.sample", rule)
	}
	c.Rules[i].Match.Sample = policy.NoHosts
	return c, nil
}

// SampledRules returns the names of rules that match a sample of the hosts, each with the first rule below it that
// matches the other hosts; an empty name stands for the defaults.
func (c *Config) SampledRules() (rules [][2]string) {
	if !slices.ContainsFunc(c.Rules, func(r policy.RuleSettings) bool { return r.Match.Sample > 0 }) {
		return nil
	}
	compiled := make([]policy.Rule, len(c.Rules))
	for i := range c.Rules {
		compiled[i] = c.Rules[i].Rule(policy.Rule{})
	}
	for i, r := range compiled {
		if r.Match.Sample <= 0 || r.Match.Sample >= 1 || r.Refuse != "" {
			continue
		}
		against := ""
		for _, next := range compiled[i+1:] {
			if next.Covers(&r) {
				against = next.Name
				break
			}
		}
		rules = append(rules, [2]string{r.Name, against})
	}
	return rules
}

// ChangedVerdicts returns the verdicts of the rules, and of the defaults with an empty name, that
// SetAlgorithm has changed since c was file. Both have the same rules.
func (c Config) ChangedVerdicts(file Config) ([]policy.Verdict, error) {
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
			own, before = c.Rules[i].TermsSettings, file.Rules[i].TermsSettings
		}
		if !reflect.DeepEqual(own, before) && !reflect.DeepEqual(v, was[i]) {
			out = append(out, v)
		}
	}
	return out, nil
}

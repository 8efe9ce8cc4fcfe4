package main

import (
	"cmp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/telemetry"
)

// currentRules are those in force, and what there is to choose from.
func (h *service) currentRules() (out telemetry.Rules, err error) {
	cfg := h.proxy.Config()
	routes, err := cfg.Routes()
	if err != nil {
		return out, err
	}
	for _, r := range routes {
		rule := telemetry.Rule{Name: r.Rule, Refuse: r.Refuse}
		if r.Refuse == "" {
			rule.Down, rule.Up = describeAlgorithm(r.Down), describeAlgorithm(r.Up)
		}
		out.Rules = append(out.Rules, rule)
	}
	for _, s := range cc.Specs() {
		out.Algorithms = append(out.Algorithms, s.Name)
	}
	for _, a := range cfg.Agents {
		out.Algorithms = append(out.Algorithms, "ccp:"+a.Name)
	}
	return out, nil
}

// changeAlgorithm puts what is in force, but for one algorithm, into force as a reload would: until
// the next reload, for the file does not have it. It logs one line and returns the same in
// words; on an error nothing has changed.
func (h *service) changeAlgorithm(c telemetry.Change, client string) (string, error) {
	h.reloads.turn.Lock()
	defer h.reloads.turn.Unlock()
	log := h.log.With("rule", ruleName(*c.Rule), "direction", cmp.Or(c.Direction, "both"), "algorithm", c.Algorithm,
		"client", client)
	done, err := h.putChanged(c)
	if err != nil {
		log.Warn("algorithm not changed", "err", err)
		return "", err
	}
	log.Info("algorithm changed until the next reload", "moved", done.Moved, "kept", done.Kept)
	return describeReload("changed until the next reload", done), nil
}

// putChanged does what can fail.
func (h *service) putChanged(c telemetry.Change) (done proxy.Reloaded, err error) {
	cfg, err := h.proxy.Config().SetAlgorithm(*c.Rule, c.Direction, c.Algorithm)
	if err != nil {
		return done, err
	}
	different, err := cfg.Different(h.reloads.fileConfig())
	if err != nil {
		return done, err
	}
	if done, err = h.proxy.Reload(cfg); err != nil {
		return done, err
	}
	var words []string
	for _, v := range different {
		words = append(words, describeRule(v))
	}
	h.reloads.noteChange(words)
	return done, nil
}

// ruleName is a rule's name as the page tells it.
func ruleName(name string) string { return cmp.Or(name, "defaults") }

// describeRule tells of one rule by its algorithms.
func describeRule(v policy.Verdict) string {
	down, up := describeAlgorithm(v.Down), describeAlgorithm(v.Up)
	if down == up {
		return ruleName(v.Rule) + ": " + down
	}
	return ruleName(v.Rule) + ": down " + down + ", up " + up
}

// fileConfig is the configuration as it was read, with the flags over it.
func (r *reloads) fileConfig() config.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.written
}

// noteChange notes which rules differ from the file from now on.
func (r *reloads) noteChange(words []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Changed = words
}

// Package policy decides what happens to a connection: whether it may pass, and
// on which terms each of its directions sends. It is pure: facts come in, a
// verdict goes out. It neither dials nor resolves.
package policy

import (
	"fmt"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// Facts are what is known about a connection, all but ServerName before its
// server leg is dialled.
type Facts struct {
	Listener   string
	Source     netip.AddrPort // the client
	Peer       string         // who hands on what many clients send, such as the far end of a tunnel; empty: the client comes by itself
	Inside     bool           // Peer is the client's own tunnel: what goes to the client goes to that host
	Target     netip.AddrPort // the server, resolved
	TargetPeer string         // the peer of the same tunnel that Target is of; empty: it is outside
	Host       string         // the name the client asked for, without its port; empty when it gave an address
	ServerName string         // as the function of that name found it; empty: there is none, or not yet
}

// Verdict is what a connection may do.
type Verdict struct {
	Rule      string     // the rule that matched; empty: the defaults
	Refuse    string     // why it may not pass; empty: it may
	Down, Up  flow.Terms // towards the client, towards the server
	SendProxy int        // version of the PROXY protocol header sent to the server; 0: none
}

// Unmanaged is the algorithm that leaves a direction to the kernel alone.
const Unmanaged = "none"

// Rule gives terms to the connections it matches.
type Rule struct {
	Name      string
	Match     Match
	Refuse    string // not empty: refuse, and this is why
	Down, Up  Terms
	SendProxy int
}

// Terms are flow.Terms whose group is still a template.
type Terms struct {
	Algorithm        string // empty: Unmanaged
	Params           cc.Params
	MaxRate          cc.Rate // of the group; 0: the algorithm alone
	ConnectionRate   cc.Rate // of each connection; 0: no other bound
	Priority, Weight int
	Class            flow.Class
	Target           cc.Rate // of flow.Guarantee; 0: not known
	MinRate          cc.Rate // 0: none
	HintCap          float64 // 0: none
	Group            Group   // the zero value groups by the host the bytes go to
}

// Policy is an ordered list of rules. It is immutable and safe for concurrent use.
type Policy struct {
	rules    []Rule
	defaults Rule
}

// New checks the rules and returns their policy. A connection that no rule
// matches gets what defaults says; its Match and Name are ignored.
func New(rules []Rule, defaults Rule) (*Policy, error) {
	p := &Policy{rules: make([]Rule, len(rules)), defaults: defaults}
	p.defaults.Name, p.defaults.Match = "", Match{}
	copy(p.rules, rules)
	names := map[string]bool{}
	for i, r := range p.rules {
		if r.Name == "" || names[r.Name] {
			return nil, fmt.Errorf("policy: rule %d: the name %q is empty or taken; every rule needs its own", i+1, r.Name)
		}
		names[r.Name] = true
		if err := r.check(); err != nil {
			return nil, fmt.Errorf("policy: rule %q: %w", r.Name, err)
		}
	}
	if err := p.defaults.check(); err != nil {
		return nil, fmt.Errorf("policy: defaults: %w", err)
	}
	for i := range p.rules {
		p.rules[i].settle()
	}
	p.defaults.settle()
	return p, nil
}

func (r Rule) check() error {
	if r.SendProxy < 0 || r.SendProxy > 2 {
		return fmt.Errorf("PROXY protocol version %d; there are 1 and 2", r.SendProxy)
	}
	if err := r.Match.check(); err != nil {
		return err
	}
	if err := r.Down.check(); err != nil {
		return fmt.Errorf("down: %w", err)
	}
	if err := r.Up.check(); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	return nil
}

func (t Terms) check() error {
	if t.Weight < 0 || t.MaxRate < 0 || t.ConnectionRate < 0 {
		return fmt.Errorf("weight and maximum rates cannot be negative")
	}
	if key, err := t.CheckClass(); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if t.Algorithm == "" {
		return nil
	}
	spec, err := cc.Lookup(t.Algorithm)
	if err != nil {
		return err
	}
	_, err = spec.Resolve(t.Params)
	return err
}

// Decide returns the verdict of the first rule that matches.
func (p *Policy) Decide(f Facts) Verdict {
	f.Source, f.Target = unmap(f.Source), unmap(f.Target)
	for i := range p.rules {
		if p.rules[i].Match.matches(f) {
			return p.rules[i].verdict(f)
		}
	}
	return p.defaults.verdict(f)
}

// Prospects returns what Decide may say once the server name of f is known: the
// verdicts of the rules that only wait for it, in their order, and last the one
// without any of them. A single one is settled.
func (p *Policy) Prospects(f Facts) []Verdict {
	f.Source, f.Target, f.ServerName = unmap(f.Source), unmap(f.Target), ""
	var out []Verdict
	for i := range p.rules {
		r := &p.rules[i]
		if !r.Match.matchesBeforeName(f) {
			continue
		}
		out = append(out, r.verdict(f))
		if len(r.Match.ServerNames) == 0 {
			return out
		}
	}
	return append(out, p.defaults.verdict(f))
}

func (r *Rule) verdict(f Facts) Verdict {
	v := Verdict{Rule: r.Name, Refuse: r.Refuse, SendProxy: r.SendProxy}
	if r.Refuse == "" {
		v.Down = r.Down.terms(f, down)
		v.Up = r.Up.terms(f, up)
	}
	return v
}

func (t Terms) terms(f Facts, d direction) flow.Terms {
	name := t.Algorithm
	if name == "" {
		name = Unmanaged
	}
	host := f.Target
	if d == down {
		host = f.Source
	}
	return flow.Terms{
		Group:          t.Group.expand(f, d),
		Alone:          t.Group.by == byFlow,
		Host:           host.Addr().WithZone(""),
		Algorithm:      name,
		Params:         t.Params,
		MaxRate:        t.MaxRate,
		ConnectionRate: t.ConnectionRate,
		Priority:       t.Priority,
		Weight:         t.Weight,
		Class:          t.Class,
		Target:         t.Target,
		MinRate:        t.MinRate,
		HintCap:        t.HintCap,
	}
}

// Verdicts returns the verdict of each rule in order, and last that of the
// defaults, for a connection about which nothing is known.
func (p *Policy) Verdicts() []Verdict {
	out := make([]Verdict, 0, len(p.rules)+1)
	for i := range p.rules {
		out = append(out, p.rules[i].verdict(Facts{}))
	}
	return append(out, p.defaults.verdict(Facts{}))
}

func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }

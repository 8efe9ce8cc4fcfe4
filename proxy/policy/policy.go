// Package policy decides what happens to a connection: whether it may pass, and
// on which terms each of its directions sends. It is pure: facts come in, a
// verdict goes out. It neither dials nor resolves.
package policy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/destination"
)

// Facts describe a connection before its server leg is dialled. ServerName may become known later than the rest.
type Facts struct {
	Listener       string
	Protocol       Protocol       // of the transport; empty: TCP
	Source         netip.AddrPort // the client
	Peer           string         // the tunnel's peer that the client's bytes come from; empty: from no tunnel
	Inside         bool           // Peer is the client's own host, and forwards nothing for other hosts
	Target         netip.AddrPort // the server, resolved
	TargetPeer     string         // the tunnel's peer that has the address of Target; empty: none
	TargetListener string         // of that tunnel
	Host           string         // the name the client asked for, without its port; empty when it gave an address
	ServerName     string         // returned by the function ServerName; empty: none, or not known yet
}

// Verdict is what a connection may do.
type Verdict struct {
	Rule     string     // the rule that matched; empty: the defaults
	Refuse   string     // why it may not pass; empty: it may
	Down, Up flow.Terms // towards the client, towards the server
	// FromServer and FromClient are the terms of the receive windows advertised to the server and to the client.
	FromServer, FromClient flow.Terms
	SendProxy              int  // version of the PROXY protocol header sent to the server; 0: none
	KeepDSCP               bool // packets carry the DSCP that the other side's had
}

// Unmanaged is the algorithm that leaves a direction to the kernel alone.
const Unmanaged = "none"

// LeaveToKernel takes the algorithms out of the verdict. Maximum rates stay.
func (v *Verdict) LeaveToKernel() {
	for _, t := range []*flow.Terms{&v.Down, &v.Up, &v.FromServer, &v.FromClient} {
		t.Algorithm, t.Params = Unmanaged, nil
	}
}

// Rule gives terms to the connections it matches.
type Rule struct {
	Name      string
	Match     Match
	Refuse    string // not empty: refuse, and this is why
	Nameless  bool   // refuse a connection without any server name that all of Match but ServerNames matches
	Down, Up  Terms
	SendProxy int
	KeepDSCP  bool
}

// Terms are flow.Terms with a group that is still a template.
type Terms struct {
	Algorithm        string // empty: Unmanaged
	Params           cc.Params
	Receive          string // the algorithm of the receive window advertised to the sender; empty: Unmanaged
	ReceiveParams    cc.Params
	MaxRate          cc.Rate // of the group; 0: the algorithm alone
	Shared           bool    // MaxRate is of all edges together
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
			return nil, fmt.Errorf("policy: rule %d: the name %q is empty or taken; every rule needs its own", i+1,
				r.Name)
		}
		names[r.Name] = true
		if err := r.checkRule(); err != nil {
			return nil, fmt.Errorf("policy: rule %q: %w", r.Name, err)
		}
	}
	if err := p.defaults.checkRule(); err != nil {
		return nil, fmt.Errorf("policy: defaults: %w", err)
	}
	for i := range p.rules {
		p.rules[i].Down.passClassToJanus()
		p.rules[i].Up.passClassToJanus()
	}
	p.defaults.Down.passClassToJanus()
	p.defaults.Up.passClassToJanus()
	return p, nil
}

// checkRule finds what the rule cannot mean.
func (r Rule) checkRule() error {
	if r.SendProxy < 0 || r.SendProxy > 2 {
		return fmt.Errorf("PROXY protocol version %d; there are 1 and 2", r.SendProxy)
	}
	if err := r.Match.checkMatch(); err != nil {
		return err
	}
	if r.Nameless && len(r.Match.ServerNames) == 0 {
		return errors.New("nothing shows a name that it does not ask for")
	}
	if err := r.Down.checkTerms(); err != nil {
		return fmt.Errorf("down: %w", err)
	}
	if err := r.Up.checkTerms(); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	return nil
}

// checkTerms finds rates, classes and algorithms that do not work.
func (t Terms) checkTerms() error {
	if t.Weight < 0 || t.MaxRate < 0 || t.ConnectionRate < 0 {
		return fmt.Errorf("weight and maximum rates cannot be negative")
	}
	if key, err := t.CheckClass(); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	if err := checkAlgorithm(t.Algorithm, t.Params); err != nil {
		return err
	}
	if err := checkAlgorithm(t.Receive, t.ReceiveParams); err != nil || t.Receive == "" {
		return err
	}
	return checkReceives(t.Receive)
}

// checkReceives refuses an algorithm that cannot decide a receive window.
func checkReceives(name string) error {
	spec, err := cc.Lookup(name)
	if err != nil {
		return err
	}
	return spec.CheckReceives()
}

// checkAlgorithm tells what is wrong with an algorithm and its settings.
func checkAlgorithm(name string, params cc.Params) error {
	if name == "" {
		return nil
	}
	spec, err := cc.Lookup(name)
	if err != nil {
		return err
	}
	_, err = spec.Resolve(params)
	return err
}

// Decide returns the verdict of the first rule that matches.
func (p *Policy) Decide(f Facts) Verdict {
	f.Source, f.Target = unmapAddrPort(f.Source), unmapAddrPort(f.Target)
	for i := range p.rules {
		r := &p.rules[i]
		switch {
		case !r.matchesBeforeName(f):
		case r.Match.matchesName(f.ServerName):
			return r.verdictFor(f)
		case r.Nameless && f.ServerName == "":
			return r.namelessVerdict()
		}
	}
	return p.defaults.verdictFor(f)
}

// Step is the outcome of one rule for a connection.
type Step struct {
	Rule     string  // empty: the defaults
	Mismatch string  // the key of match that does not match; empty: the rule decides
	Verdict  Verdict // of the rule that decides
}

// Explain returns a step for each rule that Decide passes over, and last one for the rule that decides.
func (p *Policy) Explain(f Facts) (steps []Step) {
	f.Source, f.Target = unmapAddrPort(f.Source), unmapAddrPort(f.Target)
	v := p.Decide(f)
	for i := range p.rules {
		r := &p.rules[i]
		if r.Name == v.Rule {
			break
		}
		why := "server_name"
		if !r.matchesBeforeName(f) {
			why = cmp.Or(r.Match.mismatchBeforeName(&f), "sample")
		}
		steps = append(steps, Step{Rule: r.Name, Mismatch: why})
	}
	return append(steps, Step{Rule: v.Rule, Verdict: v})
}

// Prospects appends to out every verdict that Decide may return once the server name of f is known. First come the
// rules that match but for ServerNames, in order, then the first rule without ServerNames or the defaults, then the
// refusal of a connection without a name. A single verdict means that Decide does not depend on the name.
func (p *Policy) Prospects(out []Verdict, f Facts) []Verdict {
	f.Source, f.Target, f.ServerName = unmapAddrPort(f.Source), unmapAddrPort(f.Target), ""
	var nameless []Verdict
	last := &p.defaults
	for i := range p.rules {
		r := &p.rules[i]
		if !r.matchesBeforeName(f) {
			continue
		}
		if len(r.Match.ServerNames) == 0 {
			last = r
			break
		}
		out = append(out, r.verdictFor(f))
		if r.Nameless && nameless == nil {
			nameless = []Verdict{r.namelessVerdict()}
		}
	}
	return append(append(out, last.verdictFor(f)), nameless...)
}

// matchesBeforeName reports whether everything but ServerNames matches. A rule that refuses an IPv4 address also
// matches the IPv6 addresses that embed it, so that a translator does not lead around the rule.
func (r *Rule) matchesBeforeName(f Facts) bool {
	if !r.Match.Sample.containsHost(&f, r.Name) {
		return false
	}
	if r.Match.matchesBeforeName(f) {
		return true
	}
	if r.Refuse == "" {
		return false
	}
	return slices.ContainsFunc(destination.EmbeddedIPv4(f.Target.Addr()), func(inner netip.Addr) bool {
		f.Target = netip.AddrPortFrom(inner, f.Target.Port())
		return r.Match.matchesBeforeName(f)
	})
}

// namelessVerdict refuses a connection because it shows no server name.
func (r *Rule) namelessVerdict() Verdict {
	return Verdict{Rule: r.Name, Refuse: "it shows no server name", SendProxy: r.SendProxy}
}

// verdictFor returns the verdict on a connection that the rule matches.
func (r *Rule) verdictFor(f Facts) Verdict {
	v := Verdict{Rule: r.Name, Refuse: r.Refuse, SendProxy: r.SendProxy, KeepDSCP: r.KeepDSCP}
	if r.Refuse == "" {
		v.Down = r.Down.flowTerms(f, down)
		v.Up = r.Up.flowTerms(f, up)
		v.FromServer = r.Down.receiveTerms(f, down)
		v.FromClient = r.Up.receiveTerms(f, up)
	}
	return v
}

// flowTerms returns the terms of the side that sends, with the group of this connection.
func (t Terms) flowTerms(f Facts, d direction) flow.Terms {
	name := t.Algorithm
	if name == "" {
		name = Unmanaged
	}
	from, to := f.Source, f.Target
	if d == down {
		from, to = to, from
	}
	var ends *cc.Ends
	alone := t.Group.by == byFlow
	if alone {
		ends = &cc.Ends{From: from, To: to}
	}
	return flow.Terms{
		Group:          t.Group.expandFor(f, d),
		Alone:          alone,
		Host:           to.Addr().WithZone(""),
		Ends:           ends,
		Algorithm:      name,
		Params:         t.Params,
		MaxRate:        t.MaxRate,
		Shared:         t.Shared,
		ConnectionRate: t.ConnectionRate,
		Priority:       t.Priority,
		Weight:         t.Weight,
		Class:          t.Class,
		Target:         t.Target,
		MinRate:        t.MinRate,
		HintCap:        t.HintCap,
	}
}

// receiveTerms returns the terms of the receive window advertised to the sender of direction d. Flows are grouped by
// the sender's host. There are no maximum rates, because the flow that forwards the bytes keeps them, and no hint
// cap, because hints describe the path on which we send.
func (t Terms) receiveTerms(f Facts, d direction) flow.Terms {
	if t.Receive == "" || t.Receive == Unmanaged {
		return flow.Terms{Algorithm: Unmanaged}
	}
	back := down
	if d == down {
		back = up
	}
	r := t
	r.Algorithm, r.Params, r.MaxRate, r.ConnectionRate, r.HintCap = t.Receive, t.ReceiveParams, 0, 0, 0
	r.Shared = false
	out := r.flowTerms(f, back)
	out.Group = "from " + out.Group
	return out
}

// KeepsDSCP reports whether any verdict has KeepDSCP.
func (p *Policy) KeepsDSCP() bool {
	return p.defaults.KeepDSCP || slices.ContainsFunc(p.rules, func(r Rule) bool { return r.KeepDSCP })
}

// Verdicts returns the verdict of each rule in order, and last that of the
// defaults, for a connection about which nothing is known.
func (p *Policy) Verdicts() []Verdict {
	out := make([]Verdict, 0, len(p.rules)+1)
	for i := range p.rules {
		out = append(out, p.rules[i].verdictFor(Facts{}))
	}
	return append(out, p.defaults.verdictFor(Facts{}))
}

// unmapAddrPort makes an IPv4 address of one that is mapped into IPv6, so that prefixes of IPv4 match it.
func unmapAddrPort(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

package policy

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config/check"
)

// Sources are the files with the types of this room's keys. The comment of a field says what its key is for.
//
//go:embed settings.go match.go
var Sources embed.FS

// RuleSettings are the keys of a rule, which gives terms to the connections that it matches.
type RuleSettings struct {
	// For logs and metrics; unique.
	Name string `yaml:"name" required:"yes"`
	// All that is set must match; nothing set matches every connection.
	Match Match `yaml:"match"`
	// Refuse the connection: true, or the reason for the log.
	Refuse Refuse `yaml:"refuse"`
	// What becomes of a connection that the rule would match if it had a name of match.server_name, and that shows
	// none: next (the next rule decides, as where not set) or refuse.
	Undecided     Undecided `yaml:"undecided"`
	TermsSettings `yaml:",inline"`
}

// TermsSettings are how a connection sends: for both directions, and what differs in one.
type TermsSettings struct {
	DirectionSettings `yaml:",inline"`
	// Towards the client, where it differs.
	Down DirectionSettings `yaml:"down"`
	// Towards the server, where it differs.
	Up DirectionSettings `yaml:"up"`
	// Open the connection to the server with a PROXY protocol header.
	SendProxy SendProxy `yaml:"send_proxy"`
	// keep: packets to the server carry the DSCP that the client's had in its handshake, from the SYN on unless a name
	// decides, and those to the client the server's, or where that sets none the client's own. ECN stays as it is.
	// What an IPv4 server sets takes CAP_BPF to be known; what a peer of a tunnel sets as a server, and who comes by
	// HTTP/3 CONNECT, is not. off: packets carry none.
	DSCP DSCP `yaml:"dscp"`
}

// DirectionSettings are how one direction sends. What is left out comes from the next wider scope. Params belong to
// the algorithm that they stand beside.
type DirectionSettings struct {
	// Congestion control, optionally with settings or a profile: penstock, copa:delta=0.1. none leaves it to the
	// kernel.
	Algorithm Algorithm `yaml:"algorithm"`
	// Settings of the algorithm by name.
	Params map[string]Param `yaml:"params"`
	// Congestion control of the window that the proxy lets the sender of this direction's bytes send in while a queue
	// stands: under up the client, under down the server. none leaves it to the kernel. Not set: penstock under up,
	// unless its algorithm is none, and none under down.
	Receive Algorithm `yaml:"receive"`
	// All connections of one group together are never faster than this, such as 20mbit: with the usual group, what one
	// host gets.
	MaxRate cc.Rate `yaml:"max_rate"`
	// true: max_rate holds for the connections of all edges of the fleet together.
	Shared *bool `yaml:"shared"`
	// One connection is never faster than this, such as 5mbit.
	ConnectionRate cc.Rate `yaml:"connection_rate"`
	// Share within the group; 1 where not set.
	Weight int `yaml:"weight" min:"0" max:"1000"`
	// Lower goes first within the group; 0 where not set.
	Priority *int `yaml:"priority"`
	// What the flow is for: bulk takes what is left, delay_sensitive has its share at once, guarantee has its target
	// before others share the rest. bulk where not set.
	Class Class `yaml:"class"`
	// With class guarantee, the payload that the application needs: its due, and a little above it its most. Not set:
	// not known, so it shares with the rest.
	Target cc.Rate `yaml:"target"`
	// What the flow has of its group's window whatever the others want; at most target.
	MinRate cc.Rate `yaml:"min_rate"`
	// While the network tells a path's capacity (POST /v1/hints), send no faster than this part of it, above 0 up to
	// 1, such as 0.95; 0: as fast as the algorithm will.
	HintCap *check.Fraction `yaml:"hint_cap"`
	// Which flows share one window: peer (the host the bytes go to), source, source/24, destination, tunnel (who hands
	// on what many clients send), listener, flow, or a name of your own.
	Group string `yaml:"group"`
}

// The types of single values.
type (
	// Algorithm is a reference as cc.Parse reads it; empty: not set.
	Algorithm string
	// Param is the value of an algorithm's setting: a number or the name of a choice.
	Param string
	// Undecided says what becomes of a connection without a server name; empty: next.
	Undecided string
	// Class names what a flow is for; empty: not set.
	Class string
	// Refuse is why a rule refuses; empty: it does not.
	Refuse string
	// SendProxy is the version of the PROXY protocol header sent; empty: not set.
	SendProxy string
	// DSCP says what becomes of the mark of a connection's packets; empty: not set.
	DSCP string
)

// KeepDSCP has packets carry the mark that the other side's had.
const KeepDSCP DSCP = "keep"

// ParseAlgorithm reads a name with settings, such as copa:delta=0.1. The algorithm exists and takes them.
func ParseAlgorithm(s string) (Algorithm, error) {
	name, params, err := cc.Parse(s)
	if err == nil {
		err = checkAlgorithm(name, params)
	}
	if err != nil {
		return "", err
	}
	return Algorithm(s), nil
}

// ParseRefuse reads a reason in words.
func ParseRefuse(s string) (Refuse, error) {
	switch strings.ToLower(s) {
	case "", "true", "false", "yes", "no", "on", "off", "y", "n": // the opposite of what some of them say
		return "", errors.New("expected true, false or the reason in words")
	}
	return Refuse(s), nil
}

// RefuseByRule returns the reason for a key that is true or false instead of a reason in words; empty for false.
func RefuseByRule(refuse bool) Refuse {
	if refuse {
		return "refused by rule"
	}
	return ""
}

// headerVersion returns the version of the PROXY protocol; 0: no header.
func (p SendProxy) headerVersion() int {
	switch p {
	case "v1":
		return 1
	case "v2":
		return 2
	}
	return 0
}

// Validate checks the keys of a rule against each other. Compile checks the terms, because it knows the defaults.
// Errors are *check.Errors.
func (s *RuleSettings) Validate() error {
	errs := []error{check.Name("name", s.Name)}
	if s.Undecided != "" && len(s.Match.ServerNames) == 0 {
		errs = append(errs, check.Errorf("undecided", "there is nothing to decide by; it goes with match.server_name"))
	}
	if s.Match.Protocol == ICMP && len(s.Match.ServerNames) > 0 {
		errs = append(errs, check.Errorf("match.protocol", "nothing that comes over icmp shows a name; remove "+
			"server_name, or protocol"))
	}
	if s.Match.hasHostsWithoutTCP() {
		errs = append(errs, check.Errorf("match.protocol", "nothing that comes over %s asks for a host; remove host, "+
			"or protocol", s.Match.Protocol))
	}
	for i, h := range s.Match.Hosts {
		if cure := cureOfHost(h); cure != "" {
			errs = append(errs, check.Errorf(fmt.Sprintf("match.host[%d]", i), "%q is no host name; %s", h, cure))
		}
	}
	return errors.Join(errs...)
}

// VoidKeys returns the keys below the rule that have no effect, because the rule matches datagrams only: the PROXY
// protocol, the DSCP of a handshake and the advertised window exist for TCP alone.
func (s *RuleSettings) VoidKeys() (keys []string) {
	if s.Match.Protocol == "" || s.Match.Protocol == TCP {
		return nil
	}
	for _, k := range []struct {
		key   string
		isSet bool
	}{
		{"send_proxy", s.SendProxy != ""},
		{"dscp", s.DSCP != ""},
		{"receive", s.Receive != ""},
		{"down.receive", s.Down.Receive != ""},
		{"up.receive", s.Up.Receive != ""},
	} {
		if k.isSet {
			keys = append(keys, k.key)
		}
	}
	return keys
}

// cureOfHost says what to write instead of a pattern that can match no host name; empty: the pattern is right.
func cureOfHost(s string) string {
	address, err := netip.ParseAddr(s)
	switch {
	case err == nil: // a client that asks for an address asks for no name
		return fmt.Sprintf("write %v under destination", address)
	case strings.Trim(s, ".") != "" && check.IsHostName(s):
		return ""
	case strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII }):
		return "write its ASCII form, which begins with xn--"
	}
	return "write example.com, or .example.com for all names below it"
}

// Compile returns the rules with their terms, and as base the rule for connections that none of them matches. Errors
// are *check.Errors, with keys below rules and defaults.
func Compile(settings []RuleSettings, defaults TermsSettings) (rules []Rule, base Rule, err error) {
	base = Rule{SendProxy: defaults.SendProxy.headerVersion(), KeepDSCP: defaults.DSCP == KeepDSCP}
	errs := []error{base.addDirections(defaults.scopesAt("defaults"))}
	rules = make([]Rule, len(settings))
	for i, s := range settings {
		rules[i] = s.Rule(base)
		wider := defaults.scopesAt("defaults")
		for d, own := range s.scopesAt(fmt.Sprintf("rules[%d]", i)) {
			wider[d] = append(wider[d], own...)
		}
		errs = append(errs, check.CausedBy("defaults", rules[i].addDirections(wider)))
	}
	return rules, base, errors.Join(errs...)
}

// Rule returns the rule without its terms. SendProxy and KeepDSCP are those of base where the rule does not set them.
func (s *RuleSettings) Rule(base Rule) Rule {
	out := Rule{
		Name: s.Name, Refuse: string(s.Refuse), Nameless: s.Undecided == "refuse", Match: s.Match,
		SendProxy: base.SendProxy, KeepDSCP: base.KeepDSCP,
	}
	if s.SendProxy != "" {
		out.SendProxy = s.SendProxy.headerVersion()
	}
	if s.DSCP != "" {
		out.KeepDSCP = s.DSCP == KeepDSCP
	}
	return out
}

// Algorithms yields the references to algorithms, with the keys of t where they stand.
func (t *TermsSettings) Algorithms() iter.Seq2[string, Algorithm] {
	return func(yield func(string, Algorithm) bool) {
		_ = yield("algorithm", t.Algorithm) && yield("down.algorithm", t.Down.Algorithm) &&
			yield("up.algorithm", t.Up.Algorithm)
	}
}

// SharedKeys returns the keys of t that share a maximum rate with other edges.
func (t *TermsSettings) SharedKeys() (keys []string) {
	for _, d := range []struct {
		key    string
		shared *bool
	}{{"shared", t.Shared}, {"down.shared", t.Down.Shared}, {"up.shared", t.Up.Shared}} {
		if d.shared != nil && *d.shared {
			keys = append(keys, d.key)
		}
	}
	return keys
}

// scope is the settings that one place of the configuration has for a direction.
type scope struct {
	key string // where the settings stand in the whole configuration
	DirectionSettings
}

// scopesAt returns the scopes of t, which stands at key, for the direction down and for up. The widest scope is first.
func (t *TermsSettings) scopesAt(key string) [2][]scope {
	both := scope{key, t.DirectionSettings}
	return [2][]scope{{both, {key + ".down", t.Down}}, {both, {key + ".up", t.Up}}}
}

// addDirections sets the terms of both directions. Where no scope names an algorithm for the receive window advertised
// to clients, it is the default algorithm, or none where up is left to the kernel.
func (r *Rule) addDirections(scopes [2][]scope) error {
	var down, up error
	r.Down, down = mergeScopes(scopes[0])
	r.Up, up = mergeScopes(scopes[1])
	if r.Up.Receive == "" && r.Up.Algorithm != Unmanaged {
		r.Up.Receive = cc.Default
	}
	return errors.Join(down, up)
}

// mergeScopes returns the terms of the scopes. Each scope overrides the wider ones before it. A scope with an
// algorithm drops the parameters of the one before, and a scope with a class without target drops the target.
func mergeScopes(scopes []scope) (Terms, error) {
	t := Terms{Algorithm: Unmanaged}
	var errs []error
	setAt := map[string]string{} // by key: the scope that set its value
	for _, s := range scopes {
		errs = append(errs, check.Within(s.key, s.overrideTerms(&t)))
		for key, set := range map[string]bool{
			"class": s.Class != "", "target": s.Target > 0, "min_rate": s.MinRate > 0, "hint_cap": s.HintCap != nil,
			"shared": s.Shared != nil,
		} {
			if set {
				setAt[key] = s.key
			}
		}
	}
	if t.Shared && t.MaxRate == 0 {
		errs = append(errs, check.Errorf(setAt["shared"]+".shared",
			"there is no max_rate to share; add one, or remove shared"))
	}
	if key, err := t.CheckClass(); err != nil {
		errs = append(errs, check.Errorf(setAt[key]+"."+key, "%v", err))
	}
	return t, errors.Join(errs...)
}

// overrideTerms replaces those terms that s sets.
func (s *DirectionSettings) overrideTerms(t *Terms) error {
	var errs []error
	addError := func(key string, err error) {
		if err != nil {
			errs = append(errs, check.Errorf(key, "%v", err))
		}
	}
	if s.Algorithm != "" {
		name, params, err := cc.Parse(string(s.Algorithm))
		if err != nil {
			return check.Errorf("algorithm", "%v", err)
		}
		t.Algorithm, t.Params = name, params
	}
	errs = append(errs, s.addParams(t))
	if s.Receive != "" {
		name, params, err := cc.Parse(string(s.Receive))
		if err == nil {
			err = checkReceives(name)
		}
		addError("receive", err)
		t.Receive, t.ReceiveParams = name, params
	}
	if s.Group != "" {
		g, err := ParseGroup(s.Group)
		addError("group", err)
		t.Group = g
	}
	if s.Class != "" {
		c, err := flow.ParseClass(string(s.Class))
		addError("class", err)
		if t.Class = c; c != flow.Guarantee {
			t.Target = 0
		}
	}
	if s.Priority != nil {
		t.Priority = *s.Priority
	}
	if s.Shared != nil {
		t.Shared = *s.Shared
	}
	if s.HintCap != nil {
		t.HintCap = float64(*s.HintCap)
	}
	t.Weight = cmp.Or(s.Weight, t.Weight)
	t.MaxRate = cmp.Or(s.MaxRate, t.MaxRate)
	t.ConnectionRate = cmp.Or(s.ConnectionRate, t.ConnectionRate)
	t.Target = cmp.Or(s.Target, t.Target)
	t.MinRate = cmp.Or(s.MinRate, t.MinRate)
	return errors.Join(errs...)
}

// addParams adds the parameters of s to those that stand with the algorithm's name.
func (s *DirectionSettings) addParams(t *Terms) error {
	if len(s.Params) == 0 {
		return nil
	}
	spec, err := cc.Lookup(t.Algorithm)
	if err != nil {
		return check.Errorf("params", "%v", err)
	}
	params := maps.Clone(t.Params)
	if params == nil {
		params = cc.Params{}
	}
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(s.Params)) {
		v, err := spec.ParseParam(name, string(s.Params[name]))
		if err != nil {
			errs = append(errs, check.Errorf("params."+name, "%v", err))
			continue
		}
		params[name] = v
	}
	t.Params = params
	return errors.Join(errs...)
}

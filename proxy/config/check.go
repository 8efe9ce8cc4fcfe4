package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/proxy/policy"
)

// checkAll checks each section, and the sections against each other. The errors are *check.Errors, joined.
func (c *Config) checkAll() error {
	if len(c.Listeners) == 0 {
		return check.Errorf("listeners",
			"at least one listener is needed, such as {name: local, mode: mixed, address: \"127.0.0.1:1080\"}")
	}
	errs := []error{checkTags("", reflect.ValueOf(*c)), c.checkListeners()}
	rules := c.checkRules()
	if _, _, err := policy.Compile(c.Rules, c.Defaults); err != nil || rules != nil {
		errs = append(errs, rules, err)
	} else if _, err := c.Policy(); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, c.checkAgents(), check.Within("limits", c.Limits.Validate()),
		check.Within("telemetry", c.Telemetry.Validate()), check.Within("fleet", c.Fleet.Validate()), c.checkShared())
	interfaces := check.Taken{}
	for i := range c.Hints {
		key := fmt.Sprintf("hints[%d]", i)
		if errs = append(errs, check.Within(key, c.Hints[i].Validate())); errs[len(errs)-1] == nil {
			errs = append(errs, interfaces.Add(key+".interface", c.Hints[i].Interface))
		}
	}
	return errors.Join(errs...)
}

// checkListeners checks each listener, and that no two have the same name, device, queue or socket.
func (c *Config) checkListeners() error {
	var errs []error
	names, devices, queues := check.Taken{}, check.Taken{}, check.Taken{}
	var taken sockets
	for i := range c.Listeners {
		l := &c.Listeners[i]
		key := fmt.Sprintf("listeners[%d]", i)
		errs = append(errs, check.Within(key, l.Validate()), names.Add(key+".name", l.Name),
			devices.Add(key+".device", l.Interface()), taken.addSocket(key+".address", l.Network(), l.Address))
		if l.UDP.Queue > 0 {
			errs = append(errs, queues.Add(key+".udp.queue", strconv.Itoa(l.UDP.Queue)))
		}
		if l.UDP.UplinkQueue > 0 {
			errs = append(errs, queues.Add(key+".udp.up_queue", strconv.Itoa(l.UDP.UplinkQueue)))
		}
		if l.Mode == access.WireGuard && l.WireGuard.DatapathOrDefault() == access.DatapathKernel {
			errs = append(errs, c.KernelLacks(l))
		}
	}
	return errors.Join(append(errs, taken.addSocket("telemetry.address", "tcp", c.Telemetry.Address),
		taken.addSocket("telemetry.health", "tcp", c.Telemetry.Health))...)
}

// checkRules checks each rule, that names are unique, and that the listeners that rules name exist.
func (c *Config) checkRules() error {
	var errs []error
	names := check.Taken{}
	for i := range c.Rules {
		r := &c.Rules[i]
		key := fmt.Sprintf("rules[%d]", i)
		errs = append(errs, check.Within(key, r.Validate()), names.Add(key+".name", r.Name))
		for j, name := range r.Match.Listeners {
			if !slices.ContainsFunc(c.Listeners, func(l access.Listener) bool { return l.Name == name }) {
				err := check.Errorf(fmt.Sprintf("%s.match.listener[%d]", key, j), "there is no listener %q", name)
				errs = append(errs, check.CausedBy("listeners", err))
			}
		}
	}
	return errors.Join(errs...)
}

// checkShared refuses shared maximum rates without a fleet.
func (c *Config) checkShared() error {
	if c.Fleet.IsOn() {
		return nil
	}
	var errs []error
	refuse := func(at string, t *policy.TermsSettings) {
		for _, key := range t.SharedKeys() {
			errs = append(errs, check.CausedBy("fleet", check.Errorf(at+"."+key,
				"there are no other edges to share max_rate with; add fleet: {listen, key_file, join}, or remove shared")))
		}
	}
	refuse("defaults", &c.Defaults)
	for i := range c.Rules {
		refuse(fmt.Sprintf("rules[%d]", i), &c.Rules[i].TermsSettings)
	}
	return errors.Join(errs...)
}

// checkAgents checks each agent, and that the agents that rules name exist.
func (c *Config) checkAgents() error {
	var errs []error
	names, sockets := check.Taken{}, check.Taken{}
	for i := range c.Agents {
		a := &c.Agents[i]
		key := fmt.Sprintf("agents[%d]", i)
		errs = append(errs, check.Within(key, a.Validate()), sockets.Add(key+".address", a.Address))
		if ccp.CheckName(a.Name) == nil {
			errs = append(errs, names.Add(key+".name", a.Name))
		}
		if local := a.Address == "" && a.TLS == (agent.TLS{}); local && filepath.IsAbs(a.SocketPath()) {
			errs = append(errs, sockets.Add(key+".socket", a.SocketPath()), sockets.Add(key+".reply", a.ReplyPath()))
		}
	}
	errs = append(errs, c.checkAgentsOf("defaults", &c.Defaults))
	for i := range c.Rules {
		errs = append(errs, c.checkAgentsOf(fmt.Sprintf("rules[%d]", i), &c.Rules[i].TermsSettings))
	}
	return errors.Join(errs...)
}

// checkAgentsOf checks that there is an agent for each algorithm ccp:NAME of t.
func (c *Config) checkAgentsOf(key string, t *policy.TermsSettings) error {
	var errs []error
	for below, algorithm := range t.Algorithms() {
		first, _, _ := strings.Cut(string(algorithm), ",")
		word, name, _ := strings.Cut(first, ":")
		if word != ccp.Family {
			continue
		}
		var agents []string
		for _, a := range c.Agents {
			agents = append(agents, a.Name)
		}
		cure := fmt.Sprintf("agents has %s", strings.Join(agents, ", "))
		if agents == nil {
			cure = fmt.Sprintf("name it in agents, as in {name: %s}", name)
		}
		if !slices.Contains(agents, name) {
			err := check.Errorf(key+"."+below, "there is no agent %q; %s", name, cure)
			errs = append(errs, check.CausedBy("agents", err))
		}
	}
	return errors.Join(errs...)
}

// KernelLacks returns an error about the keys that the kernel's WireGuard cannot apply to a listener, because it
// forwards datagrams by itself; nil: it applies all.
func (c *Config) KernelLacks(l *access.Listener) error {
	at := slices.IndexFunc(c.Listeners, func(other access.Listener) bool { return other.Name == l.Name })
	errs := []error{check.Within(fmt.Sprintf("listeners[%d]", at), l.KernelLacks())}
	for i := range c.Rules {
		r := &c.Rules[i]
		isForDatagrams := r.Match.Protocol != "" && r.Match.Protocol != policy.TCP
		if isForDatagrams && r.Refuse == "" && matchesNameless(l, r) {
			errs = append(errs, check.Errorf(fmt.Sprintf("rules[%d].match.protocol", i), "what the kernel forwards out of "+
				"listener %q has no window, so that this rule can refuse it and nothing else; have it refuse, or take "+
				"wireguard.datapath: netstack", l.Name))
		}
	}
	return errors.Join(errs...)
}

// matchesNameless reports whether the rule may decide about packets out of the listener's tunnel that show no name.
func matchesNameless(l *access.Listener, r *policy.RuleSettings) bool {
	m := &r.Match
	return (len(m.Listeners) == 0 || slices.Contains(m.Listeners, l.Name)) && len(m.Hosts) == 0 &&
		(len(m.ServerNames) == 0 || r.Undecided == "refuse")
}

// KernelRules returns the rules, in order, for packets that the kernel forwards out of the listener's tunnel past the
// proxy. It knows no names.
func (c *Config) KernelRules(l *access.Listener) []policy.RuleSettings {
	return slices.DeleteFunc(slices.Clone(c.Rules), func(r policy.RuleSettings) bool { return !matchesNameless(l, &r) })
}

// sockets are the addresses of all listening sockets.
type sockets []socket

// socket is the address of a listening socket, with the key that has it.
type socket struct {
	key, network, address string
	host                  netip.Addr // 0.0.0.0: all IPv4 addresses; [::]: all of both families
	port                  string
}

// addSocket adds an address that has been checked. It returns an error if the kernel would refuse it
// beside another one. Addresses with port 0 never collide.
func (list *sockets) addSocket(key, network, address string) error {
	host, port, _ := net.SplitHostPort(address)
	if port == "" || port == "0" { // off, or known once its config_file is read
		return nil
	}
	s := socket{key: key, network: network, address: address, host: netip.IPv6Unspecified(), port: port}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		s.host = addr.Unmap()
	}
	for _, other := range *list {
		switch {
		case s.network != other.network || s.port != other.port || !s.coversSocket(other) && !other.coversSocket(s):
		case s.host == other.host:
			return check.Errorf(key, "%q is already %s", address, other.key)
		default:
			return check.Errorf(key, "%q is already %s, which is %q: one of them has every address", address, other.key,
				other.address)
		}
	}
	*list = append(*list, s)
	return nil
}

// coversSocket reports whether the address of s includes that of other.
func (s socket) coversSocket(other socket) bool {
	return s.host == other.host || s.host.IsUnspecified() && (s.host.Is6() || other.host.Is4())
}

// Warnings describes settings that are allowed and probably not intended.
func (c Config) Warnings() (out []string) {
	if failed := new(reading).runRecovering(nil, func() { out = c.findWarnings() }); failed != nil {
		return []string{failed.Message}
	}
	return out
}

// findWarnings collects the warnings of each section, and those about sections together.
func (c *Config) findWarnings() (out []string) {
	for i := range c.Listeners {
		l := &c.Listeners[i]
		for _, w := range l.Warnings() {
			out = append(out, fmt.Sprintf("listeners[%d]: %s", i, w))
		}
		for j := range i {
			if shared := l.SharedPool(&c.Listeners[j]); shared.IsValid() {
				out = append(out, fmt.Sprintf("listeners[%d]: its peers and those of listeners[%d] have their addresses from "+
					"%v both; whoever is looked for there is looked for in the first alone", i, j, shared))
			}
		}
	}
	holdsUDP := slices.ContainsFunc(c.Listeners, func(l access.Listener) bool { return l.UDP.HoldsAny() })
	tunnels := slices.ContainsFunc(c.Listeners, func(l access.Listener) bool { return l.Mode.Tunnels() })
	namesNone := !slices.ContainsFunc(c.Listeners, func(l access.Listener) bool {
		return !l.Mode.Captures() && l.Mode != access.WireGuard && l.Mode != access.TUN
	})
	rules := make([]policy.Rule, len(c.Rules))
	for i, r := range c.Rules {
		if keys := r.VoidKeys(); len(keys) > 0 {
			out = append(out, fmt.Sprintf("rules[%d]: %s: only TCP has a use for it, and the rule is for %s; remove it, "+
				"or match.protocol", i, strings.Join(keys, ", "), r.Match.Protocol))
		}
		switch p := r.Match.Protocol; {
		case p == policy.UDP && len(r.Match.ServerNames) > 0 && !holdsUDP:
			out = append(out, fmt.Sprintf("rules[%d]: UDP shows a server name only where it is held, so the rule "+
				"matches nothing; set udp.queue of a listener of mode tproxy or redirect", i))
		case p == policy.UDP && !holdsUDP && !tunnels:
			out = append(out, fmt.Sprintf("rules[%d]: UDP goes past these listeners, so the rule matches nothing; set "+
				"udp.queue of a listener of mode tproxy or redirect, or refuse UDP in the forward chain", i))
		case p == policy.ICMP && !tunnels:
			out = append(out, fmt.Sprintf("rules[%d]: only tunnels have icmp, so the rule matches nothing; remove it", i))
		}
		if len(r.Match.Hosts) > 0 && namesNone {
			out = append(out, fmt.Sprintf("rules[%d]: match.host: clients tell these listeners no host, so the rule matches "+
				"nothing; match.server_name is the name in their first bytes", i))
		}
		c.clearVoidConditions(&r.Match)
		rules[i] = r.Rule(policy.Rule{})
	}
	unreachable := policy.Unreachable(rules)
	for i := range rules {
		if w := unreachable[i]; w != "" {
			out = append(out, fmt.Sprintf("rules[%d]: %s", i, w))
		}
	}
	return append(append(out, c.Telemetry.Warnings()...), c.Fleet.Warnings()...)
}

// clearVoidConditions removes the conditions that hold for every connection of this configuration.
func (c *Config) clearVoidConditions(m *policy.Match) {
	datagrams := slices.ContainsFunc(c.Listeners, func(l access.Listener) bool {
		return l.Mode.Tunnels() || l.UDP.HoldsAny()
	})
	if !datagrams && m.Protocol == policy.TCP { // nothing else comes in
		m.Protocol = ""
	}
	if !datagrams && slices.Contains(m.Ports, policy.PortRange{First: 1, Last: 65535}) {
		m.Ports = nil
	}
	if !slices.ContainsFunc(c.Listeners, func(l access.Listener) bool { return !slices.Contains(m.Listeners, l.Name) }) {
		m.Listeners = nil
	}
}

// Policy compiles the rules to the policy that decides about connections. Errors name keys.
func (c *Config) Policy() (*policy.Policy, error) {
	rules, base, err := policy.Compile(c.Rules, c.Defaults)
	if err != nil {
		return nil, err
	}
	p, err := policy.New(rules, base)
	if err != nil {
		return nil, check.Errorf("rules", "%v", err)
	}
	return p, nil
}

// Routes returns the verdict of each rule in order, and last that of the defaults. Groups are those
// of a connection about which nothing is known.
func (c *Config) Routes() ([]policy.Verdict, error) {
	p, err := c.Policy()
	if err != nil {
		return nil, err
	}
	return p.Verdicts(), nil
}

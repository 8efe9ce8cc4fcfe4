package main

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/destination"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/telemetry"
)

// question is a connection that check is asked about.
type question struct{ name, listener, peer string }

// explainDecision prints which rule decides about a connection of a client to a server, and why no rule before it
// does.
func (q *question) explainDecision(w io.Writer, cfg *config.Config, client, server string) error {
	listener := &cfg.Listeners[0]
	if q.listener != "" {
		i := slices.IndexFunc(cfg.Listeners, func(l access.Listener) bool { return l.Name == q.listener })
		if i < 0 {
			var names []string
			for _, l := range cfg.Listeners {
				names = append(names, l.Name)
			}
			return cli.BadInput(fmt.Errorf("--listener: there is none of the name %q; there are %s", q.listener,
				strings.Join(names, ", ")))
		}
		listener = &cfg.Listeners[i]
	}
	facts, err := q.readFacts(listener, client, server)
	if err != nil {
		return cli.BadInput(err)
	}
	p, err := cfg.Policy()
	if err != nil {
		return err
	}
	var b strings.Builder
	guard := destination.Guard{
		Allow: listener.Allow, Captured: listener.Mode.Captures(),
		// The file says nothing of the addresses of the machine that it is for.
		Own: func(netip.Addr) (bool, error) { return false, nil },
	}
	if err := guard.Check(facts.Target.Addr()); err != nil && listener.Target == "" {
		fmt.Fprintf(&b, "listener %s refuses it before any rule: %v\n", listener.Name, err)
	}
	rules := p.Explain(facts)
	for _, step := range rules[:len(rules)-1] {
		fmt.Fprintf(&b, "%s: no, match.%s does not match%s\n", step.Rule, step.Mismatch,
			q.valueOf(step.Mismatch, &facts))
	}
	v := rules[len(rules)-1].Verdict
	if v.Refuse != "" {
		fmt.Fprintf(&b, "%s: refuses it (%s)\n", telemetry.RuleName(v.Rule), v.Refuse)
	} else {
		fmt.Fprintf(&b, "%s: decides\n  down: %s, in the group %s\n  up: %s, in the group %s\n", telemetry.RuleName(v.Rule),
			describeTerms(v.Down), describeGroup(v.Down.Group), describeTerms(v.Up), describeGroup(v.Up.Group))
	}
	_, err = io.WriteString(w, config.Printable(b.String()))
	return err
}

// describeGroup writes the key of a group without the | between its parts.
func describeGroup(key string) string { return strings.ReplaceAll(key, "|", " ") }

// readFacts returns the facts of the connection that policy decides on.
func (q *question) readFacts(listener *access.Listener, client, server string) (f policy.Facts, err error) {
	f = policy.Facts{
		Listener: listener.Name, Protocol: policy.TCP, Host: q.name, ServerName: q.name, Peer: q.peer,
		Inside: q.peer != "",
	}
	if listener.Mode.Captures() {
		f.Host = "" // captured clients are asked for no name
	}
	if address, ok := strings.CutSuffix(server, "/udp"); ok {
		f.Protocol, server = policy.UDP, address
	}
	if f.Source, err = netip.ParseAddrPort(client); err != nil {
		address, err := netip.ParseAddr(client)
		if err != nil {
			return f, fmt.Errorf("%q is no client; write an address such as 192.168.1.50, with a port or without",
				client)
		}
		f.Source = netip.AddrPortFrom(address, 0)
	}
	if f.Target, err = netip.ParseAddrPort(server); err != nil {
		return f, fmt.Errorf("%q is no server; write an address and a port such as 203.0.113.7:443 or [2001:db8::7]:443/udp",
			server)
	}
	return f, nil
}

// valueOf returns what the connection has for a key of match, in words.
func (q *question) valueOf(key string, f *policy.Facts) string {
	switch key {
	case "protocol":
		return ": it is " + string(f.Protocol)
	case "listener":
		return ": it comes to " + f.Listener
	case "source":
		return ": it comes from " + f.Source.Addr().String()
	case "destination":
		return ": it goes to " + f.Target.Addr().String()
	case "ports":
		return fmt.Sprintf(": it goes to port %d", f.Target.Port())
	case "sample":
		return ": the host " + policy.ClientHost(f.Source.Addr(), q.peer) + " is not in it"
	}
	if q.name == "" {
		return ": no --name is given"
	}
	return ": the name is " + q.name
}

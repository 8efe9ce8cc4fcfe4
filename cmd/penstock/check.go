package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/config/check"
	"github.com/penstock-net/penstock/proxy/policy"
)

// checkCommand reads a configuration as run does, and opens nothing.
func checkCommand() *cobra.Command {
	var explain bool
	var asked question
	cmd := &cobra.Command{
		Use:   "check FILE [--explain CLIENT SERVER]",
		Short: "Check a configuration file and print what it would run",
		Long: `Check reads a configuration file as "run" would, password files included, but
opens nothing. It exits with 78 when the file is wrong: the first mistake is shown where it
stands, up to 19 others have a line each.

With --explain it says which rule decides about a connection, why those before it do not,
and what the connection gets. CLIENT is an address, with a port or without; SERVER is an
address and a port, with /udp behind it for UDP.`,
		Example: `  penstock check /etc/penstock/penstock.yaml
  penstock check /etc/penstock/penstock.yaml --explain 192.168.1.50 203.0.113.7:443 --name www.example.com
  penstock check /etc/penstock/penstock.yaml --explain 192.168.1.50 203.0.113.7:443/udp --listener lan`,
		Args: func(cmd *cobra.Command, args []string) error {
			if explain {
				return cobra.ExactArgs(3)(cmd, args)
			}
			for _, flag := range []string{"name", "listener", "peer"} {
				if cmd.Flags().Changed(flag) {
					return cli.BadInput(fmt.Errorf("--%s is of the connection that --explain is asked about: add --explain CLIENT "+
						"SERVER, or leave it out", flag))
				}
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if args[0] == "" {
				return cli.BadInput(errNoName)
			}
			f := runFlags{config: args[0]}
			cfg, err := f.loadConfig(cmd.Flags())
			if err != nil {
				return badConfig(cmd.ErrOrStderr(), err)
			}
			printWarnings(cmd.ErrOrStderr(), cfg)
			if explain {
				return asked.explainDecision(cmd.OutOrStdout(), &cfg, args[1], args[2])
			}
			return describeConfig(cmd.OutOrStdout(), cfg)
		},
	}
	cmd.Flags().BoolVar(&explain, "explain", false, "say which rule decides about a connection, and why")
	cmd.Flags().StringVar(&asked.name, "name", "", "`NAME` that the client asks for or shows; only with --explain")
	cmd.Flags().StringVar(&asked.listener, "listener", "",
		"`NAME` of the listener that it comes to (default the first); "+
			"only with --explain")
	cmd.Flags().StringVar(&asked.peer, "peer", "", "`NAME` of the tunnel's peer that it comes from; only with --explain")
	return cmd
}

// printWarnings writes a line for each warning of cfg.
func printWarnings(w io.Writer, cfg config.Config) {
	for _, warning := range cfg.Warnings() {
		fmt.Fprintln(w, warningMark+config.Printable(warning))
	}
}

// badConfig prints the excerpt of a mistake in the file to w. It returns err, which has the exit code and the line
// that is printed after the excerpt. An error that is not of a file becomes bad input.
func badConfig(w io.Writer, err error) error {
	var ce *config.Error
	if !errors.As(err, &ce) {
		return cli.BadInput(err)
	}
	if ce.Excerpt != "" {
		fmt.Fprintln(errorWriter(w), strings.TrimRight(ce.Excerpt, "\n"))
	}
	return err
}

// describeConfig prints what cfg would run, with all defaults filled in: listeners, rules in their order, and
// telemetry.
func describeConfig(w io.Writer, cfg config.Config) error {
	var b strings.Builder
	for i := range cfg.Listeners {
		describeListener(&b, &cfg.Listeners[i])
	}
	routes, err := cfg.Routes()
	if err != nil {
		return err
	}
	named := 0
	for i, r := range routes {
		name := "rule " + r.Rule
		if r.Rule == "" {
			name = "otherwise"
		} else if names := cfg.Rules[i].Match.ServerNames; len(names) > 0 {
			named++
			none := ""
			if cfg.Rules[i].Undecided == "refuse" {
				none = ", or none: refuse"
			}
			name += fmt.Sprintf(" (server name %s%s)", joinPatterns(names), none)
		}
		describeVerdict(&b, name, &r)
	}
	if named > 0 {
		fmt.Fprintf(&b, "server names: the client's first bytes are awaited for at most %v, until the server "+
			"speaks\n", cfg.Limits.ServerNameWait)
	}
	fmt.Fprintf(&b, "telemetry: %s\n", cfg.Telemetry.Address)
	if ways := hintWays(cfg); len(ways) > 0 {
		fmt.Fprintf(&b, "hints: %s\n", strings.Join(ways, ", "))
	}
	_, err = io.WriteString(w, config.Printable(b.String()))
	return err
}

// describeListener writes the line of a listener.
func describeListener(b *strings.Builder, l *access.Listener) {
	fmt.Fprintf(b, "listener %s: %s on %s", l.Name, l.Mode, cmp.Or(l.Address, l.Device)) // it has one of them
	if l.Mode == access.WireGuard && l.WireGuard.DatapathOrDefault() != access.DatapathNetstack {
		fmt.Fprintf(b, ", datapath %s, interface %s", l.WireGuard.DatapathOrDefault(), l.Interface())
	}
	if l.Mode.Tunnels() {
		fmt.Fprintf(b, ", MTU %d", l.MTU())
	}
	if n := len(l.WireGuard.Peers); n > 0 {
		fmt.Fprintf(b, ", %d peers", n)
	}
	if n := len(l.MASQUE.Tokens); n > 0 {
		fmt.Fprintf(b, ", %d tokens", n)
	}
	if l.Target != "" {
		fmt.Fprintf(b, " to %s", l.Target)
	}
	if len(l.Users) > 0 {
		fmt.Fprintf(b, ", %d users", len(l.Users))
	}
	if l.KeepClient {
		b.WriteString(", keeps the client's address")
	}
	b.WriteByte('\n')
}

// describeVerdict writes the line of a rule: what its connections get.
func describeVerdict(b *strings.Builder, name string, v *policy.Verdict) {
	if v.Refuse != "" {
		fmt.Fprintf(b, "%s: refuse (%s)\n", name, v.Refuse)
		return
	}
	fmt.Fprintf(b, "%s: down %s, up %s", name, describeTerms(v.Down), describeTerms(v.Up))
	for _, receive := range []struct {
		who   string
		terms flow.Terms
	}{{"servers", v.FromServer}, {"clients", v.FromClient}} {
		if receive.terms.Algorithm != policy.Unmanaged {
			fmt.Fprintf(b, ", %s' windows held by %s", receive.who, describeTerms(receive.terms))
		}
	}
	if v.SendProxy > 0 {
		fmt.Fprintf(b, ", PROXY protocol v%d to the server", v.SendProxy)
	}
	if v.KeepDSCP {
		b.WriteString(", DSCP kept")
	}
	b.WriteByte('\n')
}

// hintWays lists where hints are taken, and whether with a token.
func hintWays(cfg config.Config) (ways []string) {
	hints := cfg.Telemetry.Hints
	switch address := cfg.Telemetry.Address; {
	case address == "off":
	case hints.Token != "":
		ways = append(ways, "on "+address+" with the token")
	case check.IsLoopback(address):
		ways = append(ways, "on "+address)
	}
	if hints.Socket != "" {
		ways = append(ways, "on "+hints.Socket)
	}
	return ways
}

// joinPatterns lists the patterns as the configuration writes them.
func joinPatterns(names []policy.NamePattern) string {
	words := make([]string, len(names))
	for i, n := range names {
		words[i] = n.String()
	}
	return strings.Join(words, ", ")
}

// describeTerms writes the algorithm as a rule has it, and after it every other term that is not the default.
func describeTerms(t flow.Terms) string {
	out := describeAlgorithm(t)
	if t.MaxRate > 0 {
		out += " at most " + t.MaxRate.String() + " in a group"
	}
	if t.ConnectionRate > 0 {
		out += " at most " + t.ConnectionRate.String() + " each"
	}
	if t.Weight > 1 {
		out += fmt.Sprintf(" weight %d", t.Weight)
	}
	if t.Class != flow.Bulk {
		out += " class " + t.Class.String()
	}
	if t.Target > 0 {
		out += " target " + t.Target.String()
	}
	if t.MinRate > 0 {
		out += " at least " + t.MinRate.String()
	}
	if t.HintCap > 0 {
		out += fmt.Sprintf(" within %g of hints", t.HintCap)
	}
	return out
}

// describeAlgorithm writes an algorithm with its settings, as the configuration has it.
func describeAlgorithm(t flow.Terms) string {
	s := paramsOf(t)
	if s == "" {
		return t.Algorithm
	}
	between := ":"
	if strings.Contains(t.Algorithm, ":") { // such as ccp:NAME
		between = ","
	}
	return t.Algorithm + between + s
}

// paramsOf writes the settings that differ from the defaults.
func paramsOf(t flow.Terms) string {
	spec, err := cc.Lookup(t.Algorithm)
	if err != nil {
		return ""
	}
	var items []string
	for _, p := range spec.Params {
		if v, ok := t.Params[p.Name]; ok && v != p.Default {
			items = append(items, p.Name+"="+p.FormatValue(v))
		}
	}
	return strings.Join(items, ",")
}

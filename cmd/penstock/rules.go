package main

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/doctor"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/config/check"
)

// rulesCommand has the commands that capture connections by nftables: apply, remove and print.
func rulesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "rules",
		Short: "Install, remove or show the rules that capture connections",
		Long: fmt.Sprintf(`Rules make the kernel hand the connections that this machine forwards to a
transparent listener of "penstock run". They are one nftables table (inet %s)
and, for mode tproxy, a policy rule and a local route for each address family,
of protocol %d. Nothing else is touched, and no nft or ip program is needed.

The rules stay when the proxy ends: with mode tproxy new connections then go
past it, with mode redirect they are refused. Connections that are open when
rules are applied are not captured.

A captured connection ends here and another begins, so neither passes the
machine's forward chain. Where that chain drops or rejects something, apply says
so, and leaves connections to networks that the machine itself is on alone, unless
it is given --connected. It looks when it is run: apply again after a change of the
firewall. --connected=no leaves them alone in any case.

UDP is not captured. With --udp, what the machine forwards of it towards the
interfaces waits in a netfilter queue until the window of its host has room, which
the listener's "udp" decides. Addresses and ports stay as they are. While no proxy
serves the queue, it passes.

apply, remove and status need CAP_NET_ADMIN.`, capture.Table, capture.RouteProtocol),
		Example: `  # What comes in from the home network for the web, over IPv4 and IPv6:
  penstock rules apply --interface lan0 --port 1081 --dport 80,443

  # But for what stays in other networks of this site; see it first:
  penstock rules print --interface lan0 --port 1081 --not-destination 192.168.0.0/16,fd00::/8

  # QUIC and other UDP of the same clients wait for room in the same windows:
  penstock rules apply --interface lan0 --port 1081 --udp all

  # For a listener of mode redirect:
  penstock rules apply --mode redirect --interface lan0 --port 1082

  # Whatever was applied, and however:
  penstock rules remove`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	cmd.AddCommand(
		rulesFor(&cobra.Command{
			Use:   "apply",
			Short: "Make the installed rules exactly these",
			Long: `Replaces what an earlier apply installed, whatever its settings; applying the
same rules again changes nothing, but follows changes of this machine's networks.
IPv6 is left out where it is switched off. It warns of chains of the firewall and of
kernel settings that keep captured connections from working, with the cure of each.
Needs CAP_NET_ADMIN.`,
		}, func(c *cobra.Command, r capture.Rules) error {
			if err := r.Apply(c.Context()); err != nil {
				return err
			}
			for _, note := range r.Advice() {
				fmt.Fprintln(c.ErrOrStderr(), "note: "+note) //nolint:errcheck // the rules are in place
			}
			for _, warning := range findObstacles(r) {
				fmt.Fprintln(c.ErrOrStderr(), "warning: "+warning) //nolint:errcheck // as above
			}
			return nil
		}),
		&cobra.Command{
			Use:        "remove",
			Short:      "Remove everything that apply has ever installed",
			SuggestFor: []string{"rm", "del", "delete", "flush"},
			Long: `Needs no settings: it finds what apply made by its names and numbers, also
after a crash. Without anything to remove it does nothing. Needs CAP_NET_ADMIN.`,
			Args: cli.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error { return capture.Remove(c.Context()) },
		},
		&cobra.Command{
			Use:   "status",
			Short: "Say whether rules are in force, and what they have captured",
			Long: `Prints the rules that are in force, the first packets of connections that they have
captured since they were applied, and who listens where they lead to. It exits with 1 where
there are none, where parts of them are gone, or where nothing listens.
Needs CAP_NET_ADMIN.`,
			Args: cli.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error { return printRuleStatus(c.OutOrStdout()) },
		},
		rulesFor(&cobra.Command{
			Use:   "print",
			Short: "Print these rules as a script for nft and ip",
			Long: `Installs nothing and needs no privilege. Without CAP_NET_ADMIN the forward chains
cannot be looked at, and the networks of this machine are left out, as they are now:
for another machine give --connected.`,
		}, func(c *cobra.Command, r capture.Rules) error { return r.Print(c.OutOrStdout()) }),
	)
	return cmd
}

// printRuleStatus prints the rules in force. The error says what keeps them from capturing.
func printRuleStatus(w io.Writer) error {
	all, err := capture.ReadInstalled()
	if err != nil {
		return err
	}
	lost, err := capture.LostParts()
	if err != nil {
		return err
	}
	var missing []string
	for _, part := range lost {
		missing = append(missing, part+" has gone: apply the rules again")
	}
	if len(all) == 0 && len(lost) == 0 {
		missing = append(missing, "no rules are in force, so that nothing is captured: penstock rules apply")
	}
	for _, r := range all {
		by := strings.Join(r.Interfaces, ", ")
		if r.Tunnel {
			by = "the tunnel " + by
		}
		owner := doctor.SocketOwner("tcp", net.JoinHostPort("", strconv.Itoa(int(r.Port))))
		if owner == "" {
			missing = append(missing, fmt.Sprintf("nothing is seen to listen at port %d", r.Port))
			owner = "nothing is seen there"
		}
		fmt.Fprintf(w, "in force: %s, from %s to port %d (%s)\n", r.Mode, by, r.Port, owner)
		for _, n := range r.Packets {
			fmt.Fprintf(w, "  %s: %d connections' first packets captured\n", n.Family, n.Packets)
		}
	}
	if len(missing) > 0 {
		return errors.New(strings.Join(missing, "; "))
	}
	return nil
}

// findObstacles returns what keeps applied rules from working, with the cure of each: chains of the firewall that drop
// captured connections, and settings of the kernel.
func findObstacles(r capture.Rules) (lines []string) {
	obstacles, err := r.Obstacles()
	if err != nil {
		lines = append(lines, fmt.Sprintf("whether the input and output chains let captured connections in is unknown: %v",
			err))
	}
	for _, o := range obstacles {
		lines = append(lines, o.String())
	}
	for _, c := range doctor.Settings() {
		if r.Mode == capture.Redirect && c.Name == doctor.SYNCookies {
			continue // address translation does not need the socket
		}
		if c.State != doctor.OK {
			lines = append(lines, fmt.Sprintf("%s is %s: %s", c.Name, c.Found, c.Fix))
		}
	}
	return lines
}

// rulesFor gives cmd the flags that describe rules, and calls do with the rules once they are checked. apply and print
// share them, so that what is printed is what would be applied.
func rulesFor(cmd *cobra.Command, do func(*cobra.Command, capture.Rules) error) *cobra.Command {
	var flags ruleFlags
	flags.registerFlags(cmd.Flags())
	cmd.Args = cli.NoArgs
	cli.CompleteFlag(cmd, "interface", interfaceNames)
	cli.CompleteFlag(cmd, "mode", oneOf(capture.TPROXY, capture.Redirect))
	cli.CompleteFlag(cmd, "connected", oneOf(capture.ConnectedAuto, capture.ConnectedCapture, capture.ConnectedLeave))
	cmd.RunE = func(c *cobra.Command, _ []string) error {
		if err := flags.parseLists(); err != nil {
			return cli.BadInput(err)
		}
		return do(c, flags.rules)
	}
	return cmd
}

// ruleFlags are the flags that describe rules. parseLists puts the texts into rules.
type ruleFlags struct {
	rules                         capture.Rules
	mode                          string
	ports                         []string
	sources, notSources           []string
	destinations, notDestinations []string
	udp                           []string
}

// registerFlags defines the flags.
func (flags *ruleFlags) registerFlags(f *pflag.FlagSet) {
	r := &flags.rules
	f.StringVar(&flags.mode, "mode", string(capture.TPROXY), "the listener's mode: tproxy or redirect")
	f.Uint16Var(&r.Port, "port", 0, "the listener's port")
	f.BoolVar(&r.IPv4, "ipv4", true, "capture IPv4")
	f.BoolVar(&r.IPv6, "ipv6", true, "capture IPv6")
	f.StringSliceVarP(&r.Interfaces, "interface", "i", nil,
		"where connections come in, such as lan0; any is every interface, the outside ones too (required)")
	f.StringVar((*string)(&r.Connected), "connected", string(capture.ConnectedAuto),
		"capture what goes to networks that this machine is on: auto (where no forward chain drops or rejects), "+
			"yes or no")
	f.Lookup("connected").NoOptDefVal = string(capture.ConnectedCapture)
	f.StringSliceVar(&flags.ports, "dport", nil, "destination ports, such as 80,443,8000-8099 (default all)")
	f.StringSliceVar(&flags.sources, "source", nil, "only from these prefixes")
	f.StringSliceVar(&flags.notSources, "not-source", nil, "not from these prefixes")
	f.StringSliceVar(&flags.destinations, "destination", nil, "only to these prefixes")
	f.StringSliceVar(&flags.notDestinations, "not-destination", nil, "not to these prefixes")
	f.StringSliceVar(&flags.udp, "udp", nil,
		"hold UDP towards the interfaces until its host's window has room: all, or ports of servers such as 443")
	f.Uint16Var(&r.Hold.Queue, "udp-queue", capture.DefaultHoldQueue,
		`number of the netfilter queue that holds UDP ("udp.queue" of the listener)`)
	f.BoolVar(&r.Hold.Uplink, "udp-up", false,
		"hold what clients send to the ports of --udp as well, where this machine stands in front of the uplink")
	f.Uint16Var(&r.Hold.UplinkQueue, "udp-up-queue", capture.DefaultUplinkQueue,
		`number of the netfilter queue for what clients send ("udp.up_queue" of the listener)`)
	f.Uint32Var(&r.Mark, "mark", capture.DefaultMark, "bits that mark captured packets, for tproxy")
	f.Uint32Var(&r.OwnMark, "own-mark", capture.DefaultOwnMark,
		`bits that mark the proxy's own connections ("mark" in its configuration)`)
	f.IntVar(&r.RouteTable, "route-table", capture.DefaultRouteTable,
		"routing table for captured packets, for tproxy; only ours")
}

// parseLists completes the rules by what flags have as text, and checks them.
func (flags *ruleFlags) parseLists() error {
	r := &flags.rules
	r.Mode = capture.Mode(flags.mode)
	err := checkWord("--mode", r.Mode, capture.TPROXY, capture.Redirect)
	if err != nil {
		return err
	}
	err = checkWord("--connected", r.Connected, capture.ConnectedAuto, capture.ConnectedCapture, capture.ConnectedLeave)
	if err != nil {
		return err
	}
	if r.Ports, err = parsePorts(flags.ports); err != nil {
		return fmt.Errorf("--dport: %w", err)
	}
	if r.Hold.All = slices.Equal(flags.udp, []string{"all"}); !r.Hold.All {
		if r.Hold.Ports, err = parsePorts(flags.udp); err != nil {
			return fmt.Errorf("--udp: write all, or ports such as 443: %w", err)
		}
	}
	for _, list := range []struct {
		flag  string
		texts []string
		out   *[]netip.Prefix
	}{
		{"source", flags.sources, &r.Sources.Include},
		{"not-source", flags.notSources, &r.Sources.Exclude},
		{"destination", flags.destinations, &r.Destinations.Include},
		{"not-destination", flags.notDestinations, &r.Destinations.Exclude},
	} {
		if *list.out, err = parsePrefixes(list.texts); err != nil {
			return fmt.Errorf("--%s: %w", list.flag, err)
		}
	}
	if !r.IPv4 && !r.IPv6 {
		return errors.New("--ipv4 and --ipv6: both are off, so there is nothing to capture")
	}
	if r.Port == 0 {
		return fmt.Errorf("--port: missing; name the port of the listener of mode %s in the configuration, such as "+
			"--port 7000", flags.mode)
	}
	return r.Validate()
}

// checkWord returns an error unless given is one of words.
func checkWord[T ~string](flag string, given T, words ...T) error {
	if slices.Contains(words, given) {
		return nil
	}
	all, hint := check.Strings(words), ""
	if near := cc.Nearest(string(given), all); near != "" {
		hint = "; did you mean " + near + "?"
	}
	return fmt.Errorf("%s: %q is not one of %s%s", flag, given, strings.Join(all, ", "), hint)
}

// parsePorts reads ports and ranges of them.
func parsePorts(texts []string) (ports []capture.PortRange, err error) {
	for _, text := range texts {
		var p capture.PortRange
		if err := p.UnmarshalText([]byte(text)); err != nil {
			return nil, err
		}
		ports = append(ports, p)
	}
	return ports, nil
}

// parsePrefixes reads prefixes; an address alone is a prefix of its full length. IPv4 within IPv6 is refused, because
// rules would match neither family with it.
func parsePrefixes(texts []string) ([]netip.Prefix, error) {
	var prefixes []netip.Prefix
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if addr, addrErr := netip.ParseAddr(text); addrErr == nil && addr.Zone() == "" {
			p, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		if err != nil || p.Addr().Is4In6() {
			return nil, fmt.Errorf("%q is no prefix such as 192.0.2.0/24 or 2001:db8::/32", text)
		}
		prefixes = append(prefixes, p)
	}
	return prefixes, nil
}

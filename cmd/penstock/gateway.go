package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

// defaultConfig is where the packages and the unit have the configuration.
const defaultConfig = "/etc/penstock/penstock.yaml"

func gatewayCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "gateway",
		Short: "Manage who may use the WireGuard gateway",
		Args:  cli.NoArgs,
		RunE:  func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	cmd.AddCommand(initCommand(), peerCommand(), &cobra.Command{
		Use:   "key",
		Short: "Print a new private key, for private_key_file",
		Example: `  (umask 077; penstock gateway key > /etc/penstock/vpn.key)
  chgrp penstock /etc/penstock/vpn.key && chmod 640 /etc/penstock/vpn.key`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			key, err := access.GenerateKey()
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.OutOrStdout(), key)
			return err
		},
	})
	return cmd
}

func peerCommand() *cobra.Command {
	g := &gateway{}
	cmd := &cobra.Command{
		Use:   "peer",
		Short: "Add, remove and list the clients of a WireGuard listener",
		Long: `Peers are those of a listener of mode wireguard. They are kept in its peers_file
or config_file, which these commands edit; a proxy that runs takes them over at
once, and other peers' sessions go on.`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	flags := cmd.PersistentFlags()
	flags.StringVarP(&g.config, "config", "c", defaultConfig, "configuration `FILE`")
	flags.StringVar(&g.listener, "listener", "", "`NAME` of the listener, where there is more than one of mode "+
		"wireguard")
	flags.StringVar(&g.telemetry, "telemetry", "",
		"`host:port` where the running proxy answers, if that is not the file's telemetry.address")

	var n newPeer
	add := &cobra.Command{
		Use:   "add NAME",
		Short: "Let a new client in, and print its configuration",
		Long: `Makes a key pair and an address for the client, writes the public half to the
listener's file, has a running proxy reread it, and prints what the client's
WireGuard app wants: a configuration and, on a terminal, the same as a QR code to
scan. The private key is stored nowhere: whoever loses it gets a new one.`,
		Example: `  penstock gateway peer add phone --endpoint vpn.example.com --dns 9.9.9.9
  penstock gateway peer add laptop --endpoint 203.0.113.5:51820 --allowed-ips 10.0.0.0/8 > laptop.conf`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			n.name = args[0]
			return g.addPeer(c.Context(), n, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := add.Flags()
	f.StringVar(&n.endpoint, "endpoint", "",
		"`HOST[:PORT]` where clients reach this machine (default its own address and the listener's port)")
	f.StringSliceVar(&n.allowed, "allowed-ips", []string{"0.0.0.0/0", "::/0"}, "what the client sends into the tunnel")
	f.StringSliceVar(&n.addresses, "address", nil,
		"the client's own addresses in the tunnel (default the next that is free of each prefix in wireguard.pool)")
	f.BoolVar(&n.exit, "exit", false, "it is the way out for others: --address may be 0.0.0.0/0")
	f.StringSliceVar(&n.dns, "dns", nil, "name servers that the client is to use")
	f.BoolVar(&n.preshared, "preshared-key", false, "give both ends a shared key, too")
	f.BoolVar(&n.noQR, "no-qr", false, "print no QR code")
	cmd.AddCommand(
		add,
		&cobra.Command{
			Use:   "remove NAME",
			Short: "Let a client in no longer",
			Args:  cobra.ExactArgs(1),
			RunE: func(c *cobra.Command, args []string) error {
				return g.removePeer(c.Context(), args[0], c.ErrOrStderr())
			},
		},
		&cobra.Command{
			Use:   "list",
			Short: "List the clients, with what a running proxy knows of them",
			Args:  cli.NoArgs,
			RunE: func(c *cobra.Command, _ []string) error {
				return g.listPeers(c.Context(), c.OutOrStdout(), c.ErrOrStderr())
			},
		},
	)
	return cmd
}

// gateway is one listener of mode wireguard with its file, as a command works on it.
type gateway struct {
	config, listener, telemetry string // the flags

	file    string // where the peers are
	release func() // lets the next command work on them
	cfg     config.Config
	config.Listener
}

// openFiles finds the listener and its file, which it makes if need be and locks.
// Call release afterwards.
func (g *gateway) openFiles() (err error) {
	if g.release, err = lockFile(g.config); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w; penstock gateway init makes one, and --config names another", err)
		}
		return cli.BadInput(fmt.Errorf("--config: %w", err))
	}
	defer func() {
		if err != nil {
			g.release()
		}
	}()
	written, err := config.Written(g.config)
	if err != nil {
		return err
	}
	i, err := g.findListener(written.Listeners)
	if err != nil {
		return cli.BadInput(err)
	}
	w := written.Listeners[i].WireGuard
	switch {
	case w.ConfigFile != "":
		g.file = pathBeside(g.config, w.ConfigFile)
	case w.PeersFile != "":
		g.file = pathBeside(g.config, w.PeersFile)
		if err := makeLike(g.config, g.file); err != nil {
			return err
		}
	default:
		return cli.BadInput(fmt.Errorf("listeners[%d].wireguard.peers_file: missing; name a file for peers there, "+
			"such as "+
			"peers.conf (it need not exist yet)", i))
	}
	if g.cfg, err = config.Load(g.config); err != nil {
		return err
	}
	g.Listener = g.cfg.Listeners[i]
	return nil
}

// findListener returns which listener is meant.
func (g *gateway) findListener(listeners []config.Listener) (int, error) {
	var names []string
	at := -1
	for i, l := range listeners {
		if l.Mode != access.WireGuard {
			continue
		}
		names = append(names, l.Name)
		if g.listener == "" || l.Name == g.listener {
			at = i
		}
	}
	switch {
	case len(names) == 0:
		return 0, fmt.Errorf("%s has no listener of mode wireguard", g.config)
	case g.listener == "" && len(names) > 1:
		return 0, fmt.Errorf("--listener: say which of %s", strings.Join(names, ", "))
	case at < 0:
		return 0, fmt.Errorf("--listener: %q is not one of %s", g.listener, strings.Join(names, ", "))
	}
	return at, nil
}

func (g *gateway) removePeer(ctx context.Context, name string, notes io.Writer) error {
	if err := g.openFiles(); err != nil {
		return err
	}
	defer g.release()
	text, err := config.ReadFile(g.file)
	if err != nil {
		return fmt.Errorf("%s: %w", g.file, err)
	}
	rest, found, err := access.RemoveSection(string(text), name)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", g.file, err)
	case !found:
		for _, p := range g.WireGuard.Peers {
			if p.Name == name {
				return cli.BadInput(fmt.Errorf("peer %q stands in %s itself; remove it there", name, g.config))
			}
		}
		return cli.BadInput(fmt.Errorf("there is no peer %q; penstock gateway peer list shows who there is", name))
	}
	if err := replaceFile(g.file, []byte(rest), nil); err != nil {
		return err
	}
	fmt.Fprintf(notes, "%s is no longer in %s\n", name, g.file)
	return g.reloadProxy(ctx, notes)
}

func (g *gateway) listPeers(ctx context.Context, w, notes io.Writer) error {
	if err := g.openFiles(); err != nil {
		return err
	}
	g.release() // nothing is written
	known := map[string]telemetry.Peer{}
	running, err := g.askPeers(ctx)
	if err != nil {
		fmt.Fprintf(notes, "only what the files say: %s\n", config.Printable(err.Error()))
	}
	for _, p := range running {
		if p.Listener == g.Name {
			known[p.Name] = p
		}
	}
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(table, "NAME\tADDRESSES\tHANDSHAKE\tRECEIVED\tSENT\tQUEUE\tFROM")
	for _, p := range g.WireGuard.Access() {
		handshake, received, sent, queue, from := "-", "-", "-", "-", "-"
		if k, ok := known[p.Name]; ok {
			handshake = "never"
			if k.Handshake > 0 {
				handshake = formatAgo(time.Since(time.UnixMilli(int64(k.Handshake * 1e3))))
			}
			received, sent = roundBytes(k.Received), roundBytes(k.Sent)
			if k.QueueingDelay > 0 {
				queue = time.Duration(k.QueueingDelay * float64(time.Second)).Round(time.Millisecond).String()
			}
			if k.Endpoint != "" {
				from = config.Printable(k.Endpoint)
			}
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			p.Name, access.JoinPrefixes(p.AllowedIPs), handshake, received, sent, queue, from)
	}
	return table.Flush()
}

// roundBytes is a count of bytes for people, with two or three digits.
func roundBytes(n uint64) string {
	v, unit := float64(n), "B"
	for _, next := range []string{"kB", "MB", "GB", "TB", "PB"} {
		if v < 999.5 {
			break
		}
		v, unit = v/1000, next
	}
	digits := 0
	if unit != "B" && v < 9.95 {
		digits = 1
	}
	return strconv.FormatFloat(v, 'f', digits, 64) + unit
}

// formatAgo is a time in the past for people.
func formatAgo(d time.Duration) string { return max(0, d).Round(time.Second).String() + " ago" }

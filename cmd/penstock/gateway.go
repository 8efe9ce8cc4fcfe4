package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"rsc.io/qr"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

// defaultConfig is where the packages and the unit have the configuration.
const defaultConfig = "/etc/penstock/penstock.yaml"

// gatewayCommand has the commands of a WireGuard gateway: init, key and peer.
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

// peerCommand has the commands that edit the list of peers: add, remove and list.
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
			Use:        "remove NAME",
			Short:      "Let a client in no longer",
			SuggestFor: []string{"rm", "del", "delete"},
			Args:       cobra.ExactArgs(1),
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

// gateway is one listener of mode wireguard and its file of peers, which commands edit.
type gateway struct {
	config    string // the flag: the proxy's configuration file
	listener  string // the flag: a name; empty: there is only one
	telemetry string // the flag: host:port; empty: as in the configuration

	file            string        // where the peers are
	release         func()        // releases the lock of openFiles
	cfg             config.Config // as a proxy would read it
	access.Listener               // the listener in cfg
}

// openFiles finds the listener and its file of peers, and makes the file if it is not there. It locks the
// configuration first, so that two commands do not write the same file of peers. Call release afterwards. It looks for
// the listener in the configuration as written, because config.Load refuses a file of peers that is not there.
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
	written, err := config.LoadAlone(g.config)
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
		g.file = resolvePath(g.config, w.ConfigFile)
	case w.PeersFile != "":
		g.file = resolvePath(g.config, w.PeersFile)
		if err := createLike(g.config, g.file); err != nil {
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

// findListener returns the index of the listener that the flag names, or of the only one of mode wireguard.
func (g *gateway) findListener(listeners []access.Listener) (int, error) {
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

// removePeer takes a peer out of the listener's file and has a running proxy reread it.
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

// listPeers prints the peers of the files, and what a running proxy knows of each. If no proxy answers, the columns
// have dashes and notes says why.
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
	for _, p := range g.WireGuard.Peers {
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

// roundBytes writes a count of bytes for people, with two or three digits and a decimal prefix.
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

// formatAgo writes a time in the past for people. A clock that was set back gives 0s.
func formatAgo(d time.Duration) string { return max(0, d).Round(time.Second).String() + " ago" }

// newGatewayConfig is the configuration that gateway init writes. The files that it names are made beside it.
const newGatewayConfig = `# A WireGuard gateway. UDP port 51820 must be reachable from outside.
listeners:
  - name: vpn
    mode: wireguard
    address: ":51820"
    wireguard:
      private_key_file: vpn.key
      peers_file: peers.conf                  # written by penstock gateway peer
      pool: [10.9.0.0/24, "fd00:9::/64"]      # addresses for peers
`

// initCommand writes the files of a new gateway.
func initCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "init FILE",
		Short: "Write the configuration of a new gateway, with its key and an empty list of peers",
		Long: `Init writes a configuration with a listener of mode wireguard, and beside it
vpn.key, a new private key, and peers.conf, for "penstock gateway peer add". It
replaces nothing that is there.`,
		Example: `  penstock gateway init penstock.yaml
  penstock gateway peer add phone --config penstock.yaml --endpoint vpn.example.com --dns 9.9.9.9`,
		Args: cobra.ExactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return initGateway(args[0], c.ErrOrStderr())
		},
	}
}

// initGateway makes the configuration, the key and the list of peers. It replaces no file, and removes what it has
// made if one of the three cannot be made.
func initGateway(config string, notes io.Writer) (err error) {
	key, err := access.GenerateKey()
	if err != nil {
		return err
	}
	dir := filepath.Dir(config)
	var made []string
	defer func() {
		if err != nil {
			for _, path := range made {
				err = errors.Join(err, os.Remove(path))
			}
		}
	}()
	for _, f := range []struct {
		path, content string
		mode          fs.FileMode
	}{
		{config, newGatewayConfig, 0o644},
		{filepath.Join(dir, "vpn.key"), key.String() + "\n", 0o600},
		{filepath.Join(dir, "peers.conf"), "", 0o600},
	} {
		out, err := os.OpenFile(f.path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, f.mode)
		if errors.Is(err, fs.ErrExist) {
			return cli.BadInput(fmt.Errorf("%s is there already; name a file in another directory, or remove it",
				f.path))
		}
		if err != nil {
			return err
		}
		made = append(made, f.path)
		_, err = io.WriteString(out, f.content)
		if err := errors.Join(err, out.Close()); err != nil {
			return err
		}
		fmt.Fprintf(notes, "made: %s\n", f.path)
	}
	fmt.Fprintf(notes, "next:\n  penstock gateway peer add NAME --config %s --endpoint HOST\n"+
		"  penstock run --config %[1]s\n", shellWord(config))
	return nil
}

// shellWord returns a file's name as a shell takes it.
func shellWord(name string) string {
	if !strings.ContainsFunc(name, func(r rune) bool {
		return !strings.ContainsRune("/._-+,:@%", r) && !unicode.IsLetter(r) && !unicode.IsDigit(r)
	}) {
		return name
	}
	return "'" + strings.ReplaceAll(name, "'", `'\''`) + "'"
}

// newPeer has the flags of peer add.
type newPeer struct {
	name      string
	endpoint  string   // HOST or HOST:PORT; empty: this machine's own address
	allowed   []string // prefixes that the client sends into the tunnel
	addresses []string // the client's own; empty: the next ones of the pool
	dns       []string // name servers for the client
	preshared bool     // both ends get a shared key
	exit      bool     // the client is the way out for others
	noQR      bool
}

// clientKeepalive is in seconds. It keeps the mappings of address translators to a client open, which end after 30 s
// or more without a packet.
const clientKeepalive = 25

// addPeer makes a key pair and an address for a client, and prints the client's configuration to w. The peer is in the
// listener's file only if all of that was printed, because the private key is stored nowhere.
func (g *gateway) addPeer(ctx context.Context, n newPeer, w, notes io.Writer) error {
	if err := checkPeerName(n.name); err != nil {
		return cli.BadInput(err)
	}
	if err := g.openFiles(); err != nil {
		return err
	}
	defer g.release()
	p := access.Peer{Name: n.name, Exit: n.exit}
	var err error
	if p.AllowedIPs, err = g.chooseAddresses(n.addresses); err != nil {
		return cli.BadInput(err)
	}
	private, err := access.GenerateKey()
	if err != nil {
		return err
	}
	if p.PublicKey, err = private.Public(); err != nil {
		return err
	}
	if n.preshared {
		if p.Preshared, err = access.GenerateKey(); err != nil {
			return err
		}
	}
	if err := access.CheckPeers(append(slices.Clip(g.WireGuard.Peers), p)); err != nil {
		return cli.BadInput(err)
	}
	if err := p.CheckExit(g.WireGuard.Pool, "--exit"); err != nil {
		return cli.BadInput(err)
	}
	client, err := g.clientConfig(n, p, private, notes)
	if err != nil {
		return cli.BadInput(err)
	}
	text, err := config.ReadFile(g.file)
	if err != nil {
		return fmt.Errorf("%s: %w", g.file, err)
	}
	// The private key is nowhere else, so a peer must not be added unless its configuration was printed. Without SIGPIPE
	// the write fails if the reader has gone.
	signal.Ignore(syscall.SIGPIPE)
	printConfig := func() error {
		_, err := io.WriteString(w, client)
		if terminal, ok := w.(*os.File); err == nil && !n.noQR && ok && isTerminal(terminal) {
			err = writeQR(w, client)
		}
		return err
	}
	if err := replaceFile(g.file, []byte(access.AddSection(string(text), p)), printConfig); err != nil {
		return err
	}
	fmt.Fprintf(notes, "%s is in %s now\n", n.name, g.file)
	return g.reloadProxy(ctx, notes)
}

// checkPeerName refuses a name that cannot be read back from the comment of a WireGuard section, where it is stored.
func checkPeerName(name string) error {
	odd := func(r rune) bool { return !strconv.IsPrint(r) || r == '#' || r == '=' }
	if name == "" || len(name) > 64 || strings.ContainsFunc(name, odd) ||
		strings.Join(strings.Fields(name), " ") != name {
		return fmt.Errorf("%q is no name for a peer: at most 64 printable bytes without # and =, such as phone", name)
	}
	return nil
}

// chooseAddresses returns the client's addresses in the tunnel: as given, or the next free one of each prefix of the
// pool.
func (g *gateway) chooseAddresses(given []string) ([]netip.Prefix, error) {
	if len(given) > 0 {
		list, err := parsePrefixes(given)
		if err != nil {
			return nil, fmt.Errorf("--address: %w", err)
		}
		for i, p := range list {
			if p != p.Masked() { // an address with the length of its network, as wg-quick writes it
				list[i] = netip.PrefixFrom(p.Addr(), p.Addr().BitLen())
			}
		}
		for _, pool := range g.WireGuard.Pool {
			own := access.GatewayIn(pool)
			if slices.Contains(list, netip.PrefixFrom(own, own.BitLen())) {
				return nil, fmt.Errorf("--address: %v is the gateway's own, as the first of %v; give another one", own, pool)
			}
		}
		return list, nil
	}
	if len(g.WireGuard.Pool) == 0 {
		return nil, fmt.Errorf("listener %s has no wireguard.pool to take an address from; add one such as "+
			"[10.9.0.0/24], "+
			"or give --address", g.Name)
	}
	var taken, out []netip.Prefix
	for _, p := range g.WireGuard.Peers {
		taken = append(taken, p.AllowedIPs...)
	}
	for _, pool := range g.WireGuard.Pool {
		free, ok := nextFree(pool, taken)
		if !ok {
			return nil, fmt.Errorf("every address of %v is taken; add a prefix to wireguard.pool, or remove a peer",
				pool)
		}
		out = append(out, netip.PrefixFrom(free, free.BitLen()))
	}
	return out, nil
}

// nextFree returns the first address of pool that no peer has. It leaves out the first address, the second one, which
// is the gateway's, and the last one of IPv4. A prefix that contains the whole pool takes no address, because the peer
// that has it is an exit.
func nextFree(pool netip.Prefix, taken []netip.Prefix) (netip.Addr, bool) {
	taken = slices.DeleteFunc(slices.Clone(taken), func(t netip.Prefix) bool {
		return !t.Overlaps(pool) || t.Bits() <= pool.Bits()
	})
	for addr := access.GatewayIn(pool).Next(); pool.Contains(addr); addr = addr.Next() {
		if addr.Is4() && !pool.Contains(addr.Next()) {
			break
		}
		i := slices.IndexFunc(taken, func(t netip.Prefix) bool { return t.Contains(addr) })
		if i < 0 {
			return addr, true
		}
		addr = access.LastOf(taken[i]) // skips the prefix, which may be too large to walk through
	}
	return netip.Addr{}, false
}

// clientConfig returns the configuration for the client's app, in the format of wg-quick(8). The client's private key
// is in it and nowhere else.
func (g *gateway) clientConfig(n newPeer, p access.Peer, private access.Key, notes io.Writer) (string, error) {
	server, err := g.WireGuard.PrivateKey.Public()
	if err != nil {
		return "", err
	}
	endpoint, err := g.endpointFor(n.endpoint, notes)
	if err != nil {
		return "", err
	}
	allowed, err := parsePrefixes(n.allowed)
	if err != nil {
		return "", fmt.Errorf("--allowed-ips: %w", err)
	}
	for _, d := range n.dns {
		if _, err := netip.ParseAddr(d); err != nil {
			return "", fmt.Errorf("--dns: %q is no address", d)
		}
	}
	if len(n.dns) == 0 && g.Tunnel.DNS.IsValid() && len(g.WireGuard.Pool) > 0 {
		n.dns = []string{access.GatewayIn(g.WireGuard.Pool[0]).String()}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "[Interface]\nPrivateKey = %v\nAddress = %s\n", private, access.JoinPrefixes(p.AllowedIPs))
	if len(n.dns) > 0 {
		fmt.Fprintf(&b, "DNS = %s\n", strings.Join(n.dns, ", "))
	} else if slices.ContainsFunc(allowed, func(a netip.Prefix) bool { return a.Bits() == 0 }) {
		fmt.Fprintln(notes, "without --dns the client asks the name servers of whatever network it is in, through the "+
			"tunnel, where they seldom answer")
	}
	fmt.Fprintf(&b, "MTU = %d\n\n[Peer]\nPublicKey = %v\n", g.MTU(), server)
	if p.Preshared != (access.Key{}) {
		fmt.Fprintf(&b, "PresharedKey = %v\n", p.Preshared)
	}
	fmt.Fprintf(&b, "Endpoint = %s\nAllowedIPs = %s\nPersistentKeepalive = %d\n", endpoint,
		access.JoinPrefixes(allowed), clientKeepalive)
	return b.String(), nil
}

// endpointFor returns where the client reaches the gateway: as given, else at this machine's own address, which it
// mentions in notes. The port is that of the listener unless it is given.
func (g *gateway) endpointFor(given string, notes io.Writer) (string, error) {
	_, port, _ := net.SplitHostPort(g.Address) // it has been checked
	host := given
	if h, p, err := net.SplitHostPort(given); err == nil {
		host, port = h, p
	} else if addr, err := netip.ParseAddr(strings.Trim(given, "[]")); err == nil {
		host = addr.String()
	}
	n, err := strconv.ParseUint(port, 10, 16)
	switch {
	case err != nil, strings.ContainsAny(host, " /\t\n[]#"), strings.Contains(host, ":") && !isIP(host),
		given != "" && host == "":
		return "", fmt.Errorf("--endpoint: %q is not HOST or HOST:PORT", given)
	case n == 0:
		return "", fmt.Errorf("--endpoint: say the port, since listener %s has a new one each time", g.Name)
	case host == "":
		own, err := ownAddress()
		if err != nil {
			return "", fmt.Errorf("--endpoint: missing, and this machine's own address is unknown: %w", err)
		}
		fmt.Fprintf(notes, "the endpoint is this machine's own address, %s; where clients reach it by another, say "+
			"so with "+
			"--endpoint\n", own)
		host = own
	}
	return net.JoinHostPort(host, port), nil
}

// isIP reports whether host is an address and not a name.
func isIP(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil
}

// ownAddress returns the address from which this machine reaches the internet. A connected UDP socket has it, and
// connect sends no packet (192.0.2.1 is for documentation, RFC 5737).
func ownAddress() (string, error) {
	conn, err := net.Dial("udp", "192.0.2.1:9")
	if err != nil {
		return "", err
	}
	defer conn.Close() //nolint:errcheck // nothing was sent
	return conn.LocalAddr().(*net.UDPAddr).IP.String(), nil
}

// lockFile locks a file against other commands until release is called, or the process ends.
func lockFile(path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // for a pipe, does not wait for a writer
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// resolvePath returns the path of a file that the configuration names, relative to the configuration's directory.
func resolvePath(config, name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(filepath.Dir(config), name)
}

// createLike makes an empty file unless there is one. It gets the owner, group and mode of model, but others may
// neither read nor write it, and its group may not write it.
func createLike(model, path string) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	info, err := os.Stat(model)
	if err != nil {
		return err
	}
	return writeBeside(path, nil, info, info.Mode().Perm()&^0o027, nil)
}

// replaceFile replaces a file by one with other content, so that a reader sees the old or the new. Owner, group and
// mode stay. It calls beforeRename once the new file is complete. If that returns an error, the old file stays. nil:
// there is nothing to call.
func replaceFile(path string, content []byte, beforeRename func() error) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return writeBeside(path, content, info, info.Mode().Perm(), beforeRename)
}

// writeBeside writes a file beside path and renames it to path, unless beforeRename returns an error.
func writeBeside(
	path string, content []byte, owner fs.FileInfo, mode fs.FileMode, beforeRename func() error,
) (err error) {
	f, err := config.CreateTemporary(path)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if s, ok := owner.Sys().(*syscall.Stat_t); ok {
		if err := f.Chown(int(s.Uid), int(s.Gid)); err != nil {
			return fmt.Errorf("%s keeps its owner, which takes root: %w", path, err)
		}
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if beforeRename != nil {
		if err := beforeRename(); err != nil {
			return err
		}
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return f.Close()
}

// requestPage asks the running proxy for a page and returns its answer.
func (g *gateway) requestPage(ctx context.Context, method, page string) (status int, body []byte, err error) {
	return askProxy(ctx, cmp.Or(g.telemetry, g.cfg.Telemetry.Address), method, page)
}

// reloadProxy lets a running proxy read the file again. It is an error if the proxy refuses it. It is none if no proxy
// runs, because the next start reads the file.
func (g *gateway) reloadProxy(ctx context.Context, notes io.Writer) error {
	status, body, err := g.requestPage(ctx, http.MethodPost, "/-/reload")
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, errTelemetryOff):
		fmt.Fprintf(notes, "not reloaded: %v\n", err)
		if cfg, err := config.Load(g.config); err == nil { // with the changed file
			printWarnings(notes, cfg)
		}
		return nil
	case err != nil:
		return fmt.Errorf("the proxy was not reloaded; systemctl reload penstock does it: %w", err)
	case status != http.StatusOK:
		return fmt.Errorf("the proxy was not reloaded: %s", strings.TrimSpace(string(body)))
	}
	fmt.Fprintln(notes, "the running proxy has taken it over")
	_, warnings := splitAnswer(string(body))
	for _, warning := range warnings {
		fmt.Fprintln(notes, config.Printable(warning))
	}
	return nil
}

// askPeers returns what the running proxy knows of peers, of all listeners.
func (g *gateway) askPeers(ctx context.Context) ([]telemetry.Peer, error) {
	status, body, err := g.requestPage(ctx, http.MethodGet, "/v1/peers?limit=0")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("it answers %d: %s", status, strings.TrimSpace(string(body)))
	}
	if err != nil {
		return nil, err
	}
	var peers []telemetry.Peer
	if err := json.Unmarshal(body, &peers); err != nil {
		return nil, fmt.Errorf("what answers there is no proxy of this kind: %w", err)
	}
	return peers, nil
}

// quietZone is how many modules around a QR code stay light (ISO/IEC 18004).
const quietZone = 4

// writeQR draws text as a QR code (level L, which has the most room for text), two modules to a character, dark on
// light whatever the terminal's own colours are.
func writeQR(w io.Writer, text string) error {
	code, err := qr.Encode(text, qr.L)
	if err != nil {
		return fmt.Errorf("this configuration is too long for a QR code; --no-qr does without: %w", err)
	}
	var b strings.Builder
	for y := -quietZone; y < code.Size+quietZone; y += 2 {
		b.WriteString("\x1b[30;107m")
		for x := -quietZone; x < code.Size+quietZone; x++ {
			// Black is false outside of the code.
			switch upper, lower := code.Black(x, y), code.Black(x, y+1); {
			case upper && lower:
				b.WriteRune('█')
			case upper:
				b.WriteRune('▀')
			case lower:
				b.WriteRune('▄')
			default:
				b.WriteByte(' ')
			}
		}
		b.WriteString("\x1b[0m\n")
	}
	_, err = io.WriteString(w, b.String())
	return err
}

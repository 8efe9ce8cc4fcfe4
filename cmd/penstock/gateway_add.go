package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// newPeer is a client to be, as the flags have it.
type newPeer struct {
	name                    string
	endpoint                string
	allowed, addresses, dns []string
	preshared, exit, noQR   bool
}

// clientKeepalive keeps the way to a client open in translators of addresses.
const clientKeepalive = 25

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
	if err := access.CheckPeers(append(g.WireGuard.Access(), p)); err != nil {
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
	// The key is nowhere else: who cannot be given it is not let in. A reader that has gone is
	// an error like any other.
	signal.Ignore(syscall.SIGPIPE)
	show := func() error {
		_, err := io.WriteString(w, client)
		if terminal, ok := w.(*os.File); err == nil && !n.noQR && ok && isTerminal(terminal) {
			err = writeQR(w, client)
		}
		return err
	}
	if err := replaceFile(g.file, []byte(access.AddSection(string(text), p)), show); err != nil {
		return err
	}
	fmt.Fprintf(notes, "%s is in %s now\n", n.name, g.file)
	return g.reloadProxy(ctx, notes)
}

// checkPeerName wants what is as good a name in a comment as in a list.
func checkPeerName(name string) error {
	odd := func(r rune) bool { return !strconv.IsPrint(r) || r == '#' || r == '=' }
	if name == "" || len(name) > 64 || strings.ContainsFunc(name, odd) ||
		strings.Join(strings.Fields(name), " ") != name {
		return fmt.Errorf("%q is no name for a peer: at most 64 printable bytes without # and =, such as phone", name)
	}
	return nil
}

// chooseAddresses are the client's in the tunnel: as given, or the next that is
// free of each prefix of the pool.
func (g *gateway) chooseAddresses(given []string) ([]netip.Prefix, error) {
	if len(given) > 0 {
		list, err := parsePrefixes(given)
		if err != nil {
			return nil, fmt.Errorf("--address: %w", err)
		}
		for i, p := range list {
			if p != p.Masked() { // as wg-quick writes an address: the network is not the peer's
				list[i] = netip.PrefixFrom(p.Addr(), p.Addr().BitLen())
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
	for _, p := range g.WireGuard.Access() {
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

// nextFree returns the first address of pool that nobody has. The pool's own,
// the one after it, which is the gateway's, and the last of IPv4 are left out.
// A prefix that holds the whole pool is somebody's way elsewhere and takes none.
func nextFree(pool netip.Prefix, taken []netip.Prefix) (netip.Addr, bool) {
	taken = slices.DeleteFunc(slices.Clone(taken), func(t netip.Prefix) bool {
		return !t.Overlaps(pool) || t.Bits() <= pool.Bits()
	})
	for addr := pool.Addr().Next().Next(); pool.Contains(addr); addr = addr.Next() {
		if addr.Is4() && !pool.Contains(addr.Next()) {
			break
		}
		i := slices.IndexFunc(taken, func(t netip.Prefix) bool { return t.Contains(addr) })
		if i < 0 {
			return addr, true
		}
		addr = access.LastOf(taken[i]) // a prefix may have more than can be counted
	}
	return netip.Addr{}, false
}

// clientConfig is what the client's app wants.
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
		n.dns = []string{g.WireGuard.Pool[0].Masked().Addr().Next().String()}
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

// endpointFor is where the client reaches us.
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

func isIP(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil
}

// ownAddress is the address from which this machine reaches the rest of the
// world. Nothing is sent to find out.
func ownAddress() (string, error) {
	conn, err := net.Dial("udp", "192.0.2.1:9")
	if err != nil {
		return "", err
	}
	defer conn.Close() //nolint:errcheck // nothing was sent
	return conn.LocalAddr().(*net.UDPAddr).IP.String(), nil
}

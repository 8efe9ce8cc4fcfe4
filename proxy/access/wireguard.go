package access

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// WireGuardSettings are a WireGuard endpoint.
type WireGuardSettings struct {
	// Our private key, as wg genkey prints it.
	PrivateKey Key `yaml:"private_key" secret:"true"`
	// A file that holds the private key in its first line, closed to others; relative to the configuration file.
	PrivateKeyFile string `yaml:"private_key_file"`
	// A file as wg-quick has it, instead of private_key, peers_file and, where they are not set, address and
	// tunnel.mtu.
	ConfigFile string `yaml:"config_file"`
	// [Peer] sections as wg-quick has them, a comment # Name = phone in each; relative to the configuration file,
	// reread with it, and written by penstock gateway peer.
	PeersFile string `yaml:"peers_file" reload:"yes"`
	// Who may use the tunnel, besides those in the file.
	Peers []Peer `yaml:"peers" reload:"yes"`
	// Where penstock gateway peer add takes addresses from, such as 10.9.0.0/24 and fd00:9::/64; the first of each is
	// kept for the gateway.
	Pool []netip.Prefix `yaml:"pool" reload:"yes"`
	// Who ends the tunnel. netstack, the default: this process, without privileges. kernel: the kernel's WireGuard,
	// with an interface, routes and packet filter rules that go again at the end; needs CAP_NET_ADMIN, and forwards
	// UDP and ICMP past windows; of the rules those that refuse hold for them. auto: kernel where that can be had,
	// else netstack.
	Datapath Datapath `yaml:"datapath"`
	// Networks with hosts that reach peers by UDP and ping, and by TCP that nothing captures; the peers see the
	// gateway's address inside. Datapath kernel only.
	ReachableFrom []netip.Prefix `yaml:"reachable_from" reload:"yes"`
}

// Datapath says who ends the tunnels of mode wireguard; empty: netstack.
type Datapath string

// The datapaths of mode wireguard.
const (
	DatapathAuto     Datapath = "auto"
	DatapathKernel   Datapath = "kernel"
	DatapathNetstack Datapath = "netstack"
)

// DatapathOrDefault returns the datapath, or the default one where none is set.
func (w *WireGuardSettings) DatapathOrDefault() Datapath {
	if w.Datapath == "" {
		return DatapathNetstack
	}
	return w.Datapath
}

// isZero reports whether no key was set.
func (w *WireGuardSettings) isZero() bool {
	return w.PrivateKey == Key{} && w.PrivateKeyFile == "" && w.ConfigFile == "" && w.PeersFile == "" &&
		len(w.Peers) == 0 && len(w.Pool) == 0 && w.Datapath == "" && len(w.ReachableFrom) == 0
}

// checkWireGuard checks the keys of mode wireguard.
func (l *Listener) checkWireGuard() error {
	var errs []error
	if l.WireGuard.ConfigFile == "" || l.Address != "" {
		err := check.Address("address", l.Address)
		if host, _, _ := net.SplitHostPort(l.Address); err == nil && host != "" && host != "::" && host != "0.0.0.0" {
			err = check.Errorf("address", "mode wireguard listens on every address of the machine: write :%s, and keep "+
				"others out with the packet filter", portOf(l.Address))
		}
		errs = append(errs, err)
	}
	if l.Tunnel.DNS.IsValid() && len(l.WireGuard.Pool) == 0 && l.WireGuard.ConfigFile == "" {
		errs = append(errs, check.Errorf("tunnel.dns",
			"without a pool the gateway has no address inside for it; add wireguard.pool, such as [10.9.0.0/24]"))
	}
	return errors.Join(append(errs, check.Within("wireguard", l.WireGuard.checkKeys()))...)
}

// checkKeys checks the keys below wireguard.
func (w *WireGuardSettings) checkKeys() error {
	var errs []error
	switch hasKey := w.PrivateKeyFile != "" || w.PrivateKey != (Key{}); {
	case w.ConfigFile != "" && hasKey:
		errs = append(errs, check.Errorf("config_file",
			"has the private key already; remove private_key and private_key_file"))
	case w.ConfigFile != "" && w.PeersFile != "":
		errs = append(errs, check.Errorf("config_file",
			"has the peers already; remove peers_file, or move them there"))
	case w.ConfigFile == "" && !hasKey:
		errs = append(errs, check.Errorf("private_key_file",
			"missing; make one with: umask 077; wg genkey > vpn.key (or penstock gateway key > vpn.key)"))
	}
	if len(w.ReachableFrom) > 0 && w.DatapathOrDefault() != DatapathKernel {
		errs = append(errs, check.Errorf("reachable_from",
			"only datapath kernel forwards to peers; set it, or have a listener of mode forward lead there, over TCP"))
	}
	errs = append(errs, checkPool("pool", w.Pool))
	var peers []error
	for i, p := range w.Peers {
		peers = append(peers, check.Within(fmt.Sprintf("peers[%d]", i), p.checkKeys(w.Pool)))
	}
	err := errors.Join(peers...)
	if err == nil {
		if err = CheckPeers(w.Peers); err != nil {
			err = check.Errorf("peers", "%v", err)
		}
	}
	return errors.Join(append(errs, err)...)
}

// checkKeys checks one peer; the other peers have their addresses in pool.
func (p Peer) checkKeys(pool []netip.Prefix) error {
	var errs []error
	if err := p.CheckExit(pool, "exit: true"); err != nil {
		errs = append(errs, check.Errorf("allowed_ips", "%v", err))
	}
	switch {
	case p.Name == "":
		errs = append(errs, check.Errorf("name", "missing; give it a name such as phone"))
	case strings.ContainsFunc(p.Name, func(r rune) bool { return !strconv.IsPrint(r) }):
		errs = append(errs, check.Errorf("name", "%q: a name has printable characters only", p.Name))
	case len(p.Name) > check.MaxName:
		errs = append(errs, check.Errorf("name", "a name has at most %d bytes, not %d", check.MaxName, len(p.Name)))
	}
	if (p.PublicKey == Key{}) {
		errs = append(errs, check.Errorf("public_key", "missing; it is what the client's app shows as its public key"))
	}
	if every := p.Keepalive; every%time.Second != 0 || every > 65535*time.Second {
		errs = append(errs, check.Errorf("keepalive", "%v is not in whole seconds up to 65535s", every))
	}
	return errors.Join(errs...)
}

// maxDefaultBits is the longest prefix that covers nearly all destinations: 2000::/3 covers those of IPv6.
const maxDefaultBits = 3

// KernelLacks returns an error about the keys that the kernel's WireGuard cannot apply, because it forwards datagrams
// by itself; nil: it applies all.
func (l *Listener) KernelLacks() error {
	var errs []error
	for _, k := range []struct {
		name string
		set  bool
	}{
		{"tunnel.udp_idle", l.Tunnel.UDPIdle != nil},
		{"tunnel.udp_sessions", l.Tunnel.UDPSessions != nil},
	} {
		if k.set {
			errs = append(errs, check.Errorf(k.name,
				"the kernel forwards datagrams by itself; remove this, or take wireguard.datapath: netstack"))
		}
	}
	for _, p := range l.WireGuard.Peers {
		for _, a := range p.AllowedIPs {
			if a.Bits() <= maxDefaultBits { // it also covers the peers' endpoints, so the tunnel would carry itself
				errs = append(errs, check.Errorf("wireguard.peers", "peer %q has %v, and all that this machine sends "+
					"would be routed to it; remove this, or take wireguard.datapath: netstack", p.Name, a))
			}
		}
	}
	return errors.Join(errs...)
}

// readPeerFiles reads config_file or peers_file.
func (l *Listener) readPeerFiles(from check.Files) (err error) {
	w := &l.WireGuard
	key := "wireguard.peers_file"
	switch {
	case w.ConfigFile != "":
		key = "wireguard.config_file"
		cure := "penstock gateway init makes a configuration of its own; the file of a wg-quick interface is " +
			"/etc/wireguard/INTERFACE.conf"
		if err = l.adoptQuickFile(w.ConfigFile, cure, from); err == nil {
			w.ConfigFile = ""
		}
	case w.PeersFile != "":
		cure := "penstock gateway peer add makes a peers_file, and so does touch"
		if err = w.adoptPeersFile(w.PeersFile, cure, from); err == nil {
			w.PeersFile = ""
		}
	}
	if err != nil {
		return check.Errorf(key, "%v", err)
	}
	return nil
}

// adoptQuickFile adds the values of a wg-quick file with an [Interface] section. Address, MTU and pool of the listener
// stay where they are set.
func (l *Listener) adoptQuickFile(name, cure string, from check.Files) error {
	f, err := readQuickFile(name, cure, from)
	if err != nil {
		return err
	}
	if (f.PrivateKey == Key{}) {
		return errors.New("it has no PrivateKey in an [Interface] section; a file of peers alone is a peers_file")
	}
	l.WireGuard.PrivateKey = f.PrivateKey
	if l.Address == "" {
		if f.Port == 0 {
			return errors.New("it has no ListenPort; add one, or set address to a port such as :51820")
		}
		l.Address = ":" + strconv.Itoa(int(f.Port))
	}
	if l.Tunnel.MTU == 0 && f.MTU != 0 {
		if l.Tunnel.MTU = f.MTU; f.MTU < minMTU || f.MTU > maxMTU {
			return fmt.Errorf("MTU = %d is outside %d to %d", f.MTU, minMTU, maxMTU)
		}
	}
	if len(l.WireGuard.Pool) == 0 {
		for _, a := range f.Addresses {
			if hasRoom(a) && !slices.ContainsFunc(l.WireGuard.Pool, a.Overlaps) {
				l.WireGuard.Pool = append(l.WireGuard.Pool, a.Masked())
			}
		}
	}
	return l.WireGuard.addPeers(f, from.Path(name))
}

// adoptPeersFile adds the peers of a file that has no [Interface] section.
func (w *WireGuardSettings) adoptPeersFile(name, cure string, from check.Files) error {
	f, err := readQuickFile(name, cure, from)
	if err != nil {
		return err
	}
	if (f.PrivateKey != Key{}) {
		return fmt.Errorf("it has an [Interface] section with a private key; write config_file: %s instead", name)
	}
	return w.addPeers(f, from.Path(name))
}

// addPeers adds the peers of the file at path, and checks all peers together.
func (w *WireGuardSettings) addPeers(f QuickFile, path string) error {
	if err := f.CheckExits(w.Pool); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	w.Peers = slices.Concat(w.Peers, f.Peers)
	return CheckPeers(w.Peers)
}

// readQuickFile reads a file in wg-quick's format. A file with secrets must be closed to others. cure says what to do
// where there is no such file.
func readQuickFile(name, cure string, from check.Files) (QuickFile, error) {
	text, err := from.Read(name, false)
	if errors.Is(err, fs.ErrNotExist) {
		return QuickFile{}, fmt.Errorf("there is no %s; %s", from.Path(name), cure)
	}
	if err != nil {
		return QuickFile{}, err
	}
	f, err := ParseQuick(text)
	if err != nil {
		return f, fmt.Errorf("%s: %w", from.Path(name), err)
	}
	if f.hasSecrets() {
		_, err = from.Read(name, true)
	}
	return f, err
}

// hasSecrets reports whether the file holds a private or preshared key.
func (f *QuickFile) hasSecrets() bool {
	return f.PrivateKey != Key{} || slices.ContainsFunc(f.Peers, func(p Peer) bool { return p.Preshared != Key{} })
}

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
	"time"
	"unicode"

	"github.com/penstock-net/penstock/proxy/access"
)

// maxName bounds names that become metric labels.
const maxName = 64

// checkAll finds what the shape alone does not show: *keyErrors, joined.
func (c *Config) checkAll() error {
	if len(c.Listeners) == 0 {
		return keyErrorf("listeners",
			"at least one listener is needed, such as {name: local, mode: mixed, address: \"127.0.0.1:1080\"}")
	}
	errs := []error{inBounds("", reflect.ValueOf(*c))}
	names, devices := map[string]string{}, map[string]string{}
	var taken sockets
	for i := range c.Listeners {
		l := &c.Listeners[i]
		key := fmt.Sprintf("listeners[%d]", i)
		errs = append(errs, l.checkListener(key))
		if l.Name != "" {
			errs = append(errs, checkUnique(names, key+".name", l.Name))
		}
		switch inKernel := l.Mode == access.WireGuard && l.WireGuard.Path() != DatapathNetstack; {
		case inKernel && l.Name != "":
			errs = append(errs, checkUnique(devices, key+".device", l.Interface()))
		case !inKernel && l.Device != "":
			errs = append(errs, checkUnique(devices, key+".device", l.Device))
		}
		errs = append(errs, taken.addSocket(key+".address", l.Network(), l.Address))
	}
	rules := c.checkRules(names)
	if _, _, err := c.compileTerms(); err != nil || rules != nil {
		errs = append(errs, rules, err)
	} else if _, err := c.Policy(); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, c.checkDatapath(), c.checkAgents(), c.checkSources(), c.Limits.checkLimits())
	if c.Telemetry.Address != "off" {
		errs = append(errs, checkAddress("telemetry.address", c.Telemetry.Address),
			taken.addSocket("telemetry.address", "tcp", c.Telemetry.Address))
	}
	if c.Telemetry.Health != "off" {
		errs = append(errs, checkAddress("telemetry.health", c.Telemetry.Health),
			taken.addSocket("telemetry.health", "tcp", c.Telemetry.Health))
	}
	return errors.Join(append(errs, c.Telemetry.Hints.checkHints("telemetry.hints"),
		checkGiven("telemetry.change_token", c.Telemetry.ChangeToken, c.Telemetry.ChangeTokenFile))...)
}

// checkRules is about names and matches; listeners are the names that there are.
func (c *Config) checkRules(listeners map[string]string) error {
	var errs []error
	rules := map[string]string{}
	for i, r := range c.Rules {
		key := fmt.Sprintf("rules[%d]", i)
		errs = append(errs, checkName(key+".name", r.Name))
		if r.Name != "" {
			errs = append(errs, checkUnique(rules, key+".name", r.Name))
		}
		if r.Undecided != "" && len(r.Match.ServerName) == 0 {
			errs = append(errs, keyErrorf(key+".undecided",
				"there is nothing to decide by; it goes with match.server_name"))
		}
		if p := r.Match.Protocol; p != "" && p != "tcp" && len(r.Match.ServerName)+len(r.Match.Host) > 0 {
			errs = append(errs, keyErrorf(key+".match.protocol",
				"nothing that comes over %s shows a name; remove server_name and host, or protocol", p))
		}
		for j, l := range r.Match.Listener {
			if _, ok := listeners[l]; !ok {
				err := keyErrorf(fmt.Sprintf("%s.match.listener[%d]", key, j), "there is no listener %q", l)
				errs = append(errs, withCause("listeners", err))
			}
		}
		for j, h := range r.Match.Host {
			if wrong := noHostPattern(h); wrong != "" {
				errs = append(errs, keyErrorf(fmt.Sprintf("%s.match.host[%d]", key, j),
					"%q is no host name; %s", h, wrong))
			}
		}
	}
	return errors.Join(errs...)
}

// noHostPattern says what to write instead of what no client's host name matches; empty: one may.
func noHostPattern(s string) string {
	address, err := netip.ParseAddr(s)
	switch {
	case err == nil: // who asks for an address asks for no name
		return fmt.Sprintf("write %v under destination", address)
	case strings.Trim(s, ".") != "" && access.HostBytes(s):
		return ""
	case strings.ContainsFunc(s, func(r rune) bool { return r > unicode.MaxASCII }):
		return "write its ASCII form, which begins with xn--"
	}
	return "write example.com, or .example.com for all names below it"
}

func (l *Listener) checkListener(key string) error {
	errs := []error{checkName(key+".name", l.Name)}
	if l.Mode == "" {
		return errors.Join(append(errs,
			keyErrorf(key+".mode", "missing; it is one of %s", strings.Join(stringsOf(access.Modes), ", ")))...)
	}
	errs = append(errs, l.checkTunnel(key))
	if !l.Mode.Tunnels() {
		errs = append(errs, checkAddress(key+".address", l.Address))
	}
	switch {
	case l.Mode == access.Forward && l.Target == "":
		errs = append(errs, keyErrorf(key+".target", "missing; mode forward needs the host:port to connect to"))
	case l.Mode == access.Forward && strings.Contains(l.Target, "%"):
		errs = append(errs, keyErrorf(key+".target", "%q has a zone, and what is on one link alone is no target",
			l.Target))
	case l.Mode == access.Forward:
		errs = append(errs, checkTarget(key+".target", l.Target))
	case l.Target != "":
		errs = append(errs, keyErrorf(key+".target", "only mode forward has a target; remove it or change the mode"))
	}
	if l.KeepClient && l.Mode != access.TPROXY {
		errs = append(errs, keyErrorf(key+".keep_client", "only mode tproxy can keep the client's address"))
	}
	if len(l.Users) > 0 && !l.Mode.Asks() {
		errs = append(errs, keyErrorf(key+".users", "mode %s cannot ask for a password; use socks5, connect or mixed",
			l.Mode))
	}
	if len(l.Allow) > 0 && l.Mode == access.Forward {
		errs = append(errs, keyErrorf(key+".allow", "mode forward has the one destination that you gave it; remove "+
			"allow"))
	}
	return errors.Join(append(errs, l.checkUsers(key))...)
}

// Network is what the listener's address is of: tcp or udp.
func (l *Listener) Network() string {
	if l.Mode == access.WireGuard || l.Mode == access.MASQUE {
		return "udp"
	}
	return "tcp"
}

func (l *Listener) checkUsers(key string) error {
	var errs []error
	seen := map[string]string{}
	for i, u := range l.Users {
		at := fmt.Sprintf("%s.users[%d]", key, i)
		if len(u.Name) < 1 || len(u.Name) > 255 {
			errs = append(errs, keyErrorf(at+".name", "a name has 1 to 255 bytes, not %d", len(u.Name)))
		} else {
			errs = append(errs, checkUnique(seen, at+".name", u.Name))
		}
		switch {
		case u.Password != "" && u.PasswordFile != "":
			errs = append(errs, keyErrorf(at+".password_file", "give password or password_file, not both"))
		case u.Password == "" && u.PasswordFile == "":
			errs = append(errs, keyErrorf(at, "needs a password or a password_file"))
		case len(u.Password) > 255:
			errs = append(errs, keyErrorf(at+".password", "a password has at most 255 bytes, not %d", len(u.Password)))
		}
	}
	return errors.Join(errs...)
}

// minBuffer is the least that a copy takes, which package datapath keeps for when memory is short.
const minBuffer = 16 << 10

// What Linux lets a peer send first takes 128 KiB with its overhead.
const (
	minReceiveBuffer = 128 << 10
	maxReceiveBuffer = 1 << 30
)

// maxServerNameWait is longer than any client takes that is going to speak.
const maxServerNameWait = time.Minute

func (l Limits) checkLimits() error {
	var errs []error
	wrong := func(key, format string, args ...any) {
		errs = append(errs, keyErrorf("limits."+key, format, args...))
	}
	if l.HandshakeTimeout == 0 {
		wrong("handshake_timeout", "0s would leave silent clients connected for ever; write a time such as 10s")
	}
	if l.DialTimeout == 0 {
		wrong("dial_timeout", "0s would let no connection be made; write a time such as 10s")
	}
	if l.ServerNameWait == 0 || l.ServerNameWait > maxServerNameWait {
		wrong("server_name_wait", "%v is not above 0s and at most 1m; write a time such as 1s. "+
			"Nothing waits where no rule has a server_name", l.ServerNameWait)
	}
	if l.Buffer < minBuffer || l.Buffer > 16<<20 {
		wrong("buffer", "%v is outside 16KiB to 16MiB", l.Buffer)
	}
	if l.ReceiveBuffer != 0 && (l.ReceiveBuffer < minReceiveBuffer || l.ReceiveBuffer > maxReceiveBuffer) {
		wrong("receive_buffer", "%v is outside 128KiB to 1GiB; 0B is as much as the kernel likes",
			l.ReceiveBuffer)
	}
	if l.Memory < minBuffer {
		wrong("memory", "%v is not enough; at least 16KiB", l.Memory)
	}
	return errors.Join(errs...)
}

func checkName(key, name string) error {
	if name == "" {
		return keyErrorf(key, "missing; give it a name of letters, digits, - and _")
	}
	ok := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_'
	}
	if len(name) > maxName || strings.ContainsFunc(name, func(r rune) bool { return !ok(r) }) {
		return keyErrorf(key, "%q: a name has at most %d letters, digits, - and _", name, maxName)
	}
	return nil
}

// uniqueSecret is unique, but does not show the value.
func uniqueSecret(seen map[string]string, key, value string) error {
	if other, taken := seen[value]; taken {
		return keyErrorf(key, "it is already %s", other)
	}
	seen[value] = key
	return nil
}

func checkUnique(seen map[string]string, key, value string) error {
	if other, taken := seen[value]; taken {
		return keyErrorf(key, "%q is already %s", value, other)
	}
	seen[value] = key
	return nil
}

// sockets are the addresses that are listened on.
type sockets []socket

type socket struct {
	key, network, address string
	host                  netip.Addr // unspecified: all of its family, and of both where it is IPv6
	port                  string
}

// addSocket notes an address that has been checked, unless the kernel would refuse it
// beside one that is there. Port 0 is another each time.
func (list *sockets) addSocket(key, network, address string) error {
	host, port, _ := net.SplitHostPort(address)
	if port == "" || port == "0" { // or known once its config_file is read
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
			return keyErrorf(key, "%q is already %s", address, other.key)
		default:
			return keyErrorf(key, "%q is already %s, which is %q: one of them has every address", address, other.key,
				other.address)
		}
	}
	*list = append(*list, s)
	return nil
}

// coversSocket reports whether what comes to other could come to s.
func (s socket) coversSocket(other socket) bool {
	return s.host == other.host || s.host.IsUnspecified() && (s.host.Is6() || other.host.Is4())
}

// checkAddress wants an address literal: a name would be resolved to who knows which.
func checkAddress(key, s string) error {
	if s == "" {
		return keyErrorf(key, "missing; write host:port, such as 127.0.0.1:1080 or [::]:7000")
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return keyErrorf(key, "%q is not host:port, such as 127.0.0.1:1080 or [::]:7000", s)
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return keyErrorf(key, "port %q is not a number up to 65535", port)
	}
	if host == "" || host == "localhost" {
		return nil
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return keyErrorf(key, "%q is not an address of this machine, such as 127.0.0.1 or [::]", host)
	}
	return nil
}

func checkTarget(key, s string) error {
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" {
		return keyErrorf(key, "%q is not host:port, such as server.example:443", s)
	}
	if _, err := netip.ParseAddr(host); err != nil && (!access.HostBytes(host) || len(host) > 255) {
		return keyErrorf(key, "%q is neither an address nor a host name, such as server.example", host)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return keyErrorf(key, "port %q is not a number from 1 to 65535", port)
	}
	return nil
}

// maxSocketPath is what an address of a Unix socket has room for (sun_path, with
// its final zero), less what tells apart the one that is being made.
const maxSocketPath = 107 - len(".new")

func (h Hints) checkHints(key string) error {
	var errs []error
	switch {
	case h.Socket != "" && !filepath.IsAbs(h.Socket):
		errs = append(errs, keyErrorf(key+".socket", "%q is not a whole path, such as /run/penstock/hints.sock",
			h.Socket))
	case len(h.Socket) > maxSocketPath:
		errs = append(errs, keyErrorf(key+".socket", "a path of %d bytes; a socket's has at most %d", len(h.Socket),
			maxSocketPath))
	}
	return errors.Join(append(errs, checkGiven(key+".token", h.Token, h.TokenFile))...)
}

// sharedPool is a prefix of b's that peers of a have addresses from, too; invalid: none is.
func sharedPool(a, b Listener) netip.Prefix {
	theirs := slices.Concat(a.WireGuard.Pool, a.MASQUE.Pool)
	for _, p := range slices.Concat(b.WireGuard.Pool, b.MASQUE.Pool) {
		if slices.ContainsFunc(theirs, p.Overlaps) {
			return p
		}
	}
	return netip.Prefix{}
}

// Warnings names what is allowed and probably not meant.
func (c Config) Warnings() (out []string) {
	if failed := new(reading).runRecovering(nil, func() { out = c.findWarnings() }); failed != nil {
		return []string{failed.Message}
	}
	return out
}

func (c *Config) findWarnings() []string {
	var out []string
	for i, l := range c.Listeners {
		if (l.Mode.Asks() && len(l.Users) == 0 || l.MASQUE.Open) && !OnLoopback(l.Address) {
			out = append(out, fmt.Sprintf("listeners[%d]: %s serves everybody who can reach %s; add users (or "+
				"tokens), or "+
				"listen on loopback", i, l.Name, l.Address))
		}
		if inner, outer := access.Overlap(l.WireGuard.Access()); inner != "" {
			out = append(out, fmt.Sprintf("listeners[%d]: allowed_ips of peer %s lie within those of %s, which "+
				"does not get "+
				"what is sent there", i, inner, outer))
		}
		if exit := slices.IndexFunc(l.WireGuard.Peers, func(p Peer) bool { return p.Exit }); exit >= 0 &&
			l.Tunnel.Datagrams().Isolate {
			out = append(out, fmt.Sprintf("listeners[%d]: peer %s is an exit, but nobody reaches it: peers are isolated; "+
				"set tunnel.isolate: false", i, l.WireGuard.Peers[exit].Name))
		}
		for j, other := range c.Listeners[:i] {
			if shared := sharedPool(other, l); shared.IsValid() {
				out = append(out, fmt.Sprintf("listeners[%d]: its peers and those of listeners[%d] have their "+
					"addresses from %v both; whoever is looked for there is looked for in the first alone", i, j, shared))
			}
		}
		if slices.ContainsFunc(l.ProxyProtocol.From, func(p netip.Prefix) bool { return p.Bits() == 0 }) {
			out = append(out, fmt.Sprintf("listeners[%d]: proxy_protocol.from lets everybody claim any address", i))
		}
	}
	out = append(out, c.unreachableRules()...)
	if c.Telemetry.Address != "off" && !OnLoopback(c.Telemetry.Address) {
		out = append(out, fmt.Sprintf("telemetry.address: /flows and /hosts show who talks to whom to everybody "+
			"who can "+
			"reach %s", c.Telemetry.Address))
		if c.Telemetry.Hints.Token != "" {
			out = append(out, fmt.Sprintf("telemetry.hints: hints to %s carry their token unencrypted; whoever "+
				"listens on the "+
				"way may use it", c.Telemetry.Address))
		}
		if c.Telemetry.ChangeToken != "" {
			out = append(out, fmt.Sprintf("telemetry.change_token: changes of algorithms to %s carry their token "+
				"unencrypted; whoever listens on the way may use it", c.Telemetry.Address))
		}
	}
	return out
}

// OnLoopback reports whether nobody but this machine reaches an address of the
// configuration.
func OnLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.Unmap().IsLoopback()
}

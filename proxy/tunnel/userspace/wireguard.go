package userspace

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// WireGuardConfig describes the endpoint of a WireGuard tunnel.
type WireGuardConfig struct {
	Name string
	// Port is the UDP port, on every address of this machine. 0: any free port.
	Port       uint16
	PrivateKey access.Key
	Peers      []access.Peer
	// Pool has the prefixes of peers' addresses. The first address of each is the gateway's.
	Pool []netip.Prefix
	// MTU is that of the stack, in bytes.
	MTU int
	Log *slog.Logger

	// bind replaces the sockets in tests; nil: a udpBind.
	bind conn.Bind
}

// WireGuard is the endpoint of a WireGuard tunnel, in this process.
type WireGuard struct {
	tunnel.Condition
	tunnel.Pool
	name   string
	log    *slog.Logger
	stack  *netstack.Stack
	device *device.Device
	// refused counts packets with a wrong key, or from an address that is not the peer's.
	refused atomic.Uint64
	// failures gets the error of a socket that has failed. watchPort opens the port again.
	failures chan error
	// bind is nil where a test has sockets of its own.
	bind *udpBind
	// peerMTUs has the largest inner packet by peer, in bytes, for peers behind a path that is
	// narrower than the stack's MTU. nil: there are none.
	peerMTUs atomic.Pointer[map[string]int]
	cancel   context.CancelFunc
	done     sync.WaitGroup

	// mu guards the fields below, and changes of the device's peers. owners and leaving are read
	// without it, for every packet.
	mu     sync.Mutex
	port   uint16
	peers  map[access.Key]access.Peer
	owners atomic.Pointer[tunnel.Owners]
	// leaving has removed peers that may still answer resets; nil: there are none.
	leaving atomic.Pointer[leaving]
}

// ListenWireGuard opens the endpoint and joins it to a stack.
func ListenWireGuard(cfg WireGuardConfig, stack *netstack.Stack) (*WireGuard, error) {
	w := &WireGuard{
		name: cfg.Name, log: cfg.Log, stack: stack, failures: make(chan error, 1),
		peers: map[access.Key]access.Peer{},
	}
	w.owners.Store(tunnel.OwnersOf(nil))
	w.SetPool(cfg.Pool)
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	w.log = w.log.With("listener", cfg.Name)
	if cfg.bind == nil {
		w.bind = newUDPBind()
		cfg.bind = w.bind
	}
	w.device = device.NewDevice(newLink(stack, cfg.MTU, w), cfg.bind, w.newLogger())
	setup := "private_key=" + cfg.PrivateKey.Hex() + "\nlisten_port=" + strconv.Itoa(int(cfg.Port)) + "\n"
	err := w.device.IpcSet(setup)
	if err == nil {
		err = w.SetPeers(cfg.Peers)
	}
	if err == nil {
		err = w.device.Up()
	}
	if err == nil {
		err = w.learnPort()
	}
	if err == nil && cfg.Port != 0 && w.port != cfg.Port {
		// The device also comes up by an event of its link. If it could not open the port then, it has forgotten it. Opening
		// the port again returns the error.
		w.port = cfg.Port
		err = w.bindPort()
	}
	if err != nil {
		w.device.Close()
		return nil, fmt.Errorf("tunnel: listener %q: WireGuard on UDP port %d: %w", cfg.Name, cfg.Port, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	w.done.Go(func() { w.watchPort(ctx) })
	if w.bind != nil {
		w.done.Go(func() { w.followPaths(ctx) })
	}
	return w, nil
}

// followPaths keeps peerMTUs up to date until ctx is done. A path may change, and a peer may move to another path.
func (w *WireGuard) followPaths(ctx context.Context) {
	tick := time.NewTicker(pathPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.bind.paths.changed:
		case <-tick.C:
			if w.peerMTUs.Load() == nil {
				continue
			}
		}
		states, err := w.States()
		if err != nil {
			continue // the device is being closed
		}
		sizes := map[string]int{}
		for _, s := range states {
			at, err := netip.ParseAddrPort(s.Endpoint)
			if err != nil {
				continue
			}
			if size := w.bind.paths.largestInner(at); size > 0 && size < w.stack.MTU() {
				sizes[s.Name] = size
			}
		}
		if len(sizes) == 0 {
			w.peerMTUs.Store(nil)
		} else {
			w.peerMTUs.Store(&sizes)
		}
	}
}

// largestPacket implements peerGate.
func (w *WireGuard) largestPacket(inner netip.Addr) int {
	sizes := w.peerMTUs.Load()
	if sizes == nil {
		return 0
	}
	return (*sizes)[w.Peer(inner)]
}

// watchPort opens the UDP port again after its sockets have failed, until ctx is done.
func (w *WireGuard) watchPort(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case err := <-w.failures:
			err = fmt.Errorf("WireGuard's UDP port %d failed: %w", w.port, err)
			w.Reopen(ctx, w.log, err, func() error {
				err := w.bindPort()
				select {
				case <-w.failures: //nolint:errcheck // of a socket that is closed by now
				default:
				}
				return err
			})
		}
	}
}

// bindPort opens the UDP port once more.
func (w *WireGuard) bindPort() error { return w.device.IpcSet(fmt.Sprintf("listen_port=%d\n", w.port)) }

// reopenAfter makes watchPort open the UDP port again. One request at a time is enough.
func (w *WireGuard) reopenAfter(err error) {
	select {
	case w.failures <- err:
	default:
	}
}

// newLogger returns the device's logger. The device reports errors, refused packets and failed
// sockets only by its log, so the logger counts the refused and wakes watchPort.
func (w *WireGuard) newLogger() *device.Logger {
	return &device.Logger{
		Verbosef: func(format string, args ...any) {
			switch {
			case strings.HasPrefix(format, "Failed to receive"):
				w.reopenAfter(fmt.Errorf(format, args...)) //nolint:err113 // the device's words
			case strings.Contains(format, "invalid"), strings.Contains(format, "disallowed"):
				w.refused.Add(1)
				w.log.Debug("tunnel: refused", "reason", fmt.Sprintf(format, args...))
			}
		},
		Errorf: func(format string, args ...any) {
			w.log.Warn("tunnel: WireGuard", "err", fmt.Sprintf(format, args...))
		},
	}
}

// Peers returns the present peers, ordered by name.
func (w *WireGuard) Peers() []access.Peer {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.SortedFunc(maps.Values(w.peers), func(a, b access.Peer) int { return strings.Compare(a.Name, b.Name) })
}

// Apply implements Outside.
func (w *WireGuard) Apply(s tunnel.Settings) error {
	if err := w.SetPeers(s.Peers); err != nil {
		return err
	}
	w.SetPool(s.Pool)
	return nil
}

// Resume implements Outside. It starts a handshake with each peer that has not been heard from yet.
// Without it a peer would use its old keys until WireGuard's timers run out, after 15 s at least.
// The device asks a peer that has gone for 90 s.
func (w *WireGuard) Resume(at map[access.Key]netip.AddrPort) {
	states, err := w.States()
	if err != nil {
		w.log.Warn("tunnel: peers find out by themselves that the endpoint is another", "err", err)
		return
	}
	for _, s := range states {
		where, known := at[s.PublicKey]
		if !known || s.Endpoint != "" {
			continue
		}
		err := w.device.IpcSet(fmt.Sprintf("public_key=%s\nupdate_only=true\nendpoint=%v\n", s.PublicKey.Hex(), where))
		if peer := w.device.LookupPeer(device.NoisePublicKey(s.PublicKey)); err == nil && peer != nil {
			err = peer.SendHandshakeInitiation(false)
		}
		if err != nil {
			w.log.Debug("tunnel: a peer is not where it was", "peer", s.Name, "endpoint", where, "err", err)
		}
	}
}

// Report implements Outside.
func (w *WireGuard) Report(s *tunnel.Status) (err error) {
	s.Refused = w.Refused()
	if w.bind != nil {
		s.SendErrors = w.bind.errors.errorCounts()
	}
	s.Peers, err = w.States()
	return err
}

// Forward implements Outside. All datagrams of WireGuard come in packets.
func (w *WireGuard) Forward(*Datagrams) {}

// Requests implements Outside.
func (w *WireGuard) Requests() <-chan datapath.Conn { return nil }

// Peer implements Inside by the longest matching prefix, as WireGuard does for packets.
func (w *WireGuard) Peer(inner netip.Addr) string { return w.owners.Load().Peer(inner) }

// Place implements Inside.
func (w *WireGuard) Place(addr netip.Addr) tunnel.Place {
	if w.Peer(addr) != "" {
		return tunnel.OfPeer
	}
	return w.Vacant(addr)
}

// States returns the peers' states, ordered by name. It reads the text of WireGuard's configuration
// protocol.
func (w *WireGuard) States() ([]tunnel.PeerState, error) {
	text, err := w.device.IpcGet()
	if err != nil {
		return nil, fmt.Errorf("tunnel: read peers: %w", err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	var states []tunnel.PeerState
	var seconds int64
	known := false // the peer that lines are about is ours
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		key, value, _ := strings.Cut(lines.Text(), "=")
		if key == "public_key" {
			k, err := parseHexKey(value)
			if err != nil {
				return nil, fmt.Errorf("tunnel: read peers: %w", err)
			}
			if _, known = w.peers[k]; !known {
				continue // it is leaving
			}
			states = append(states, tunnel.PeerState{Name: w.peers[k].Name, PublicKey: k, Addresses: w.peers[k].AllowedIPs})
			continue
		}
		if !known {
			continue
		}
		s := &states[len(states)-1]
		switch key {
		case "endpoint":
			s.Endpoint = value
		case "last_handshake_time_sec":
			seconds, _ = strconv.ParseInt(value, 10, 64)
		case "last_handshake_time_nsec":
			if ns, _ := strconv.ParseInt(value, 10, 64); seconds != 0 || ns != 0 {
				s.Handshake = time.Unix(seconds, ns)
			}
		case "rx_bytes":
			s.Received, _ = strconv.ParseUint(value, 10, 64)
		case "tx_bytes":
			s.Sent, _ = strconv.ParseUint(value, 10, 64)
		}
	}
	sort.Slice(states, func(i, j int) bool { return states[i].Name < states[j].Name })
	return states, nil
}

// Refused returns how many packets were dropped because of a wrong key or a source address that is
// not the peer's.
func (w *WireGuard) Refused() uint64 { return w.refused.Load() }

// learnPort reads the port that the device has chosen.
func (w *WireGuard) learnPort() error {
	text, err := w.device.IpcGet()
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(text, "\n") {
		if port, ok := strings.CutPrefix(line, "listen_port="); ok {
			n, err := strconv.ParseUint(port, 10, 16)
			w.port = uint16(n)
			return err
		}
	}
	return errors.New("the endpoint has no port")
}

// Addr implements Outside.
func (w *WireGuard) Addr() net.Addr { return &net.UDPAddr{Port: int(w.port)} }

// Drain implements Outside. WireGuard has no clients to refuse.
func (w *WireGuard) Drain() {}

// Close implements Outside.
func (w *WireGuard) Close() error {
	if _, sent := w.stack.Traffic(); sent > 0 {
		waitForSending()
	}
	w.cancel()
	w.done.Wait()
	w.mu.Lock()
	if l := w.leaving.Swap(nil); l != nil {
		l.timer.Stop()
	}
	w.mu.Unlock()
	w.device.Close()
	return nil
}

func parseHexKey(s string) (access.Key, error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(access.Key{}) {
		return access.Key{}, fmt.Errorf("%q is no key", s)
	}
	return access.Key(b), nil
}

// leavingPeriod is how long a removed peer may still receive the resets of its connections.
const leavingPeriod = 500 * time.Millisecond

// leaving has peers and addresses that were removed from the configuration and not yet from the
// device.
type leaving struct {
	// addresses are those that were removed, by peer.
	addresses *tunnel.Owners
	// remaining is what stays of each peer at the end of the period; nil: nothing.
	remaining map[access.Key]*access.Peer
	timer     *time.Timer
}

// SetPeers replaces the peers. Peers without a change keep their sessions. Removed peers, and
// addresses that peers lose, are refused at once. Their keys go after leavingPeriod, so that the
// resets of their connections still reach them.
func (w *WireGuard) SetPeers(peers []access.Peer) error {
	if err := access.CheckPeers(peers); err != nil {
		return err
	}
	next, taken := make(map[access.Key]access.Peer, len(peers)), map[netip.Prefix]bool{}
	for _, p := range peers {
		next[p.PublicKey] = p
		for _, a := range p.AllowedIPs {
			taken[a.Masked()] = true
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.leaving.Load()
	if before == nil {
		before = &leaving{}
	}
	after, gone := w.findLeaving(next, taken)
	var change strings.Builder
	for key := range before.remaining { // their period ends early
		if _, back := next[key]; !back {
			fmt.Fprintf(&change, "public_key=%s\nremove=true\n", key.Hex())
		}
	}
	for key, p := range next {
		old, known := w.peers[key]
		if _, changed := before.remaining[key]; known && !changed && old.Equal(p) {
			continue
		}
		if _, loses := after.remaining[key]; loses {
			p.AllowedIPs = slices.Concat(p.AllowedIPs, without(old.AllowedIPs, taken))
		}
		writePeer(&change, p)
	}
	if err := w.device.IpcSet(change.String()); err != nil {
		return fmt.Errorf("set peers: %w", err)
	}
	if before.timer != nil {
		before.timer.Stop()
	}
	w.peers = next
	w.owners.Store(tunnel.OwnersOf(peers))
	if len(gone) == 0 {
		w.leaving.Store(nil)
		return nil
	}
	after.addresses = tunnel.OwnersOf(gone)
	after.timer = time.AfterFunc(leavingPeriod, func() { w.removeLeaving(after) })
	w.leaving.Store(after)
	return nil
}

// findLeaving returns what leaves when next replaces the peers, which take these prefixes. gone has the leaving peers,
// and the peers that lose addresses, with these alone. The caller holds w.mu.
func (w *WireGuard) findLeaving(
	next map[access.Key]access.Peer, taken map[netip.Prefix]bool,
) (l *leaving, gone []access.Peer) {
	l = &leaving{remaining: map[access.Key]*access.Peer{}}
	for key, old := range w.peers {
		p, stays := next[key]
		if !stays {
			l.remaining[key] = nil
			gone = append(gone, old)
			continue
		}
		if lost := without(old.AllowedIPs, taken); len(lost) > 0 {
			l.remaining[key] = &p
			gone = append(gone, access.Peer{Name: old.Name, AllowedIPs: lost})
		}
	}
	return l, gone
}

// without returns prefixes without those that are taken.
func without(prefixes []netip.Prefix, taken map[netip.Prefix]bool) []netip.Prefix {
	return slices.DeleteFunc(slices.Clone(prefixes), func(a netip.Prefix) bool { return taken[a.Masked()] })
}

// removeLeaving removes the leaving peers and addresses from the device, unless a later change has
// done so.
func (w *WireGuard) removeLeaving(l *leaving) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.leaving.Load() != l {
		return
	}
	var change strings.Builder
	for key, rest := range l.remaining {
		if rest == nil {
			fmt.Fprintf(&change, "public_key=%s\nremove=true\n", key.Hex())
		} else {
			writePeer(&change, *rest)
		}
	}
	if err := w.device.IpcSet(change.String()); err != nil {
		w.log.Error("tunnel: peers that have been removed are still let in", "err", err)
		return
	}
	w.leaving.Store(nil)
}

// mayEnter implements peerGate. Leaving peers may answer resets, but open no connections.
func (w *WireGuard) mayEnter(p []byte) bool {
	l := w.leaving.Load()
	if l == nil {
		return true
	}
	from, _, ok := endsOf(p)
	return !ok || w.Peer(from) != "" || l.addresses.Peer(from) == "" || isTCP(p) && !isSYN(p)
}

// writePeer writes the peer in WireGuard's configuration protocol (UAPI).
func writePeer(b *strings.Builder, p access.Peer) {
	fmt.Fprintf(b, "public_key=%s\nreplace_allowed_ips=true\n", p.PublicKey.Hex())
	fmt.Fprintf(b, "preshared_key=%s\npersistent_keepalive_interval=%d\n", p.Preshared.Hex(),
		int(p.Keepalive.Seconds()))
	for _, a := range p.AllowedIPs {
		fmt.Fprintf(b, "allowed_ip=%v\n", a)
	}
}

// Package kernelspace ends WireGuard tunnels in the kernel. It makes the interface, and rules that hand TCP out of it
// to a transparent socket and forward the rest with this machine's address. It also uses an interface of a program
// that speaks WireGuard's configuration protocol.
//
//	peer ══ WireGuard ══▶ interface ──┬─ TCP ──▶ TPROXY ──▶ socket ──▶ proxy
//	                                  └─ other ──▶ forwarded, masqueraded
package kernelspace

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// Config describes a tunnel.
type Config struct {
	Name string
	// Interface is the name of the interface. One that exists is used, and stays, unless it has another private key.
	Interface string
	// Port is the UDP port, on every address. 0: any free port.
	Port       uint16
	PrivateKey access.Key
	MTU        int
	// Closed has the destinations to which the kernel must not forward.
	Closed []netip.Prefix
	// Socket configures the transparent socket. Its address and mode are set here.
	Socket ingress.Config
	Open   ingress.Open
	// Dial opens a connection from a source, which need not be this machine's; invalid: any.
	Dial func(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error)
	// Log may be nil: silent.
	Log *slog.Logger
}

// Settings are the settings of any tunnel, and those for packets that the kernel forwards.
type Settings struct {
	tunnel.Settings
	// From has the addresses outside that may reach peers.
	From []netip.Prefix
	// Rules decide about packets that a peer sends. The first match decides.
	Rules []Rule
}

// Rule decides what the kernel forwards.
type Rule = capture.Verdict

// PortRange is a range of ports of a Rule.
type PortRange = capture.PortRange

// WireGuard is a tunnel that the kernel ends. It implements tunnel.Listener.
type WireGuard struct {
	*ingress.Socket
	tunnel.Pool
	tunnel.Condition
	// cfg has the port that WireGuard has chosen, so that the interface gets the same one when it is made again.
	cfg    Config
	log    *slog.Logger
	device *device
	// owners finds the peer that has an address inside.
	owners atomic.Pointer[tunnel.Owners]
	drain  sync.Once
	once   sync.Once
	// err is the result of Close.
	err error
	// cancel ends watchInterface, and done waits for its end.
	cancel context.CancelFunc
	done   sync.WaitGroup

	// mu guards the device and the fields below. owners is read without it.
	mu sync.Mutex
	// gone reports that the interface has gone, until reopenInterface has made and configured it again.
	gone bool
	// unrouted is the result of the last isUnrouted.
	unrouted bool
	// peers are those that the interface has.
	peers map[access.Key]access.Peer
	// endpoints are those of peers at the last Status.
	endpoints map[access.Key]netip.AddrPort
	// inForce are the settings that the interface gets again if it has to be made again.
	inForce Settings
}

// watchPeriod is the time between two checks of the interface.
const watchPeriod = time.Second

var _ tunnel.Listener = (*WireGuard)(nil)

// Listen makes the tunnel. Close, or an error, removes all that it has made.
func Listen(ctx context.Context, cfg Config, s Settings) (_ *WireGuard, err error) {
	w := &WireGuard{cfg: cfg, log: cfg.Log}
	if w.log == nil {
		w.log = slog.New(slog.DiscardHandler)
	}
	w.log = w.log.With("listener", cfg.Name)
	w.owners.Store(tunnel.OwnersOf(nil))
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("tunnel: listener %q: interface %s: %w", cfg.Name, cfg.Interface, err), w.closeAll())
		}
	}()
	if w.Socket, err = ingress.Listen(ctx, transparentConfig(cfg.Socket), cfg.Open); err != nil {
		return nil, err
	}
	if w.device, w.peers, err = openDevice(cfg); err != nil {
		return nil, err
	}
	if err := w.applySettings(s); err != nil {
		return nil, err
	}
	if err := w.device.bringUp(); err != nil {
		return nil, err
	}
	if w.cfg.Port, err = w.device.chosenPort(); err != nil {
		return nil, err
	}
	watching, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	w.done.Go(func() { w.watchInterface(watching) })
	w.log.Info("tunnel: the kernel ends it", "device", cfg.Interface)
	for _, off := range ForwardingOff(s.Pool) {
		w.log.Warn("what is not TCP does not leave the tunnel: the kernel does not forward", "fix", "sysctl -w "+off+"=1")
	}
	w.warnOfObstacles(s)
	return w, nil
}

// warnOfObstacles logs which chains of the machine's firewall drop connections out of the tunnel. It ignores an error,
// which penstock doctor shows.
func (w *WireGuard) warnOfObstacles(s Settings) {
	obstacles, _ := capture.Tunnel{Interface: w.cfg.Interface, Inside: s.Pool}.Obstacles()
	for _, o := range obstacles {
		w.log.Warn("the firewall of this machine is in the way of connections out of the tunnel",
			"hook", o.Hook, "chain", o.Chain, "drops", o.Drops, "fix", o.Cure)
	}
}

// transparentConfig returns the configuration of the socket that the kernel hands connections to.
func transparentConfig(c ingress.Config) ingress.Config {
	c.Mode, c.Addr, c.Socket = access.TPROXY, ":0", nil
	return c
}

// Name implements tunnel.Listener.
func (w *WireGuard) Name() string { return w.cfg.Name }

// Addr implements tunnel.Listener.
func (w *WireGuard) Addr() net.Addr { return &net.UDPAddr{Port: int(w.cfg.Port)} }

// Greet implements tunnel.Listener. It resets connections that do not come out of the tunnel.
func (w *WireGuard) Greet(ctx context.Context, conn datapath.Conn) (ingress.Client, error) {
	c, err := w.Socket.Greet(ctx, conn)
	if err != nil {
		return c, err
	}
	from := c.Source.Addr()
	c.Peer = w.Peer(from)
	if c.Peer == "" {
		_ = conn.Reset()
		return ingress.Client{}, fmt.Errorf("tunnel: listener %q: %v is no peer's address", w.cfg.Name, from)
	}
	c.Current = func() bool { return w.Peer(from) == c.Peer }
	return c, nil
}

// Peer implements tunnel.Inside.
func (w *WireGuard) Peer(inner netip.Addr) string { return w.owners.Load().Peer(inner) }

// Place implements tunnel.Inside.
func (w *WireGuard) Place(addr netip.Addr) tunnel.Place {
	if w.Peer(addr) != "" {
		return tunnel.OfPeer
	}
	return w.Vacant(addr)
}

// Forward implements tunnel.Listener. The kernel forwards by itself.
func (w *WireGuard) Forward(access.Datagrams, tunnel.Forwarding) {}

// Dial implements tunnel.Listener.
func (w *WireGuard) Dial(ctx context.Context, source netip.Addr, target netip.AddrPort) (datapath.Conn, error) {
	if source.Is4() != target.Addr().Is4() || w.Peer(source) == "" {
		source = w.Own(target.Addr())
	}
	c, err := w.cfg.Dial(ctx, source, target)
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", w.cfg.Name, err)
	}
	return c, nil
}

// Apply puts settings into force. commit does so for the settings of the socket. An error changes
// nothing.
func (w *WireGuard) Apply(s Settings, socket ingress.Config) (commit func(), err error) {
	w.mu.Lock()
	before := w.inForce
	w.mu.Unlock()
	if err = w.applySettings(s); err == nil {
		commit, err = w.Socket.Apply(transparentConfig(socket))
	}
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: interface %s: %w", w.cfg.Name, w.cfg.Interface,
			errors.Join(err, w.applySettings(before)))
	}
	return commit, nil
}

// applySettings puts settings into force. Peers that stay keep their sessions.
func (w *WireGuard) applySettings(s Settings) error {
	if err := access.CheckPeers(s.Peers); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.isMissing() { // otherwise reopenInterface configures all
		if err := w.configureAll(s); err != nil {
			return err
		}
	}
	w.inForce = s
	w.owners.Store(tunnel.OwnersOf(s.Peers))
	w.SetPool(s.Pool)
	return nil
}

// configureAll puts settings into the interface, its rules and its routes. The caller holds w.mu.
func (w *WireGuard) configureAll(s Settings) error {
	next := make(map[access.Key]access.Peer, len(s.Peers))
	inside := s.Pool
	for _, p := range s.Peers {
		next[p.PublicKey] = p
		inside = append(inside[:len(inside):len(inside)], p.AllowedIPs...)
	}
	// Old peers are removed before the rules change, and new ones are added after that. So no packet of a peer passes
	// that neither configuration permits.
	stay := peersThatStay(w.peers, next)
	if err := w.device.setPeers(w.peers, stay); err != nil {
		return err
	}
	w.peers = stay
	gateways := gatewaysOf(s.Pool)
	rules := capture.Tunnel{
		Interface: w.cfg.Interface, Port: uint16(w.Socket.Addr().(*net.TCPAddr).Port),
		Inside: inside, DNS: s.Datagrams.DNS, Isolate: s.Datagrams.Isolate,
		Closed: w.cfg.Closed, Open: s.Allow, From: s.From, Verdicts: s.Rules,
	}
	for _, g := range gateways {
		rules.Gateways = append(rules.Gateways, g.Addr())
	}
	if err := rules.Apply(context.Background()); err != nil {
		return err
	}
	if err := w.device.setAddresses(gateways, inside); err != nil {
		return err
	}
	if err := w.device.setPeers(stay, next); err != nil {
		return err
	}
	w.peers = next
	return nil
}

// peersThatStay returns the peers with a key that next has, too.
func peersThatStay(peers, next map[access.Key]access.Peer) map[access.Key]access.Peer {
	stay := maps.Clone(peers)
	maps.DeleteFunc(stay, func(key access.Key, _ access.Peer) bool {
		_, stays := next[key]
		return !stays
	})
	return stay
}

// gatewaysOf returns this machine's addresses inside the tunnel, with the lengths of the pool's prefixes.
func gatewaysOf(pool []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range pool {
		out = append(out, netip.PrefixFrom(access.GatewayIn(p), p.Bits()))
	}
	return out
}

// watchInterface makes the interface again whenever it has gone, until ctx is done. A user may have deleted it, or the
// program that made it may have ended. Connections wait for it.
func (w *WireGuard) watchInterface(ctx context.Context) {
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := w.checkInterface(); err != nil && !w.Reopen(ctx, w.log, err, w.reopenInterface) {
			return
		}
	}
}

// checkInterface returns an error if the interface has gone. Otherwise it restores lost parts: addresses and routes,
// which the kernel removes when the link goes down, and rules, which "nft flush ruleset" removes.
func (w *WireGuard) checkInterface() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.isMissing() {
		return fmt.Errorf("WireGuard interface %q has gone", w.cfg.Interface)
	}
	unrouted := w.device.isUnrouted()
	if (!unrouted || w.unrouted) && (capture.Tunnel{Interface: w.cfg.Interface}).IsInstalled() {
		w.unrouted = unrouted
		return nil
	}
	w.unrouted = unrouted // if restoring does not help, it is not tried each period
	w.log.Warn("tunnel: addresses, routes or rules of the interface have gone, and are put back",
		"listener", w.cfg.Name, "interface", w.cfg.Interface, "err", w.configureAll(w.inForce))
	return nil
}

// isMissing returns gone, and sets it if the interface has gone. The caller holds w.mu.
func (w *WireGuard) isMissing() bool {
	if w.device.link != nil && errors.Is(w.device.readTraffic(), errGone) {
		w.gone, w.device.link = true, nil
	}
	return w.gone
}

// reopenInterface finds or makes the interface again, with its addresses, routes and rules.
func (w *WireGuard) reopenInterface() (err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.peers, err = w.device.openInterface(w.cfg); err != nil {
		return err
	}
	if err := w.configureAll(w.inForce); err != nil {
		return err
	}
	if err := w.device.bringUp(); err != nil {
		return err
	}
	w.gone = false
	w.resumePeers(w.endpoints)
	return nil
}

// Resume implements tunnel.Listener. It sends a packet to each peer that has not been heard from yet, before which
// WireGuard makes a handshake.
func (w *WireGuard) Resume(at map[access.Key]netip.AddrPort) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.resumePeers(at)
}

// resumePeers is Resume. The caller holds w.mu.
func (w *WireGuard) resumePeers(at map[access.Key]netip.AddrPort) {
	if err := w.device.resumePeers(w.peers, at); err != nil {
		w.log.Debug("tunnel: peers are not where they were", "err", err)
	}
}

// Status implements tunnel.Listener.
func (w *WireGuard) Status() (tunnel.Status, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	var s tunnel.Status
	var err error
	if w.gone {
		for _, p := range w.inForce.Peers {
			s.Peers = append(s.Peers, tunnel.PeerState{Name: p.Name, PublicKey: p.PublicKey, Addresses: p.AllowedIPs})
		}
	} else if err = w.device.readTraffic(); err == nil {
		s.Peers, err = w.device.peerStates(w.peers)
		w.endpoints = tunnel.Endpoints(s.Peers)
	}
	all := w.device.past.addTraffic(w.device.current)
	s.Received, s.Sent, s.Lost = all.received, all.sent, all.lost
	if err != nil {
		return s, fmt.Errorf("tunnel: listener %q: %w", w.cfg.Name, err)
	}
	return s, nil
}

// Health implements tunnel.Listener.
func (w *WireGuard) Health() error { return w.Condition.Health() }

// Drain implements tunnel.Listener. New connections then go past the proxy.
func (w *WireGuard) Drain() { w.drain.Do(w.Socket.Drain) }

// Close implements tunnel.Listener.
func (w *WireGuard) Close() error {
	w.once.Do(func() { w.err = w.closeAll() })
	return w.err
}

// closeAll removes what Listen has made so far.
func (w *WireGuard) closeAll() error {
	var errs []error
	if w.cancel != nil {
		w.cancel()
		w.done.Wait()
	}
	if w.Socket != nil {
		errs = append(errs, w.Socket.Close())
	}
	if w.device != nil {
		w.mu.Lock()
		defer w.mu.Unlock()
		errs = append(errs, w.removeInterface(), w.device.control.Close())
	}
	return errors.Join(errs...)
}

// removeInterface removes the interface with its rules and routes. The caller holds w.mu.
func (w *WireGuard) removeInterface() error {
	var err error
	if w.device.link != nil {
		err = w.device.setPeers(w.peers, nil)
	}
	rules := capture.Tunnel{Interface: w.cfg.Interface}
	return errors.Join(err, w.device.removeAdded(), rules.Remove(context.Background()))
}

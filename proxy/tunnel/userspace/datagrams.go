package userspace

import (
	"container/heap"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

const (
	dnsIdleTimeout  = 5 * time.Second // idle time of a session with name servers after an answer (RFC 4787 REQ-5c)
	dnsPort         = 53
	maxRemotes      = 1024    // of one session: addresses and ports that may answer it
	maxRemotesTotal = 1 << 18 // of a tunnel's sessions, among which they are divided
)

// Datagrams forwards the UDP datagrams and echo requests of a tunnel. Each address and port of a
// peer has a socket of its own. It sends to anybody outside, and accepts answers only from
// addresses that it has sent to: endpoint-independent mapping with address- and port-dependent
// filtering (RFC 4787 §4.1 and §5).
//
// A datagram from a peer takes one of these ways:
//
//	to a peer             association ─▶ the other peer's queue ─▶ stack
//	to the gateway        echo: answered here; DNS: session with the name server
//	elsewhere             session ─▶ uplink, if a max_rate holds it ─▶ socket
//	CONNECT-UDP           session with one target ─▶ uplink ─▶ socket
//
// An answer goes from the session's socket to the peer's queue, and then to the stack or the
// request.
//
// Locks: mu guards the maps and what sessions and peers change. A shaper's mu guards its queue. mu
// comes first.
type Datagrams struct {
	stack  *netstack.Stack
	inside tunnel.Inside
	with   tunnel.Forwarding
	cfg    atomic.Pointer[access.Datagrams]
	counts counters
	// queued has the bytes in the queues of all peers.
	queued atomic.Int64
	// raw has sockets for echo requests over IPv6 (key true) and IPv4 (false), for families without
	// ping sockets.
	raw map[bool]*socket

	mu sync.Mutex
	// sessions are by the peer's address and port.
	sessions map[origin]*session
	peers    map[string]*peer
	// bySessions has the peers, the one with the most sessions first.
	bySessions peerHeap
	// echoes are the sessions that share a raw socket.
	echoes map[echoID]*session
	// lastID is the identifier that was given to one of echoes last.
	lastID uint16
	// associations are exchanges between peers, with the time of their last use.
	associations map[association]cc.Time
	// associationsByPeer counts the associations that each peer has begun.
	associationsByPeer map[string]int
	closed             bool

	// wakeSignal has a value while wokenShapers is not empty.
	wakeSignal   chan struct{}
	wakeMu       sync.Mutex
	wokenShapers []*shaper
	// activeShapers have packets, or had some within activeTime. wakeMu guards this and wokenShapers.
	activeShapers []*shaper
	stop          chan struct{}
	done          sync.WaitGroup
	// cookie is the content of our own echo requests. It distinguishes answers to them.
	cookie [8]byte
}

// counters are those of tunnel.DatagramStats.
type counters struct {
	sentPackets, sentBytes, receivedPackets, receivedBytes                  atomic.Uint64
	refused, crowded, evicted, late, overflow, failed, unsolicited, notices atomic.Uint64
}

// association is an exchange that one peer has begun with another. The other may answer. It needs
// no socket.
type association struct {
	// sender is the name of the peer that has begun it.
	sender string
	from   origin
	// to has no port for echo requests.
	to netip.AddrPort
}

// echoID distinguishes the echo replies of a raw socket.
type echoID struct {
	six bool
	id  uint16
}

// forwardDatagrams forwards a stack's datagrams until Close. The caller calls Close before the
// stack's.
func forwardDatagrams(
	listener string, stack *netstack.Stack, inside tunnel.Inside, cfg access.Datagrams, with tunnel.Forwarding,
) *Datagrams {
	if with.Log == nil {
		with.Log = slog.New(slog.DiscardHandler)
	}
	with.Log = with.Log.With("listener", listener)
	d := &Datagrams{
		stack: stack, inside: inside, with: with, sessions: map[origin]*session{}, peers: map[string]*peer{},
		echoes: map[echoID]*session{}, associations: map[association]cc.Time{}, associationsByPeer: map[string]int{},
		lastID:     uint16(with.Clock()),
		wakeSignal: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	_, _ = rand.Read(d.cookie[:]) // it never fails
	d.Configure(cfg)
	d.openEchoes()
	d.done.Go(d.serveTimers)
	stack.SetDatagrams(d)
	return d
}

// openEchoes opens the raw sockets for echo requests where there may be no ping sockets
// (net.ipv4.ping_group_range), which is the kernel's default. It runs while the process still has
// its privileges. None are needed later.
func (d *Datagrams) openEchoes() {
	d.raw = map[bool]*socket{}
	for _, six := range []bool{false, true} {
		ping, err := newSocket(forPing, six, d.with.Mark)
		if err == nil {
			ping.closeSocket()
			continue
		}
		if !errors.Is(err, unix.EACCES) {
			d.with.Log.Debug("tunnel: no ping sockets", "ipv6", six, "err", err) // such as without IPv6
			continue
		}
		raw, err := newSocket(forRaw, six, d.with.Mark)
		if err != nil {
			d.with.Log.Warn("tunnel: pings through the tunnel stay unanswered; let the proxy make ping sockets "+
				"(sysctl -w net.ipv4.ping_group_range=\"0 2147483647\"), or start it with "+
				"CAP_NET_RAW", "ipv6", six, "err", err)
			continue
		}
		d.raw[six] = raw
		d.done.Go(func() { d.receiveEchoes(raw) })
	}
}

// receiveEchoes passes replies on from the raw socket that sessions share, until it is closed.
func (d *Datagrams) receiveEchoes(raw *socket) {
	for {
		news, err := raw.receiveOne()
		if err != nil {
			return
		}
		d.mu.Lock()
		s := d.echoes[echoID{raw.six, news.id}]
		d.mu.Unlock()
		if s != nil { // a raw socket also receives the replies to other processes' pings
			s.deliverReceived(news)
		}
		news.releaseMemory()
	}
}

// Configure puts another configuration into force. Sessions stay, unless their peers are gone or
// have too many.
func (d *Datagrams) Configure(cfg access.Datagrams) {
	d.cfg.Store(&cfg)
	d.mu.Lock()
	for _, p := range maps.Clone(d.peers) {
		for p.sessions.Len() > cfg.Sessions {
			d.removeSession(p.sessions.Back().Value.(*session))
		}
	}
	d.mu.Unlock()
	d.endStaleSessions(d.with.Clock())
}

// UDP implements netstack.Datagrams.
func (d *Datagrams) UDP(source, target netip.AddrPort, hops uint8, payload []byte) {
	d.forwardDatagram(origin{AddrPort: source}, target, hops, payload)
}

// Echo implements netstack.Datagrams.
func (d *Datagrams) Echo(source, target netip.Addr, hops uint8, message []byte) {
	identifier := binary.BigEndian.Uint16(message[4:])
	d.forwardDatagram(origin{AddrPort: netip.AddrPortFrom(source, identifier), echo: true}, netip.AddrPortFrom(target, 0),
		hops, message)
}

// EchoReply implements netstack.Datagrams. It passes a reply on to the peer that has asked, unless
// that was this gateway.
func (d *Datagrams) EchoReply(source, target netip.Addr, message []byte) {
	if d.isPing(message) {
		d.mu.Lock()
		p := d.peers[d.inside.Peer(source)]
		d.mu.Unlock()
		if p != nil {
			p.ReceiveAck(binary.BigEndian.Uint16(message[6:]), 1, 0)
		}
		return
	}
	asked := origin{AddrPort: netip.AddrPortFrom(target, binary.BigEndian.Uint16(message[4:])), echo: true}
	if !d.refreshAssociation(association{d.inside.Peer(target), asked, netip.AddrPortFrom(source, 0)}) {
		d.counts.unsolicited.Add(1)
		return
	}
	d.deliverToPeer(netip.AddrPortFrom(source, 0), asked, message)
}

// forwardDatagram sends a datagram on by the place of its target.
func (d *Datagrams) forwardDatagram(from origin, target netip.AddrPort, hops uint8, payload []byte) {
	switch d.inside.Place(target.Addr()) {
	case tunnel.OfPeer:
		d.forwardAcross(from, target, payload)
		return
	case tunnel.OfGateway:
		if from.echo {
			d.answerEcho(from, target.Addr(), payload)
			return
		}
		if server := d.cfg.Load().DNS; target.Port() == dnsPort && server.IsValid() {
			from.gatewayAddr, from.dnsServer = target, server
			target, hops = server, udpHops // the peer's datagram ends here: this one is ours
		}
	case tunnel.Elsewhere, tunnel.Unused:
	}
	s, up, err := d.sessionFor(from, target, "")
	if err != nil {
		d.refuseDatagram(from, target, payload, err)
		return
	}
	s.sendOutside(up, target, payload, hops)
}

// forwardAcross forwards a datagram from one peer to another, and keeps its source address.
func (d *Datagrams) forwardAcross(from origin, to netip.AddrPort, payload []byte) {
	if err := d.mayCross(from, to); err != nil {
		d.refuseDatagram(from, to, payload, err)
		return
	}
	target := origin{AddrPort: to, echo: from.echo}
	if from.echo {
		target.AddrPort = netip.AddrPortFrom(to.Addr(), from.Port()) // the identifier stays
	}
	d.deliverToPeer(from.AddrPort, target, payload)
}

// mayCross returns why a peer may not send to another; nil: it answers the other, or policy permits
// it.
func (d *Datagrams) mayCross(from origin, to netip.AddrPort) error {
	sender, receiver := d.inside.Peer(from.Addr()), d.inside.Peer(to.Addr())
	if sender == "" {
		return errors.New("its source is no peer's")
	}
	begun := association{sender, from, to}
	answered := association{receiver, origin{AddrPort: to}, from.AddrPort}
	if d.refreshAssociation(begun) || !from.echo && d.refreshAssociation(answered) {
		return nil
	}
	if _, _, err := d.with.Verdict(tunnel.Sent{Peer: sender, Source: from.AddrPort, Target: to}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, exists := d.associations[begun]; exists {
		return nil
	}
	if d.associationsByPeer[sender] >= d.cfg.Load().Sessions {
		return errCrowded
	}
	d.associations[begun] = d.with.Clock()
	d.associationsByPeer[sender]++
	return nil
}

// refreshAssociation reports whether an association exists, and records its use.
func (d *Datagrams) refreshAssociation(a association) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, exists := d.associations[a]; !exists {
		return false
	}
	d.associations[a] = d.with.Clock()
	return true
}

// deliverToPeer sends a packet to the peer that has the target. If that peer has sessions, the
// packet waits for room in the peer's part of a window.
func (d *Datagrams) deliverToPeer(source netip.AddrPort, target origin, payload []byte) {
	name := d.inside.Peer(target.Addr())
	d.counts.sentPackets.Add(1)
	d.counts.sentBytes.Add(uint64(len(payload)))
	d.mu.Lock()
	p := d.peers[name]
	d.mu.Unlock()
	if p == nil {
		p = &peer{shaper: shaper{d: d}, name: name}
	}
	p.sendOrQueue(d.with.Clock(), packet{fiveTuple: fiveTuple{source, target}, payload: payload})
}

// answerEcho answers an echo request for the gateway's own address inside.
func (d *Datagrams) answerEcho(from origin, gateway netip.Addr, message []byte) {
	message[0] = echoReply4
	if gateway.Is6() {
		message[0] = echoReply6
	}
	if err := d.stack.SendICMP(gateway, from.Addr(), message); err != nil {
		d.counts.failed.Add(1)
	}
}

// beginOutside begins a session with a target outside the tunnel. Peers inside are reached only by
// packets (CONNECT-IP).
func (d *Datagrams) beginOutside(from origin, target netip.AddrPort, host string) (*session, error) {
	if d.inside.Place(target.Addr()) != tunnel.Elsewhere {
		return nil, fmt.Errorf("destination %v is inside the tunnel: %w", target, syscall.EHOSTUNREACH)
	}
	s, _, err := d.sessionFor(from, target, host)
	return s, err
}

// sendFromClient sends a datagram of a CONNECT-UDP request; false: its session is over.
func (d *Datagrams) sendFromClient(s *session, target netip.AddrPort, payload []byte) bool {
	d.mu.Lock()
	if d.sessions[s.from] != s {
		d.mu.Unlock()
		return false
	}
	up, _ := s.uplinkFor(target, d.with.Clock()) // target is known: the session has no other
	d.mu.Unlock()
	s.sendOutside(up, target, payload, udpHops)
	return true
}

var errCrowded = errors.New("too many sessions")

// sessionFor returns the session of a datagram, and the uplink that holds it to a maximum rate;
// nil: none does. It opens a session if policy permits it. host is the target's name, if the client
// gave one.
//
// The socket is opened without d.mu. Where two goroutines open one for the same origin, the second
// is closed.
func (d *Datagrams) sessionFor(from origin, target netip.AddrPort, host string) (*session, *uplink, error) {
	now := d.with.Clock()
	d.mu.Lock()
	s := d.sessions[from]
	if s != nil {
		if up, known := s.uplinkFor(target, now); known {
			d.mu.Unlock()
			return s, up, nil
		}
	}
	d.mu.Unlock()
	name := d.ownerOf(from)
	if name == "" {
		return nil, nil, errors.New("its source is no peer's")
	}
	down, up, err := d.with.Verdict(tunnel.Sent{Peer: name, Source: from.AddrPort, Target: target, Host: host})
	if err != nil {
		return nil, nil, err
	}
	var fresh *socket
	if s == nil {
		if !d.hasRoom(name) {
			return nil, nil, errCrowded
		}
		if fresh, err = d.openSocket(from, target); err != nil {
			return nil, nil, errors.Join(errCrowded, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if s = d.sessions[from]; s == nil && fresh != nil {
		s = d.addSession(from, name, down, fresh)
	} else if fresh != nil { // another goroutine has added the session
		fresh.releaseSocket()
	}
	if s == nil {
		return nil, nil, errCrowded
	}
	s.addRemote(target, s.peer.uplinkFor(up))
	held, _ := s.uplinkFor(target, now)
	return s, held, nil
}

// ownerOf returns the name of the peer that has an origin; empty: none has.
func (d *Datagrams) ownerOf(from origin) string {
	if from.stream != nil {
		return from.stream.name
	}
	return d.inside.Peer(from.Addr())
}

// openSocket opens the socket for an origin, or returns the raw one that sessions share.
func (d *Datagrams) openSocket(from origin, target netip.AddrPort) (*socket, error) {
	six := target.Addr().Is6()
	switch {
	case !from.echo:
		return newSocket(forUDP, six, d.with.Mark)
	case d.raw[six] != nil:
		return d.raw[six], nil
	}
	return newSocket(forPing, six, d.with.Mark)
}

// addSession adds a session; nil: there is no room for it. The caller holds d.mu.
func (d *Datagrams) addSession(from origin, name string, terms flow.Terms, sock *socket) *session {
	if !d.makeRoom(name) {
		sock.releaseSocket()
		return nil
	}
	p := d.peers[name]
	if p == nil {
		p = d.newPeer(name, terms)
		d.peers[name] = p
		heap.Push(&d.bySessions, p)
	}
	s := &session{
		d: d, peer: p, from: from, socket: sock, remotes: map[netip.AddrPort]*uplink{},
		dns: from.stream == nil,
	}
	s.listEntry = p.sessions.PushFront(s)
	heap.Fix(&d.bySessions, p.heapIndex)
	d.sessions[from] = s
	if sock.isShared() {
		s.id = d.assignIdentifier(s)
	} else {
		d.done.Go(s.receiveUntilEnd)
	}
	return s
}

// newPeer makes a peer. The terms of its first datagram choose its window.
func (d *Datagrams) newPeer(name string, terms flow.Terms) *peer {
	p := &peer{shaper: shaper{d: d}, name: name, uplinks: map[rateLimit]*uplink{}}
	if terms.Algorithm != "" {
		p.openWindow(name, terms)
	}
	return p
}

// hasRoom reports whether a peer may have one more session, before a socket is opened for it.
func (d *Datagrams) hasRoom(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.peerToEvict(name)
	return ok
}

// makeRoom ends sessions until a peer may have one more; false: it may not. The caller holds d.mu.
func (d *Datagrams) makeRoom(name string) bool {
	for {
		p, ok := d.peerToEvict(name)
		if p == nil {
			return ok
		}
		d.counts.evicted.Add(1)
		d.removeSession(p.sessions.Back().Value.(*session))
	}
}

// peerToEvict returns the peer that has to lose its longest idle session before the named peer gets
// one more. That is the named peer itself if it has as many as one peer may have. If the tunnel has
// as many as it may have, it is the peer with the most. No peer loses its last session to another.
// nil and true: no session has to end; nil and false: none can. The caller holds d.mu.
func (d *Datagrams) peerToEvict(name string) (p *peer, ok bool) {
	cfg := d.cfg.Load()
	p = d.peers[name]
	switch {
	case d.closed || cfg.Sessions == 0:
		return nil, false
	case p != nil && p.sessions.Len() >= cfg.Sessions:
	case len(d.sessions) < cfg.MaxSessions:
		return nil, true
	case len(d.bySessions) == 0:
		return nil, false
	case p == nil || d.bySessions[0].sessions.Len() > p.sessions.Len():
		if p = d.bySessions[0]; p.sessions.Len() == 1 {
			return nil, false
		}
	}
	return p, true
}

// assignIdentifier gives a session on a raw socket an identifier of its own. The caller holds d.mu.
func (d *Datagrams) assignIdentifier(s *session) uint16 {
	for {
		d.lastID++ // there are fewer sessions than identifiers
		e := echoID{s.from.Addr().Is6(), d.lastID}
		if d.echoes[e] == nil {
			d.echoes[e] = s
			return e.id
		}
	}
}

// refuseDatagram drops a datagram. It sends an ICMP error, except where only room is missing.
func (d *Datagrams) refuseDatagram(from origin, target netip.AddrPort, payload []byte, err error) {
	if errors.Is(err, errCrowded) {
		d.counts.crowded.Add(1)
		d.with.Log.Debug("tunnel: datagram lost", "client", from.AddrPort, "target", target, "err", err)
		return
	}
	d.counts.refused.Add(1)
	d.with.Log.Debug("tunnel: datagram refused", "client", from.AddrPort, "target", target, "err", err)
	notice, ok := icmpErrorFor(err, target)
	if !ok {
		notice = prohibitedError(target)
	}
	d.sendICMPError(from, target, payload, notice)
}

// sendICMPError sends an ICMP error about payload to its sender. The stack limits their rate (RFC
// 1812 §4.3.2.8, RFC 4443 §2.4 f).
func (d *Datagrams) sendICMPError(about origin, target netip.AddrPort, payload []byte, u netstack.Unreachable) {
	if six := about.Addr().Is6(); six != target.Addr().Is6() { // a name server that answers in the gateway's place
		if u.MTU > 0 {
			return // of another path
		}
		u = translateICMP(u, six)
	}
	u.Source, u.Target, u.Echo, u.Length = about.AddrPort, about.shownSource(target), about.echo, len(payload)
	if u.Echo && len(payload) >= icmpHeader {
		u.Sequence, u.Length = binary.BigEndian.Uint16(payload[6:]), len(payload)-icmpHeader
	}
	switch sent, err := d.stack.SendUnreachable(u); {
	case err != nil:
		d.counts.failed.Add(1)
	case sent:
		d.counts.notices.Add(1)
	}
}

// serveTimers ends idle sessions, sends queued packets once there is room, and checks the timers of active shapers,
// until Close.
func (d *Datagrams) serveTimers() {
	timer, checks := time.NewTimer(0), time.NewTicker(time.Hour)
	defer timer.Stop()
	defer checks.Stop()
	isChecking := false
	for {
		select {
		case <-d.stop:
			return
		case <-checks.C:
			if isChecking = d.checkActive(d.with.Clock()); !isChecking {
				checks.Reset(time.Hour)
			}
		case <-d.wakeSignal:
			for _, p := range d.takeWoken() {
				p.sendAfterWake(d.with.Clock())
			}
			if !isChecking {
				isChecking = true
				checks.Reset(checkEvery)
			}
		case <-timer.C:
			d.endStaleSessions(d.with.Clock())
			timer.Reset(min(max(d.cfg.Load().Idle/8, 10*time.Millisecond), time.Second))
		}
	}
}

// takeWoken returns and clears wokenShapers.
func (d *Datagrams) takeWoken() []*shaper {
	d.wakeMu.Lock()
	defer d.wakeMu.Unlock()
	all := d.wokenShapers
	d.wokenShapers = nil
	return all
}

// endStaleSessions ends sessions that were idle for too long, and those with an address that
// another peer has now.
func (d *Datagrams) endStaleSessions(now cc.Time) {
	idle := d.cfg.Load().Idle
	owners := map[netip.Addr]string{}
	d.mu.Lock()
	for _, s := range d.sessions {
		if now.Sub(s.used) > s.idleTimeout(idle) {
			d.removeSession(s)
			continue
		}
		if s.from.stream == nil {
			owners[s.from.Addr()] = ""
		}
	}
	d.forgetAssociations(func(_ association, used cc.Time) bool { return now.Sub(used) > idle })
	d.mu.Unlock()
	for addr := range owners {
		owners[addr] = d.inside.Peer(addr)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sessions {
		if owner, known := owners[s.from.Addr()]; known && s.from.stream == nil && owner != s.peer.name {
			s.addressReused.Store(true)
			d.removeSession(s)
		}
	}
}

// finishSession ends a session, unless it has ended.
func (d *Datagrams) finishSession(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removeSession(s)
}

// forgetAddresses ends all sessions and associations of addresses inside.
func (d *Datagrams) forgetAddresses(inner []netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sessions {
		if s.from.stream == nil && slices.Contains(inner, s.from.Addr()) {
			s.addressReused.Store(true)
			d.removeSession(s)
		}
	}
	d.forgetAssociations(func(a association, _ cc.Time) bool {
		return slices.Contains(inner, a.from.Addr()) || slices.Contains(inner, a.to.Addr())
	})
}

// forgetAssociations forgets the associations that over selects. The caller holds d.mu.
func (d *Datagrams) forgetAssociations(over func(a association, used cc.Time) bool) {
	for a, used := range d.associations {
		if !over(a, used) {
			continue
		}
		delete(d.associations, a)
		if d.associationsByPeer[a.sender]--; d.associationsByPeer[a.sender] == 0 {
			delete(d.associationsByPeer, a.sender)
		}
	}
}

// removeSession forgets a session, and its peer with the last one. The caller holds d.mu.
func (d *Datagrams) removeSession(s *session) {
	if d.sessions[s.from] != s {
		return
	}
	delete(d.sessions, s.from)
	s.peer.sessions.Remove(s.listEntry)
	heap.Fix(&d.bySessions, s.peer.heapIndex)
	if s.socket.isShared() {
		delete(d.echoes, echoID{s.from.Addr().Is6(), s.id})
	}
	s.socket.releaseSocket()
	if s.from.stream != nil {
		s.from.stream.cancel()
	}
	if s.peer.sessions.Len() == 0 {
		heap.Remove(&d.bySessions, s.peer.heapIndex)
		delete(d.peers, s.peer.name)
		s.peer.closeWindow()
		for _, u := range s.peer.uplinks {
			s.peer.dropUplink(u)
		}
	}
}

// countDropped counts a packet that a queue has dropped.
func (d *Datagrams) countDropped(_ packet, why flow.Drop) {
	if why == flow.DroppedOverflow {
		d.counts.overflow.Add(1)
		return
	}
	d.counts.late.Add(1)
}

// Stats returns the counts.
func (d *Datagrams) Stats() tunnel.DatagramStats {
	d.mu.Lock()
	sessions, peers := len(d.sessions), len(d.peers)
	d.mu.Unlock()
	c := &d.counts
	return tunnel.DatagramStats{
		Sessions: sessions, Peers: peers,
		SentPackets: c.sentPackets.Load(), SentBytes: c.sentBytes.Load(),
		ReceivedPackets: c.receivedPackets.Load(), ReceivedBytes: c.receivedBytes.Load(),
		Refused: c.refused.Load(), Crowded: c.crowded.Load(), Late: c.late.Load(), Overflow: c.overflow.Load(),
		Failed: c.failed.Load(), Unsolicited: c.unsolicited.Load(), Evicted: c.evicted.Load(), Notices: c.notices.Load(),
	}
}

// Close ends all sessions.
func (d *Datagrams) Close() error {
	d.stack.SetDatagrams(nil)
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	d.closed = true
	for _, s := range d.sessions {
		d.removeSession(s)
	}
	d.mu.Unlock()
	for _, raw := range d.raw {
		raw.closeSocket()
	}
	close(d.stop)
	d.done.Wait()
	return nil
}

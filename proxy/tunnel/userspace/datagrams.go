package userspace

import (
	"container/heap"
	"encoding/binary"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

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

// Datagrams forwards the UDP datagrams and echo requests of a tunnel: each address and
// port of a peer has a socket of its own to send to anybody outside, which accepts
// answers only from those that it has sent to (endpoint-independent mapping with
// address- and port-dependent filtering, RFC 4787 §4.1 and §5).
type Datagrams struct {
	stack  *netstack.Stack
	inside tunnel.Inside
	with   tunnel.Forwarding
	cfg    atomic.Pointer[access.Datagrams]
	counts counters
	queued atomic.Int64     // bytes that wait for room, of all peers
	raw    map[bool]*socket // for echo requests over IPv6 (true) and IPv4 that may have no sockets of their own

	mu                 sync.Mutex
	sessions           map[origin]*session
	peers              map[string]*peer
	bySessions         peerHeap
	echoes             map[echoID]*session     // those that share a raw socket
	lastID             uint16                  // the identifier given to one of echoes last
	associations       map[association]cc.Time // between peers, with when they were last used
	associationsByPeer map[string]int          // how many each peer has begun
	closed             bool

	wakeSignal   chan struct{} // woken is not empty
	wakeMu       sync.Mutex
	wokenShapers []*shaper
	stop         chan struct{}
	done         sync.WaitGroup
}

// origin is a peer's address and port, or the identifier of its echo requests.
type origin struct {
	netip.AddrPort
	echo        bool
	stream      *udpStream     // a CONNECT-UDP request from that address outside; nil: it is inside
	gatewayAddr netip.AddrPort // the gateway's, if a name server outside answers in its place; else invalid
	dnsServer   netip.AddrPort // that name server: another one is another session
}

// shownSource is the source address that the peer is shown of a datagram from source outside.
func (o origin) shownSource(source netip.AddrPort) netip.AddrPort {
	if o.gatewayAddr.IsValid() {
		return o.gatewayAddr
	}
	return source
}

// echoID tells the echo replies that a raw socket receives apart.
type echoID struct {
	six bool
	id  uint16
}

type counters struct {
	sentPackets, sentBytes, receivedPackets, receivedBytes                  atomic.Uint64
	refused, crowded, evicted, late, overflow, failed, unsolicited, notices atomic.Uint64
}

// forwardDatagrams forwards a stack's datagrams until Close, which the caller calls
// before the stack's Close.
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
	d.Configure(cfg)
	d.openEchoes()
	d.done.Go(d.endIdleSessions)
	stack.Handle(d)
	return d
}

// Configure puts another configuration into force. Sessions stay, unless their peers are
// gone or may not have as many. A new Share applies only to peers that have no session yet.
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
	d.stack.Handle(nil)
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

var errCrowded = errors.New("too many sessions")

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

// refuseDatagram drops a datagram and says why, unless there was only no room for it.
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

// prohibitedError is the error for what policy refuses (RFC 1812 §5.2.7.1, RFC 4443 §3.1).
func prohibitedError(target netip.AddrPort) netstack.Unreachable {
	if target.Addr().Is6() {
		return netstack.Unreachable{Type: 1, Code: 1}
	}
	return netstack.Unreachable{Type: 3, Code: 13}
}

// sendICMPError sends the sender of payload an ICMP error about it, unless there have been many
// of late (RFC 1812 §4.3.2.8, RFC 4443 §2.4 f).
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
	switch told, err := d.stack.SendUnreachable(u); {
	case err != nil:
		d.counts.failed.Add(1)
	case told:
		d.counts.notices.Add(1)
	}
}

// sessionFor returns the session of a datagram, a new one if there is none and policy permits
// it, and the uplink that holds the datagram to a maximum rate; nil: none. host is the name
// that the target was given as, if it was.
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
	} else if fresh != nil { // another was faster
		fresh.releaseSocket()
	}
	if s == nil {
		return nil, nil, errCrowded
	}
	s.addRemote(target, s.peer.uplinkFor(up))
	held, _ := s.uplinkFor(target, now)
	return s, held, nil
}

// ownerOf is the name of the peer that has an origin; empty: none has.
func (d *Datagrams) ownerOf(from origin) string {
	if from.stream != nil {
		return from.stream.name
	}
	return d.inside.Peer(from.Addr())
}

// addSession adds a session; nil if there is no room for it. The caller holds d.mu.
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
		d.done.Go(s.receive)
	}
	return s
}

// hasRoom tells whether a peer may have one more session at present, before a socket is opened.
func (d *Datagrams) hasRoom(name string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, ok := d.peerToEvict(name)
	return ok
}

// makeRoom ends sessions until a peer may have one more. The caller holds d.mu.
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

// peerToEvict returns the peer whose longest idle session has to end for a peer to have one more: the peer
// itself if it has as many as one may, and if the tunnel has as many as it may, the peer with the
// most. No peer loses its last one to another. nil: none has to end, or, if not ok, none can. The
// caller holds d.mu.
func (d *Datagrams) peerToEvict(name string) (p *peer, ok bool) {
	cfg := d.cfg.Load()
	p = d.peers[name]
	switch {
	case d.closed || cfg.Sessions == 0:
		return nil, false
	case p != nil && p.sessions.Len() >= cfg.Sessions:
	case len(d.sessions) < cfg.Most:
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

// assignIdentifier gives a session that shares a raw socket an identifier of its own. The
// caller holds d.mu.
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

// removeSession forgets a session. The caller holds d.mu.
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

// endIdleSessions ends idle sessions, and sends what has waited for room.
func (d *Datagrams) endIdleSessions() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-d.wakeSignal:
			for _, p := range d.takeWoken() {
				p.sendAfterWake(d.with.Clock())
			}
		case <-timer.C:
			d.endStaleSessions(d.with.Clock())
			timer.Reset(min(max(d.cfg.Load().Idle/8, 10*time.Millisecond), time.Second))
		}
	}
}

func (d *Datagrams) takeWoken() []*shaper {
	d.wakeMu.Lock()
	defer d.wakeMu.Unlock()
	all := d.wokenShapers
	d.wokenShapers = nil
	return all
}

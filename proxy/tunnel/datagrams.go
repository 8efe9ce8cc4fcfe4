package tunnel

import (
	"container/list"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
)

const (
	defaultIdle  = time.Minute
	answeredDNS  = 5 * time.Second // a name server has nothing more to say
	dnsPort      = 53
	maxEndpoints = 1 << 14 // of all peers of a tunnel: each is a socket
	maxRemotes   = 1024    // of one session: who else may answer it
)

// Forwarding is what datagrams need besides what configuration says of them.
type Forwarding struct {
	Listener string
	Outside  Outside
	// Verdict is policy's, and the Fence's: an error refuses what peer sends to
	// target, which for an echo request has no port. The terms say whose window the
	// answers share; without an algorithm nobody's.
	Verdict func(peer string, source, target netip.AddrPort) (flow.Terms, error)
	Flows   *flow.Manager
	Clock   func() cc.Time
	Mark    uint32 // of the sockets; 0: none
	Log     *slog.Logger
}

// Datagrams forwards the UDP and the echo requests of a tunnel: each address and
// port of a peer has a socket of its own, through which it reaches anybody, and
// through which those answer that it has written to (RFC 4787's
// endpoint-independent mapping with address- and port-dependent filtering).
type Datagrams struct {
	stack *netstack.Stack
	with  Forwarding
	cfg   atomic.Pointer[DatagramConfig]
	count counters
	ids   atomic.Uint32 // identifiers for raw sockets
	noted atomic.Bool   // that echo requests cannot be sent

	mu       sync.Mutex
	sessions map[origin]*session
	peers    map[string]*peer
	closed   bool

	wakes chan struct{} // woken is not empty
	wake  sync.Mutex
	woken []*peer
	stop  chan struct{}
	done  sync.WaitGroup
}

// origin is a peer's address and port, or the identifier of its echo requests.
type origin struct {
	netip.AddrPort
	echo bool
}

type counters struct {
	sentPackets, sentBytes, receivedPackets, receivedBytes atomic.Uint64
	refused, crowded, late, failed, unsolicited            atomic.Uint64
}

// DatagramStats counts, since the start, what became of datagrams; bytes are of
// payload.
type DatagramStats struct {
	Sessions, Peers                                        int // at the moment
	SentPackets, SentBytes, ReceivedPackets, ReceivedBytes uint64
	Refused                                                uint64 // by policy, or of nobody
	Crowded                                                uint64 // lost, since there were too many sessions, or sockets
	Late                                                   uint64 // lost to peers, since flows left them no room in time
	Failed                                                 uint64 // among sent and received: the network outside, or the tunnel, did not take them
	Unsolicited                                            uint64 // from whom the peer had not written to
}

// ForwardDatagrams has a stack's datagrams forwarded until Close, which comes
// before the stack's.
func ForwardDatagrams(stack *netstack.Stack, cfg DatagramConfig, with Forwarding) *Datagrams {
	if with.Log == nil {
		with.Log = slog.New(slog.DiscardHandler)
	}
	with.Log = with.Log.With("listener", with.Listener)
	d := &Datagrams{
		stack: stack, with: with, sessions: map[origin]*session{}, peers: map[string]*peer{},
		wakes: make(chan struct{}, 1), stop: make(chan struct{}),
	}
	d.ids.Store(uint32(with.Clock()))
	d.Configure(cfg)
	d.done.Go(d.keep)
	stack.Handle(d)
	return d
}

// Configure puts another configuration into force; sessions stay. A share holds
// for peers that have none yet.
func (d *Datagrams) Configure(cfg DatagramConfig) {
	if cfg.Idle == 0 {
		cfg.Idle = defaultIdle
	}
	d.cfg.Store(&cfg)
}

// Stats returns the counts.
func (d *Datagrams) Stats() DatagramStats {
	d.mu.Lock()
	sessions, peers := len(d.sessions), len(d.peers)
	d.mu.Unlock()
	c := &d.count
	return DatagramStats{
		Sessions: sessions, Peers: peers,
		SentPackets: c.sentPackets.Load(), SentBytes: c.sentBytes.Load(),
		ReceivedPackets: c.receivedPackets.Load(), ReceivedBytes: c.receivedBytes.Load(),
		Refused: c.refused.Load(), Crowded: c.crowded.Load(), Late: c.late.Load(), Failed: c.failed.Load(), Unsolicited: c.unsolicited.Load(),
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
		d.end(s)
	}
	d.mu.Unlock()
	close(d.stop)
	d.done.Wait()
	return nil
}

// UDP implements netstack.Datagrams.
func (d *Datagrams) UDP(source, target netip.AddrPort, payload []byte) {
	d.forward(origin{source, false}, target, payload)
}

// Echo implements netstack.Datagrams.
func (d *Datagrams) Echo(source, target netip.Addr, message []byte) {
	identifier := binary.BigEndian.Uint16(message[4:])
	d.forward(origin{netip.AddrPortFrom(source, identifier), true}, netip.AddrPortFrom(target, 0), message)
}

var errCrowded = errors.New("too many sessions")

func (d *Datagrams) forward(from origin, target netip.AddrPort, payload []byte) {
	s, err := d.session(from, target)
	switch {
	case errors.Is(err, errCrowded):
		d.count.crowded.Add(1)
		d.with.Log.Debug("tunnel: datagram lost", "client", from.AddrPort, "target", target, "err", err)
		return
	case err != nil:
		d.count.refused.Add(1)
		d.with.Log.Debug("tunnel: datagram refused", "client", from.AddrPort, "target", target, "err", err)
		d.tell(from, target, payload, prohibited(target))
		return
	}
	d.count.sentPackets.Add(1)
	d.count.sentBytes.Add(uint64(len(payload)))
	if err := s.socket.send(target, payload); err != nil {
		d.count.failed.Add(1)
	}
}

// prohibited is the error for what policy refuses (RFC 1812 §5.2.7.1, RFC 4443 §3.1).
func prohibited(target netip.AddrPort) netstack.Unreachable {
	if target.Addr().Is6() {
		return netstack.Unreachable{Type: 1, Code: 1}
	}
	return netstack.Unreachable{Type: 3, Code: 13}
}

// tell passes an ICMP error about payload on to whom it came from.
func (d *Datagrams) tell(about origin, target netip.AddrPort, payload []byte, u netstack.Unreachable) {
	u.Source, u.Target, u.Echo, u.Length = about.AddrPort, target, about.echo, len(payload)
	if u.Echo && len(payload) >= icmpHeader {
		u.Sequence, u.Length = binary.BigEndian.Uint16(payload[6:]), len(payload)-icmpHeader
	}
	if err := d.stack.SendUnreachable(u); err != nil {
		d.count.failed.Add(1)
	}
}

// session returns the session that a datagram belongs to; a new one, if policy
// has nothing against it.
func (d *Datagrams) session(from origin, target netip.AddrPort) (*session, error) {
	d.mu.Lock()
	s := d.sessions[from]
	if s != nil && s.knows(target) {
		s.touch(d.with.Clock())
		d.mu.Unlock()
		return s, nil
	}
	d.mu.Unlock()
	name := d.with.Outside.Peer(from.Addr())
	if name == "" {
		return nil, errors.New("its source is no peer's")
	}
	terms, err := d.with.Verdict(name, from.AddrPort, target)
	if err != nil {
		return nil, err
	}
	var fresh *socket
	if s == nil {
		if fresh, err = d.openSocket(from); err != nil {
			return nil, errors.Join(errCrowded, err)
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if s = d.sessions[from]; s == nil && fresh != nil {
		s = d.begin(from, name, terms, fresh)
	} else if fresh != nil { // another was faster
		fresh.close()
	}
	if s == nil {
		return nil, errCrowded
	}
	s.learn(target)
	s.touch(d.with.Clock())
	return s, nil
}

// begin adds a session; nil if there is no room for it. The caller holds d.mu.
func (d *Datagrams) begin(from origin, name string, terms flow.Terms, sock *socket) *session {
	most := d.cfg.Load().Sessions
	p := d.peers[name]
	for p != nil && p.sessions.Len() > 0 && (p.sessions.Len() >= most || len(d.sessions) >= maxEndpoints) {
		d.end(p.sessions.Back().Value.(*session))
		p = d.peers[name]
	}
	if d.closed || most == 0 || len(d.sessions) >= maxEndpoints {
		sock.close()
		return nil
	}
	if p == nil {
		p = d.newPeer(name, terms)
		d.peers[name] = p
	}
	s := &session{d: d, peer: p, from: from, socket: sock, remotes: map[netip.AddrPort]struct{}{}, dns: true}
	s.place = p.sessions.PushFront(s)
	d.sessions[from] = s
	d.done.Go(s.receive)
	return s
}

// end forgets a session. The caller holds d.mu.
func (d *Datagrams) end(s *session) {
	if d.sessions[s.from] != s {
		return
	}
	delete(d.sessions, s.from)
	s.peer.sessions.Remove(s.place)
	s.socket.close()
	if s.peer.sessions.Len() == 0 {
		delete(d.peers, s.peer.name)
		s.peer.leave()
	}
}

// keep ends what is idle, and lets go what has waited for room.
func (d *Datagrams) keep() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-d.stop:
			return
		case <-d.wakes:
			for _, p := range d.takeWoken() {
				p.drain(d.with.Clock())
			}
		case <-timer.C:
			d.sweep(d.with.Clock())
			timer.Reset(min(max(d.cfg.Load().Idle/8, 10*time.Millisecond), time.Second))
		}
	}
}

func (d *Datagrams) takeWoken() []*peer {
	d.wake.Lock()
	defer d.wake.Unlock()
	all := d.woken
	d.woken = nil
	return all
}

// sweep ends the sessions that have been idle for long enough, and those whose
// address is another peer's now.
func (d *Datagrams) sweep(now cc.Time) {
	idle := d.cfg.Load().Idle
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.sessions {
		if now.Sub(s.used) > s.lasts(idle) || d.with.Outside.Peer(s.from.Addr()) != s.peer.name {
			d.end(s)
		}
	}
}

// session is a peer's endpoint and its socket. d.mu guards what changes.
type session struct {
	d      *Datagrams
	peer   *peer
	from   origin
	socket *socket
	place  *list.Element // among the peer's, the latest used first

	remotes  map[netip.AddrPort]struct{} // written to: they may answer
	used     cc.Time
	dns      bool // all remotes are name servers
	answered bool
}

func (s *session) knows(remote netip.AddrPort) bool {
	_, ok := s.remotes[remote]
	return ok
}

func (s *session) learn(remote netip.AddrPort) {
	if len(s.remotes) >= maxRemotes {
		for any := range s.remotes {
			delete(s.remotes, any)
			break
		}
	}
	s.remotes[remote] = struct{}{}
	s.dns = s.dns && !s.from.echo && remote.Port() == dnsPort
}

func (s *session) touch(now cc.Time) {
	s.used = now
	s.peer.sessions.MoveToFront(s.place)
}

func (s *session) lasts(idle time.Duration) time.Duration {
	if s.dns && s.answered {
		return min(idle, answeredDNS)
	}
	return idle
}

// receive passes on what comes from outside until the session ends.
func (s *session) receive() {
	for {
		news, err := s.socket.receive()
		if err != nil {
			s.d.mu.Lock()
			s.d.end(s)
			s.d.mu.Unlock()
			return
		}
		s.take(news)
		news.release()
	}
}

func (s *session) take(news received) {
	d := s.d
	now := d.with.Clock()
	d.mu.Lock()
	known := s.knows(news.from)
	if known && news.failure == nil {
		s.answered = true
		s.touch(now)
	}
	d.mu.Unlock()
	switch {
	case !known:
		d.count.unsolicited.Add(1)
	case news.failure != nil:
		d.tell(s.from, news.from, news.payload, *news.failure)
	default:
		for left := news.payload; ; {
			n := len(left)
			if news.segment > 0 {
				n = min(n, news.segment)
			}
			s.peer.pass(now, packet{source: news.from, target: s.from, payload: left[:n]})
			if left = left[n:]; len(left) == 0 {
				return
			}
		}
	}
}

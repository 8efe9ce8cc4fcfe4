package userspace

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	legs "github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// sessionQueue bounds the packets that wait for a session's QUIC connection: 20 ms of half a
// gigabit. What comes beyond it is lost, and the senders in the stack slow down.
const sessionQueue = 1024

// How many packets of a client's go into the stack, and out of it, at once.
const (
	inwardBatch  = 64
	outwardBatch = 16
)

// What comes before each packet in a datagram: a quarter of the stream's number (RFC 9297
// §2.1), and a context ID, of which zero is for IP packets (RFC 9484 §6).
const (
	contextID    = 1 // byte
	beforePacket = 8 + contextID
)

// maxAsked bounds the addresses that a client may ask for at once: answers wait until it reads them.
const maxRequestedAddresses = 64

// ipSession is one client's CONNECT-IP.
type ipSession struct {
	masque    *MASQUE
	name      string
	endpoint  string
	addrs     []netip.Addr
	scope     ipScope
	conn      *quic.Conn
	stream    *http3.Stream
	datagrams *legs.Datagrams
	outlet    *netstack.Outlet // nil: the session has not begun

	received, sent atomic.Uint64 // bytes of packets
}

// Sessions returns the present CONNECT-IP sessions, ordered by address.
func (m *MASQUE) Sessions() []tunnel.SessionState {
	m.mu.RLock()
	defer m.mu.RUnlock()
	var states []tunnel.SessionState
	for a, s := range m.sessions {
		if a == s.addrs[0] {
			states = append(states, tunnel.SessionState{
				Name: s.name, Endpoint: s.endpoint, Addresses: slices.Clone(s.addrs), Received: s.received.Load(),
				Sent: s.sent.Load(),
			})
		}
	}
	sort.Slice(states, func(i, j int) bool { return states[i].Addresses[0].Less(states[j].Addresses[0]) })
	return states
}

// addTraffic returns the sum of t and the session's traffic.
func (s *ipSession) addTraffic(t tunnel.Traffic) tunnel.Traffic {
	return tunnel.Traffic{Received: t.Received + s.received.Load(), Sent: t.Sent + s.sent.Load()}
}

// maxClients bounds the names whose past sessions are counted: certificates may hold
// any number.
const maxClients = 4096

// clientTraffic returns the traffic of all sessions so far, by the name of their peer.
func (m *MASQUE) clientTraffic() map[string]tunnel.Traffic {
	m.mu.RLock()
	defer m.mu.RUnlock()
	all := maps.Clone(m.endedTraffic)
	for a, s := range m.sessions {
		if a == s.addrs[0] {
			all[s.name] = s.addTraffic(all[s.name])
		}
	}
	return all
}

// hijacked gives connect-ip a stream that we use as well: connect-ip handles its
// capsules, we its datagrams.
type hijacked struct {
	http.ResponseWriter
	stream *http3.Stream
}

func (hijacked) WriteHeader(int)                      {}
func (t hijacked) HTTPStream() (*http3.Stream, error) { return t.stream, nil }
func (t hijacked) Header() http.Header                { return http.Header{} }
func prefixOf(a netip.Addr) netip.Prefix              { return netip.PrefixFrom(a, a.BitLen()) }

// serveIP runs a CONNECT-IP session until either side ends it.
func (m *MASQUE) serveIP(w http.ResponseWriter, r *http.Request, who identity) {
	scope, err := scopeOf(r, func(ctx context.Context, name string) ([]netip.Addr, error) {
		return m.resolveName(ctx, who.name, name)
	})
	switch {
	case errors.Is(err, errLookups):
		m.rejectRequest(w, r, http.StatusServiceUnavailable, errLookups.Error())
		return
	case err != nil:
		m.rejectRequest(w, r, http.StatusBadRequest, err.Error())
		return
	}
	addrs, err := m.takeSessionAddresses(who.name)
	if err != nil {
		m.log.Warn("tunnel: CONNECT-IP refused", "peer", who.name, "err", err)
		m.rejectRequest(w, r, http.StatusServiceUnavailable, err.Error())
		return
	}
	conn, _ := r.Context().Value(connKey{}).(*quic.Conn)
	s := &ipSession{
		masque: m, conn: conn, name: who.name, endpoint: r.RemoteAddr, addrs: addrs, scope: scope,
	}
	if err := s.runSession(w, r); err != nil {
		m.log.Debug("tunnel: CONNECT-IP ended", "peer", who.name, "err", err)
	}
	// What is for this client must not reach the next with its addresses.
	m.stack.AbortFor(addrs)
	if d := m.datagrams.Load(); d != nil {
		d.forgetAddresses(addrs)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pool.returnAddresses(addrs)
	if m.sessionsPerPeer[who.name]--; m.sessionsPerPeer[who.name] == 0 {
		delete(m.sessionsPerPeer, who.name)
	}
}

// takeSessionAddresses takes addresses for one more session of a peer.
func (m *MASQUE) takeSessionAddresses(name string) ([]netip.Addr, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sessionsPerPeer[name] >= maxSessions {
		return nil, errTooManySessions
	}
	addrs, err := m.pool.takeAddresses(name)
	if err == nil {
		m.sessionsPerPeer[name]++
	}
	return addrs, err
}

var errTooManySessions = fmt.Errorf("a peer may have %d sessions at a time", maxSessions)

func (s *ipSession) runSession(w http.ResponseWriter, r *http.Request) (err error) {
	w.Header().Set(http3.CapsuleProtocolHeader, "?1")
	w.WriteHeader(http.StatusOK)
	if s.stream, err = w.(http3.HTTPStreamer).HTTPStream(); err != nil {
		return err
	}
	capsules, err := (&connectip.Proxy{}).Proxy(hijacked{w, s.stream}, nil)
	if err != nil {
		return err
	}
	s.datagrams, err = legs.ReceiveDatagrams(s.stream.QlogTrace(), s.stream.StreamID(), s.stream.ReceiveDatagram)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(r.Context())
	var done sync.WaitGroup
	defer func() {
		s.masque.removeSession(s)
		cancel()
		_ = capsules.Close()
		done.Wait()
	}()
	s.masque.addSession(s)
	done.Go(func() { s.moveInward(ctx) })
	done.Go(func() { s.moveOutward(ctx) })

	if err := s.assignAddresses(capsules); err != nil {
		return err
	}
	done.Go(func() { // what the client assigns to us is of no use, but would wait
		for {
			if _, err := capsules.ReceiveAddressAssignment(ctx); err != nil {
				return
			}
		}
	})
	for {
		asked, err := capsules.ReceiveAddressRequest(ctx)
		if err != nil {
			return err
		}
		if len(asked.Prefixes) > maxRequestedAddresses {
			return fmt.Errorf("the client asks for %d addresses at once", len(asked.Prefixes))
		}
		if err := s.answerAddressRequest(asked); err != nil {
			return err
		}
	}
}

// assignAddresses tells the client its addresses, and what it may reach.
func (s *ipSession) assignAddresses(capsules *connectip.Conn) error {
	var prefixes []netip.Prefix
	for _, a := range s.addrs {
		prefixes = append(prefixes, prefixOf(a))
	}
	if err := capsules.AssignAddresses(prefixes); err != nil {
		return err
	}
	return capsules.AdvertiseRoute(s.scope.advertisedRoutes(s.addrs))
}

// answerAddressRequest gives a client that asks for addresses those that it has: an answer
// replaces all before it (RFC 9484 §4.7.1).
func (s *ipSession) answerAddressRequest(asked *connectip.AddressRequest) error {
	rest := slices.Clone(s.addrs)
	given := make([]netip.Prefix, len(asked.Prefixes)) // zero: refused
	for i, p := range asked.Prefixes {
		j := slices.IndexFunc(rest, func(a netip.Addr) bool {
			return a.Is4() == p.Addr().Is4() && (p.Addr().IsUnspecified() || p.Contains(a))
		})
		if j >= 0 {
			given[i] = prefixOf(rest[j])
			rest = slices.Delete(rest, j, j+1)
		}
	}
	var others []netip.Prefix
	for _, a := range rest {
		others = append(others, prefixOf(a))
	}
	return asked.Respond(given, others)
}

// moveInward moves packets from the client into the stack, those that come together at once.
func (s *ipSession) moveInward(ctx context.Context) {
	defer s.datagrams.Close()
	batch, packets := make([][]byte, 0, inwardBatch), make([][]byte, 0, inwardBatch)
	for {
		var err error
		if batch, err = s.datagrams.Receive(ctx, batch); err != nil {
			return
		}
		packets = packets[:0]
		for _, b := range batch {
			if p, ok := s.packetOf(b); ok {
				s.clampMSS(p)
				s.received.Add(uint64(len(p)))
				packets = append(packets, p)
			}
		}
		s.masque.stack.Deliver(packets...)
	}
}

// packetOf returns the packet in a datagram, if it is one that this client may send.
func (s *ipSession) packetOf(b []byte) ([]byte, bool) {
	drops := &s.masque.drops
	id, n, err := quicvarint.Parse(b)
	if err != nil {
		drops.malformed.Add(1)
		return nil, false
	}
	if id != 0 {
		return nil, false // of an extension that we do not have
	}
	from, to, ok := endsOf(b[n:])
	if !ok {
		drops.malformed.Add(1)
		return nil, false
	}
	if !slices.Contains(s.addrs, from) {
		drops.source.Add(1)
		return nil, false
	}
	if !s.scope.containsPacket(b[n:], to) {
		drops.destination.Add(1)
		return nil, false
	}
	return b[n:], true
}

// moveOutward moves packets to the client.
func (s *ipSession) moveOutward(ctx context.Context) {
	bufs, sizes := makeBuffers(outwardBatch, beforePacket+s.masque.stack.MTU())
	prefix := append(quicvarint.Append(nil, uint64(s.stream.StreamID()/4)), 0)
	begin := beforePacket - len(prefix)
	for _, b := range bufs {
		copy(b[begin:], prefix)
	}
	for {
		n, err := s.outlet.Collect(ctx, bufs, sizes, beforePacket)
		if err != nil {
			return
		}
		for i, b := range bufs[:n] {
			if !s.sendDatagram(b[begin:beforePacket+sizes[i]], b[beforePacket:beforePacket+sizes[i]]) {
				return
			}
		}
	}
}

// sendDatagram sends a datagram, the last part of which is packet, to the client; false: the connection
// has ended. The stream's SendDatagram would copy it once more.
func (s *ipSession) sendDatagram(datagram, packet []byte) bool {
	s.clampMSS(packet)
	err := s.conn.SendDatagram(datagram)
	var large *quic.DatagramTooLargeError
	switch {
	case err == nil:
		s.sent.Add(uint64(len(packet)))
	case errors.As(err, &large):
		s.masque.drops.large.Add(1)
		if icmp := tooBig(packet, s.largestPacket(large)); icmp != nil {
			s.masque.stack.Deliver(icmp)
		}
	default:
		return false
	}
	return true
}

// largestPacket is the size of the largest packet, in bytes, that fits a datagram behind stream and context.
func (s *ipSession) largestPacket(large *quic.DatagramTooLargeError) int {
	return int(large.MaxDatagramPayloadSize) - quicvarint.Len(uint64(s.stream.StreamID()/4)) - contextID
}

// oversized fits no datagram, as quic-go's packets have 1452 bytes at most: quic-go tells what does
// fit only by the error about one that does not.
var oversized [2048]byte

// clampMSS lowers the MSS in SYNs of both ends of a connection to what fits at present; the
// path may turn out to carry more, never less.
func (s *ipSession) clampMSS(p []byte) {
	if !isSYN(p) {
		return
	}
	var large *quic.DatagramTooLargeError
	if errors.As(s.stream.SendDatagram(oversized[:]), &large) {
		clampMSS(p, s.largestPacket(large))
	}
}

func (m *MASQUE) addSession(s *ipSession) {
	s.outlet = m.stack.Outlet(sessionQueue, s.addrs)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range s.addrs {
		m.sessions[a] = s
	}
}

func (m *MASQUE) removeSession(s *ipSession) {
	s.outlet.Close()
	m.mu.Lock()
	defer m.mu.Unlock()
	if t, known := m.endedTraffic[s.name]; known || len(m.endedTraffic) < maxClients {
		m.endedTraffic[s.name] = s.addTraffic(t)
	}
	for _, a := range s.addrs {
		delete(m.sessions, a)
	}
}

// dropUnmatched drops what the stack sends to addresses without a session.
func (m *MASQUE) dropUnmatched(ctx context.Context) {
	bufs, sizes := makeBuffers(outwardBatch, m.stack.MTU())
	for {
		n, err := m.stack.Collect(ctx, bufs, sizes, 0)
		if err != nil {
			return
		}
		m.drops.destination.Add(uint64(n))
	}
}

// extendedProtocol is the protocol of an extended CONNECT (RFC 9220); empty: r is a plain one.
func extendedProtocol(r *http.Request) string {
	if strings.HasPrefix(r.Proto, "HTTP/") {
		return ""
	}
	return r.Proto
}

// clientAddr reads an address as package net writes it.
func clientAddr(s string) netip.AddrPort {
	a, _ := netip.ParseAddrPort(s)
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

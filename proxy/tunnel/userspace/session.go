package userspace

import (
	"container/list"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// session is an address and port of a peer with the socket for it. d.mu guards what changes.
type session struct {
	d         *Datagrams
	peer      *peer
	from      origin
	socket    *socket
	id        uint16        // of its echo requests in a raw socket that it shares
	listEntry *list.Element // among the peer's, the latest used first

	remotes       map[netip.AddrPort]*uplink // sent to, so they may answer; nil: not held to a rate
	used          cc.Time
	addressReused atomic.Bool // its address may be another client's: queued packets are dropped
	dns           bool        // all remotes are name servers
	hasAnswer     bool
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

func (s *session) knowsRemote(remote netip.AddrPort) bool {
	_, ok := s.remotes[remote]
	return ok
}

// uplinkFor returns the uplink that holds datagrams for a remote to a rate; false: the remote is
// new, so policy is to be asked. The caller holds d.mu.
func (s *session) uplinkFor(remote netip.AddrPort, now cc.Time) (*uplink, bool) {
	up, known := s.remotes[remote]
	if !known {
		return nil, false
	}
	s.noteUse(now)
	if up != nil {
		if up.evicted {
			up = s.peer.uplinkFor(up.terms)
			s.remotes[remote] = up
		}
		up.used = now
	}
	return up, true
}

// sendOutside sends a datagram outside, now or when its uplink lets it.
func (s *session) sendOutside(up *uplink, target netip.AddrPort, payload []byte, hops uint8) {
	if up == nil {
		s.send(target, payload, hops)
		return
	}
	up.sendOrQueue(s.d.with.Clock(), packet{fiveTuple: fiveTuple{target, s.from}, payload: payload, viaSession: s, hops: hops})
}

// send sends a datagram outside. If the network does not take it, the peer gets an ICMP error.
func (s *session) send(target netip.AddrPort, payload []byte, hops uint8) {
	c := &s.d.counts
	c.sentPackets.Add(1)
	c.sentBytes.Add(uint64(len(payload)))
	err := s.socket.sendDatagram(target, payload, s.id, hops)
	if err == nil {
		return
	}
	c.failed.Add(1)
	if notice, ok := icmpErrorFor(err, target); ok && s.from.stream == nil {
		s.d.sendICMPError(s.from, target, payload, notice)
	}
}

// addRemote lets a remote answer; if there are too many, some others no longer may.
func (s *session) addRemote(remote netip.AddrPort, up *uplink) {
	most := min(maxRemotes, maxRemotesTotal/len(s.d.sessions))
	for any := range s.remotes {
		if len(s.remotes) < most {
			break
		}
		delete(s.remotes, any)
	}
	s.remotes[remote] = up
	s.dns = s.dns && !s.from.echo && remote.Port() == dnsPort
}

func (s *session) noteUse(now cc.Time) {
	s.used = now
	s.peer.sessions.MoveToFront(s.listEntry)
}

func (s *session) idleTimeout(idle time.Duration) time.Duration {
	if s.dns && s.hasAnswer {
		return min(idle, dnsIdleTimeout)
	}
	return idle
}

// receive passes on what comes to the session's socket until the session ends.
func (s *session) receive() {
	for {
		news, err := s.socket.receiveOne()
		if err != nil {
			s.d.mu.Lock()
			s.d.removeSession(s)
			s.d.mu.Unlock()
			return
		}
		s.deliverReceived(news)
		news.releaseMemory()
	}
}

func (s *session) deliverReceived(news received) {
	d := s.d
	now := d.with.Clock()
	d.mu.Lock()
	known := s.knowsRemote(news.from)
	if known && news.icmpError == nil {
		s.hasAnswer = true
		s.noteUse(now)
	}
	d.mu.Unlock()
	switch {
	case !known:
		d.counts.unsolicited.Add(1)
	case news.icmpError != nil:
		if s.from.stream == nil {
			d.sendICMPError(s.from, news.from, news.payload, *news.icmpError)
		} else if targetGone(*news.icmpError, news.from) { // the request ends with its socket (RFC 9298 §3.1)
			d.finishSession(s)
		}
	default:
		for left := news.payload; ; {
			n := len(left)
			if news.segment > 0 {
				n = min(n, news.segment)
			}
			s.peer.sendOrQueue(now, packet{fiveTuple: fiveTuple{news.from, s.from}, payload: left[:n], answers: s})
			if left = left[n:]; len(left) == 0 {
				return
			}
		}
	}
}

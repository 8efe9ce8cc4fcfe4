package userspace

import (
	"container/list"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// session is an address and port of a peer, with its socket. The mu of Datagrams guards the fields
// that change.
type session struct {
	d      *Datagrams
	peer   *peer
	from   origin
	socket *socket
	// id is the identifier of its echo requests on a raw socket.
	id uint16
	// listEntry is its place among the peer's sessions, the latest used first.
	listEntry *list.Element

	// remotes are the addresses that it has sent to, which may answer. Each has the uplink that
	// holds it to a rate; nil: no rate does.
	remotes map[netip.AddrPort]*uplink
	used    cc.Time
	// addressReused is set when the session ends because another client may have the address now.
	// Packets that are still queued are then dropped.
	addressReused atomic.Bool
	// dns reports whether all remotes are name servers.
	dns       bool
	hasAnswer bool
}

// origin is the source of a datagram: an address and port inside, or the identifier of echo
// requests.
type origin struct {
	netip.AddrPort
	echo bool
	// stream is the CONNECT-UDP request from that address outside; nil: the address is inside.
	stream *udpStream
	// gatewayAddr is the gateway's address that the peer has sent to, if a name server outside answers
	// in its place; otherwise it is invalid.
	gatewayAddr netip.AddrPort
	// dnsServer is that name server. Another one makes another session.
	dnsServer netip.AddrPort
}

// shownSource returns the address that the peer sees as the source of an answer.
func (o origin) shownSource(source netip.AddrPort) netip.AddrPort {
	if o.gatewayAddr.IsValid() {
		return o.gatewayAddr
	}
	return source
}

// knowsRemote reports whether a remote may answer. The caller holds d.mu.
func (s *session) knowsRemote(remote netip.AddrPort) bool {
	_, ok := s.remotes[remote]
	return ok
}

// uplinkFor returns the uplink for a remote; nil: no rate holds it. false: the remote is new, and policy
// must decide about it. The caller holds d.mu.
func (s *session) uplinkFor(remote netip.AddrPort, now cc.Time) (*uplink, bool) {
	up, known := s.remotes[remote]
	if !known {
		return nil, false
	}
	s.markUsed(now)
	if up != nil {
		if up.evicted {
			up = s.peer.uplinkFor(up.terms)
			s.remotes[remote] = up
		}
		up.used = now
	}
	return up, true
}

// sendOutside sends a datagram now, or when its uplink has room.
func (s *session) sendOutside(up *uplink, target netip.AddrPort, payload []byte, hops uint8) {
	if up == nil {
		s.sendNow(target, payload, hops)
		return
	}
	up.sendOrQueue(s.d.with.Clock(), packet{
		fiveTuple: fiveTuple{target, s.from}, payload: payload, viaSession: s, hops: hops,
	})
}

// sendNow sends a datagram outside. If the network refuses it, the peer gets an ICMP error.
func (s *session) sendNow(target netip.AddrPort, payload []byte, hops uint8) {
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

// addRemote lets a remote answer. If there are too many, some other may no longer answer. The
// caller holds d.mu.
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

// markUsed records a use, for the end of idle sessions. The caller holds d.mu.
func (s *session) markUsed(now cc.Time) {
	s.used = now
	s.peer.sessions.MoveToFront(s.listEntry)
}

// idleTimeout returns how long the session may be idle. A session with name servers ends soon after
// an answer.
func (s *session) idleTimeout(idle time.Duration) time.Duration {
	if s.dns && s.hasAnswer {
		return min(idle, dnsIdleTimeout)
	}
	return idle
}

// receiveUntilEnd passes on what comes to the session's socket, until the session ends.
func (s *session) receiveUntilEnd() {
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

// deliverReceived passes datagrams or an ICMP error from outside to the peer.
func (s *session) deliverReceived(news received) {
	d := s.d
	now := d.with.Clock()
	d.mu.Lock()
	known := s.knowsRemote(news.from)
	if known && news.icmpError == nil {
		s.hasAnswer = true
		s.markUsed(now)
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

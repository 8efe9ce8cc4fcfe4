package userspace

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/quic-go/quic-go/quicvarint"

	legs "github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

const (
	// udpPath is the path of a CONNECT-UDP request by the default template of RFC 9298 §2,
	// before target_host and target_port.
	udpPath = "/.well-known/masque/udp/"

	udpQueue = 64 // datagrams that may wait for a request's QUIC connection
	udpHops  = 64 // the hop limit of what leaves

	resolveTimeout = 10 * time.Second // a target's name
	maxLookups     = 64               // at a time, of two sockets each

	capsuleDatagram = 0         // RFC 9297 §3.5
	maxUDP          = 65527 + 8 // of a datagram's payload (RFC 9298 §5), and the context before it
)

// udpStream is a CONNECT-UDP request: a session of Datagrams with one target.
type udpStream struct {
	name   string // of the peer
	queue  chan []byte
	cancel context.CancelFunc
}

// udpTarget returns the target in a request's path: an address and port, or a name and a port.
func udpTarget(r *http.Request) (netip.AddrPort, string, error) {
	rest, ok := strings.CutPrefix(r.URL.EscapedPath(), udpPath)
	parts := strings.Split(rest, "/")
	if !ok || len(parts) != 3 || parts[2] != "" {
		return netip.AddrPort{}, "", fmt.Errorf("targets are asked for at %sHOST/PORT/", udpPath)
	}
	host, err := url.PathUnescape(parts[0]) // an IPv6 address has its colons escaped
	if err != nil {
		return netip.AddrPort{}, "", err
	}
	return ingress.Destination(net.JoinHostPort(host, parts[1]))
}

// serveUDP forwards the datagrams of a CONNECT-UDP request (RFC 9298) until it ends, or
// has been idle for access.Datagrams.Idle.
func (m *MASQUE) serveUDP(w http.ResponseWriter, r *http.Request, who identity) {
	target, host, err := udpTarget(r)
	if err != nil {
		m.rejectRequest(w, r, http.StatusBadRequest, err.Error())
		return
	}
	d := m.datagrams.Load()
	if d == nil {
		m.rejectRequest(w, r, http.StatusServiceUnavailable, "the proxy is starting")
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	u := &udpStream{name: who.name, queue: make(chan []byte, udpQueue), cancel: cancel}
	s, target, err := m.beginUDPSession(ctx, d, u, clientAddr(r.RemoteAddr), target, host)
	switch {
	case errors.Is(err, errLookups):
		m.rejectRequest(w, r, http.StatusServiceUnavailable, errLookups.Error())
		return
	case errors.Is(err, errCrowded):
		m.rejectRequest(w, r, http.StatusServiceUnavailable, "the proxy has no room for another UDP session")
		return
	case err != nil:
		m.log.Debug("tunnel: CONNECT-UDP refused", "peer", who.name, "target", target, "host", host, "err", err)
		status, why, reason := ingress.HTTPFailure(err)
		w.Header().Set("Proxy-Status", why)
		refuseWith(w, status, reason)
		return
	}
	defer d.finishSession(s)
	w.Header().Set(http3.CapsuleProtocolHeader, "?1")
	w.WriteHeader(http.StatusOK)
	stream, err := w.(http3.HTTPStreamer).HTTPStream()
	if err != nil {
		return
	}
	datagrams, err := legs.ReceiveDatagrams(stream.QlogTrace(), stream.StreamID(), stream.ReceiveDatagram)
	if err != nil {
		return
	}
	var done sync.WaitGroup
	for _, part := range []func() error{
		func() error {
			return inwardUDP(ctx, datagrams, func(b []byte) bool { return d.sendFromClient(s, target, b) })
		},
		func() error {
			return capsulesUDP(stream, func(b []byte) bool { return d.sendFromClient(s, target, b) })
		},
		func() error { return m.outwardUDP(ctx, stream, u) },
	} {
		done.Go(func() {
			if err := part(); err != nil && !errors.Is(err, io.EOF) && ctx.Err() == nil {
				m.log.Debug("tunnel: CONNECT-UDP ended", "peer", who.name, "target", target, "err", err)
			}
			cancel()
		})
	}
	<-ctx.Done()
	stream.CancelRead(quic.StreamErrorCode(http3.ErrCodeNoError))
	done.Wait()
	_ = stream.Close()
}

var errSessionOver = errors.New("the session is over")

// inwardUDP passes on what comes in QUIC's datagrams.
func inwardUDP(ctx context.Context, datagrams *legs.Datagrams, pass func([]byte) bool) error {
	defer datagrams.Close()
	batch := make([][]byte, 0, inwardBatch)
	for {
		var err error
		if batch, err = datagrams.Receive(ctx, batch); err != nil {
			return err
		}
		for _, b := range batch {
			if payload, ok := payloadUDP(b); ok && !pass(payload) {
				return errSessionOver
			}
		}
	}
}

// capsulesUDP passes on what comes in the stream, and returns when the client ends it.
func capsulesUDP(stream io.Reader, pass func([]byte) bool) error {
	capsules := http3.NewCapsuleParser(stream)
	for {
		kind, content, err := capsules.Next()
		if err != nil {
			return err
		}
		if kind != capsuleDatagram { // to be passed over (RFC 9297 §3.2)
			if _, err := io.Copy(io.Discard, content); err != nil {
				return err
			}
			continue
		}
		b, err := io.ReadAll(io.LimitReader(content, maxUDP+1))
		if err != nil {
			return err
		}
		if len(b) > maxUDP {
			return fmt.Errorf("a datagram of more than %d bytes", maxUDP)
		}
		if payload, ok := payloadUDP(b); ok && !pass(payload) {
			return errSessionOver
		}
	}
}

// payloadUDP is the UDP payload of an HTTP datagram; false: the datagram is of an extension
// that we do not have, or malformed.
func payloadUDP(b []byte) ([]byte, bool) {
	id, n, err := quicvarint.Parse(b)
	return b[min(n, len(b)):], err == nil && id == 0
}

// outwardUDP sends the client what has come for it.
func (m *MASQUE) outwardUDP(ctx context.Context, stream *http3.Stream, u *udpStream) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case b := <-u.queue:
			var large *quic.DatagramTooLargeError
			switch err := stream.SendDatagram(b); {
			case errors.As(err, &large):
				m.drops.large.Add(1) // in the stream it would wait for others (RFC 9298 §5)
			case err != nil:
				return err
			}
		}
	}
}

// queueDatagram queues a datagram for the client; an error: there is no room. One that fits no QUIC
// datagram is not queued, so that the queue of a client that acknowledges nothing stays small.
func (u *udpStream) queueDatagram(payload []byte) error {
	if contextID+len(payload) > len(oversized) {
		return syscall.EMSGSIZE
	}
	b := append(make([]byte, contextID, contextID+len(payload)), payload...)
	select {
	case u.queue <- b:
		return nil
	default:
		return syscall.ENOBUFS
	}
}

// beginUDPSession begins the session of a request: with target, or with the first address of host
// that policy permits.
func (m *MASQUE) beginUDPSession(
	ctx context.Context, d *Datagrams, u *udpStream, source, target netip.AddrPort, host string,
) (
	*session, netip.AddrPort, error,
) {
	from := origin{AddrPort: source, stream: u}
	if target.IsValid() {
		s, err := d.beginOutside(from, target, "")
		return s, target, err
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		return nil, target, err
	}
	n, err := net.LookupPort("udp", port)
	if err != nil {
		return nil, target, err
	}
	if !m.lookups.Take(u.name) {
		return nil, target, errLookups
	}
	defer m.lookups.Leave(u.name)
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	type reached struct {
		session *session
		target  netip.AddrPort
	}
	// There is no Spare: two sessions of one request would be one.
	r, err := happyeyeballs.Dial(ctx, happyeyeballs.Host{Name: name, Resolver: m.cfg.Resolver},
		func(_ context.Context, a netip.Addr) (reached, error) {
			target := netip.AddrPortFrom(a.WithZone(""), uint16(n))
			s, err := d.beginOutside(from, target, name)
			return reached{s, target}, err
		}, func(late reached) { d.finishSession(late.session) })
	return r.session, r.target, err
}

var errLookups = errors.New("too many names are being looked up")

// resolveName resolves a name that a peer asks for, unless too many are being resolved.
func (m *MASQUE) resolveName(ctx context.Context, peer, name string) ([]netip.Addr, error) {
	if !m.lookups.Take(peer) {
		return nil, errLookups
	}
	defer m.lookups.Leave(peer)
	ctx, cancel := context.WithTimeout(ctx, resolveTimeout)
	defer cancel()
	addrs, err := happyeyeballs.LookUp(ctx, happyeyeballs.Host{Name: name, Resolver: m.cfg.Resolver})
	for i, a := range addrs {
		addrs[i] = a.WithZone("")
	}
	return addrs, err
}

// beginOutside begins a session with a target outside the tunnel: peers inside are reached only
// by packets (CONNECT-IP).
func (d *Datagrams) beginOutside(from origin, target netip.AddrPort, host string) (*session, error) {
	if d.inside.Place(target.Addr()) != tunnel.Elsewhere {
		return nil, fmt.Errorf("destination %v is inside the tunnel: %w", target, syscall.EHOSTUNREACH)
	}
	s, _, err := d.sessionFor(from, target, host)
	return s, err
}

// sendFromClient sends what a request's client sends; false: the session is over.
func (d *Datagrams) sendFromClient(s *session, target netip.AddrPort, payload []byte) bool {
	d.mu.Lock()
	if d.sessions[s.from] != s {
		d.mu.Unlock()
		return false
	}
	up, _ := s.uplinkFor(target, d.with.Clock()) // the one that it knows
	d.mu.Unlock()
	s.sendOutside(up, target, payload, udpHops)
	return true
}

// finishSession ends a session, unless it has ended.
func (d *Datagrams) finishSession(s *session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.removeSession(s)
}

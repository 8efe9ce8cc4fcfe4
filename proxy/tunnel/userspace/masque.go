package userspace

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	quicgo "github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/netstack"
	"github.com/penstock-net/penstock/proxy/datapath/quic"
	"github.com/penstock-net/penstock/proxy/happyeyeballs"
	"github.com/penstock-net/penstock/proxy/ingress"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// MASQUEConfig describes a MASQUE listener: HTTP/3 that carries IP packets
// (CONNECT-IP, RFC 9484), UDP (CONNECT-UDP, RFC 9298) and TCP streams (CONNECT,
// RFC 9114 §4.4).
type MASQUEConfig struct {
	Name        string
	Addr        string // UDP, "host:port"; an empty host is every address
	Certificate tls.Certificate
	Tokens      []access.Token // clients with one of them may use it
	ClientCAs   *x509.CertPool // clients with a certificate of theirs may use it; nil: none are asked for
	Open        bool           // everybody may use it
	Pool        []netip.Prefix // addresses for CONNECT-IP clients, one of each to a client; empty: only streams
	Clock       func() cc.Time
	Log         *slog.Logger
	Resolver    happyeyeballs.Resolver // nil: the system's
}

const (
	maxSessions = 8        // CONNECT-IP of one peer at a time, lest it take all addresses
	maxHeader   = 16 << 10 // bytes
	maxStreams  = 1024     // of one connection at a time
	maxConns    = 256      // of one client at a time

	// A connection without a request is closed after idleTimeout. While it has one, QUIC
	// sends keep-alives every askEvery, as TCP does on a kernel leg; a client that has
	// vanished is noticed after vanishedAfter.
	idleTimeout     = 2 * time.Minute
	keepAlivePeriod = 2 * time.Minute
	maxIdleQUIC     = 4 * time.Minute

	// clientsLeaveWithin is how long Close waits for clients of streams to close their connections,
	// as GOAWAY tells them to do after their last stream: if we close one, what has arrived
	// at the client and has not been read there is lost.
	clientsLeaveWithin = 5 * time.Second
)

const (
	// initialPacket is the size of QUIC's first packets, in bytes, before it has probed
	// the path's MTU. Cellular paths carry this much.
	initialPacket = 1350

	// Bounds of the QUIC connections whose clients have shown neither token nor certificate
	// yet: maxStrangers at a time, and with verifyFrom or more a client must first prove its
	// address, which takes another round trip (Retry, RFC 9000 §8.1.2).
	maxUnauthenticated = 1024
	retryFrom          = 128

	// What a stranger may do before it has to say who it is: each request holds memory, though its header
	// never comes.
	authenticateWithin = 10 * time.Second
	unauthRequests     = 64
	requestGrace       = time.Second // for the first of more requests to be understood
)

// MASQUE is a MASQUE listener. It is the Outside of a stack, and also accepts streams.
type MASQUE struct {
	tunnel.Condition
	tunnel.Pool
	cfg         MASQUEConfig
	log         *slog.Logger
	stack       *netstack.Stack
	certificate atomic.Pointer[tls.Certificate]
	authorities atomic.Pointer[x509.CertPool] // of clients' certificates; nil: these are not asked for
	addr        *net.UDPAddr                  // where it listens
	requests    chan datapath.Conn
	closed      chan struct{}
	closing     sync.Once
	lifetime    context.Context // done once it is closed, and all that was sent has left
	cancel      context.CancelFunc
	stopServing context.CancelFunc
	done        sync.WaitGroup
	refused     atomic.Uint64

	unauthorized atomic.Uint64 // by a wrong token; of refused
	guesses      ingress.Guesses
	drops        masqueDrops
	datagrams    atomic.Pointer[Datagrams] // nil until there is one

	leaveWait       time.Duration    // leaveWithin
	unauthPerHost   *datapath.Places // by host
	lookups         *datapath.Places // names that are being looked up, by peer
	mu              sync.RWMutex
	draining        bool
	server          *masqueServer // replaced where its socket has failed
	tokens          []hashedToken
	pool            *pool
	sessions        map[netip.Addr]*ipSession
	sessionsPerPeer map[string]int            // sessions of each peer, those that begin too
	endedTraffic    map[string]tunnel.Traffic // of ended sessions, by peer
	conns           map[*quicgo.Conn]*masqueConn
	connsPerClient  map[string]int // connections of each client
}

// masqueConn is what is known of a client's QUIC connection.
type masqueConn struct {
	name       string          // of the client; empty: it has not authenticated yet
	tokens     map[digest]bool // that have been used on it
	hadStreams atomic.Bool     // there have been some
	closed     <-chan struct{}

	rejected bool // before it had told who it is
}

// masqueDrops counts packets that were not passed on.
type masqueDrops struct{ malformed, source, destination, large atomic.Uint64 }

// MASQUEDrops counts packets of CONNECT-IP sessions that were not passed on.
type MASQUEDrops struct {
	Malformed   uint64 // no IP packets
	Source      uint64 // from an address that is not the client's
	Destination uint64 // for an address that no client has, or outside what a session asked for
	Large       uint64 // answered with a Packet Too Big
}

// masqueServer is what serves at one socket.
type masqueServer struct {
	*http3.Server
	udp       *quic.Socket
	transport *quicgo.Transport
	listener  *quicgo.EarlyListener
}

// ListenMASQUE opens the listener and joins it to a stack.
func ListenMASQUE(cfg MASQUEConfig, stack *netstack.Stack) (*MASQUE, error) {
	m, err := newMASQUE(cfg, stack)
	if err != nil {
		return nil, fmt.Errorf("tunnel: listener %q: %w", cfg.Name, err)
	}
	return m, nil
}

func newMASQUE(cfg MASQUEConfig, stack *netstack.Stack) (*MASQUE, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	m := &MASQUE{
		cfg: cfg, log: cfg.Log.With("listener", cfg.Name), stack: stack, requests: make(chan datapath.Conn, waitingRequests),
		closed: make(chan struct{}), sessions: map[netip.Addr]*ipSession{}, sessionsPerPeer: map[string]int{},
		endedTraffic: map[string]tunnel.Traffic{}, conns: map[*quicgo.Conn]*masqueConn{}, connsPerClient: map[string]int{},
		leaveWait: clientsLeaveWithin, unauthPerHost: datapath.NewPlaces(maxUnauthenticated), lookups: datapath.NewPlaces(maxLookups),
	}
	switch {
	case len(cfg.Certificate.Certificate) == 0:
		return nil, errors.New("tls: MASQUE needs a certificate and its key")
	case len(cfg.Tokens) == 0 && cfg.ClientCAs == nil && !cfg.Open:
		return nil, errors.New("nobody could be refused: name tokens (masque.tokens_file) or an authority for client " +
			"certificates (tls.client_ca), or say that it is open to everybody")
	case cfg.Open && (len(cfg.Tokens) > 0 || cfg.ClientCAs != nil):
		return nil, errors.New("it cannot be open to everybody and ask for tokens or certificates")
	}
	m.SetPool(cfg.Pool)
	m.certificate.Store(&cfg.Certificate)
	m.authorities.Store(cfg.ClientCAs)
	var err error
	if m.tokens, err = hashTokens(cfg.Tokens); err != nil {
		return nil, err
	}
	if m.pool, err = newPool(cfg.Pool); err != nil {
		return nil, err
	}
	m.pool.reserveFor(namesOf(cfg.Tokens))
	if m.addr, err = net.ResolveUDPAddr("udp", cfg.Addr); err == nil {
		err = m.listenUDP()
	}
	if err != nil {
		return nil, fmt.Errorf("MASQUE on UDP address %q: %w", cfg.Addr, err)
	}
	m.addr = m.server.udp.LocalAddr().(*net.UDPAddr)
	m.lifetime, m.cancel = context.WithCancel(context.Background())
	serving, stopServing := context.WithCancel(m.lifetime)
	m.stopServing = stopServing
	m.done.Go(func() { m.dropUnmatched(m.lifetime) })
	m.done.Go(func() { m.serveUntilDrained(serving) })
	return m, nil
}

// tlsConfig asks for a certificate if clients may authenticate by one, and requires it if they
// have no other way.
func (m *MASQUE) tlsConfig() *tls.Config {
	all := &tls.Config{
		MinVersion:     tls.VersionTLS13,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return m.certificate.Load(), nil },
	}
	all.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) {
		c := all.Clone()
		c.ClientCAs = m.authorities.Load()
		m.mu.RLock()
		tokens := len(m.tokens)
		m.mu.RUnlock()
		switch {
		case c.ClientCAs == nil:
		case tokens == 0:
			c.ClientAuth = tls.RequireAndVerifyClientCert
		default:
			c.ClientAuth = tls.VerifyClientCertIfGiven
		}
		return c, nil
	}
	return all
}

// listenUDP opens the UDP socket and puts a server on it.
func (m *MASQUE) listenUDP() error {
	udp, err := quic.ListenUDP(m.addr)
	if err != nil {
		return err
	}
	transport := &quicgo.Transport{
		Conn: udp, ConnContext: m.admitConnection,
		VerifySourceAddress: func(net.Addr) bool { return m.unauthPerHost.Taken() >= retryFrom },
	}
	listener, err := transport.ListenEarly(http3.ConfigureTLSConfig(m.tlsConfig()), &quicgo.Config{
		Tracer:            quic.Tracer(m.cfg.Clock, func() { m.refused.Add(1) }),
		InitialPacketSize: initialPacket, MaxIncomingStreams: maxStreams, EnableDatagrams: true,
		MaxIdleTimeout: maxIdleQUIC, KeepAlivePeriod: keepAlivePeriod,
	})
	if err != nil {
		return errors.Join(err, udp.Close())
	}
	server := &http3.Server{
		Handler: m, EnableDatagrams: true, MaxHeaderBytes: maxHeader, ConnContext: m.onConnected,
		IdleTimeout: idleTimeout, Logger: m.log,
	}
	s := &masqueServer{server, udp, transport, listener}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.draining {
		return errors.Join(http.ErrServerClosed, s.closeServer())
	}
	m.server = s
	return nil
}

// serveUntilDrained takes connections until it is drained, over another socket after one has failed.
func (m *MASQUE) serveUntilDrained(ctx context.Context) {
	for {
		s := m.currentServer()
		err := s.serveConnections()
		if ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
			return
		}
		err = errors.Join(fmt.Errorf("MASQUE on UDP address %v failed: %w", m.addr, err), s.Close(), s.closeServer())
		if !m.Reopen(ctx, m.log, err, m.listenUDP) {
			return
		}
	}
}

// currentServer is what serves at present.
func (m *MASQUE) currentServer() *masqueServer {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.server
}

// serveConnections takes connections until the server is shut down, or the socket fails.
func (s *masqueServer) serveConnections() error {
	err := s.ServeListener(s.listener)
	_ = s.listener.Close()
	return err
}

// closeServer closes the socket, and what is left there.
func (s *masqueServer) closeServer() error {
	_ = s.transport.Close()
	if err := s.udp.Close(); !errors.Is(err, net.ErrClosed) { // it had failed
		return err
	}
	return nil
}

// authenticatedKey is the key, in a connection's context, of the function to call once its client is known.
type authenticatedKey struct{}

// connKey is the key of a request's QUIC connection in its context.
type connKey struct{}

var errTooManyUnauthenticated = errors.New("too many clients have not told who they are")

// admitConnection lets a connection begin, unless there are too many whose clients are not known yet.
func (m *MASQUE) admitConnection(ctx context.Context, from *quicgo.ClientInfo) (context.Context, error) {
	host := datapath.Host(clientAddr(from.RemoteAddr.String()).Addr()).String()
	if !m.unauthPerHost.Take(host) {
		m.refused.Add(1)
		return nil, errTooManyUnauthenticated
	}
	known := sync.OnceFunc(func() { m.unauthPerHost.Leave(host) })
	context.AfterFunc(ctx, known)
	return context.WithValue(ctx, authenticatedKey{}, known), nil
}

func (m *MASQUE) onConnected(ctx context.Context, c *quicgo.Conn) context.Context {
	m.mu.Lock()
	m.conns[c] = &masqueConn{tokens: map[digest]bool{}, closed: c.Context().Done()}
	m.mu.Unlock()
	expel := func() { m.closeUnauthenticated(c) }
	quic.BoundRequests(c.QlogTrace(), unauthRequests, func() { time.AfterFunc(requestGrace, expel) })
	timer := time.AfterFunc(authenticateWithin, expel)
	context.AfterFunc(c.Context(), func() {
		timer.Stop()
		m.mu.Lock()
		defer m.mu.Unlock()
		if name := m.conns[c].name; name != "" {
			if m.connsPerClient[name]--; m.connsPerClient[name] == 0 {
				delete(m.connsPerClient, name)
			}
		}
		delete(m.conns, c)
	})
	return context.WithValue(ctx, connKey{}, c)
}

// closeUnauthenticated closes a connection whose client is not known yet.
func (m *MASQUE) closeUnauthenticated(c *quicgo.Conn) {
	m.mu.Lock()
	state := m.conns[c]
	stranger := state != nil && state.name == ""
	if stranger {
		state.rejected = true
	}
	m.mu.Unlock()
	if stranger {
		m.refused.Add(1)
		_ = c.CloseWithError(quicgo.ApplicationErrorCode(http3.ErrCodeRequestRejected), errUnknown.Error())
	}
}

// ServeHTTP implements http.Handler.
func (m *MASQUE) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	who, err := m.identify(r)
	switch {
	case errors.Is(err, errUnknown):
		m.refused.Add(1)
		w.Header().Set("WWW-Authenticate", "Bearer")
		m.rejectRequest(w, r, http.StatusUnauthorized, err.Error())
		return
	case err != nil:
		m.rejectRequest(w, r, http.StatusServiceUnavailable, err.Error())
		return
	}
	if known, ok := r.Context().Value(authenticatedKey{}).(func()); ok {
		known()
	}
	switch protocol := extendedProtocol(r); {
	case r.Method != http.MethodConnect:
		w.Header().Set("Allow", http.MethodConnect)
		m.rejectRequest(w, r, http.StatusMethodNotAllowed, "only CONNECT is served here")
	case protocol == "":
		m.serveStream(w, r, who)
	case protocol == "connect-ip" && len(m.cfg.Pool) > 0:
		m.serveIP(w, r, who)
	case protocol == "connect-udp":
		m.serveUDP(w, r, who)
	default:
		m.rejectRequest(w, r, http.StatusNotImplemented, "this protocol is not served here")
	}
}

// extendedProtocol is the protocol of an extended CONNECT (RFC 9220); empty: r is a plain one.
func extendedProtocol(r *http.Request) string {
	if strings.HasPrefix(r.Proto, "HTTP/") {
		return ""
	}
	return r.Proto
}

// rejectRequest refuses a request.
func (m *MASQUE) rejectRequest(w http.ResponseWriter, r *http.Request, status int, reason string) {
	m.log.Debug("tunnel: refused", "client", r.RemoteAddr, "status", status, "reason", reason)
	refuseWith(w, status, reason)
}

var (
	errUnknown      = errors.New("a token or a certificate is needed")
	errGuessing     = fmt.Errorf("%w: too many wrong ones of this host wait for their answers", errUnknown)
	errTooManyConns = fmt.Errorf("a client may have %d connections at a time", maxConns)
)

// identify returns who a request's client is, or why it is not served. The answer to a wrong token may wait.
func (m *MASQUE) identify(r *http.Request) (who identity, err error) {
	from := clientAddr(r.RemoteAddr).Addr()
	if !m.isKnown(r) && !m.guesses.May(from) {
		m.unauthorized.Add(1)
		return identity{}, errGuessing
	}
	who, ok := m.authenticate(r)
	if ok {
		return who, m.recordClient(r, who)
	}
	if who.token != (digest{}) {
		m.unauthorized.Add(1)
		m.guesses.Wrong(r.Context(), from, authenticateWithin*9/10) // before the connection is closed
	}
	return identity{}, errUnknown
}

// isKnown reports whether the client of a request's connection has told who it is.
func (m *MASQUE) isKnown(r *http.Request) bool {
	c, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
	m.mu.RLock()
	defer m.mu.RUnlock()
	state := m.conns[c]
	return state != nil && state.name != ""
}

// authenticate tells who r is from: by its token if it has one, in the field Authorization
// or Proxy-Authorization, else by its certificate, which TLS has verified; or by its
// address if the listener is open to everybody.
func (m *MASQUE) authenticate(r *http.Request) (identity, bool) {
	if m.cfg.Open {
		return identity{name: datapath.Host(clientAddr(r.RemoteAddr).Addr()).String()}, true
	}
	given := r.Header.Get("Authorization")
	if given == "" {
		given = r.Header.Get("Proxy-Authorization")
	}
	if given != "" {
		scheme, value, _ := strings.Cut(given, " ")
		h := digest(sha256.Sum256([]byte(strings.TrimSpace(value))))
		m.mu.RLock()
		name, ok := findToken(m.tokens, h)
		m.mu.RUnlock()
		return identity{name, h}, ok && strings.EqualFold(scheme, "Bearer")
	}
	name := certificateName(r.TLS)
	return identity{name: name}, name != ""
}

// recordClient remembers the client of a request's connection, and the token that it has used.
func (m *MASQUE) recordClient(r *http.Request, who identity) error {
	c, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := findToken(m.tokens, who.token); !ok && who.token != (digest{}) {
		return errUnknown // the token has just gone
	}
	state := m.conns[c]
	if state == nil {
		return nil // it has just ended
	}
	if state.rejected {
		return errUnknown
	}
	if state.name == "" {
		if m.connsPerClient[who.name] >= maxConns {
			return errTooManyConns
		}
		m.connsPerClient[who.name]++
		state.name = who.name
	}
	if who.token != (digest{}) {
		state.tokens[who.token] = true
	}
	return nil
}

// certificateName is the name in a client's certificate; empty: it has shown none.
func certificateName(s *tls.ConnectionState) string {
	if s == nil || len(s.VerifiedChains) == 0 {
		return ""
	}
	c := s.PeerCertificates[0]
	switch {
	case c.Subject.CommonName != "":
		return c.Subject.CommonName
	case len(c.DNSNames) > 0:
		return c.DNSNames[0]
	case len(c.EmailAddresses) > 0:
		return c.EmailAddresses[0]
	}
	return "serial " + c.SerialNumber.String()
}

// serveStream passes a CONNECT to whoever accepts, and returns once it is answered.
func (m *MASQUE) serveStream(w http.ResponseWriter, r *http.Request, who identity) {
	req := &request{writer: w, peer: who.name, source: clientAddr(r.RemoteAddr), done: make(chan struct{})}
	var err error
	if req.target, req.host, err = ingress.Destination(r.Host); err != nil {
		m.rejectRequest(w, r, http.StatusBadRequest, "CONNECT needs host:port")
		return
	}
	full := func() error {
		m.rejectRequest(w, r, http.StatusServiceUnavailable, "the proxy has no room for another connection")
		return nil
	}
	req.Conn = quic.NewConn(m.Addr(), net.UDPAddrFromAddrPort(req.source), func() { _ = req.answerOnce(full) })
	c, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
	if !m.queueRequest(req, c) {
		_ = req.answerOnce(full)
		return
	}
	select {
	case <-req.done:
	case <-r.Context().Done():
	case <-m.closed:
	}
	_ = req.answerOnce(func() error { return nil }) // nobody may write to w once this returns
}

// queueRequest queues a request to be accepted; false: there is no room, or the listener drains. What
// was queued before Drain is refused by it.
func (m *MASQUE) queueRequest(req *request, from *quicgo.Conn) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.draining {
		return false
	}
	select {
	case m.requests <- req:
		if c := m.conns[from]; c != nil {
			c.hadStreams.Store(true)
		}
		return true
	default:
		return false
	}
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
	datagrams, err := quic.ReceiveDatagrams(stream.QlogTrace(), stream.StreamID(), stream.ReceiveDatagram)
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
	stream.CancelRead(quicgo.StreamErrorCode(http3.ErrCodeNoError))
	done.Wait()
	_ = stream.Close()
}

// outwardUDP sends the client what has come for it.
func (m *MASQUE) outwardUDP(ctx context.Context, stream *http3.Stream, u *udpStream) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case b := <-u.queue:
			var large *quicgo.DatagramTooLargeError
			switch err := stream.SendDatagram(b); {
			case errors.As(err, &large):
				m.drops.large.Add(1) // in the stream it would wait for others (RFC 9298 §5)
			case err != nil:
				return err
			}
		}
	}
}

var errLookups = errors.New("too many names are being looked up")

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
	conn, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
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

// Apply implements Outside.
func (m *MASQUE) Apply(s tunnel.Settings) error {
	if err := m.SetTokens(s.Tokens); err != nil {
		return err
	}
	m.authorities.Store(s.Authorities)
	m.certificate.Store(&s.Certificate)
	return nil
}

// SetTokens replaces the tokens. It closes the connections of clients that have used a token
// which is gone. A listener that had tokens goes on to need one or a certificate.
func (m *MASQUE) SetTokens(tokens []access.Token) error {
	hashed, err := hashTokens(tokens)
	if err != nil {
		return err
	}
	var gone []*quicgo.Conn
	m.mu.Lock()
	m.tokens = hashed
	m.pool.reserveFor(namesOf(tokens))
	for c, state := range m.conns {
		for h := range state.tokens {
			if _, stays := findToken(hashed, h); !stays {
				gone = append(gone, c)
				break
			}
		}
	}
	m.mu.Unlock()
	for _, c := range gone {
		_ = c.CloseWithError(quicgo.ApplicationErrorCode(http3.ErrCodeRequestRejected), "the token is not valid any more")
	}
	return nil
}

// digest is a token's hash: the time to compare hashes depends neither on the tokens'
// lengths nor on where they differ.
type digest [sha256.Size]byte

type hashedToken struct {
	name  string
	value digest
}

// identity is the client of a request.
type identity struct {
	name  string
	token digest // zero: came without one
}

func hashTokens(tokens []access.Token) ([]hashedToken, error) {
	hashed := make([]hashedToken, 0, len(tokens))
	owner := map[digest]string{}
	for _, t := range tokens {
		if err := errors.Join(t.CheckName(), t.CheckValue()); err != nil {
			return nil, fmt.Errorf("tunnel: tokens: %w", err)
		}
		h := digest(sha256.Sum256([]byte(t.Value)))
		if other, taken := owner[h]; taken {
			return nil, fmt.Errorf("tunnel: tokens: %q and %q have the same token", other, t.Name)
		}
		owner[h] = t.Name
		hashed = append(hashed, hashedToken{t.Name, h})
	}
	return hashed, nil
}

func namesOf(tokens []access.Token) (names []string) {
	for _, t := range tokens {
		names = append(names, t.Name)
	}
	return names
}

// findToken looks up a token. It compares with all of them, so that its time is the same.
func findToken(tokens []hashedToken, h digest) (name string, ok bool) {
	for i := range tokens {
		if subtle.ConstantTimeCompare(tokens[i].value[:], h[:]) == 1 {
			name, ok = tokens[i].name, true
		}
	}
	return name, ok
}

// Resume implements Outside: clients that are gone come back by themselves.
func (m *MASQUE) Resume(map[access.Key]netip.AddrPort) {}

// Report implements Outside.
func (m *MASQUE) Report(s *tunnel.Status) error {
	d := m.Drops()
	s.Refused += m.Refused() + d.Malformed + d.Source
	s.Unauthorized = m.unauthorized.Load()
	s.Sessions, s.Clients = m.Sessions(), m.clientTraffic()
	return nil
}

// Forward implements Outside: CONNECT-UDP brings datagrams that are in no packets.
func (m *MASQUE) Forward(d *Datagrams) { m.datagrams.Store(d) }

// Requests implements Outside: the CONNECTs over HTTP/3.
func (m *MASQUE) Requests() <-chan datapath.Conn { return m.requests }

// Peer implements Inside.
func (m *MASQUE) Peer(inner netip.Addr) string {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if s := m.sessions[inner]; s != nil {
		return s.name
	}
	return ""
}

// Place implements Inside.
func (m *MASQUE) Place(addr netip.Addr) tunnel.Place {
	if m.Peer(addr) != "" {
		return tunnel.OfPeer
	}
	return m.Vacant(addr)
}

// Addr implements Outside.
func (m *MASQUE) Addr() net.Addr { return m.addr }

// Refused counts the clients that were refused, as for their token or certificate.
func (m *MASQUE) Refused() uint64 { return m.refused.Load() }

// Drops counts packets that were not passed on.
func (m *MASQUE) Drops() MASQUEDrops {
	d := &m.drops
	return MASQUEDrops{d.malformed.Load(), d.source.Load(), d.destination.Load(), d.large.Load()}
}

// Drain implements Outside: clients are told to send no more requests (GOAWAY, RFC 9114 §5.2).
func (m *MASQUE) Drain() {
	m.mu.Lock()
	again := m.draining
	m.draining = true
	m.mu.Unlock()
	if again {
		return
	}
	m.stopServing()
	m.done.Go(func() { _ = m.currentServer().Shutdown(m.lifetime) }) // what is left then is closed
}

// Close implements Outside.
func (m *MASQUE) Close() (err error) {
	m.closing.Do(func() {
		m.Drain()
		close(m.closed)
		if m.awaitClients() {
			waitForSending()
		}
		m.cancel()
		m.done.Wait()
		err = m.currentServer().closeServer()
	})
	return err
}

// awaitClients waits for the clients of streams to leave, and tells whether there are others.
func (m *MASQUE) awaitClients() (others bool) {
	m.mu.RLock()
	conns := slices.Collect(maps.Values(m.conns))
	m.mu.RUnlock()
	timer := time.NewTimer(m.leaveWait)
	defer timer.Stop()
	for _, c := range conns {
		if !c.hadStreams.Load() {
			others = true
			continue
		}
		select {
		case <-c.closed:
		case <-timer.C:
			return true
		}
	}
	return others
}

// maxClients bounds the names whose past sessions are counted: certificates may hold
// any number.
const maxClients = 4096

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

// clientAddr reads an address as package net writes it.
func clientAddr(s string) netip.AddrPort {
	a, _ := netip.ParseAddrPort(s)
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

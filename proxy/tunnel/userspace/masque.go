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

// MASQUEConfig describes a MASQUE listener: HTTP/3 that carries IP packets (CONNECT-IP, RFC 9484),
// UDP (CONNECT-UDP, RFC 9298) and TCP streams (CONNECT, RFC 9114 §4.4).
type MASQUEConfig struct {
	Name string
	// Addr is a UDP address, "host:port". An empty host is every address.
	Addr        string
	Certificate tls.Certificate
	// Tokens authenticate clients, with or instead of ClientCAs.
	Tokens []access.Token
	// ClientCAs sign the certificates that authenticate clients; nil: no certificates are asked
	// for.
	ClientCAs *x509.CertPool
	// Open lets everybody use it. There are neither Tokens nor ClientCAs then.
	Open bool
	// Pool has addresses for CONNECT-IP clients: one of each prefix for each session. Empty: there
	// are only streams.
	Pool  []netip.Prefix
	Clock func() cc.Time
	Log   *slog.Logger
	// Resolver resolves the names of targets; nil: the system's.
	Resolver happyeyeballs.Resolver
}

const (
	maxSessions = 8        // CONNECT-IP of one peer at a time; it must not take all addresses
	maxHeader   = 16 << 10 // bytes
	maxStreams  = 1024     // of one connection at a time
	maxConns    = 256      // of one client at a time

	// A connection without a request is closed after idleTimeout. While it has one, QUIC sends
	// keep-alives every keepAlivePeriod, as TCP does on a kernel leg. A client that has vanished is
	// noticed after maxIdleQUIC.
	idleTimeout     = 2 * time.Minute
	keepAlivePeriod = 2 * time.Minute
	maxIdleQUIC     = 4 * time.Minute

	// clientsLeaveWithin is how long Close waits for clients of streams to close their connections.
	// GOAWAY asks them to do so after their last stream. If this side closed first, data that the
	// client has received and not read would be lost.
	clientsLeaveWithin = 5 * time.Second
)

const (
	// initialPacket is the size of QUIC's first packets, in bytes, before it has probed
	// the path's MTU. Cellular paths carry this much.
	initialPacket = 1350

	// maxUnauthenticated bounds the QUIC connections that have shown neither token nor certificate
	// yet. With retryFrom or more a client must first prove its address, which takes another round
	// trip (Retry, RFC 9000 §8.1.2).
	maxUnauthenticated = 1024
	retryFrom          = 128

	// Bounds of a client before it authenticates. Each request holds memory, even if its header never
	// comes.
	authenticateWithin = 10 * time.Second
	unauthRequests     = 64
	requestGrace       = time.Second // after unauthRequests, for the first of them to be read
)

// MASQUE is a MASQUE listener. It is the Outside of a stack, and accepts streams too.
//
// A connection of a client goes through these states:
//
//	admitConnection       counted per host; with retryFrom or more it must prove its address
//	onConnected           unauthenticated, for authenticateWithin at most
//	recordClient          authenticated by a token or certificate, counted per client
//	closed                by the client, a removed token, or Close
type MASQUE struct {
	tunnel.Condition
	tunnel.Pool
	cfg         MASQUEConfig
	log         *slog.Logger
	stack       *netstack.Stack
	certificate atomic.Pointer[tls.Certificate]
	// authorities sign clients' certificates; nil: certificates are not asked for.
	authorities atomic.Pointer[x509.CertPool]
	// addr is where it listens. It stays the same over other sockets.
	addr *net.UDPAddr
	// requests are CONNECTs that wait for Serve.
	requests chan datapath.Conn
	// closed is closed by Close, before clients have left.
	closed  chan struct{}
	closing sync.Once
	// lifetime is done once Close has sent all that it will send.
	lifetime context.Context
	cancel   context.CancelFunc
	// stopServing ends serveUntilDrained.
	stopServing context.CancelFunc
	done        sync.WaitGroup
	// refused counts clients and requests that were refused.
	refused atomic.Uint64

	// unauthorized counts requests with a wrong token. They count in refused too.
	unauthorized atomic.Uint64
	// guesses slows the answers to wrong tokens down, by host.
	guesses ingress.Guesses
	drops   masqueDrops
	// datagrams forwards for CONNECT-UDP; nil until Forward.
	datagrams atomic.Pointer[Datagrams]

	// leaveWait is clientsLeaveWithin, or less in tests.
	leaveWait time.Duration
	// unauthPerHost counts connections of clients that have not authenticated yet.
	unauthPerHost *datapath.Places
	// lookups counts names that are being looked up, by peer.
	lookups *datapath.Places
	// mu guards the fields below.
	mu       sync.RWMutex
	draining bool
	// server is replaced after its socket has failed.
	server *masqueServer
	tokens []hashedToken
	pool   *pool
	// sessions are by inner address: one session may have several.
	sessions map[netip.Addr]*ipSession
	// sessionsPerPeer counts sessions by peer, and those that are being begun.
	sessionsPerPeer map[string]int
	// endedTraffic has the bytes of ended sessions, by peer.
	endedTraffic map[string]tunnel.Traffic
	conns        map[*quicgo.Conn]*masqueConn
	// connsPerClient counts the connections of each authenticated client.
	connsPerClient map[string]int
}

// masqueConn is the state of a client's QUIC connection. The mu of MASQUE guards it.
type masqueConn struct {
	// name is the client's; empty: it has not authenticated yet.
	name string
	// tokens are those that were used on it.
	tokens map[digest]bool
	// hadStreams is set once it had a CONNECT. Close then waits for the client to leave.
	hadStreams atomic.Bool
	// closed is closed at the connection's end.
	closed <-chan struct{}

	// rejected is set once it is being closed because the client did not authenticate in time.
	rejected bool
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

// masqueServer serves at one socket. It is replaced after the socket has failed.
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

// newMASQUE checks the configuration, opens the socket, and starts the goroutines.
func newMASQUE(cfg MASQUEConfig, stack *netstack.Stack) (*MASQUE, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	m := &MASQUE{
		cfg: cfg, log: cfg.Log.With("listener", cfg.Name), stack: stack, requests: make(chan datapath.Conn, waitingRequests),
		closed: make(chan struct{}), sessions: map[netip.Addr]*ipSession{}, sessionsPerPeer: map[string]int{},
		endedTraffic: map[string]tunnel.Traffic{}, conns: map[*quicgo.Conn]*masqueConn{}, connsPerClient: map[string]int{},
		leaveWait: clientsLeaveWithin, unauthPerHost: datapath.NewPlaces(maxUnauthenticated),
		lookups: datapath.NewPlaces(maxLookups),
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

// tlsConfig asks for a certificate if clients may authenticate by one. It requires one if they have
// no other way. Each handshake uses the certificate and authorities of its time.
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

// serveUntilDrained accepts connections until ctx is done. It opens another socket after one has
// failed.
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

// currentServer returns the present server.
func (m *MASQUE) currentServer() *masqueServer {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.server
}

// serveConnections accepts connections until the server is shut down, or the socket fails.
func (s *masqueServer) serveConnections() error {
	err := s.ServeListener(s.listener)
	_ = s.listener.Close()
	return err
}

// closeServer closes the socket and the connections that are left.
func (s *masqueServer) closeServer() error {
	_ = s.transport.Close()
	if err := s.udp.Close(); !errors.Is(err, net.ErrClosed) { // it had failed
		return err
	}
	return nil
}

// authenticatedKey is the key, in a connection's context, of the function to call once its client
// is authenticated.
type authenticatedKey struct{}

// connKey is the key of a request's QUIC connection in its context.
type connKey struct{}

// errTooManyUnauthenticated refuses a connection of a host with too many unauthenticated ones.
var errTooManyUnauthenticated = errors.New("too many clients have not told who they are")

// admitConnection lets a connection begin, unless too many are not authenticated yet.
func (m *MASQUE) admitConnection(ctx context.Context, from *quicgo.ClientInfo) (context.Context, error) {
	host := datapath.Host(clientAddr(from.RemoteAddr.String()).Addr()).String()
	if !m.unauthPerHost.Take(host) {
		m.refused.Add(1)
		return nil, errTooManyUnauthenticated
	}
	uncount := sync.OnceFunc(func() { m.unauthPerHost.Leave(host) })
	context.AfterFunc(ctx, uncount)
	return context.WithValue(ctx, authenticatedKey{}, uncount), nil
}

// onConnected bounds the time in which a new connection must authenticate, and the requests that its
// client may begin before that.
func (m *MASQUE) onConnected(ctx context.Context, c *quicgo.Conn) context.Context {
	m.mu.Lock()
	m.conns[c] = &masqueConn{tokens: map[digest]bool{}, closed: c.Context().Done()}
	m.mu.Unlock()
	closeIt := func() { m.closeUnauthenticated(c) }
	quic.BoundRequests(c.QlogTrace(), unauthRequests, func() { time.AfterFunc(requestGrace, closeIt) })
	timer := time.AfterFunc(authenticateWithin, closeIt)
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

// closeUnauthenticated closes a connection unless its client has authenticated.
func (m *MASQUE) closeUnauthenticated(c *quicgo.Conn) {
	m.mu.Lock()
	state := m.conns[c]
	isUnknown := state != nil && state.name == ""
	if isUnknown {
		state.rejected = true
	}
	m.mu.Unlock()
	if isUnknown {
		m.refused.Add(1)
		_ = c.CloseWithError(quicgo.ApplicationErrorCode(http3.ErrCodeRequestRejected), errUnknown.Error())
	}
}

// ServeHTTP implements http.Handler. It authenticates the client, and serves the request by its
// protocol:
//
//	CONNECT               serveStream
//	connect-ip            serveIP, with an address pool
//	connect-udp           serveUDP
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
	if uncount, ok := r.Context().Value(authenticatedKey{}).(func()); ok {
		uncount()
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

// extendedProtocol returns the protocol of an extended CONNECT (RFC 9220); empty: r is a plain one.
func extendedProtocol(r *http.Request) string {
	if strings.HasPrefix(r.Proto, "HTTP/") {
		return ""
	}
	return r.Proto
}

// rejectRequest refuses a request with a status and a sentence for people.
func (m *MASQUE) rejectRequest(w http.ResponseWriter, r *http.Request, status int, reason string) {
	m.log.Debug("tunnel: refused", "client", r.RemoteAddr, "status", status, "reason", reason)
	refuseWith(w, status, reason)
}

var (
	errUnknown      = errors.New("a token or a certificate is needed")
	errGuessing     = fmt.Errorf("%w: too many wrong ones of this host wait for their answers", errUnknown)
	errTooManyConns = fmt.Errorf("a client may have %d connections at a time", maxConns)
)

// identify returns the client of a request, or why it is not served. The answer to a wrong token
// may wait.
func (m *MASQUE) identify(r *http.Request) (who identity, err error) {
	from := clientAddr(r.RemoteAddr).Addr()
	if !m.isKnown(r) && !m.guesses.MayTry(from) {
		m.unauthorized.Add(1)
		return identity{}, errGuessing
	}
	who, ok := m.authenticate(r)
	if ok {
		return who, m.recordClient(r, who)
	}
	if who.token != (digest{}) {
		m.unauthorized.Add(1)
		m.guesses.DelayWrong(r.Context(), from, authenticateWithin*9/10) // before the connection is closed
	}
	return identity{}, errUnknown
}

// isKnown reports whether the client of a request's connection has authenticated before.
func (m *MASQUE) isKnown(r *http.Request) bool {
	c, _ := r.Context().Value(connKey{}).(*quicgo.Conn)
	m.mu.RLock()
	defer m.mu.RUnlock()
	state := m.conns[c]
	return state != nil && state.name != ""
}

// authenticate identifies the client by a token in Authorization or Proxy-Authorization, if there
// is one. Otherwise it uses the certificate, which TLS has verified. A listener that is open to
// everybody uses the client's address.
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

// recordClient remembers the client of a request's connection, and its token. It refuses the
// request if the token was removed in between, or if the client has too many connections.
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

// certificateName returns the name in a client's certificate; empty: there is none.
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

// serveStream queues a CONNECT for Serve, and returns once it is answered.
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
	_ = req.answerOnce(func() error { return nil }) // w may not be used after this returns
}

// queueRequest queues a request for Serve; false: there is no room, or the listener drains. Drain
// refuses what was queued before.
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

// serveUDP forwards the datagrams of a CONNECT-UDP request (RFC 9298) until it ends, or has been
// idle for access.Datagrams.Idle.
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
	u := &udpStream{name: who.name, queue: make(chan ackedDatagram, udpQueue), cancel: cancel}
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
	send := func(b []byte) bool { return d.sendFromClient(s, target, b) }
	m.relayUDP(ctx, w, u, send, m.log.With("peer", who.name, "target", target))
}

// relayUDP accepts a CONNECT-UDP request and moves its datagrams both ways, until either side ends it or u is
// cancelled. send sends a datagram of the client; false: the session is over.
func (m *MASQUE) relayUDP(
	ctx context.Context, w http.ResponseWriter, u *udpStream, send func([]byte) bool, log *slog.Logger,
) {
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
		func() error { return inwardUDP(ctx, datagrams, send) },
		func() error { return capsulesUDP(stream, send) },
		func() error { return m.outwardUDP(ctx, datagrams, stream.SendDatagram, u) },
	} {
		done.Go(func() {
			if err := part(); err != nil && !errors.Is(err, io.EOF) && ctx.Err() == nil {
				log.Debug("tunnel: CONNECT-UDP ended", "err", err)
			}
			u.cancel()
		})
	}
	<-ctx.Done()
	stream.CancelRead(quicgo.StreamErrorCode(http3.ErrCodeNoError))
	done.Wait()
	_ = stream.Close()
}

// outwardUDP sends datagrams from outside to the client. It drops those that are too large: in the
// stream they would wait for others (RFC 9298 §5).
func (m *MASQUE) outwardUDP(
	ctx context.Context, datagrams *quic.Datagrams, send func([]byte) error, u *udpStream,
) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case b := <-u.queue:
			var large *quicgo.DatagramTooLargeError
			switch err := datagrams.Send(b.content, send, b.ack); {
			case errors.As(err, &large):
				m.drops.large.Add(1)
			case err != nil:
				return err
			}
		}
	}
}

// errLookups refuses a request that would look up one name too many.
var errLookups = errors.New("too many names are being looked up")

// beginUDPSession begins the session of a request with target, or with the first address of host
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

// errTooManySessions refuses a CONNECT-IP session of a peer that has maxSessions.
var errTooManySessions = fmt.Errorf("a peer may have %d sessions at a time", maxSessions)

// addSession makes the stack send the session's packets to it.
func (m *MASQUE) addSession(s *ipSession) {
	s.outlet = m.stack.Outlet(sessionQueue, s.addrs)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range s.addrs {
		m.sessions[a] = s
	}
}

// removeSession ends what addSession began, and keeps the session's traffic.
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

// dropUnmatched drops packets of the stack for addresses without a session.
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

// SetTokens replaces the tokens. It closes connections that have used a removed token. A listener
// that had tokens still needs one or a certificate afterwards.
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

// digest is the hash of a token. The time to compare hashes depends neither on the lengths of
// tokens nor on where they differ.
type digest [sha256.Size]byte

// hashedToken is a token of the configuration.
type hashedToken struct {
	name  string
	value digest
}

// identity is the client of a request.
type identity struct {
	name string
	// token is the hash of the one that was sent; zero: none was.
	token digest
}

// hashTokens checks and hashes tokens. It refuses two that are equal.
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

// findToken looks a token up. It compares with all of them, so that its time does not depend on the
// token.
func findToken(tokens []hashedToken, h digest) (name string, ok bool) {
	for i := range tokens {
		if subtle.ConstantTimeCompare(tokens[i].value[:], h[:]) == 1 {
			name, ok = tokens[i].name, true
		}
	}
	return name, ok
}

// Resume implements Outside. Clients that have lost their connection come back by themselves.
func (m *MASQUE) Resume(map[access.Key]netip.AddrPort) {}

// Report implements Outside.
func (m *MASQUE) Report(s *tunnel.Status) error {
	d := m.Drops()
	s.Refused += m.Refused() + d.Malformed + d.Source
	s.Unauthorized = m.unauthorized.Load()
	s.Sessions, s.Clients = m.Sessions(), m.clientTraffic()
	return nil
}

// Forward implements Outside. CONNECT-UDP brings datagrams that are in no packets.
func (m *MASQUE) Forward(d *Datagrams) { m.datagrams.Store(d) }

// Requests implements Outside. It returns the CONNECTs over HTTP/3.
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

// Refused returns how many clients and requests were refused, such as for their token or
// certificate.
func (m *MASQUE) Refused() uint64 { return m.refused.Load() }

// Drops returns how many packets were not passed on.
func (m *MASQUE) Drops() MASQUEDrops {
	d := &m.drops
	return MASQUEDrops{d.malformed.Load(), d.source.Load(), d.destination.Load(), d.large.Load()}
}

// Drain implements Outside. It asks clients to send no more requests (GOAWAY, RFC 9114 §5.2).
func (m *MASQUE) Drain() {
	m.mu.Lock()
	wasDraining := m.draining
	m.draining = true
	m.mu.Unlock()
	if wasDraining {
		return
	}
	m.stopServing()
	m.done.Go(func() { _ = m.currentServer().Shutdown(m.lifetime) }) // it closes what is left at the end of lifetime
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

// awaitClients waits for the clients of streams to leave. It reports whether there are others.
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

// maxClients bounds the names with counted past sessions, because certificates may have any number
// of names.
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

// clientAddr parses an address as package net writes it.
func clientAddr(s string) netip.AddrPort {
	a, _ := netip.ParseAddrPort(s)
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

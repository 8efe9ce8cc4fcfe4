package userspace

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
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

// connKey is the key of a request's QUIC connection in its context.
type connKey struct{}

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

// rejectRequest refuses a request.
func (m *MASQUE) rejectRequest(w http.ResponseWriter, r *http.Request, status int, reason string) {
	m.log.Debug("tunnel: refused", "client", r.RemoteAddr, "status", status, "reason", reason)
	refuseWith(w, status, reason)
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

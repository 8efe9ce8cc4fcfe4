package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	quicgo "github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/quic"
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

// masqueServer is what serves at one socket.
type masqueServer struct {
	*http3.Server
	udp       *quic.Socket
	transport *quicgo.Transport
	listener  *quicgo.EarlyListener
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

// currentServer is what serves at present.
func (m *MASQUE) currentServer() *masqueServer {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.server
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

// authenticatedKey is the key, in a connection's context, of the function to call once its client is known.
type authenticatedKey struct{}

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

package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/agents/go/ccpagent"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/need"
)

// here is a certificate by an authority for the addresses of these tests.
func here(by *certs.Authority) []tls.Certificate {
	return []tls.Certificate{by.Issue("x", "127.0.0.1", need.Host(), need.LoopbackName)}
}

// trusting is how a datapath connects whose certificate is by one authority and that
// trusts another.
func trusting(by, to *certs.Authority) *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: here(by), RootCAs: to.Pool()}
}

// answers says a window to each report.
type answers struct{ flow *ccpagent.Flow }

func (a answers) Report(r ccpagent.Report) {
	a.flow.Update(ccpagent.Set{"Cwnd": 30_000 + r.Field("acked")})
}

// elsewhere serves an agent at an address over TLS to whoever has a certificate of clients.
func elsewhere(t *testing.T, address string, own *certs.Authority, clients *x509.CertPool) (at string, die func()) {
	t.Helper()
	l, err := tls.Listen("tcp", address, &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: here(own),
		ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: clients,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	a := ccpagent.Agent{
		Programs: map[string]string{"folds": text},
		New: func(f *ccpagent.Flow) ccpagent.Controller {
			f.Run("folds", nil)
			return answers{f}
		},
	}
	go func() { done <- a.ServeListener(ctx, l) }()
	over := false
	die = func() {
		if cancel(); !over {
			over = true
			assert.NoError(t, <-done)
		}
	}
	t.Cleanup(die)
	return l.Addr().String(), die
}

// ownAddress stays free while nobody listens there.
var ownAddress = need.Host() + ":7407"

func TestAnAgentOnAnotherMachineDecides(t *testing.T) {
	ca := certs.NewAuthority()
	at, die := elsewhere(t, ownAddress, ca, ca.Pool())
	s := startWith(t, Config{Address: at, TLS: trusting(ca, ca)})
	s.until("agent")
	acked := s.decided() - 30_000
	assert.Positive(t, acked)
	assert.Zero(t, acked%1448, "a report has all that was acknowledged since the last one that left")
	assert.Equal(t, at, s.link.Info().Socket)

	die()
	s.until("fallback")
	assert.NotZero(t, s.link.Info().Fallbacks["gone"])
	elsewhere(t, at, ca, ca.Pool())
	s.until("agent")
	assert.EqualValues(t, 2, s.link.Info().Connects)
}

// The name has an IPv6 address as well, where nobody listens.
func TestAnAgentIsReachedByItsName(t *testing.T) {
	ca := certs.NewAuthority()
	at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.Pool())
	_, port, err := net.SplitHostPort(at)
	require.NoError(t, err)
	link := &Link{cfg: Config{Name: "x", Address: net.JoinHostPort(need.LoopbackName, port)}}
	link.SetTLS(trusting(ca, ca))
	conn, err := link.dialRemote(t.Context())
	require.NoError(t, err)
	assert.Equal(t, at, conn.RemoteAddr().String())
	require.NoError(t, conn.Close())
}

func TestBothEndsWantACertificate(t *testing.T) {
	ca, other := certs.NewAuthority(), certs.NewAuthority()
	t.Run("the agent's is not trusted", func(t *testing.T) {
		at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.Pool())
		link := &Link{cfg: Config{Name: "x", Address: at}}
		link.SetTLS(trusting(ca, other))
		_, err := link.dialRemote(context.Background())
		var unknown x509.UnknownAuthorityError
		assert.ErrorAs(t, err, &unknown)
	})
	t.Run("the proxy's is not trusted", func(t *testing.T) {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: here(ca),
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool(),
		})
		require.NoError(t, err)
		defer l.Close()
		var refused atomic.Int64
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				if conn.(*tls.Conn).HandshakeContext(context.Background()) != nil {
					refused.Add(1)
				}
				_ = conn.Close()
			}
		}()
		said := &lines{}
		s := startWith(t, Config{
			Address: l.Addr().String(), TLS: trusting(other, ca),
			Log: slog.New(slog.NewTextHandler(said, nil)),
		})
		require.Eventually(t, func() bool { return refused.Load() > 2 }, patience, time.Millisecond)
		s.ack()
		assert.Zero(t, s.link.Info().Steered)
		assert.Zero(t, s.link.Info().Connects, "TLS 1.3 tells with the first bytes")
		assert.EqualValues(t, 1, said.n.Load(), "one line for it, however often it is dialled")
	})
}

// lines counts those of a log.
type lines struct{ n atomic.Int64 }

func (l *lines) Write(b []byte) (int, error) {
	l.n.Add(1)
	return len(b), nil
}

func TestTheNextConnectionIsByNewCertificates(t *testing.T) {
	ca, other := certs.NewAuthority(), certs.NewAuthority()
	at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.Pool())
	s := startWith(t, Config{Address: at, TLS: trusting(other, ca)})
	assert.Equal(t, "fallback", s.ack())
	s.link.SetTLS(trusting(ca, ca))
	s.until("agent")
}

// An agent that is not there is dialled again and again, and the log has one line for it.
func TestAReasonIsTheSameEachTime(t *testing.T) {
	ca := certs.NewAuthority()
	t.Run("expired", func(t *testing.T) {
		at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.Pool())
		secure := trusting(ca, ca)
		hour := time.Now().Add(24 * time.Hour)
		secure.Time = func() time.Time { hour = hour.Add(time.Hour); return hour }
		sameReason(t, at, secure)
	})
	t.Run("reset", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = conn.Read(make([]byte, 1))
				_ = conn.(*net.TCPConn).SetLinger(0)
				_ = conn.Close()
			}
		}()
		sameReason(t, l.Addr().String(), trusting(ca, ca))
	})
}

func sameReason(t *testing.T, at string, secure *tls.Config) {
	t.Helper()
	link := &Link{cfg: Config{Name: "x", Address: at}}
	link.SetTLS(secure)
	_, first := link.dialRemote(t.Context())
	_, second := link.dialRemote(t.Context())
	require.Error(t, first)
	require.Error(t, second)
	require.NotEqual(t, first.Error(), second.Error())
	assert.Equal(t, disconnectReason(first), disconnectReason(second))
}

func TestWhatIsNoMessageEndsAConnectionToAnotherMachine(t *testing.T) {
	for name, said := range map[string][]byte{
		"too long":  {1, 0, 0xff, 0xff, 0, 0, 0, 0},
		"too short": {1, 0, 7, 0, 0, 0, 0, 0},
		"eight that are malformed": func() (b []byte) {
			for range maxMalformed {
				b = append(b, byte(ccp.KindInstall), 0, 9, 0, 0, 0, 0, 0, 1)
			}
			return b
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			ca := certs.NewAuthority()
			l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
				MinVersion: tls.VersionTLS13, Certificates: here(ca),
			})
			require.NoError(t, err)
			defer l.Close()
			closed := make(chan error, 1)
			go func() {
				conn, err := l.Accept()
				if err == nil {
					_, _ = conn.Write(said)
					_, err = conn.Read(make([]byte, 1<<20))
					for err == nil {
						_, err = conn.Read(make([]byte, 1<<20))
					}
				}
				closed <- err
			}()
			s := startWith(t, Config{Address: l.Addr().String(), TLS: trusting(ca, ca)})
			assert.Error(t, <-closed)
			assert.NotZero(t, s.link.Info().Malformed)
		})
	}
}

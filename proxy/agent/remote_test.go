package agent

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"log/slog"
	"math/big"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/agents/go/ccpagent"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/internal/need"
)

// authority issues certificates.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t}
	c := a.issue(true)
	a.cert, a.key = c.Leaf, c.PrivateKey.(*ecdsa.PrivateKey)
	return a
}

// issue is a certificate for the addresses of these tests, or the authority's own.
func (a *authority) issue(own bool) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a.t, err)
	form := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1), net.ParseIP(need.Host())}, IsCA: own, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	parent, signer := a.cert, a.key
	if own {
		parent, signer = form, key
	}
	der, err := x509.CreateCertificate(rand.Reader, form, parent, &key.PublicKey, signer)
	require.NoError(a.t, err)
	leaf, err := x509.ParseCertificate(der)
	require.NoError(a.t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// datapath is how a datapath connects whose certificate is by a and that trusts to.
func (a *authority) datapath(to *authority) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{a.issue(false)}, RootCAs: to.pool(),
	}
}

// answers says a window to each report.
type answers struct{ flow *ccpagent.Flow }

func (a answers) Report(r ccpagent.Report) {
	a.flow.Update(ccpagent.Set{"Cwnd": 30_000 + r.Field("acked")})
}

// elsewhere serves an agent at an address over TLS to whoever has a certificate of clients.
func elsewhere(t *testing.T, address string, own *authority, clients *x509.CertPool) (at string, die func()) {
	t.Helper()
	l, err := tls.Listen("tcp", address, &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own.issue(false)},
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
	ca := newAuthority(t)
	at, die := elsewhere(t, ownAddress, ca, ca.pool())
	s := startWith(t, Config{Address: at, TLS: ca.datapath(ca)})
	s.until("agent")
	assert.EqualValues(t, 31_448, s.decided())
	assert.Equal(t, at, s.link.Info().Socket)

	die()
	s.until("fallback")
	assert.NotZero(t, s.link.Info().Fallbacks["gone"])
	elsewhere(t, at, ca, ca.pool())
	s.until("agent")
	assert.EqualValues(t, 2, s.link.Info().Connects)
}

func TestBothEndsWantACertificate(t *testing.T) {
	ca, other := newAuthority(t), newAuthority(t)
	t.Run("the agent's is not trusted", func(t *testing.T) {
		at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.pool())
		link := &Link{cfg: Config{Name: "x", Address: at}}
		link.Secure(ca.datapath(other))
		_, err := link.dialRemote(context.Background())
		var unknown x509.UnknownAuthorityError
		assert.ErrorAs(t, err, &unknown)
	})
	t.Run("the proxy's is not trusted", func(t *testing.T) {
		l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
			MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{ca.issue(false)},
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.pool(),
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
		s := startWith(t, Config{Address: l.Addr().String(), TLS: other.datapath(ca), Log: slog.New(slog.NewTextHandler(said, nil))})
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
	ca, other := newAuthority(t), newAuthority(t)
	at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.pool())
	s := startWith(t, Config{Address: at, TLS: other.datapath(ca)})
	assert.Equal(t, "fallback", s.ack())
	s.link.Secure(ca.datapath(ca))
	s.until("agent")
}

// An agent that is not there is dialled again and again, and the log has one line for it.
func TestAReasonIsTheSameEachTime(t *testing.T) {
	ca := newAuthority(t)
	t.Run("expired", func(t *testing.T) {
		at, _ := elsewhere(t, "127.0.0.1:0", ca, ca.pool())
		secure := ca.datapath(ca)
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
		sameReason(t, l.Addr().String(), ca.datapath(ca))
	})
}

func sameReason(t *testing.T, at string, secure *tls.Config) {
	t.Helper()
	link := &Link{cfg: Config{Name: "x", Address: at}}
	link.Secure(secure)
	_, first := link.dialRemote(t.Context())
	_, second := link.dialRemote(t.Context())
	require.Error(t, first)
	require.Error(t, second)
	require.NotEqual(t, first.Error(), second.Error())
	assert.Equal(t, reason(first), reason(second))
}

func TestWhatIsNoMessageEndsAConnectionToAnotherMachine(t *testing.T) {
	for name, said := range map[string][]byte{
		"too long":  {1, 0, 0xff, 0xff, 0, 0, 0, 0},
		"too short": {1, 0, 7, 0, 0, 0, 0, 0},
		"eight that are malformed": func() (b []byte) {
			for range nonsense {
				b = append(b, byte(ccp.KindInstall), 0, 9, 0, 0, 0, 0, 0, 1)
			}
			return b
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			ca := newAuthority(t)
			l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
				MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{ca.issue(false)},
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
			s := startWith(t, Config{Address: l.Addr().String(), TLS: ca.datapath(ca)})
			assert.Error(t, <-closed)
			assert.NotZero(t, s.link.Info().Malformed)
		})
	}
}

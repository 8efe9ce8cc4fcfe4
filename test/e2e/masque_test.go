//go:build linux

package e2e

import (
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
	legs "github.com/penstock-net/penstock/proxy/datapath/quic"
)

const (
	masquePort  = 8443
	masqueToken = "a-token-of-a-phone-s-own"
)

// masqueConfig has a certificate that was made on the spot.
var masqueConfig = func() string {
	certificate, key := certs.PEM(certs.SelfSigned("vpn.test"))
	return fmt.Sprintf("mode: masque\n    address: \":%d\"\n    tls: {certificate: %q, key: %q}\n    masque: {pool: "+
		"[10.10.0.0/24, \"fd00:10::/64\"], tokens: [{name: phone, token: %s}]}",
		masquePort, certificate, key, masqueToken)
}()

var throughMASQUE = &tunnelled{open: func(s *scene) { s.connectMASQUE() }}

// connectMASQUE brings a CONNECT-IP session up inside the client, and the way to
// the server with it.
func (s *scene) connectMASQUE() {
	s.t.Helper()
	m, err := s.openMASQUE(masqueToken)
	require.NoError(s.t, err)
	s.t.Cleanup(m.Close)
}

func (s *scene) openMASQUE(token string) (*netlab.MASQUE, error) {
	s.t.Helper()
	need.TUN(s.t)
	return s.Client.MASQUE(netlab.MASQUEConfig{
		Device: "masque0", MTU: access.MASQUEMTU, Gateway: netip.AddrPortFrom(s.EdgeNear.V4, masquePort), Token: token,
		Through: []netip.Prefix{netip.PrefixFrom(s.ServerAddr.V4, 24), netip.PrefixFrom(s.ServerAddr.V6, 64)},
	})
}

// connectUDP asks the gateway for UDP to a target (CONNECT-UDP), and returns it as a socket.
func (s *scene) connectUDP(target netip.AddrPort) net.PacketConn {
	s.t.Helper()
	gateway := net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.EdgeNear.V4, masquePort))
	conn, err := quic.Dial(s.t.Context(), listenUDP(s.t, s.Client, s.clientUDP()), gateway,
		//nolint:gosec // the gateway's key is made on the spot
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}},
		&quic.Config{
			EnableDatagrams: true, InitialPacketSize: 1400, Tracer: legs.Tracer(func() cc.Time { return 1 }, nil),
		})
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = conn.CloseWithError(0, "") })
	stream, err := (&http3.Transport{EnableDatagrams: true}).NewClientConn(conn).OpenRequestStream(s.t.Context())
	require.NoError(s.t, err)
	request, err := http.NewRequest(http.MethodConnect,
		fmt.Sprintf("https://vpn.test/.well-known/masque/udp/%s/%d/", target.Addr(), target.Port()), nil)
	require.NoError(s.t, err)
	request.Proto = "connect-udp"
	request.Header.Set("Authorization", "Bearer "+masqueToken)
	request.Header.Set(http3.CapsuleProtocolHeader, "?1")
	require.NoError(s.t, stream.SendRequestHeader(request))
	reply, err := stream.ReadResponse() //nolint:bodyclose // the body is the stream
	require.NoError(s.t, err)
	require.Equal(s.t, http.StatusOK, reply.StatusCode)
	received, err := legs.ReceiveDatagrams(stream.QlogTrace(), stream.StreamID(), stream.ReceiveDatagram)
	require.NoError(s.t, err)
	s.t.Cleanup(received.Close)
	return &udpRequest{
		stream: stream, received: received, local: conn.LocalAddr(), remote: net.UDPAddrFromAddrPort(target),
	}
}

// udpRequest is a CONNECT-UDP request as a socket. It has no deadlines.
type udpRequest struct {
	stream        *http3.RequestStream
	received      *legs.Datagrams
	local, remote net.Addr
}

func (u *udpRequest) ReadFrom(b []byte) (int, net.Addr, error) {
	batch, err := u.received.Receive(u.stream.Context(), make([][]byte, 0, 1))
	if err != nil {
		return 0, nil, net.ErrClosed
	}
	return copy(b, batch[0][1:]), u.remote, nil // without the context, 0
}

func (u *udpRequest) WriteTo(b []byte, _ net.Addr) (int, error) {
	return len(b), u.stream.SendDatagram(append([]byte{0}, b...))
}

func (u *udpRequest) Close() error { return u.stream.Close() }

func (u *udpRequest) LocalAddr() net.Addr { return u.local }

func (*udpRequest) SetDeadline(time.Time) error { return nil }

func (*udpRequest) SetReadDeadline(time.Time) error { return nil }

func (*udpRequest) SetWriteDeadline(time.Time) error { return nil }

func TestAWrongTokenIsRefusedAndCounted(t *testing.T) {
	s := newScene(t)
	p := s.start(named("masque over IPv4").yaml(""))
	_, err := s.openMASQUE("a-token-of-nobody-at-all")
	require.ErrorContains(t, err, "401")
	require.Eventually(t, func() bool {
		return p.metric("penstock_tunnel_refused_packets_total") > 0 || p.metric("penstock_rejected_total") > 0
	}, patience, 20*time.Millisecond)
	assert.Zero(t, p.metric("penstock_flows_total"))
}

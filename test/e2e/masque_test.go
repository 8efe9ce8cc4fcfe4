//go:build linux

package e2e

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/yosida95/uritemplate/v3"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/penstock-net/penstock/proxy/tunnel"
)

const (
	masquePort   = 8443
	masqueDevice = "masque0"
	masqueToken  = "a-token-of-a-phone-s-own"
)

// masqueConfig has a certificate that was made on the spot.
var masqueConfig = func() string {
	certificate, key := selfSigned()
	return fmt.Sprintf("mode: masque\n    address: \":%d\"\n    tls: {certificate: %q, key: %q}\n    masque: {pool: [10.10.0.0/24, \"fd00:10::/64\"], tokens: [{name: phone, token: %s}]}",
		masquePort, certificate, key, masqueToken)
}()

var throughMASQUE = &tunnelled{open: func(s *scene) { s.connectMASQUE() }}

// selfSigned is a certificate and its key, as PEM.
func selfSigned() (certificate, key string) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err) // there is no randomness
	}
	form := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"vpn.test"}}
	der, err := x509.CreateCertificate(rand.Reader, form, form, private.Public(), private)
	if err != nil {
		panic(err) // as above
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		panic(err) // of a curve that everybody knows
	}
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})),
		string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: secret}))
}

// dialMASQUE opens an HTTP/3 connection to the gateway and asks for a session.
func (s *scene) dialMASQUE(ctx context.Context, token string) (*connectip.Conn, *http.Response, error) {
	s.t.Helper()
	udp := listenUDP(s.t, s.Client, netip.AddrPortFrom(s.ClientAddr.V4, 0))
	conn, err := quic.Dial(ctx, udp, net.UDPAddrFromAddrPort(netip.AddrPortFrom(s.EdgeNear.V4, masquePort)),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, //nolint:gosec // the gateway's key is made on the spot
		&quic.Config{EnableDatagrams: true, InitialPacketSize: 1350, KeepAlivePeriod: 10 * time.Second})
	require.NoError(s.t, err)
	transport := &http3.Transport{EnableDatagrams: true}
	s.t.Cleanup(func() {
		_ = conn.CloseWithError(0, "") // the gateway may have ended it
		_ = transport.Close()
	})
	r, err := connectip.NewRequest(ctx, uritemplate.MustNew("https://vpn.test/.well-known/masque/ip/*/*/"))
	require.NoError(s.t, err)
	r.Header().Set("Authorization", "Bearer "+token)
	return connectip.NewClientConn(transport.NewClientConn(conn)).Dial(r)
}

// connectMASQUE brings a CONNECT-IP session up inside the client, and the way to
// the server with it.
func (s *scene) connectMASQUE() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	s.t.Cleanup(cancel)
	session, _, err := s.dialMASQUE(ctx, masqueToken) //nolint:bodyclose // the body is the session
	require.NoError(s.t, err)
	given, err := session.ReceiveAddressAssignment(ctx)
	require.NoError(s.t, err)
	var device tun.Device
	require.NoError(s.t, s.Client.Do(func() (err error) {
		if device, err = tun.CreateTUN(masqueDevice, tunnel.MASQUEMTU); err != nil {
			return err
		}
		link, err := netlink.LinkByName(masqueDevice)
		if err != nil {
			return err
		}
		for _, a := range given {
			addr, parseErr := netlink.ParseAddr(a.IPPrefix.String())
			if parseErr != nil {
				return parseErr
			}
			err = errors.Join(err, netlink.AddrAdd(link, addr))
		}
		err = errors.Join(err, netlink.LinkSetUp(link))
		for _, far := range []netip.Prefix{netip.PrefixFrom(s.ServerAddr.V4, 24), netip.PrefixFrom(s.ServerAddr.V6, 64)} {
			_, dst, _ := net.ParseCIDR(far.Masked().String())
			err = errors.Join(err, netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst}))
		}
		return err
	}))
	var done sync.WaitGroup
	s.t.Cleanup(func() {
		assert.NoError(s.t, session.Close())
		assert.NoError(s.t, device.Close())
		done.Wait()
	})
	const headroom = 16           // the device's own
	give := func(packet []byte) { // which is lost when the device has ended
		_, _ = device.Write([][]byte{append(make([]byte, headroom), packet...)}, headroom)
	}
	done.Go(func() {
		for range device.Events() {
		}
	})
	done.Go(func() {
		bufs, sizes := make([][]byte, device.BatchSize()), make([]int, device.BatchSize())
		for i := range bufs {
			bufs[i] = make([]byte, headroom+1<<16)
		}
		for {
			n, err := device.Read(bufs, sizes, headroom)
			for i := range n {
				icmp, err := session.WritePacket(bufs[i][headroom : headroom+sizes[i]])
				if err != nil {
					return
				}
				if len(icmp) > 0 { // the packet was too big
					give(icmp)
				}
			}
			if err != nil && !errors.Is(err, tun.ErrTooManySegments) {
				return
			}
		}
	})
	done.Go(func() {
		buf := make([]byte, 1<<16)
		for {
			n, err := session.ReadPacket(buf)
			if err != nil {
				return
			}
			give(buf[:n])
		}
	})
}

func TestAWrongTokenIsRefusedAndCounted(t *testing.T) {
	onceIsEnough(t)
	s := newScene(t)
	p := s.start(named("masque over IPv4").yaml(""))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, said, err := s.dialMASQUE(ctx, "a-token-of-nobody-at-all") //nolint:bodyclose // read to its end below
	require.Error(t, err)
	require.NotNil(t, said)
	_, _ = io.Copy(io.Discard, said.Body) // there is hardly one
	assert.Equal(t, http.StatusUnauthorized, said.StatusCode)
	require.Eventually(t, func() bool {
		return p.metric("penstock_tunnel_refused_packets_total") > 0 || p.metric("penstock_rejected_total") > 0
	}, patience, 20*time.Millisecond)
	assert.Zero(t, p.metric("penstock_flows_total"))
}

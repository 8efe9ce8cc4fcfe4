//go:build linux

package netlab

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	connectip "github.com/quic-go/connect-ip-go"
	"github.com/quic-go/quic-go"
	"github.com/quic-go/quic-go/http3"
	"github.com/yosida95/uritemplate/v3"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/penstock-net/penstock/cc"
	legs "github.com/penstock-net/penstock/proxy/datapath/quic"
)

// MASQUEConfig describes a CONNECT-IP client (RFC 9484) with a network device
// inside, so that ordinary sockets use it.
type MASQUEConfig struct {
	Device  string
	MTU     int // of the device
	Gateway netip.AddrPort
	Token   string         // a bearer token
	Through []netip.Prefix // what is routed into it
}

// MASQUE is a CONNECT-IP client, in this process: connect-ip-go over quic-go.
type MASQUE struct {
	udp       *legs.Socket
	conn      *quic.Conn
	transport *http3.Transport
	session   *connectip.Conn
	device    tun.Device
	done      sync.WaitGroup
}

const (
	masqueURL       = "https://vpn.test/.well-known/masque/ip/*/*/"
	masqueKeepalive = 10 * time.Second
	masquePacket    = 1350 // QUIC's first ones: less than the path to the gateway carries
	masquePatience  = 20 * time.Second
	masqueStream    = 0  // the first request of a connection has this one
	masqueHeadroom  = 16 // bytes before a packet that the device wants for itself
)

// MASQUE opens a session from inside the node. Close it before the lab.
func (n *Node) MASQUE(cfg MASQUEConfig) (*MASQUE, error) {
	m := &MASQUE{}
	err := n.Do(func() (err error) {
		m.udp, err = legs.ListenUDP(nil)
		return err
	})
	if err == nil {
		err = m.connect(cfg)
	}
	if err != nil {
		m.Close()
		return nil, fmt.Errorf("netlab: CONNECT-IP at %v: %w", cfg.Gateway, err)
	}
	if err := m.open(n, cfg); err != nil {
		m.Close()
		return nil, fmt.Errorf("netlab: bring up CONNECT-IP on %s: %w", cfg.Device, err)
	}
	return m, nil
}

// connect asks for a session. It outlives the time that it may take to open it.
func (m *MASQUE) connect(cfg MASQUEConfig) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), masquePatience)
	defer cancel()
	m.conn, err = quic.Dial(ctx, m.udp, net.UDPAddrFromAddrPort(cfg.Gateway),
		&tls.Config{InsecureSkipVerify: true, NextProtos: []string{http3.NextProtoH3}}, //nolint:gosec // in a lab, where the gateway's key is made on the spot
		&quic.Config{
			EnableDatagrams: true, InitialPacketSize: masquePacket, KeepAlivePeriod: masqueKeepalive,
			Tracer: legs.Tracer(func() cc.Time { return 1 }, nil),
		})
	if err != nil {
		return err
	}
	m.transport = &http3.Transport{EnableDatagrams: true}
	request, err := connectip.NewRequest(context.Background(), uritemplate.MustNew(masqueURL))
	if err != nil {
		return err
	}
	request.Header().Set("Authorization", "Bearer "+cfg.Token)
	m.session, _, err = connectip.NewClientConn(m.transport.NewClientConn(m.conn)).Dial(request) //nolint:bodyclose // the body is the session
	return err
}

// open brings the device up with the addresses that the gateway gives.
func (m *MASQUE) open(n *Node, cfg MASQUEConfig) error {
	ctx, cancel := context.WithTimeout(context.Background(), masquePatience)
	defer cancel()
	given, err := m.session.ReceiveAddressAssignment(ctx)
	if err != nil {
		return err
	}
	inside := WireGuardConfig{Device: cfg.Device, Peers: []WireGuardPeer{{Allowed: cfg.Through}}}
	for _, a := range given {
		inside.Addrs = append(inside.Addrs, a.IPPrefix)
	}
	err = n.Do(func() error {
		device, err := tun.CreateTUN(cfg.Device, cfg.MTU)
		if err != nil {
			return err
		}
		m.device = newSteady(device, cfg.MTU)
		return inside.route()
	})
	if err != nil {
		return err
	}
	m.done.Go(m.outward)
	m.done.Go(m.inward)
	return nil
}

// outward moves packets from the device into the session.
func (m *MASQUE) outward() {
	bufs, sizes := make([][]byte, m.device.BatchSize()), make([]int, m.device.BatchSize())
	for i := range bufs {
		bufs[i] = make([]byte, masqueHeadroom+1<<16)
	}
	for {
		n, err := m.device.Read(bufs, sizes, masqueHeadroom)
		for i := range n {
			tooBig, err := m.session.WritePacket(bufs[i][masqueHeadroom : masqueHeadroom+sizes[i]])
			if err != nil {
				return
			}
			if len(tooBig) > 0 {
				m.give(tooBig)
			}
		}
		if err != nil && !errors.Is(err, tun.ErrTooManySegments) {
			return
		}
	}
}

// inward moves packets from the session into the device. HTTP/3 waits for it: left to
// itself it loses what comes in bursts of more than 32 (legs.Datagrams).
func (m *MASQUE) inward() {
	batch := make([][]byte, 0, m.device.BatchSize())
	bufs, next := make([][]byte, cap(batch)), 0 // a batch is written before the next one is read
	for i := range bufs {
		bufs[i] = make([]byte, masqueHeadroom+1<<11)
	}
	packets, err := legs.ReceiveDatagrams(m.conn.QlogTrace(), masqueStream, func(context.Context) ([]byte, error) {
		p := bufs[next%len(bufs)]
		next++
		n, err := m.session.ReadPacket(p[masqueHeadroom:])
		return p[:masqueHeadroom+n], err
	})
	if err != nil {
		return // the connection has a Tracer
	}
	defer packets.Close()
	for {
		if batch, err = packets.Receive(context.Background(), batch); err != nil {
			return
		}
		_, _ = m.device.Write(batch, masqueHeadroom) // lost where the device has ended
	}
}

// give hands the device a packet, which is lost when it has ended.
func (m *MASQUE) give(packet []byte) {
	_, _ = m.device.Write([][]byte{append(make([]byte, masqueHeadroom, masqueHeadroom+len(packet)), packet...)},
		masqueHeadroom)
}

// Close ends the session; its device goes with it.
func (m *MASQUE) Close() {
	if m.session != nil {
		_ = m.session.Close() // the gateway may have ended it
	}
	if m.device != nil {
		_ = m.device.Close()
	}
	m.done.Wait()
	if m.conn != nil {
		_ = m.conn.CloseWithError(0, "")
	}
	if m.transport != nil {
		_ = m.transport.Close()
	}
	if m.udp != nil {
		_ = m.udp.Close()
	}
}

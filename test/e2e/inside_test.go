//go:build linux

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// insidePool is where the two peers of these tests are: the phone, which is the
// client, and the tablet, which is where the server is otherwise.
var (
	insidePool = netip.MustParsePrefix("10.9.0.0/24")
	tabletKey  = newKey()
	tabletAddr = netip.MustParseAddr("10.9.0.3")
)

// peersOf is a gateway's configuration with both.
func peersOf(isolate bool) string {
	return fmt.Sprintf(`mode: wireguard
    address: ":%d"
    tunnel: {isolate: %v}
    wireguard:
      private_key: %q
      pool: [%v]
      peers:
        - {name: phone, public_key: %q, allowed_ips: [%v]}
        - {name: tablet, public_key: %q, allowed_ips: [%v/32]}`,
		gatewayPort, isolate, gatewayKey, insidePool, publicKey(phoneKey), phoneAddrs[0], publicKey(tabletKey), tabletAddr)
}

// aClient brings up a peer inside a node, with the pool behind the gateway.
type aClient func(s *scene, n *netlab.Node, device string, key access.Key, inner, gateway netip.Addr)

func ourClient(s *scene, n *netlab.Node, device string, key access.Key, inner, gateway netip.Addr) {
	need.TUN(s.t)
	w, err := n.WireGuard(netlab.WireGuardConfig{
		Device: device, Addrs: []netip.Prefix{netip.PrefixFrom(inner, 32)}, MTU: 1420, PrivateKey: key,
		Peers: []netlab.WireGuardPeer{{
			PublicKey: publicKey(gatewayKey), Endpoint: netip.AddrPortFrom(gateway,
				gatewayPort), Allowed: []netip.Prefix{insidePool},
		}},
	})
	require.NoError(s.t, err)
	s.t.Cleanup(w.Close)
}

// wireguardGoItself is the program of package wireguard-go, set up by wg and ip.
func wireguardGoItself(s *scene, n *netlab.Node, device string, key access.Key, inner, gateway netip.Addr) {
	need.Programs(s.t, "wireguard-go", "wg", "ip")
	need.WireGuardGo(s.t)
	daemon := n.Command(s.t.Context(), "wireguard-go", "-f", device)
	require.NoError(s.t, daemon.Start())
	s.t.Cleanup(func() {
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
		_ = os.Remove("/var/run/wireguard/" + device + ".sock")
	})
	file := filepath.Join(s.t.TempDir(), "wg.conf")
	require.NoError(s.t, os.WriteFile(file, fmt.Appendf(nil,
		"[Interface]\nPrivateKey = %v\n[Peer]\nPublicKey = %v\nEndpoint = %v\nAllowedIPs = %v\n",
		key, publicKey(gatewayKey), netip.AddrPortFrom(gateway, gatewayPort), insidePool), 0o600))
	require.Eventually(s.t, func() bool {
		return n.Command(s.t.Context(), "wg", "setconf", device, file).Run() == nil
	}, patience, 20*time.Millisecond)
	for _, args := range []string{"addr add %v/24 dev %v", "link set %[2]v mtu 1420 up"} {
		out, err := n.Command(s.t.Context(), "ip", strings.Fields(fmt.Sprintf(args, inner, device))...).CombinedOutput()
		require.NoError(s.t, err, string(out))
	}
}

// leaks counts the packets that pass a device and are from or for the inside.
type leaks struct {
	fd   int
	mu   sync.Mutex
	seen []string
	all  int
	done chan struct{}
}

func (s *scene) watchForLeaks(device string) *leaks {
	l := &leaks{done: make(chan struct{})}
	require.NoError(s.t, s.Edge.Do(func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		everything := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, unix.ETH_P_ALL))
		if l.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(everything)); err != nil {
			return err
		}
		return errors.Join(
			unix.Bind(l.fd, &unix.SockaddrLinklayer{Protocol: everything, Ifindex: link.Attrs().Index}),
			unix.SetsockoptTimeval(l.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000}))
	}))
	stop := make(chan struct{})
	go func() {
		defer close(l.done)
		b := make([]byte, 1<<16)
		for {
			n, _, err := unix.Recvfrom(l.fd, b, 0)
			select {
			case <-stop:
				return
			default:
			}
			if err == nil {
				l.note(b[:n])
			}
		}
	}()
	s.t.Cleanup(func() {
		close(stop)
		<-l.done
		_ = unix.Close(l.fd)
	})
	return l
}

func (l *leaks) note(p []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all++
	switch {
	case len(p) >= 20 && p[0]>>4 == 4:
		from, to := netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
		if insidePool.Contains(from) || insidePool.Contains(to) {
			l.seen = append(l.seen, fmt.Sprintf("%v > %v protocol %d", from, to, p[9]))
		}
	case len(p) >= 28 && p[1] == 8 && p[0] == 0: // an ARP request, without its link header
		if to := netip.AddrFrom4([4]byte(p[24:28])); insidePool.Contains(to) {
			l.seen = append(l.seen, "who has "+to.String())
		}
	}
}

func (l *leaks) found() (seen []string, all int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.seen, l.all
}

// pings asks from inside a node and waits for an answer, or an ICMP error.
func (s *scene) pings(n *netlab.Node, from, to netip.Addr, wait time.Duration) icmp.Type {
	s.t.Helper()
	var conn *icmp.PacketConn
	require.NoError(s.t, n.Do(func() (err error) {
		conn, err = icmp.ListenPacket("ip4:icmp", from.String())
		return err
	}))
	defer conn.Close()
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(wait)))
	echo := icmp.Message{Type: ipv4.ICMPTypeEcho, Body: &icmp.Echo{ID: 7, Seq: 1, Data: []byte("are you there?")}}
	b, err := echo.Marshal(nil)
	require.NoError(s.t, err)
	_, err = conn.WriteTo(b, &net.IPAddr{IP: to.AsSlice()})
	require.NoError(s.t, err)
	buf := make([]byte, 1500)
	size, _, err := conn.ReadFrom(buf)
	if err != nil {
		return nil
	}
	m, err := icmp.ParseMessage(1, buf[:size])
	require.NoError(s.t, err)
	return m.Type
}

// askUDP sends a datagram from inside a node and returns the answer, or the error
// that the kernel makes of an ICMP message.
func (s *scene) askUDP(n *netlab.Node, from netip.Addr, to netip.AddrPort) (string, error) {
	s.t.Helper()
	var conn *net.UDPConn
	require.NoError(s.t, n.Do(func() (err error) {
		conn, err = net.DialUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(from, 0)),
			net.UDPAddrFromAddrPort(to))
		return err
	}))
	raw, err := conn.SyscallConn()
	require.NoError(s.t, err)
	require.NoError(s.t, raw.Control(func(fd uintptr) { // has the kernel tell of hosts that are unreachable
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1)
	}))
	require.NoError(s.t, err)
	defer conn.Close()
	require.NoError(s.t, conn.SetDeadline(time.Now().Add(patience)))
	_, err = conn.Write([]byte("hello"))
	require.NoError(s.t, err)
	b := make([]byte, 100)
	size, err := conn.Read(b)
	return string(b[:size]), err
}

// TestPeersReachEachOtherInsideAndNothingOfItLeavesOutside watches what leaves the
// gateway by its upstream, to which there is a default route.
func TestPeersReachEachOtherInsideAndNothingOfItLeavesOutside(t *testing.T) {
	needsPrivilege(t)
	phone := phoneAddrs[0].Addr()
	for name, client := range map[string]aClient{"our own": ourClient, "wireguard-go": wireguardGoItself} {
		for _, isolate := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, isolate %v", name, isolate), func(t *testing.T) {
				s := newScene(t)
				require.NoError(t, s.Edge.Route(netip.MustParsePrefix("0.0.0.0/0"), s.ServerAddr.V4))
				p := s.start(way{config: peersOf(isolate) + "\n  - {name: ask, mode: mixed, address: " +
					"\"127.0.0.1:1080\"}"}.yaml(""))
				client(s, s.Client, "inphone", phoneKey, phone, s.EdgeNear.V4)
				client(s, s.Server, "intablet", tabletKey, tabletAddr, s.EdgeFar.V4)
				upstream := s.watchForLeaks(netlab.FarDevice)

				ln, err := s.Server.Listen("tcp4", netip.AddrPortFrom(tabletAddr, servicePort).String())
				require.NoError(t, err)
				need.Serve(t, ln, func(c net.Conn) {
					_, _ = io.WriteString(c, c.RemoteAddr().(*net.TCPAddr).IP.String())
				})
				need.Echo(t, listenUDP(t, s.Server, netip.AddrPortFrom(tabletAddr, servicePort)))

				// The tablet is called once it has been heard from.
				require.Eventually(t, func() bool {
					return s.pings(s.Server, tabletAddr, insidePool.Addr().Next(),
						time.Second) == ipv4.ICMPTypeEchoReply
				}, patience, time.Millisecond, "the gateway answers pings")
				assert.Equal(t, ipv4.ICMPTypeEchoReply, s.pings(s.Client, phone, insidePool.Addr().Next(), patience))

				service := netip.AddrPortFrom(tabletAddr, servicePort)
				c, err := s.Client.Dial("tcp4", service.String())
				if isolate {
					require.ErrorIs(t, err, syscall.ECONNREFUSED)
					assert.Equal(t, ipv4.ICMPTypeDestinationUnreachable, s.pings(s.Client, phone, tabletAddr, patience))
					_, err = s.askUDP(s.Client, phone, service)
					require.ErrorIs(t, err, syscall.EHOSTUNREACH, "administratively prohibited")
				} else {
					require.NoError(t, err)
					said, err := io.ReadAll(c)
					require.NoError(t, err)
					assert.Equal(t, phone.String(), string(said))
					c.Close()
					assert.Equal(t, ipv4.ICMPTypeEchoReply, s.pings(s.Client, phone, tabletAddr, patience))
					assert.Equal(t, ipv4.ICMPTypeEchoReply, s.pings(s.Server, tabletAddr, phone, patience))
					answer, err := s.askUDP(s.Client, phone, service)
					require.NoError(t, err)
					assert.Equal(t, "hello", answer)
				}
				for last, refused := range map[byte]error{1: syscall.ECONNREFUSED, 77: syscall.EHOSTUNREACH} {
					to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, 0, last}), servicePort)
					_, err := s.Client.Dial("tcp4", to.String())
					require.ErrorIs(t, err, syscall.ECONNREFUSED)
					_, err = s.askUDP(s.Client, phone, to)
					require.ErrorIs(t, err, refused)
				}
				assert.Equal(t, ipv4.ICMPTypeDestinationUnreachable,
					s.pings(s.Client, phone, netip.MustParseAddr("10.9.0.77"), patience))
				for _, last := range []byte{1, 3, 77} { // nobody else is let in either
					c, err := s.Edge.Dial("tcp4", "127.0.0.1:1080")
					require.NoError(t, err)
					assert.Error(t, socks(c, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, 0, last}), servicePort)))
					c.Close()
				}

				p.stop()
				seen, all := upstream.found()
				assert.Empty(t, seen)
				assert.NotZero(t, all, "the tunnel's own packets pass there")
			})
		}
	}
}

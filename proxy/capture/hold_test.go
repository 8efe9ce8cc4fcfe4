package capture

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath/hold"
)

// listenUDP opens a socket of the namespace that shows the ECN field of what it receives.
func (ns namespace) listenUDP(t *testing.T, address string) *net.UDPConn {
	t.Helper()
	var conn *net.UDPConn
	ns.do(t, func() (err error) {
		conn, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(address)))
		return err
	})
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// sendUDP sends a datagram.
func (ns namespace) sendUDP(t *testing.T, from, to, text string) {
	t.Helper()
	conn := ns.listenUDP(t, from)
	_, err := conn.WriteToUDPAddrPort([]byte(text), netip.MustParseAddrPort(to))
	require.NoError(t, err)
	require.NoError(t, conn.Close())
}

// setOption sets a socket's option. Those of the other family are refused.
func setOption(t *testing.T, conn *net.UDPConn, level, option, value int) {
	t.Helper()
	raw, err := conn.SyscallConn()
	require.NoError(t, err)
	require.NoError(t, raw.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), level, option, value) }))
}

// reach sends until something arrives: neighbours are not found before link-local addresses are in use.
func reach(t *testing.T, to *net.UDPConn, send func()) {
	t.Helper()
	buffer := make([]byte, 100)
	require.Eventually(t, func() bool {
		send()
		_ = to.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err := to.Read(buffer)
		return err == nil
	}, 20*time.Second, time.Millisecond)
	for err := error(nil); err == nil; { // what was sent before it and arrived late
		_ = to.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		_, err = to.Read(buffer)
	}
}

func TestForwardedUDPWaitsInTheQueueAndLeavesWithItsMark(t *testing.T) {
	for name, c := range map[string]struct{ client, server string }{
		"IPv4": {"10.1.0.2:5000", "10.2.0.2:443"},
		"IPv6": {"[fd01::2]:5000", "[fd02::2]:443"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNetwork(t)
			client, server := n.client.listenUDP(t, c.client), n.server.listenUDP(t, c.server)
			const ect0 = 2
			setOption(t, server, unix.IPPROTO_IP, unix.IP_TOS, ect0)
			setOption(t, server, unix.IPPROTO_IPV6, unix.IPV6_TCLASS, ect0)
			setOption(t, client, unix.IPPROTO_IP, unix.IP_RECVTOS, 1)
			setOption(t, client, unix.IPPROTO_IPV6, unix.IPV6_RECVTCLASS, 1)
			send := func(text string) {
				t.Helper()
				_, err := server.WriteToUDPAddrPort([]byte(text), netip.MustParseAddrPort(c.client))
				require.NoError(t, err)
			}
			receive := func(want string, ecn byte) {
				t.Helper()
				buffer, control := make([]byte, 100), make([]byte, 100)
				require.NoError(t, client.SetReadDeadline(time.Now().Add(5*time.Second)))
				length, controls, _, _, err := client.ReadMsgUDP(buffer, control)
				require.NoError(t, err)
				assert.Equal(t, want, string(buffer[:length]))
				messages, err := unix.ParseSocketControlMessage(control[:controls])
				require.NoError(t, err)
				require.Len(t, messages, 1)
				assert.Equal(t, ecn, messages[0].Data[0]&3)
			}
			reach(t, client, func() { send("is there a way?") })
			rules := Rules{
				Mode: TPROXY, Port: proxyPort, Interfaces: []string{"lan"}, Connected: ConnectedCapture, Hold: Hold{All: true},
			}
			n.router.do(t, func() error { return rules.Apply(context.Background()) })
			n.router.do(t, func() error { return rules.Apply(context.Background()) }) // it knows its own table again
			send("no proxy says that it serves UDP")
			receive("no proxy says that it serves UDP", ect0)
			keepServed := func(lasts time.Duration, want bool) {
				t.Helper()
				n.router.do(t, func() error {
					isInstalled, err := KeepServed(false, lasts)
					assert.Equal(t, want, isInstalled)
					return err
				})
			}
			keepServed(time.Minute, true)
			send("no proxy has the queue")
			receive("no proxy has the queue", ect0)

			held := make(chan error, 1)
			ready := make(chan struct{})
			go func() {
				held <- n.router.in(func() error {
					q, err := hold.OpenQueue(DefaultHoldQueue, 16)
					if err != nil {
						return err
					}
					defer q.Close()
					close(ready)
					for done := false; !done; {
						if _, err := q.Wait(5 * time.Second); err != nil {
							return err
						}
						if _, err := q.Receive(); err != nil {
							return err
						}
						q.ForEach(func(p hold.Packet) {
							q.AcceptWithMark(p.ID, p.Mark|CongestionMark)
							done = true
						})
					}
					return q.Flush()
				})
			}()
			<-ready
			send("held")
			const ce = 3
			receive("held", ce)
			require.NoError(t, <-held)
			keepServed(0, true)
			send("no proxy serves UDP any more")
			receive("no proxy serves UDP any more", ect0)
			n.router.do(t, func() error { return Remove(context.Background()) })
			keepServed(time.Minute, false)
			send("without rules")
			receive("without rules", ect0)
		})
	}
}

// watchQueue drops what comes into a queue of the namespace, and sends the names of the queue and the content.
func (ns namespace) watchQueue(t *testing.T, number uint16, name string, seen chan<- string) {
	t.Helper()
	var q *hold.Queue
	ns.do(t, func() (err error) {
		q, err = hold.OpenQueue(number, 64)
		return err
	})
	ended, stop := make(chan error, 1), make(chan struct{})
	go func() {
		ended <- ns.in(func() error {
			defer q.Close()
			for {
				if _, err := q.Wait(10 * time.Second); err != nil {
					return err
				}
				select {
				case <-stop:
					return nil
				default:
				}
				if _, err := q.Receive(); err != nil {
					return err
				}
				q.ForEach(func(p hold.Packet) {
					q.Drop(p.ID)
					seen <- name + string(p.Content[max(0, len(p.Content)-3):])
				})
				if err := q.Flush(); err != nil {
					return err
				}
			}
		})
	}()
	t.Cleanup(func() {
		close(stop)
		q.Wake()
		require.NoError(t, <-ended)
	})
}

func TestOnlyWhatTheRulesSayIsHeld(t *testing.T) {
	n := newNetwork(t)
	reach(t, n.client.listenUDP(t, "10.1.0.2:6000"), func() {
		n.server.sendUDP(t, "10.2.0.2:443", "10.1.0.2:6000", "is there a way?")
	})
	reach(t, n.client.listenUDP(t, "[fd01::2]:6000"), func() {
		n.server.sendUDP(t, "[fd02::2]:443", "[fd01::2]:6000", "is there a way?")
	})
	seen := make(chan string, 10)
	n.router.watchQueue(t, DefaultHoldQueue, "down:", seen)
	n.router.watchQueue(t, DefaultUplinkQueue, "up:", seen)
	const text = "abc"
	all := Rules{
		Mode: TPROXY, Port: proxyPort, Interfaces: []string{"lan"}, Connected: ConnectedCapture,
		Hold: Hold{All: true, Uplink: true},
		Sources: Match{Exclude: []netip.Prefix{
			netip.MustParsePrefix("10.1.0.3/32"), netip.MustParsePrefix("fd01::3/128"),
		}},
	}
	leave, some, downOnly := all, all, all
	leave.Connected = ConnectedLeave
	some.Hold.All, some.Hold.Ports = false, []PortRange{{443, 443}}
	downOnly.Hold.Uplink = false
	for _, c := range []struct {
		what     string
		rules    Rules
		node     namespace
		from, to string // S is the server, C2 and C3 are clients, R is this machine
		want     string
	}{
		{"to a client", all, n.server, "S:443", "C2:5000", "down:"},
		{"of a client", all, n.client, "C2:5000", "S:443", "up:"},
		{"to an excluded client", all, n.server, "S:443", "C3:5000", ""},
		{"of an excluded client", all, n.client, "C3:5000", "S:443", ""},
		{"DHCP to a client", all, n.server, "S:67", "C2:68", ""},
		{"DHCPv6 to a relay", all, n.server, "S:547", "C2:547", ""},
		{"DHCP of a client", all, n.client, "C2:68", "S:67", ""},
		{"of this machine, such as its WireGuard", all, n.router, "R:51820", "C2:5000", ""},
		{"to this machine", all, n.client, "C2:5000", "R:51820", ""},
		{"of a network of this machine", leave, n.server, "S:443", "C2:5000", ""},
		{"to a network of this machine", leave, n.client, "C2:5000", "S:443", ""},
		{"of a port", some, n.server, "S:443", "C2:5000", "down:"},
		{"to a port", some, n.client, "C2:5000", "S:443", "up:"},
		{"of another port", some, n.server, "S:444", "C2:5000", ""},
		{"to another port", some, n.client, "C2:443", "S:444", ""},
		{"of a client, without --udp-up", downOnly, n.client, "C2:5000", "S:443", ""},
	} {
		n.router.do(t, func() error { return c.rules.Apply(context.Background()) })
		for _, uplink := range []bool{false, true} {
			n.router.do(t, func() error {
				_, err := KeepServed(uplink, time.Minute)
				return err
			})
		}
		for _, places := range []*strings.Replacer{
			strings.NewReplacer("S", "10.2.0.2", "C2", "10.1.0.2", "C3", "10.1.0.3", "R", "10.1.0.1"),
			strings.NewReplacer("S", "[fd02::2]", "C2", "[fd01::2]", "C3", "[fd01::3]", "R", "[fd01::1]"),
		} {
			from, to := places.Replace(c.from), places.Replace(c.to)
			receiver := n.server
			switch c.to[0] {
			case 'C':
				receiver = n.client
			case 'R':
				receiver = n.router
			}
			socket := receiver.listenUDP(t, to)
			go func() {
				buffer := make([]byte, 100)
				if length, err := socket.Read(buffer); err == nil {
					seen <- string(buffer[:length])
				}
			}()
			c.node.sendUDP(t, from, to, text)
			select {
			case got := <-seen:
				assert.Equal(t, c.want+text, got, "%s, from %s to %s", c.what, from, to)
			case <-time.After(10 * time.Second):
				assert.Fail(t, "a packet is lost", "%s, from %s to %s", c.what, from, to)
			}
			require.NoError(t, socket.Close())
		}
	}
}

func TestTheNextHopIsFound(t *testing.T) {
	n := newNetwork(t)
	for host, want := range map[string]string{
		"192.0.2.1": "10.1.0.1", "2001:db8::1": "fd01::1", "10.1.0.3": "invalid IP", "fd01::9": "invalid IP",
	} {
		n.client.do(t, func() error {
			hop, err := NextHop(netip.MustParseAddr(host))
			assert.Equal(t, want, hop.String(), host)
			return err
		})
	}
	n.client.do(t, func() error {
		up, err := netlink.LinkByName("up")
		require.NoError(t, err)
		require.NoError(t, netlink.RouteAdd(&netlink.Route{
			LinkIndex: up.Attrs().Index, Gw: net.ParseIP("fe80::9"),
			Dst: &net.IPNet{IP: net.ParseIP("2001:db8:1::"), Mask: net.CIDRMask(48, 128)},
		}))
		hop, err := NextHop(netip.MustParseAddr("2001:db8:1::1"))
		assert.Equal(t, fmt.Sprintf("fe80::9%%%d", up.Attrs().Index), hop.String())
		return err
	})
}

func TestPacketsThatMayBeginAQUICConnectionAreCopied(t *testing.T) {
	n := newNetwork(t)
	rules := Rules{
		Mode: TPROXY, Port: proxyPort, Interfaces: []string{"lan"}, Connected: ConnectedCapture, Hold: Hold{All: true},
	}
	var copies *hold.Copies
	n.router.do(t, func() (err error) {
		require.NoError(t, rules.Apply(context.Background()))
		_, err = KeepServed(false, time.Minute)
		require.NoError(t, err)
		copies, err = hold.OpenCopies(DefaultHoldQueue)
		return err
	})
	t.Cleanup(copies.Close)
	for _, c := range []struct{ client, server string }{
		{"10.1.0.2:5000", "10.2.0.2:443"}, {"[fd01::2]:5000", "[fd02::2]:443"},
	} {
		server := n.server.listenUDP(t, c.server)
		reach(t, server, func() { n.client.sendUDP(t, c.client, c.server, "is there a way?") })
		for _, text := range []string{
			"\xcf\x00\x00\x00\x01 an Initial packet of version 1",
			"\xef\x00\x00\x00\x01 a Handshake packet",
			"\x4f\x00\x00\x00\x01 a short header",
			"\xcf\x00\x00\x00\x00 a version negotiation",
			"\xcf\xff\x00\x00\x1d of a draft",
			"\xdf\x6b\x33\x43\xcf an Initial packet of version 2",
			"\xcf",
			"\xcf\x00\x00\x00\x01 the last",
		} {
			n.client.sendUDP(t, c.client, c.server, text)
		}
		var got []string
		require.Eventually(t, func() bool {
			require.NoError(t, copies.Receive(func(packet []byte) {
				_, text, _ := strings.Cut(string(packet), " ")
				got = append(got, text)
			}))
			return len(got) > 0 && got[len(got)-1] == "the last"
		}, 10*time.Second, time.Millisecond)
		assert.Equal(t, []string{"an Initial packet of version 1", "an Initial packet of version 2", "the last"}, got)
	}
}

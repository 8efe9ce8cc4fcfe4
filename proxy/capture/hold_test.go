package capture

import (
	"context"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
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
			n.router.do(t, func() error { return KeepServed(time.Minute) })
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
						if _, err := q.Receive(func(p hold.Packet) {
							q.AcceptWithMark(p.ID, p.Mark|CongestionMark)
							done = true
						}); err != nil {
							return err
						}
					}
					return q.Flush()
				})
			}()
			<-ready
			send("held")
			const ce = 3
			receive("held", ce)
			require.NoError(t, <-held)
			n.router.do(t, func() error { return KeepServed(0) })
			send("no proxy serves UDP any more")
			receive("no proxy serves UDP any more", ect0)
			n.router.do(t, func() error { return Remove(context.Background()) })
			n.router.do(t, func() error { return KeepServed(time.Minute) }) // there is nothing to do
			send("without rules")
			receive("without rules", ect0)
		})
	}
}

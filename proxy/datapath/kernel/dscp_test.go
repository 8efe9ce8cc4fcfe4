//go:build linux

package kernel

import (
	"net"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

func TestMarksOfTheHandshakeAreKnown(t *testing.T) {
	privileged := bpf.Check()
	const client, server = 46, 34 // EF, AF41
	for name, c := range map[string]struct{ listen, dial string }{
		"IPv4":                          {"127.0.0.1:0", "127.0.0.1"},
		"IPv6":                          {"[::1]:0", "::1"},
		"IPv4 on a socket of both ways": {"[::]:0", "127.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			d := still(t, Config{})
			ln, err := Listen(t.Context(), c.listen, false)
			require.NoError(t, err)
			port := ln.Addr().(*net.TCPAddr).AddrPort().Port()
			to := netip.AddrPortFrom(netip.MustParseAddr(c.dial), port)
			raw, err := ln.SyscallConn()
			require.NoError(t, err)
			require.NoError(t, datapath.Control(raw, func(fd int) error {
				if err := setDSCP(fd, true, server); err != nil {
					return err
				}
				if c.listen == "127.0.0.1:0" {
					return nil
				}
				return setDSCP(fd, false, server)
			}))
			accepted := make(chan *Conn, 1)
			l, err := d.Listener(ln)
			require.NoError(t, err)
			go func() {
				_ = l.Serve(func(conn datapath.Conn) { accepted <- conn.(*Conn) }, nil)
			}()
			defer l.Close() //nolint:errcheck // it only listened
			dialled, err := d.Dial(t.Context(), DialConfig{
				Target: to, DSCP: func(at netip.AddrPort) (uint8, bool) {
					assert.Equal(t, to, at)
					return client, true
				},
			})
			require.NoError(t, err)
			defer dialled.Close() //nolint:errcheck // nothing was written
			conn := <-accepted
			defer conn.Close() //nolint:errcheck // nothing was written

			assert.EqualValues(t, client, conn.ReceivedDSCP())
			if name != "IPv6" && privileged != nil {
				assert.Zero(t, dialled.ReceivedDSCP())
			} else {
				assert.EqualValues(t, server, dialled.ReceivedDSCP())
			}
			for _, leg := range []*Conn{conn, dialled} {
				require.NoError(t, leg.SetDSCP(8))
				require.NoError(t, leg.raw.Visit(func(fd int) error {
					level, option := unix.IPPROTO_IP, unix.IP_TOS
					if name == "IPv6" {
						level, option = unix.IPPROTO_IPV6, unix.IPV6_TCLASS
					}
					tos, err := unix.GetsockoptInt(fd, level, option)
					assert.Equal(t, 8<<2, tos&^3)
					return err
				}))
			}
		})
	}
}

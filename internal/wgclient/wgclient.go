// Package wgclient is a stock WireGuard client for tests: wireguard-go, with a TCP/IP stack of its own.
package wgclient

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/netstack"
)

// Client is one end of a tunnel. All that its stack sends goes through it.
type Client struct {
	PrivateKey, ServerKey [32]byte
	Endpoint              string // of the server: address and port
	Addresses             []netip.Addr
	DNS                   []netip.Addr // servers that the stack asks
	MTU                   int          // inside, in bytes
}

// Open brings the tunnel up until the test ends.
func (c Client) Open(t testing.TB) *netstack.Net {
	t.Helper()
	inside, stack, err := netstack.CreateNetTUN(c.Addresses, c.DNS, c.MTU)
	require.NoError(t, err)
	d := device.NewDevice(inside, conn.NewDefaultBind(), device.NewLogger(device.LogLevelSilent, ""))
	t.Cleanup(func() {
		// Close alone ends the stack while packets still come, and what it answers them panics.
		assert.NoError(t, d.Down())
		d.Close()
	})
	setup := &strings.Builder{}
	fmt.Fprintf(setup, "private_key=%x\npublic_key=%x\nendpoint=%s\n", c.PrivateKey, c.ServerKey, c.Endpoint)
	fmt.Fprintf(setup, "allowed_ip=0.0.0.0/0\nallowed_ip=::/0\n")
	require.NoError(t, d.IpcSet(setup.String()))
	require.NoError(t, d.Up())
	return stack
}

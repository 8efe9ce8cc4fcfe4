//go:build linux

package e2e

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestAnUnmanagedDirectionKeepsTheKernelsOwnControl: each leg sends one direction, down
// on the client's and up on the server's, and only those that are managed are ours.
func TestAnUnmanagedDirectionKeepsTheKernelsOwnControl(t *testing.T) {
	const system = "reno" // of the edge alone; no tier chooses it
	for name, row := range map[string]struct {
		config   string
		down, up bool // managed
	}{
		"neither":      {config: "defaults: {algorithm: none}\n"},
		"down alone":   {config: "defaults: {algorithm: copa, up: {algorithm: none}}\n", down: true},
		"up alone":     {config: "defaults: {algorithm: copa, down: {algorithm: none}}\n", up: true},
		"both":         {config: "defaults: {algorithm: copa}\n", down: true, up: true},
		"a rate alone": {config: "defaults: {algorithm: none, max_rate: 100mbit}\n"},
	} {
		t.Run(name, func(t *testing.T) {
			w := present.way()
			s := newScene(t)
			require.NoError(t, s.Edge.Sysctl("net.ipv4.tcp_congestion_control", system))
			p := s.start(w.yaml(row.config))
			s.capture(w)
			client, server := w.pair(s)
			defer server.Close()
			defer client.Close()
			warm(t, client, server)
			f := p.relaying(1)[0]
			for side, row := range map[string]struct {
				peer    net.Addr
				managed bool
			}{
				"client": {client.LocalAddr(), row.down},
				"server": {server.LocalAddr(), row.up},
			} {
				// What the socket itself says, whatever the program says.
				control := p.control(addrPort(row.peer))
				envelope := leg(t, f, side)["envelope"]
				if row.managed {
					assert.NotEqual(t, system, control, side)
					assert.NotEqual(t, system, envelope, side)
				} else {
					assert.Equal(t, system, control, side)
					assert.Equal(t, system, envelope, side)
				}
			}
		})
	}
}

// control is the congestion control of the program's socket to peer.
func (p *program) control(peer netip.AddrPort) string {
	p.t.Helper()
	fd := p.borrow(peer)
	defer unix.Close(fd) //nolint:errcheck // a copy
	name, err := unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
	require.NoError(p.t, err)
	return strings.TrimRight(name, "\x00")
}

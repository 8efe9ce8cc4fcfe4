package netstack

import (
	"context"
	"net/netip"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/datapath/datapathtest"
)

// inwards returns both ends of a connection that was dialled into the tunnel: what
// its peer accepted, and ours.
func inwards(t *testing.T) (a, b datapath.Conn) {
	now := clock()
	ours, err := New(Config{Clock: now, MTU: mtu})
	require.NoError(t, err)
	peers, err := New(Config{Clock: now, MTU: mtu})
	require.NoError(t, err)
	join(t, ours, peers, nil)
	admitted := make(chan *Conn, 1)
	go func() {
		c, err := peers.Accept()
		if assert.NoError(t, err) && assert.NoError(t, c.Admit(context.Background())) {
			admitted <- c
		}
	}()
	dialled, err := ours.Dial(context.Background(), netip.MustParseAddr("10.9.0.3"), netip.AddrPortFrom(client, 80))
	require.NoError(t, err)
	accepted := <-admitted
	assert.Equal(t, dialled.LocalAddr(), accepted.RemoteAddr())
	return accepted, dialled
}

func TestADialledConnectionConforms(t *testing.T) {
	datapathtest.Run(t, func(t *testing.T) (a, b datapath.Conn) {
		b, a = inwards(t)
		return a, b
	}, nil)
}

func TestADialIntoTheTunnelFailsAsThePeerSays(t *testing.T) {
	a := newAlone(t)
	to := netip.AddrPortFrom(client, 80)
	failed := make(chan error, 1)
	go func() {
		_, err := a.Dial(context.Background(), netip.MustParseAddr("10.9.0.3"), to)
		failed <- err
	}()
	p := a.next()
	syn := segment(p)
	require.Equal(t, header.TCPFlagSyn, syn.Flags())
	from := netip.AddrPortFrom(netip.MustParseAddr("10.9.0.3"), syn.SourcePort())
	a.Deliver(tcpPacket(to, from, header.TCPFlagRst|header.TCPFlagAck, 0, syn.SequenceNumber()+1, nil))
	require.ErrorIs(t, <-failed, syscall.ECONNREFUSED)

	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		_, err := a.Dial(ctx, netip.MustParseAddr("10.9.0.3"), to)
		failed <- err
	}()
	require.Equal(t, header.TCPFlagSyn, segment(a.next()).Flags())
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	assert.Empty(t, a.conns.allConns())
}

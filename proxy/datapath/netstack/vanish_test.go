package netstack

import (
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/faketime"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// newTimed is a stack whose timers go by a clock of the test's.
func newTimed(t *testing.T) (alone, *faketime.ManualClock) {
	timers := faketime.NewManualClock()
	s, err := New(Config{Clock: clock(), MTU: mtu, timers: timers})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, s.Close()) })
	return alone{s, t}, timers
}

// heard is when the newest segment of the peer had been taken in.
func (c *Conn) heard() cc.Time {
	c.signals.mu.Lock()
	defer c.signals.mu.Unlock()
	return c.signals.probedAt
}

// idle returns once the stack has done with the newest segment, and set its timers: both are
// under the endpoint's lock.
func (c *Conn) idle(t *testing.T) {
	endpoint, err := c.liveEndpoint()
	require.NoError(t, err)
	require.Nil(t, endpoint.GetSockOpt(&tcpip.TCPInfoOption{}))
}

func TestAnIdlePeerIsAskedWhetherItIsThereAndGivenUpWhenItIsNot(t *testing.T) {
	a, timers := newTimed(t)
	from := netip.AddrPortFrom(client, 40000)
	conn, answer := a.admit(from, server, nil)
	next := answer.SequenceNumber() + 1

	for range 3 { // while it answers, it may be idle for as long as it likes
		conn.idle(t)
		timers.Advance(datapath.KeepAliveIdle)
		probe := segment(a.next())
		assert.Equal(t, next-1, probe.SequenceNumber())
		assert.Empty(t, probe.Payload())
		heard := conn.heard()
		a.Deliver(tcpPacket(from, server, header.TCPFlagAck, 101, next, nil))
		require.Eventually(t, func() bool { return conn.heard() > heard }, time.Minute, time.Millisecond)
	}
	assert.False(t, conn.Aborted())

	conn.idle(t)
	timers.Advance(datapath.KeepAliveIdle)
	for range datapath.KeepAliveCount {
		assert.Equal(t, next-1, segment(a.next()).SequenceNumber())
		assert.False(t, conn.Aborted())
		timers.Advance(datapath.KeepAliveInterval)
	}
	_, err := conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	assert.True(t, conn.Aborted())
	require.NoError(t, conn.Reset())
}

// The kernel's own sockets take a quarter of an hour.
func TestAPeerThatAcknowledgesNothingIsGivenUp(t *testing.T) {
	a, timers := newTimed(t)
	conn, _ := a.admit(netip.AddrPortFrom(client, 40000), server, nil)
	_, err := conn.Write([]byte("hello"))
	require.NoError(t, err)
	waited := time.Duration(0)
	for ; !conn.Aborted() && waited < time.Hour; waited += time.Second {
		timers.Advance(time.Second)
		a.wire.queue.dropAll()
	}
	assert.InDelta(t, 15*time.Minute, waited, float64(10*time.Minute))
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, syscall.ETIMEDOUT)
	require.NoError(t, conn.Reset())
}

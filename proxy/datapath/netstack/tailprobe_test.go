package netstack

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/faketime"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/penstock-net/penstock/cc"
)

// However short the path, a tail is not taken for lost before nothing has come or left for
// leastProbe, and then it is: as well where the stack's timer ran before we knew of it, as
// with a server that speaks first.
func TestATailIsTakenForLostAfterAPause(t *testing.T) {
	const (
		size = 1000
		trip = 100 * time.Microsecond
	)
	for name, first := range map[string]int{"one segment before": 1, "two segments before": 2 * size} {
		t.Run(name, func(t *testing.T) {
			timers := faketime.NewManualClock()
			now := func() cc.Time { return cc.Time(timers.NowMonotonic().Sub(tcpip.MonotonicTime{})) + 1 }
			s, err := New(Config{Clock: now, MTU: mtu, timers: timers})
			require.NoError(t, err)
			t.Cleanup(func() { assert.NoError(t, s.Close()) })
			a := alone{s, t}
			from := netip.AddrPortFrom(client, 40000)
			conn, answer := a.admit(from, server, []byte{2, 4, (size + 12) >> 8, (size + 12) & 0xff, 4, 2, 1, 1})
			next := answer.SequenceNumber() + 1
			write := func(n int) (first uint32) {
				first = next
				_, err := conn.Write(make([]byte, n))
				require.NoError(t, err)
				for end := next + uint32(n); next != end; {
					s := segment(a.next())
					next = s.SequenceNumber() + uint32(len(s.Payload()))
				}
				return first
			}
			write(first)
			timers.Advance(trip)
			heard := conn.heard()
			a.Deliver(tcpPacket(from, server, header.TCPFlagAck, 101, next, nil))
			require.Eventually(t, func() bool { return conn.heard() > heard }, time.Minute, time.Millisecond)

			write(2 * size)
			timers.Advance(minProbeDelay - time.Millisecond)
			a.silent()
			tail := write(2 * size)
			timers.Advance(minProbeDelay - time.Millisecond)
			a.silent()
			timers.Advance(2 * time.Millisecond)
			assert.Equal(t, tail, segment(a.next()).SequenceNumber())
			require.NoError(t, conn.Reset())
		})
	}
}

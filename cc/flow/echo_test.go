package flow

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// echoBed is an EchoFlow over a path that answers after a round trip, one segment for each packet.
type echoBed struct {
	*testbed
	*EchoFlow
	woken int
}

func openEchoBed(t *testing.T, terms Terms) *echoBed {
	b := &echoBed{testbed: newTestbed(t)}
	var err error
	b.EchoFlow, err = b.mgr.OpenEcho(b.now, terms, func() { b.woken++ })
	require.NoError(t, err)
	return b
}

// pour sends packets of a segment until one is refused, at most 1000, with the echo requests that are due, and returns
// the number of packets and the requests.
func (b *echoBed) pour() (packets int, requests []uint16) {
	for packets < 1000 && b.EchoFlow.Take(b.now, mss, false) {
		packets++
		if b.NextEcho() <= b.now {
			requests = append(requests, b.SendEcho(b.now))
		}
	}
	return packets, requests
}

func TestAnEchoFlowKeepsToItsWindow(t *testing.T) {
	b := openEchoBed(t, static(10))
	packets, requests := b.pour()
	assert.Equal(t, 10, packets)
	assert.Len(t, requests, 3, "one for each three packets")

	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[1])
	assert.Equal(t, 1, b.woken)
	packets, _ = b.pour()
	assert.Equal(t, 6, packets, "the second request acknowledges all that had left before it")
	assert.Equal(t, 20*time.Millisecond, b.Snapshot().SRTT)
	b.ReceiveEcho(b.now, requests[0])
	b.ReceiveEcho(b.now, 77)
	packets, _ = b.pour()
	assert.Zero(t, packets, "late and unknown answers say nothing")
}

func TestTheEndOfABurstHasARequest(t *testing.T) {
	b := openEchoBed(t, static(10))
	assert.Equal(t, cc.Never, b.NextEcho(), "nothing is in flight")
	b.pour()
	assert.Equal(t, b.now.Add(echoAtEndOfBurst), b.NextEcho(), "packets wait for the answer")

	b = openEchoBed(t, static(10))
	require.True(t, b.EchoFlow.Take(b.now, 200, false))
	assert.Equal(t, b.now.Add(echoAtEnd), b.NextEcho(), "none waits")
}

func TestWhatIsNotAnsweredCountsAsGone(t *testing.T) {
	b := openEchoBed(t, static(9))
	b.pour()
	b.wait(echoTimeout)
	assert.LessOrEqual(t, b.NextTimeout(), b.now)
	b.Expire(b.now)
	lost, answered := b.Unanswered()
	assert.Equal(t, 3, lost)
	assert.Zero(t, answered)
	packets, requests := b.pour()
	assert.Equal(t, 9, packets)
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[0])
	lost, answered = b.Unanswered()
	assert.Zero(t, lost)
	assert.Equal(t, b.now, answered)
}

func TestAPacketAloneAlwaysLeaves(t *testing.T) {
	b := openEchoBed(t, static(2))
	assert.True(t, b.EchoFlow.Take(b.now, 60_000, false), "one of several segments is larger than the window")
	assert.False(t, b.EchoFlow.Take(b.now, mss, false))
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, b.SendEcho(b.now.Add(-20*time.Millisecond)))
	for range 1000 { // what was lent is paid back by answers, however small the packets are
		if b.EchoFlow.Take(b.now, 1250, false) {
			b.ReceiveEcho(b.now.Add(1), b.SendEcho(b.now))
		}
		b.wait(20 * time.Millisecond)
	}
	assert.Greater(t, b.Snapshot().Delivered, 500*cc.Bytes(1250))
}

func TestSparseFlowsAreLentRoom(t *testing.T) {
	b := openEchoBed(t, static(10))
	_, requests := b.pour()
	b.wait(20 * time.Millisecond)
	b.ReceiveEcho(b.now, requests[2])
	b.pour()
	assert.False(t, b.EchoFlow.Take(b.now, 200, false))
	assert.True(t, b.EchoFlow.Take(b.now, 200, true))
}

func TestAnEchoFlowSharesByItsNumberOfFlows(t *testing.T) {
	b := openEchoBed(t, static(40))
	require.NoError(t, b.SetFlows(b.now, 3))
	l := b.open(static(40))
	b.pour()
	l.send(100 * mss)
	b.waitForDivision()
	assert.Equal(t, 10*mss, l.limit.Cwnd, "a quarter")
}

// TestALargePacketLeavesBesideASmallFlow has a packet larger than the window wait while a call never lets it be empty.
func TestALargePacketLeavesBesideASmallFlow(t *testing.T) {
	b := openEchoBed(t, static(10))
	large := 20 * mss
	type sent struct {
		at       cc.Time
		sequence uint16
	}
	var requests []sent
	left := false
	for range 200 { // a call's packet each 10 ms, answers after 40 ms
		b.EchoFlow.Take(b.now, 200, true)
		requests = append(requests, sent{b.now, b.SendEcho(b.now)})
		if left = b.EchoFlow.Take(b.now, large, false); left {
			break
		}
		b.wait(10 * time.Millisecond)
		for len(requests) > 0 && b.now.Sub(requests[0].at) >= 40*time.Millisecond {
			b.ReceiveEcho(b.now, requests[0].sequence)
			requests = requests[1:]
		}
	}
	assert.True(t, left)
}

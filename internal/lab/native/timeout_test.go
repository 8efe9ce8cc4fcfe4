package native

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// timedOut is a sender whose timer has fired for 10 segments, and that has sent all that it may
// after that.
func timedOut(t *testing.T) (o outstanding, now cc.Time) {
	const window = 10 * payload
	o, now = newOutstanding(), cc.Time(time.Second)
	for o.allows(window) {
		o.send(now)
	}
	now = o.Deadline()
	require.True(t, o.look(now))
	for o.allows(window) {
		o.send(now)
	}
	assert.Equal(t, payload, o.report.Lost, "only the first is sent again before there is news")
	assert.Equal(t, payload, o.report.Pipe)
	assert.Equal(t, 1, o.report.Timeouts)
	return o, now.Add(time.Millisecond)
}

// What was sent before the timer fired arrives: only time was lost.
func TestATimeoutWithoutALoss(t *testing.T) {
	o, now := timedOut(t)
	require.True(t, o.take(now, ack{tx: 1, highest: 1}, 10*payload))
	assert.Equal(t, 9*payload, o.report.Pipe, "the others are on the wire still")
	assert.Zero(t, o.report.RTT, "it is that of the outage")
	n, again := o.next()
	assert.False(t, again)
	assert.EqualValues(t, 10, n)
	for tx := uint64(2); tx <= 11; tx++ {
		o.take(now, ack{tx: tx, highest: tx}, 10*payload)
	}
	assert.Equal(t, 10*payload, o.report.Acked)
	assert.Zero(t, o.report.Pipe)
	_, again = o.next()
	assert.False(t, again)
}

// A part of it does not arrive: that is found as any other loss.
func TestATimeoutWithALossAmongWhatArrives(t *testing.T) {
	o, now := timedOut(t)
	for tx := uint64(3); tx <= 6; tx++ {
		require.True(t, o.take(now, ack{tx: tx, highest: tx}, 10*payload))
	}
	assert.Equal(t, 5*payload, o.report.Pipe, "four have arrived, and one is lost")
	n, again := o.next()
	assert.True(t, again)
	assert.EqualValues(t, 1, n)
}

// The answer to what the timer sent comes first: the others are lost.
func TestATimeoutWithLosses(t *testing.T) {
	o, now := timedOut(t)
	require.True(t, o.take(now, ack{tx: 11, highest: 11}, 4*payload))
	assert.Equal(t, time.Millisecond, o.report.RTT)
	for o.allows(4 * payload) {
		o.send(now)
	}
	assert.Equal(t, 5*payload, o.report.Lost)
	assert.Equal(t, 4*payload, o.report.Pipe)
}

// The window is less than what is on the wire, and that may be lost in part: the newest is sent
// again, so that its arrival shows the losses.
func TestATimeoutWithoutALossBeyondTheWindow(t *testing.T) {
	o, now := timedOut(t)
	require.True(t, o.take(now, ack{tx: 1, highest: 1}, 2*payload))
	require.True(t, o.allows(2*payload))
	n, again := o.next()
	assert.True(t, again)
	assert.EqualValues(t, 9, n)
	o.send(now)
	assert.False(t, o.allows(2*payload))
	require.True(t, o.take(now, ack{tx: 12, highest: 12}, 2*payload))
	assert.Zero(t, o.report.Pipe, "the others are lost")
}

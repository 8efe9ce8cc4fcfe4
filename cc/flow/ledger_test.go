package flow

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// TestLedgerForgetsDetailButNeverBytes compares a ledger that merges with one
// record for every byte.
func TestLedgerForgetsDetailButNeverBytes(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		var l ledger
		var times []cc.Time // when each byte left
		acked := 0
		base := cc.Bytes(rapid.SampledFrom([]int64{0, 1 << 31, 1 << 32, 1<<40 + 7}).Draw(rt, "base"))
		l.startOffset = base
		for step := range rapid.IntRange(1, 2000).Draw(rt, "steps") {
			now := cc.Time(step+1) * cc.Time(time.Millisecond)
			if rapid.Bool().Draw(rt, "send") {
				n := rapid.IntRange(1, 40).Draw(rt, "bytes")
				l.addChunk(cc.Bytes(n), 7, chunk{sent: cc.Sent{At: now}})
				for range n {
					times = append(times, now)
				}
				continue
			}
			to := rapid.IntRange(acked, len(times)).Draw(rt, "ack")
			c, ok := l.dropArrived(base + cc.Bytes(to))
			if ok {
				require.LessOrEqual(rt, c.end, base+cc.Bytes(to), "only what has arrived in full")
				require.Equal(rt, times[int(c.end-base)-1], c.sent.At, "the record is exact for its newest byte")
			}
			acked = to
			require.Equal(rt, base+cc.Bytes(len(times)), l.endOffset())
			require.LessOrEqual(rt, len(l.ring), ledgerChunks)
		}
	})
}

func TestLedgerMergesWhenFull(t *testing.T) {
	var l ledger
	for i := range 10 * ledgerChunks {
		l.addChunk(100, 100, chunk{sent: cc.Sent{At: cc.Time(i + 1)}})
	}
	require.LessOrEqual(t, l.count, ledgerChunks)
	assert.Equal(t, cc.Bytes(10*ledgerChunks*100), l.endOffset())
	c, ok := l.dropArrived(l.endOffset())
	require.True(t, ok)
	assert.Equal(t, cc.Time(10*ledgerChunks), c.sent.At)
}

// TestSamplesKeepComing has a window go round and round: its segments leave evenly
// over a round trip, are pushed and acknowledged a few at a time, and each of the
// latter tells of a send that is at most a chunk older than what has arrived.
func TestSamplesKeepComing(t *testing.T) {
	for _, tt := range []struct {
		packets, pushed, acked int // in flight, with one Take, with one report
		least                  int // samples in a round trip
	}{
		{packets: 100, pushed: 1, acked: 1, least: 100},
		{packets: 250, pushed: 1, acked: 1, least: 250},
		{packets: 600, pushed: 1, acked: 1, least: 180},
		{packets: 600, pushed: 4, acked: 4, least: 140},
		{packets: 5000, pushed: 1, acked: 1, least: 200},
		{packets: 5000, pushed: 1, acked: 50, least: 100},
		{packets: 20_000, pushed: 1, acked: 1, least: 200},
		{packets: 20_000, pushed: 1, acked: 200, least: 100},
		{packets: 20_000, pushed: 16, acked: 2, least: 200},
		{packets: 20_000, pushed: 200, acked: 200, least: 100},
	} {
		t.Run(fmt.Sprintf("%d in flight, %d pushed and %d acknowledged at a time", tt.packets, tt.pushed, tt.acked),
			func(t *testing.T) {
				p := newTestbed(t)
				gap := 100 * time.Millisecond / time.Duration(tt.packets)
				rtt := gap * time.Duration(tt.packets)
				chunk := time.Duration(max(tt.pushed, 1+3*tt.packets/ledgerChunks*2)) * gap
				samples := 0
				p.trace = func(e Event) {
					if e.Kind != KindAck || e.RTT == 0 {
						return
					}
					samples++
					require.GreaterOrEqual(t, e.RTT, rtt)
					require.LessOrEqual(t, e.RTT, rtt+chunk+time.Duration(tt.pushed+tt.acked)*gap)
				}
				l := p.open(static(float64(tt.packets + tt.pushed + tt.acked)))
				sent, acked := 0, 0
				for k := range 6*tt.packets + 1 {
					p.wait(gap)
					if n := k - tt.packets - acked; n >= tt.acked { // what left a round trip ago
						l.ack(cc.Bytes(n) * mss)
						acked += n
					}
					if k-sent >= tt.pushed {
						require.Equal(t, cc.Bytes(tt.pushed)*mss, l.send(cc.Bytes(tt.pushed)*mss))
						sent += tt.pushed
					}
					if k == 3*tt.packets {
						samples = 0
					}
				}
				assert.GreaterOrEqual(t, samples, 3*tt.least)
				assert.InEpsilon(t, float64(cc.RateOf(mss, gap)), float64(l.Snapshot().DeliveryRate), 0.1)
				assert.LessOrEqual(t, len(l.ledger.ring), ledgerChunks)
			})
	}
}

func TestAChunkWaitsWhileItsNewestByteDoes(t *testing.T) {
	for left, want := range map[cc.Bytes]cc.Time{0: 9, 50: 9, 99: 9, 100: 1} {
		var l ledger
		l.addChunk(100, 100, chunk{sent: cc.Sent{At: 1}})
		l.noteUnsent(left, 9)
		c, ok := l.dropArrived(100)
		require.True(t, ok)
		assert.Equal(t, want, c.sent.At, "%d of 100 bytes have left", left)
	}
}

package flow

import (
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
		l.start = base
		for step := range rapid.IntRange(1, 2000).Draw(rt, "steps") {
			now := cc.Time(step+1) * cc.Time(time.Millisecond)
			if rapid.Bool().Draw(rt, "send") {
				n := rapid.IntRange(1, 40).Draw(rt, "bytes")
				l.push(cc.Bytes(n), 7, chunk{sent: cc.Sent{At: now}})
				for range n {
					times = append(times, now)
				}
				continue
			}
			to := rapid.IntRange(acked, len(times)).Draw(rt, "ack")
			c, ok := l.advance(base + cc.Bytes(to))
			if ok {
				require.LessOrEqual(rt, c.end, base+cc.Bytes(to), "only what has arrived in full")
				require.Equal(rt, times[int(c.end-base)-1], c.sent.At, "the record is exact for its newest byte")
			}
			acked = to
			require.Equal(rt, base+cc.Bytes(len(times)), l.end())
			require.LessOrEqual(rt, len(l.ring), ledgerChunks)
		}
	})
}

func TestLedgerMergesWhenFull(t *testing.T) {
	var l ledger
	for i := range 10 * ledgerChunks {
		l.push(100, 100, chunk{sent: cc.Sent{At: cc.Time(i + 1)}})
	}
	require.LessOrEqual(t, l.n, ledgerChunks)
	assert.Equal(t, cc.Bytes(10*ledgerChunks*100), l.end())
	c, ok := l.advance(l.end())
	require.True(t, ok)
	assert.Equal(t, cc.Time(10*ledgerChunks), c.sent.At)
}

package agent

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// An agent on a router with 32 bits gets as many messages in some days, and as many bytes in an hour.
func TestALedgerCountsBeyond32Bits(t *testing.T) {
	var l ledger
	l.n, l.total = math.MaxInt32-1, math.MaxInt32-1
	at := cc.Time(1)
	for range 8 {
		at = at.Add(time.Second)
		l.addMessage(message{ccp.Ready{}.Append(nil), at})
	}
	memory := l.sizeOf(len(ccp.Ready{}.Append(nil))).memory
	assert.Equal(t, at, l.unreadSince(at, memory), "the last one is unread")
	assert.Equal(t, at.Add(-time.Second), l.unreadSince(at, 2*memory), "the last two are")
	assert.Zero(t, l.unreadSince(at, 0), "none is")
}

package netstack

import (
	"reflect"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// The version of the stack that go.mod names keeps its window where we look.
func TestTheStacksWindowIsWithinReach(t *testing.T) {
	require.NoError(t, unreachable)
}

func TestAnotherStackIsLeftAlone(t *testing.T) {
	type named struct{ TCPSenderState tcp.TCPSenderState }
	type wrong struct{ TCPSenderState int }
	for name, c := range map[string]struct {
		endpoint any
		ok       bool
	}{
		"as it is":          {struct{ snd *named }{}, true},
		"no sender":         {struct{ sender *named }{}, false},
		"not a pointer":     {struct{ snd named }{}, false},
		"a pointer to none": {struct{ snd *int }{}, false},
		"another state":     {struct{ snd *wrong }{}, false},
	} {
		_, _, err := findWindow(reflect.TypeOf(c.endpoint))
		assert.Equal(t, c.ok, err == nil, "%s: %v", name, err)
	}
}

func TestLossesLeaveTheStacksWindowAboveOurs(t *testing.T) {
	const ours = 100
	for name, observed := range map[string]bool{"ours holds": true, "nobody observes": false} {
		t.Run(name, func(t *testing.T) {
			near, far := connect(t, func(n int) bool { return n%50 == 0 })
			if observed {
				near.Observe(func(r flow.Report) flow.Limit { return flow.Limit{Cwnd: ours * max(r.MSS, 1)} })
			}
			data := make([]byte, 4<<20)
			go func() {
				_, err := near.Write(data)
				assert.NoError(t, err)
				assert.NoError(t, near.CloseWrite())
			}()
			least, lost := cc.Bytes(1<<40), cc.Bytes(0)
			for got, b := 0, make([]byte, 64<<10); got < len(data); {
				n, err := far.Read(b)
				require.NoError(t, err)
				got += n
				info := near.Info()
				if lost = info.Retransmitted; lost > 0 {
					least = min(least, info.Cwnd)
				}
			}
			require.Positive(t, lost)
			if observed {
				assert.GreaterOrEqual(t, least, ours*near.signals.mss)
			} else {
				assert.Less(t, least, ours*near.signals.mss)
			}
		})
	}
}

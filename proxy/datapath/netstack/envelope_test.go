package netstack

import (
	"errors"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// The version of the stack that go.mod names keeps its window where we look.
func TestTheStacksWindowIsWithinReach(t *testing.T) {
	require.NoError(t, layoutErr)
}

func TestAnotherStackIsLeftAlone(t *testing.T) {
	type named struct {
		TCPSenderState          tcp.TCPSenderState
		minRTO                  time.Duration //nolint:unused // looked for by its name, and those below
		resendTimer, probeTimer timer         //nolint:unused
	}
	type wrong struct {
		TCPSenderState          int
		minRTO                  time.Duration //nolint:unused
		resendTimer, probeTimer timer         //nolint:unused
	}
	type untimed struct{ TCPSenderState tcp.TCPSenderState }
	type otherTimer struct {
		TCPSenderState          tcp.TCPSenderState
		minRTO                  time.Duration //nolint:unused
		resendTimer, probeTimer struct {      //nolint:unused
			state string
			clock tcpip.Clock
		}
	}
	for name, c := range map[string]struct {
		endpoint any
		ok       bool
	}{
		"as it is":          {struct{ snd *named }{}, true},
		"no sender":         {struct{ sender *named }{}, false},
		"not a pointer":     {struct{ snd named }{}, false},
		"a pointer to none": {struct{ snd *int }{}, false},
		"another state":     {struct{ snd *wrong }{}, false},
		"no timeout":        {struct{ snd *untimed }{}, false},
		"other timers":      {struct{ snd *otherTimer }{}, false},
	} {
		_, err := findSenderLayout(reflect.TypeOf(c.endpoint))
		assert.Equal(t, c.ok, err == nil, "%s: %v", name, err)
	}
}

func TestLossesLeaveTheStacksWindowAboveOurs(t *testing.T) {
	const ours = 100
	for name, observed := range map[string]bool{"ours holds": true, "nobody observes": false} {
		t.Run(name, func(t *testing.T) {
			var gone atomic.Int64
			near, far := connect(t, func(n int) bool {
				if n%50 == 0 {
					gone.Add(1)
				}
				return n%50 == 0
			})
			if observed {
				near.Enforce(datapath.HoldAll, 0)
				near.Observe(func(r flow.Report) { near.Apply(flow.Limit{Cwnd: ours * max(r.MSS, 1)}) })
			}
			data := make([]byte, 4<<20)
			written := make(chan error, 1)
			go func() {
				_, err := near.Write(data)
				written <- errors.Join(err, near.CloseWrite())
			}()
			least, lost := cc.Bytes(1<<40), cc.Bytes(0)
			for got, b := 0, make([]byte, 64<<10); got < len(data); {
				n, err := far.Read(b)
				require.NoError(t, err)
				got += n
				info := near.Info()
				if lost = info.Retransmitted; lost > 0 && info.Cwnd > 0 { // it is not known before the first acknowledgement
					least = min(least, info.Cwnd)
				}
			}
			require.NoError(t, <-written)
			near.signals.mu.Lock()
			mss := near.signals.mss
			near.signals.mu.Unlock()
			require.Positive(t, lost)
			// On a path of less than a millisecond the stack takes what answers an earlier packet for the answer to one
			// that it has sent again in the same millisecond, since its timestamps tell no more, and then all that
			// left before that one for lost (rackControl.update): up to three times what was lost leaves again.
			// Were what the peer holds sent again, it would be six to ten times. A timeout, which a slow machine brings
			// about, sends again whatever may have arrived.
			if near.timeoutCount() == 0 {
				assert.LessOrEqual(t, lost, 5*cc.Bytes(gone.Load())*mss, "what has arrived is not sent again")
			}
			if observed {
				assert.GreaterOrEqual(t, least, ours*mss)
			} else {
				assert.Less(t, least, ours*mss)
			}
		})
	}
}

package stage

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

func TestWindow(t *testing.T) {
	at := func(packets, kernel, pipe float64) windowSample {
		return windowSample{ours: cc.Bytes(packets * 1448), kernel: socket{cwnd: kernel, pipe: pipe, mss: 1448}}
	}
	assert.Nil(t, window(nil))
	assert.Nil(t, window([]windowSample{{}}), "the connection was not up yet")

	w := window([]windowSample{at(22, 44, 20), at(22, 22, 22), at(22, 21, 23), at(22.5, 22, 10)})
	require.NotNil(t, w)
	assert.Equal(t, 4, w.Samples)
	assert.InDelta(t, 0.75, w.KernelCovers, 0, "half a packet is never sent, so 22 covers 22.5")
	assert.InDelta(t, 1, w.PipeExcess, 1e-3)
	assert.InDelta(t, 22, w.KernelCwnd.Median, 0)

	w = window([]windowSample{at(22, 44, 20)})
	require.NotNil(t, w)
	assert.InDelta(t, -2, w.PipeExcess, 1e-3, "it never reached the window")
}

// fixed is one download in a window of 22 packets on a path that has 20 in flight.
func fixed(loss float64) Stage {
	link := sim.LinkConfig{Rate: 12 * mbit, Delay: 10 * time.Millisecond, QueuePackets: 250}
	s := Stage{
		Name: "fixed", Down: link, Up: link, Actors: []Actor{{Name: "bulk", Kind: Bulk}}, Duration: 3 * time.Second, Seed: 1,
		Edge: "defaults: {algorithm: \"static:cwnd_packets=22\"}\n",
	}
	s.Down.Loss = loss
	return s
}

// What is asserted follows from the link's virtual schedule and holds on a slow machine too.
func TestWhatIsBelowAWindowIsLookedAt(t *testing.T) {
	labtest.Need(t)
	env := penstock(t)
	r, err := Play(t.Context(), env, fixed(0), nil)
	require.NoError(t, err)
	untouched(t, r)
	assert.Empty(t, r.Discarded)
	assert.NotEmpty(t, r.Envelope)
	assert.Len(t, r.Points, 30)
	assert.InDelta(t, 12, cc.RateOf(r.Path.Down.Offered, 3*time.Second).Mbps(), 0.1)
	require.NotNil(t, r.Window)
	assert.Positive(t, r.Window.Samples)
	assert.InDelta(t, 22, r.Window.Cwnd.Median, 0.5)
	// A window of 22 packets cannot queue more than itself.
	assert.LessOrEqual(t, r.Queueing.P95, 40*time.Millisecond)
}

func TestOurOwnControlSendsAgainWhatIsLost(t *testing.T) {
	labtest.Need(t)
	if err := bpf.Check(); err != nil {
		t.Skip(err)
	}
	env := penstock(t)
	s := fixed(0.01)
	s.Envelope, s.Edge = "ebpf", "envelope: ebpf\ndefaults: {algorithm: \"static:cwnd_packets=40,pacing_mbit=6\"}\n"
	r, err := Play(t.Context(), env, s, nil)
	require.NoError(t, err)
	assert.Equal(t, "ebpf", r.Envelope)
	assert.Empty(t, r.Discarded)
	assert.Positive(t, r.Resent)
}

// A native sender keeps its window by itself, without a proxy, and sends again what the link loses.
func TestANativeSenderHasNothingBelowIt(t *testing.T) {
	labtest.Need(t)
	for over, loss := range map[string]float64{"": 0, OverUDP: 0.02, OverOwnAcks: 0.02, OverTCP: 0} {
		s := fixed(loss)
		s.Native, s.Over = true, over
		r, err := Play(t.Context(), Env{Laboratory: labtest.Laboratory(t)}, s, nil)
		require.NoError(t, err)
		untouched(t, r)
		assert.Greater(t, r.Throughput, mbit)
		assert.Positive(t, total(r.Actors[0]))
		// Not the most there was: on a machine that stands still the timer fires in vain.
		assert.LessOrEqual(t, r.Queueing.P50, 23*time.Millisecond, "22 packets and what is left of one, at 1 ms each")
		assert.Positive(t, r.CPU, "of the sender's process")
		assert.Less(t, r.CPU, s.Duration)
		if loss > 0 {
			assert.Positive(t, r.Resent)
		}
	}
}

// What overtakes others has a native sender send again what comes all the same: the application has it once.
func TestWhatANativeReceiverHasTwiceCountsOnce(t *testing.T) {
	labtest.Need(t)
	s := fixed(0)
	s.Native, s.Down.Reorder, s.Down.ReorderBy = true, 0.05, 30*time.Millisecond
	r, err := Play(t.Context(), Env{Laboratory: labtest.Laboratory(t)}, s, nil)
	require.NoError(t, err)
	untouched(t, r)
	require.Greater(t, r.Resent, 0.02)
	came := float64(r.Path.Down.Delivered) * float64(cc.DefaultMSS)
	assert.InEpsilon(t, came*(1-r.Resent), float64(total(r.Actors[0])), 0.01)
}

// A native upload leaves the host, under the stage's algorithm, and what comes to the server is counted.
func TestANativeUploadGoesUp(t *testing.T) {
	labtest.Need(t)
	s := fixed(0)
	s.Native, s.Over, s.Actors[0].Kind = true, OverOwnAcks, Upload
	r, err := Play(t.Context(), Env{Laboratory: labtest.Laboratory(t)}, s, nil)
	require.NoError(t, err)
	untouched(t, r)
	up, down := r.Path.Up, r.Path.Down
	assert.Greater(t, up.Throughput, 5*down.Throughput, "data goes up, acknowledgements come down")
	assert.Less(t, r.Queueing.P95, 40*time.Millisecond, "22 packets, not what the queue has room for: %v", r.Queueing)
	carried := float64(up.Delivered) * float64(cc.DefaultMSS)
	assert.InEpsilon(t, carried, float64(total(r.Actors[0])), 0.05)
}

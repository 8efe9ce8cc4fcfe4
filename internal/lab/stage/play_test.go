package stage

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/labtest"
)

const (
	kbit cc.Rate = 1e3
	mbit cc.Rate = 1e6
)

// lastHop is fast enough that the tests are short, and slow enough for a machine
// that does other things as well.
func lastHop() sim.LinkConfig {
	return sim.LinkConfig{Rate: 20 * mbit, Delay: 10 * time.Millisecond, QueuePackets: 250}
}

func short(actors ...Actor) Stage {
	return Stage{
		Name: "test", Down: lastHop(), Up: lastHop(), Edge: "defaults: {algorithm: \"copa\"}\n",
		Actors: actors, Duration: 2 * time.Second, Seed: 1,
	}
}

// total is what the actor has read.
func total(a ActorRecord) (sum cc.Bytes) {
	for _, n := range a.Bytes {
		sum += n
	}
	return sum
}

// untouched says that the bytes were right, and came to the end.
func untouched(t *testing.T, r Record) {
	t.Helper()
	for _, a := range r.Actors {
		assert.Empty(t, a.Corrupt, a.Name)
		assert.Empty(t, a.Error, a.Name)
	}
}

// What is asserted here holds on a slow machine too: how well it goes is for
// recipes to say.
func TestEveryKindOfApplicationPlaysBesideTheOthers(t *testing.T) {
	labtest.Need(t)
	s := short(
		Actor{Name: "bulk", Kind: Bulk},
		Actor{Name: "limited", Kind: Bulk, Host: 1, Rate: 400 * kbit},
		Actor{Name: "finite", Kind: Bulk, Host: 1, Size: 50_000},
		Actor{Name: "requests", Kind: Requests, Host: 2, Size: 20_000, Every: 300 * time.Millisecond},
		Actor{
			Name: "web", Kind: Web, Host: 2, Port: 8080, Size: 20_000, Every: 300 * time.Millisecond,
			Start: 500 * time.Millisecond,
		},
		Actor{
			Name: "video", Kind: Video, Host: 3, Rate: 800 * kbit, Every: 200 * time.Millisecond,
			Buffer: time.Second,
		},
		Actor{
			Name: "udp", Kind: UDP, Host: 4, Rate: 2 * mbit, Start: 200 * time.Millisecond,
			Stop: 1200 * time.Millisecond,
		},
		Actor{Name: "direct", Kind: Bulk, Host: 5, Direct: true, Stop: time.Second},
		Actor{Name: "upload", Kind: Upload, Host: 6, Control: "reno", Start: 1200 * time.Millisecond},
		Actor{Name: "quic", Kind: QUIC, Host: 7},
		Actor{Name: "quic of bbr", Kind: QUIC, Host: 7, Control: "bbr"},
	)
	s.Hold = true
	var told []time.Duration
	r, err := Play(t.Context(), penstock(t), s, func(d time.Duration) { told = append(told, d) })
	require.NoError(t, err)
	untouched(t, r)
	assert.NotEmpty(t, told)
	require.Len(t, r.Actors, len(s.Actors))
	by := map[string]ActorRecord{}
	for _, a := range r.Actors {
		by[a.Name] = a
		assert.Len(t, a.Bytes, 20, a.Name)
		assert.Positive(t, total(a), a.Name)
	}
	assert.Positive(t, r.Throughput)
	assert.LessOrEqual(t, r.Throughput, 20*mbit+mbit/10)
	assert.Positive(t, r.Lateness)
	assert.Positive(t, r.CPU)
	assert.NotEmpty(t, r.Memory)
	assert.LessOrEqual(t, r.Queueing.P50, r.Queueing.Max)

	limited := total(by["limited"])
	assert.LessOrEqual(t, limited, (400*kbit).BytesIn(s.Duration)+portion, "what the application has produced")
	assert.Equal(t, cc.Bytes(50_000), total(by["finite"]))

	for _, name := range []string{"requests", "web"} {
		asked := by[name].Requests
		require.NotEmpty(t, asked, name)
		done, counted := 0, 0
		for i, q := range asked {
			assert.GreaterOrEqual(t, q.At, time.Duration(i)*300*time.Millisecond, "%s, request %d", name, i)
			if q.Took > 0 {
				done++
				assert.GreaterOrEqual(t, q.Took, 20*time.Millisecond, "a round trip")
			}
			if q.Took > 0 && q.At+q.Took < s.Duration-Step { // bytes are counted until the run's end
				counted++
			}
		}
		assert.GreaterOrEqual(t, done, len(asked)-1, "only the last may be under way")
		assert.GreaterOrEqual(t, total(by[name]), cc.Bytes(counted)*20_000)
	}
	assert.GreaterOrEqual(t, by["web"].Requests[0].At, 500*time.Millisecond)

	video := by["video"].Video
	require.NotNil(t, video)
	assert.Positive(t, video.StartUp)
	assert.Positive(t, video.Played)
	assert.LessOrEqual(t, video.StartUp+video.Played+video.Rebuffer, s.Duration)

	udp := by["udp"]
	assert.InDelta(t, 2e6/8*payloadShare, float64(udp.Sent), 2*float64(sim.DatagramPayload))
	assert.LessOrEqual(t, total(udp), udp.Sent)
	assert.Nil(t, udp.Cwnd)
	assert.NotEmpty(t, udp.Jitter)

	direct := by["direct"]
	assert.Nil(t, direct.Cwnd, "the proxy does not know it")
	assert.Nil(t, direct.Limited)
	assert.Zero(t, direct.Rate(1500*time.Millisecond, 2*time.Second), "it has stopped")
	upload := by["upload"]
	assert.Nil(t, upload.Cwnd, "its window is the client's own")
	assert.Positive(t, upload.Queueing.P50)
	bulk := by["bulk"]
	assert.Positive(t, bulk.Queueing.P50, "it is alone on its host")
	assert.Zero(t, by["limited"].Queueing, "others are on its host")
	require.Len(t, bulk.Cwnd, 20)
	assert.Positive(t, bulk.Cwnd[19])
	assert.Positive(t, bulk.Limited["cwnd"])
	assert.Positive(t, bulk.Share[19])
}

func TestAReloadMovesARunningTransferAndABrokenOneIsRecorded(t *testing.T) {
	labtest.Need(t)
	s := short(Actor{Name: "bulk", Kind: Bulk})
	s.Changes = []Change{
		{At: 600 * time.Millisecond, Edge: "defaults: {algorithm: \"static:cwnd_packets=7\"}\n"},
		{At: 1200 * time.Millisecond, Edge: "defaults: {algorithm: \"no-such\"}\n"},
	}
	r, err := Play(t.Context(), penstock(t), s, nil)
	require.NoError(t, err)
	untouched(t, r)
	require.Len(t, r.Reloads, 2)
	assert.Empty(t, r.Reloads[0].Error)
	assert.GreaterOrEqual(t, r.Reloads[0].At, 600*time.Millisecond)
	assert.Contains(t, r.Reloads[1].Error, "no-such")
	assert.InDelta(t, 7*1448, float64(r.Actors[0].Cwnd[19]), 100, "the last good one is in force")
}

// payloadShare is what of a datagram is payload.
const payloadShare = float64(sim.DatagramPayload) / float64(sim.DatagramBytes)

func TestDatagramsThatTheLastHopHasNoRoomForAreMissing(t *testing.T) {
	labtest.Need(t)
	s := short(Actor{
		Name: "blaster", Kind: UDP, Rate: 8 * mbit, On: 400 * time.Millisecond,
		Off: 300 * time.Millisecond,
	})
	s.Edge, s.Duration = "", 1500*time.Millisecond
	s.Down.Rate, s.Down.QueuePackets = 2*mbit, 10
	r, err := Play(t.Context(), Env{}, s, nil)
	require.NoError(t, err)
	untouched(t, r)
	a := r.Actors[0]
	const ran = 0.4 + 0.4 + 0.1
	assert.InDelta(t, ran*8e6/8*payloadShare, float64(a.Sent), 3*float64(sim.DatagramPayload))
	assert.Positive(t, total(a))
	// A quarter goes through, and what the queue holds at each end.
	assert.Less(t, total(a), a.Sent/2)
	assert.Zero(t, r.CPU)
	assert.Nil(t, r.Memory)
}

func TestACancelledRunLeavesNothing(t *testing.T) {
	labtest.Need(t)
	s := short(
		Actor{Name: "bulk", Kind: Bulk},
		Actor{Name: "web", Kind: Web, Size: 1000},
		Actor{Name: "video", Kind: Video, Rate: mbit, Every: time.Second},
		Actor{Name: "udp", Kind: UDP, Rate: mbit},
		Actor{Name: "later", Kind: Bulk, Start: time.Minute},
	)
	s.Duration, s.Hints = time.Hour, 20*time.Millisecond
	s.Changes = []Change{{At: 30 * time.Minute, Edge: s.Edge}}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	r, err := Play(ctx, penstock(t), s, func(time.Duration) { cancel(errors.New("enough")) })
	require.ErrorContains(t, err, "stage: test: enough")
	assert.Zero(t, r)
}

func TestAProxyThatDoesNotStartIsExplained(t *testing.T) {
	labtest.Need(t)
	s := short(Actor{Name: "bulk", Kind: Bulk})
	s.Edge = "defaults: {algorithm: \"no-such\"}\n"
	_, err := Play(t.Context(), penstock(t), s, nil)
	require.ErrorContains(t, err, "before it was ready")
	assert.ErrorContains(t, err, "no-such")
}

func TestAConnectionThatEndsEarlyIsRecorded(t *testing.T) {
	labtest.Need(t)
	s := short(
		Actor{Name: "bulk", Kind: Bulk},
		Actor{Name: "refused", Kind: Bulk, Port: 81},
	)
	s.Edge = "rules:\n  - {name: no, match: {ports: [81]}, refuse: true}\ndefaults: {algorithm: copa}\n"
	s.Duration = time.Second
	r, err := Play(t.Context(), penstock(t), s, nil)
	require.NoError(t, err)
	assert.Empty(t, r.Actors[0].Error)
	assert.Regexp(t, "connection 1 ended after 0 bytes|connect: .* reset by peer", r.Actors[1].Error,
		"a reset may come before its client has looked")
	assert.Empty(t, r.Actors[1].Corrupt)
}

// A cell gives each host half of its blocks, whatever the other asks for, and a
// queue of its own; and its word reaches the algorithm, which knows no capacity
// without.
func TestHostsOfACellHaveQueuesOfTheirOwnAndHints(t *testing.T) {
	labtest.Need(t)
	s := short(
		Actor{Name: "told", Kind: Bulk},
		Actor{Name: "blaster", Kind: UDP, Host: 1, Rate: 20 * mbit},
	)
	s.Down, s.Up.QueuePackets = sim.LinkConfig{}, 0
	// 10 Mbit/s
	s.Cell = &sim.CellConfig{Blocks: 20, Delay: 10 * time.Millisecond, Hosts: []sim.CellHost{{QueuePackets: 100}}}
	s.Edge, s.Hints = "defaults: {algorithm: pbe}\n", 10*time.Millisecond
	s.Changes = []Change{{At: 500 * time.Millisecond, Delay: 15 * time.Millisecond}}
	r, err := Play(t.Context(), penstock(t), s, nil)
	require.NoError(t, err)
	untouched(t, r)
	told, blaster := r.Actors[0], r.Actors[1]
	assert.Positive(t, total(told))
	assert.Less(t, total(blaster), blaster.Sent)
	assert.Positive(t, told.Queueing.P50)
	assert.Greater(t, blaster.Queueing.P95, 150*time.Millisecond, "a full queue of 100 at 5 Mbit/s takes 240 ms")
	assert.NotEqual(t, told.Queueing, blaster.Queueing)
	assert.Positive(t, told.Cwnd[19])
}

// Without a proxy the window is that of the server's socket, over real sockets as in virtual time.
func TestTheServersOwnWindowIsLookedAt(t *testing.T) {
	s := short(Actor{Name: "held back", Kind: Bulk, SendBuffer: 20 * cc.DefaultMSS})
	s.Edge = ""
	check := func(t *testing.T, r Record, err error) {
		require.NoError(t, err)
		untouched(t, r)
		assert.Positive(t, total(r.Actors[0]))
		assert.Positive(t, slices.Max(r.Actors[0].Cwnd))
		assert.Less(t, slices.Max(r.Actors[0].Cwnd), 200*cc.DefaultMSS, "a queue of 250 packets could have more")
	}
	t.Run("virtual", func(t *testing.T) {
		r, err := PlayVirtual(t.Context(), s, nil)
		check(t, r, err)
	})
	t.Run("real", func(t *testing.T) {
		labtest.Need(t)
		r, err := Play(t.Context(), penstock(t), s, nil)
		check(t, r, err)
	})
}

// In the warm-up datagrams take the link from a download; afterwards it has it for itself.
func TestWhatIsSentAgainIsCountedAfterTheWarmUp(t *testing.T) {
	labtest.Need(t)
	s := short(Actor{Name: "bulk", Kind: Bulk},
		Actor{Name: "noise", Kind: UDP, Rate: 40 * mbit, Stop: 1500 * time.Millisecond})
	s.Edge, s.Duration = "", 3500*time.Millisecond
	whole, err := Play(t.Context(), Env{}, s, nil)
	require.NoError(t, err)
	s.Warmup = 2500 * time.Millisecond
	rest, err := Play(t.Context(), Env{}, s, nil)
	require.NoError(t, err)
	require.Positive(t, whole.Resent)
	assert.Less(t, rest.Resent, whole.Resent/2)
}

func TestWhatUploadsSendAgainIsCounted(t *testing.T) {
	labtest.Need(t)
	s := short(Actor{Name: "first", Kind: Upload}, Actor{Name: "second", Kind: Upload})
	s.Edge, s.Up.Loss = "", 0.05
	r, err := Play(t.Context(), Env{}, s, nil)
	require.NoError(t, err)
	untouched(t, r)
	assert.InDelta(t, 0.05, r.Resent, 0.04)
}

// Connections are gone by the end of the run: one has brought what was asked for, one was stopped,
// and what was sent on them within the warm-up does not count.
func TestWhatIsSentAgainOnConnectionsThatEndIsCounted(t *testing.T) {
	labtest.Need(t)
	s := short(
		Actor{Name: "before", Kind: Bulk, Size: 20_000},
		Actor{Name: "finite", Kind: Bulk, Size: 200_000, Start: 600 * time.Millisecond},
		Actor{Name: "stopped", Kind: Bulk, Stop: 2 * time.Second},
	)
	s.Down.Loss, s.Warmup, s.Duration = 0.05, 500*time.Millisecond, 2500*time.Millisecond
	for name, direct := range map[string]bool{"from the server": true, "from the proxy": false} {
		t.Run(name, func(t *testing.T) {
			for i := range s.Actors {
				s.Actors[i].Direct = direct
			}
			r, err := Play(t.Context(), penstock(t), s, nil)
			require.NoError(t, err)
			untouched(t, r)
			assert.InDelta(t, 0.05, r.Resent, 0.03)
		})
	}
}

// What a tunnel's transport sends again is set against what passes the last hop meanwhile.
func TestWhatATunnelSendsAgainIsCountedAfterTheWarmUp(t *testing.T) {
	labtest.Need(t)
	s := fixed(0.05)
	s.Tunnel, s.Warmup, s.Duration = WireGuard, 2*time.Second, 3*time.Second
	r, err := Play(t.Context(), penstock(t), s, nil)
	require.NoError(t, err)
	untouched(t, r)
	assert.InDelta(t, 0.05, r.Resent, 0.03)
}

// A tenth of marks leaves cubic a window of a few packets, where they are asked for.
func TestALinkThatMarksMarks(t *testing.T) {
	labtest.Need(t)
	s := short(Actor{Name: "bulk", Kind: Bulk})
	s.Edge, s.Down.Mark = "", 0.1
	r, err := Play(t.Context(), Env{}, s, nil)
	require.NoError(t, err)
	untouched(t, r)
	assert.Less(t, r.Utilisation, 0.8)
	assert.Zero(t, r.Path.Down.Drops.Total())
}

// Rivals of virtual time must send as Linux does, or figures beside them mean nothing. The two distributions of
// queueing may be 0.15 apart (Kolmogorov and Smirnov).
func TestServersOwnSendersQueueAsInVirtualTime(t *testing.T) {
	labtest.Need(t)
	for _, control := range []string{"cubic", "reno"} {
		s := Stage{
			Name: control, Kernel: control, Actors: []Actor{{Name: "download", Kind: Bulk}},
			Down: sim.LinkConfig{Rate: 12 * mbit, Delay: 10 * time.Millisecond, QueueBytes: 150e3},
			Up:   sim.LinkConfig{Delay: 10 * time.Millisecond}, Duration: 10 * time.Second,
		}
		record, err := Play(t.Context(), Env{}, s, nil)
		require.NoError(t, err)
		virtual, err := PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		linux, ours := record.Path.Down.DataQueueing.Centiles, virtual.Path.Down.DataQueueing.Centiles
		for p := 15; p <= 85; p++ {
			assert.GreaterOrEqual(t, linux[p], ours[p-15], "%s, centile %d", control, p)
			assert.LessOrEqual(t, linux[p], ours[p+15], "%s, centile %d", control, p)
		}
	}
}

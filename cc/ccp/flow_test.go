package ccp

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

const ms = time.Millisecond

// bench is a flow with an agent whose messages a test writes.
type bench struct {
	t     *testing.T
	agent *Agent
	alg   cc.Algorithm
	now   cc.Time
	total cc.Bytes
	sent  []Message
	err   error // of each transmission
	woken int
}

// newBench has an agent that has installed the programs of the texts, numbered from 1.
func newBench(t *testing.T, texts ...string) *bench {
	b := &bench{t: t, now: cc.Time(time.Second)}
	var err error
	b.agent, err = NewAgent("x", "own", func(m []byte) error {
		require.LessOrEqual(t, len(m), MaxToAgent)
		if b.err == nil {
			msg, rest, err := Next(append([]byte(nil), m...))
			require.NoError(t, err)
			require.Empty(t, rest)
			b.sent = append(b.sent, msg)
		}
		return b.err
	})
	require.NoError(t, err)
	b.connect(texts...)
	b.alg = b.agent.Spec().New(b.config(nil))
	return b
}

func (b *bench) config(over cc.Params) cc.Config {
	p, err := b.agent.Spec().Resolve(over)
	require.NoError(b.t, err)
	return cc.Config{
		MSS: 1448, InitialCwnd: 14480, Params: p,
		Ends: cc.Ends{From: netip.MustParseAddrPort("192.0.2.1:443"), To: netip.MustParseAddrPort("10.0.0.7:50000")},
		Wake: func(now cc.Time) { b.woken++; b.alg.OnTick(b.state()) },
	}
}

func (b *bench) connect(texts ...string) {
	require.NoError(b.t, b.agent.Connect(b.now, 7))
	for i, text := range texts {
		code, err := Compile(text)
		require.NoError(b.t, err)
		require.NoError(b.t, b.agent.Receive(b.now, code.Install(uint32(i+1)).Append(nil)))
	}
}

func (b *bench) state() cc.State {
	return cc.State{
		Now: b.now, MSS: 1448, Inflight: 14480, Delivered: b.total,
		SRTT: 20 * ms, RTTVar: 5 * ms, MinRTT: 20 * ms, CwndLimited: true,
	}
}

// ack acknowledges so many segments a millisecond later.
func (b *bench) ack(segments cc.Bytes) {
	b.now = b.now.Add(ms)
	b.total += segments * 1448
	left := b.now.Add(-20 * ms)
	b.alg.OnAck(cc.Ack{
		State: b.state(), Acked: segments * 1448, RTT: 20 * ms, DeliveryRate: 100e6,
		Sent: cc.Sent{At: left, DeliveredAt: left, Cwnd: 14480},
	})
}

// last is the newest message to the agent, of a kind.
func (b *bench) last(k Kind) Message {
	b.t.Helper()
	for i := len(b.sent) - 1; i >= 0; i-- {
		if b.sent[i].Kind == k {
			return b.sent[i]
		}
	}
	require.Fail(b.t, "no message", "of kind %v", k)
	return Message{}
}

func (b *bench) count(k Kind) (n int) {
	for _, m := range b.sent {
		if m.Kind == k {
			n++
		}
	}
	return n
}

func (b *bench) create() Create {
	c, err := b.last(KindCreate).Create()
	require.NoError(b.t, err)
	return c
}

// say has the agent speak about the newest flow.
func (b *bench) say(program uint32, updates ...Update) {
	require.NoError(b.t, b.agent.Receive(b.now, Change{b.create().Flow, program, updates}.Append(nil)))
}

func (b *bench) steered() bool { return b.alg.Control().Phase == "agent" }

func cwnd(v uint64) Update { return Update{Register{ClassImplicit, implicitCwnd}, v} }

const reports = `(def (Report (volatile acked 0) (volatile lost 0) (volatile timeout false)) (every 0))
	(when true
		(:= Report.acked (+ Report.acked Ack.bytes_acked)) (:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
		(:= Report.timeout Flow.was_timeout) (fallthrough))
	(when (|| Report.timeout (> Report.lost 0)) (report))
	(when (> Micros every) (report) (:= Micros 0))`

func TestAFlowIsAnnouncedAndSteered(t *testing.T) {
	b := newBench(t, reports)
	assert.False(t, b.steered(), "the fallback decides until the agent has answered")
	b.ack(2)
	c := b.create()
	assert.Equal(t, "own", c.Algorithm)
	assert.EqualValues(t, 14480, c.InitialCwnd)
	assert.EqualValues(t, 1448, c.MSS)
	assert.Equal(t, "192.0.2.1:443", c.Local.String())
	assert.Equal(t, "10.0.0.7:50000", c.Remote.String())

	b.say(1, Update{Register{ClassControl, 0}, 2500})
	assert.Equal(t, 1, b.woken, "what an agent says does not wait for an acknowledgement")
	require.True(t, b.steered())
	assert.EqualValues(t, 14480, b.alg.Control().Cwnd)
	b.ack(2)
	b.ack(3)
	assert.Zero(t, b.count(KindMeasure), "not before 2.5 ms")
	b.ack(1)
	m, err := b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.Equal(t, Measure{c.Flow, 1, []uint64{6 * 1448, 0, 0}}, m)

	b.say(0, cwnd(28960))
	assert.EqualValues(t, 28960, b.alg.Control().Cwnd)
	b.say(0, Update{Register{ClassImplicit, implicitRate}, 1e6})
	assert.EqualValues(t, 8e6, b.alg.Control().PacingRate)

	b.alg.OnLoss(cc.Loss{State: b.state(), Lost: 3000, Timeout: true})
	m, err = b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.Equal(t, []uint64{0, 3, 1}, m.Fields, "a loss and a timeout are reported at once")

	cc.Close(b.alg)
	m, err = b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.Equal(t, Measure{c.Flow, 0, []uint64{}}, m, "the agent forgets a flow that is over")
	assert.Zero(t, b.agent.Counters().Flows)
	assert.Zero(t, b.agent.Counters().Steered)
}

func TestAFlowIsAnnouncedUntilTheAgentAnswers(t *testing.T) {
	b := newBench(t, reports)
	b.ack(1)
	require.Equal(t, 1, b.count(KindCreate))
	b.ack(1)
	require.Equal(t, 1, b.count(KindCreate))
	for range 3 {
		b.now = b.alg.Control().NextTick
		b.alg.OnTick(b.state())
	}
	assert.Equal(t, 4, b.count(KindCreate))
	assert.Equal(t, 800*ms, b.alg.Control().NextTick.Sub(b.now), "ever more rarely")
	for range 10 {
		b.now = b.alg.Control().NextTick
		b.alg.OnTick(b.state())
	}
	assert.Equal(t, 30*time.Second, b.alg.Control().NextTick.Sub(b.now))

	b.say(9)
	assert.False(t, b.steered(), "there is no such program")
	b.say(1)
	assert.True(t, b.steered())
}

func TestAnAnswerThatComesAsTheNextAnnouncementIsDueIsHeardFirst(t *testing.T) {
	b := newBench(t, reports)
	b.ack(1)
	b.now = b.alg.Control().NextTick
	b.agent.Inline = true // the flow's own clock comes before the wake of the answer
	b.say(1)
	b.alg.OnTick(b.state())
	assert.True(t, b.steered())
	assert.Equal(t, 1, b.count(KindCreate))
}

// faults are what has the fallback take over, by the reason that is counted.
var faults = map[string]func(b *bench){
	"gone": func(b *bench) {
		b.err = errors.New("connection refused")
		b.ack(1)
	},
	"stalled": func(b *bench) {
		b.agent.SetUnread(b.now)
		for range 100 {
			b.ack(1)
		}
		assert.True(b.t, b.steered(), "100 ms are not over")
	},
	"silent": func(b *bench) { b.now = b.now.Add(31 * time.Second) },
	"program": func(b *bench) {
		b.say(2)
		for range 101 {
			b.ack(1)
		}
	},
}

// fault has the fallback take over from an agent whose window of 400 packets is beyond the 172 that arrive in a round
// trip.
func fault(t *testing.T, why string) *bench {
	b := newBench(t, reports, "(def (Report (x 0))) (when true (:= Report.x (- 1 2)))")
	b.ack(1)
	b.say(1)
	b.say(0, cwnd(400*1448))
	b.ack(1)
	require.True(t, b.steered())

	faults[why](b)
	b.ack(1)
	require.False(t, b.steered())
	ctl := b.alg.Control()
	assert.Equal(t, "fallback", ctl.Phase)
	assert.LessOrEqual(t, ctl.Cwnd, cc.Rate(100e6).BytesIn(21*ms)+2*1448, "what has arrived in a round trip")
	assert.GreaterOrEqual(t, ctl.Cwnd, cc.Bytes(14480))
	counters := b.agent.Counters()
	assert.EqualValues(t, 1, counters.Fallbacks[why])
	assert.Zero(t, counters.Steered)
	return b
}

func TestAnAgentThatIsGoneIsToldOfANewFlow(t *testing.T) {
	for _, why := range []string{"gone", "program"} {
		t.Run(why, func(t *testing.T) {
			b := fault(t, why)
			first := b.create().Flow
			b.err = nil
			if why == "gone" {
				b.connect(reports)
			}
			b.now = b.now.Add(2 * time.Second)
			b.ack(1)
			assert.NotEqual(t, first, b.create().Flow, "what is late is about another flow")
			require.NoError(t, b.agent.Receive(b.now, Change{first, 0, []Update{cwnd(1)}}.Append(nil)))
			assert.False(t, b.steered())
			assert.EqualValues(t, 1, b.agent.Counters().Refused["no_such_flow"])
			b.say(1)
			assert.True(t, b.steered())
			assert.EqualValues(t, 14480, b.alg.Control().Cwnd, "as the agent was told")
		})
	}
}

func TestASlowAgentHasItsFlowBackWithItsLateAnswer(t *testing.T) {
	for _, why := range []string{"stalled", "silent"} {
		t.Run(why, func(t *testing.T) {
			b := fault(t, why)
			reported := b.count(KindMeasure)
			for range 20 {
				b.ack(1)
			}
			assert.Greater(t, b.count(KindMeasure), reported, "the program goes on, for agents that answer few reports")
			held := b.alg.Control().Cwnd

			b.agent.SetUnread(0)
			b.say(0, cwnd(400*1448))
			require.True(t, b.steered())
			assert.Equal(t, held, b.alg.Control().Cwnd, "no burst")
			for acked := cc.Bytes(0); acked < 400*1448-held; acked += 10 * 1448 {
				assert.InDelta(t, float64(held+acked), float64(b.alg.Control().Cwnd), 1448, "as in slow start")
				b.ack(10)
			}
			assert.EqualValues(t, 400*1448, b.alg.Control().Cwnd, "which the agent believes it has")
			b.say(0, cwnd(100*1448))
			assert.EqualValues(t, 100*1448, b.alg.Control().Cwnd, "nor is it bounded below what is asked for")

			assert.Equal(t, 1, b.count(KindCreate), "it never began anew")
			assert.EqualValues(t, 1, b.last(KindMeasure).Flow)
			assert.EqualValues(t, 1, b.agent.Counters().Fallbacks[why])
			assert.EqualValues(t, 1, b.agent.Counters().Steered)
			cc.Close(b.alg)
			assert.Zero(t, b.agent.Counters().Steered)
		})
	}
}

func TestALateAnswerWithoutAWindowLeavesTheWindow(t *testing.T) {
	b := fault(t, "stalled")
	for b.alg.Control().Cwnd <= 400*1448 { // the fallback's grows beyond what the agent asked for
		b.ack(20)
	}
	held := b.alg.Control().Cwnd
	b.say(0, Update{Register{ClassControl, 0}, 2500})
	require.True(t, b.steered())
	assert.Equal(t, held, b.alg.Control().Cwnd)
}

func TestASuspendedFlowIsAnnouncedAnewOnceTheAgentHasForgottenIt(t *testing.T) {
	ready := func(b *bench) { require.NoError(b.t, b.agent.Receive(b.now, Ready{1}.Append(nil))) }
	for name, happens := range map[string]func(*bench){
		"the agent has gone": func(b *bench) {
			b.agent.Disconnect(b.now)
			b.connect(reports)
		},
		"it says Ready": ready,
		"it reads, and answers nothing for as long again as made it silent": func(b *bench) {
			b.now = b.now.Add(59 * time.Second)
			b.ack(1)
			assert.Equal(b.t, 1, b.count(KindCreate))
			b.now = b.now.Add(2 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := fault(t, "stalled")
			b.now = b.now.Add(10 * time.Minute) // stopped, it keeps the flow
			b.ack(1)
			require.Equal(t, 1, b.count(KindCreate))
			b.agent.SetUnread(0)
			happens(b)
			b.ack(1)
			assert.Equal(t, 2, b.count(KindCreate))
			assert.EqualValues(t, 2, b.create().Flow)
			b.say(1)
			assert.True(t, b.steered())
		})
	}
}

func TestAnAgentThatSaysReadyAndAnswersGoesOn(t *testing.T) {
	b := newBench(t, reports)
	b.ack(1)
	b.say(1)
	for range 5 {
		require.NoError(t, b.agent.Receive(b.now, Ready{1}.Append(nil)))
		b.ack(1)
		b.say(0, cwnd(20_000))
		b.now = b.now.Add(200 * ms)
		b.ack(1)
		require.True(t, b.steered())
	}
	require.NoError(t, b.agent.Receive(b.now, Ready{1}.Append(nil)))
	for range 102 {
		b.ack(1)
	}
	assert.False(t, b.steered(), "it has begun anew, and knows no flow")
	assert.Equal(t, 2, b.count(KindCreate))
}

func TestWindowsAreBounded(t *testing.T) {
	b := newBench(t, reports)
	cc.Close(b.alg)
	b.alg = b.agent.Spec().New(b.config(cc.Params{"max_window": 100}))
	b.ack(1)
	b.say(1)
	for set, want := range map[uint64]cc.Bytes{1: 2 * 1448, 1 << 63: 100 * 1448, 50_000: 50_000} {
		b.say(0, cwnd(set))
		assert.Equal(t, want, b.alg.Control().Cwnd)
	}
}

func TestAReportThatFindsNoRoomIsPartOfTheNext(t *testing.T) {
	b := newBench(t, reports)
	b.ack(1)
	b.say(1)
	b.err = ErrBusy
	b.ack(2)
	b.err = nil
	b.ack(3)
	m, err := b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.EqualValues(t, 5*1448, m.Fields[0])
	assert.EqualValues(t, 1, b.agent.Counters().Dropped)
}

func TestAnAgentThatStartsAnewHasNoneOfTheOldPrograms(t *testing.T) {
	b := newBench(t, reports, reports)
	require.Equal(t, 2, b.agent.Counters().Programs)
	code, err := Compile(reports)
	require.NoError(t, err)
	require.NoError(t, b.agent.Receive(b.now, code.Install(1).Append(nil)))
	assert.Equal(t, 1, b.agent.Counters().Programs)
}

func TestARunThatIsAbortedSetsNoWindow(t *testing.T) {
	b := newBench(t, `(def (Report (volatile acked 0)))
		(when (> Ack.packets_acked 5) (:= Cwnd 2896) (:= Report.acked (- 1 2)) (fallthrough))
		(when true (report))`)
	b.ack(1)
	b.say(1, cwnd(50_000))
	b.ack(6)
	assert.EqualValues(t, 50_000, b.alg.Control().Cwnd)
	assert.EqualValues(t, 1, b.agent.Counters().Aborted)
	assert.Zero(t, b.count(KindMeasure), "and nothing is reported")
	b.ack(1)
	assert.Equal(t, 1, b.count(KindMeasure))
}

func TestADatagramMayHoldSeveralMessages(t *testing.T) {
	b := newBench(t)
	b.ack(1)
	code, err := Compile(reports)
	require.NoError(t, err)
	both := Change{b.create().Flow, 4, []Update{cwnd(30_000)}}.Append(code.Install(4).Append(nil))
	require.NoError(t, b.agent.Receive(b.now, both))
	assert.True(t, b.steered())
	assert.EqualValues(t, 30_000, b.alg.Control().Cwnd)
}

func TestAProgramReplacesWhatWasSetBefore(t *testing.T) {
	b := newBench(t, reports, reports)
	b.ack(1)
	b.say(1)
	b.agent.Inline = true // nothing wakes the flow: all waits for its next event
	b.say(0, cwnd(50_000))
	b.say(2, Update{Register{ClassControl, 0}, 2500})
	b.ack(1)
	assert.EqualValues(t, 14480, b.alg.Control().Cwnd, "that was for the program before")
	for range 3 {
		b.ack(1)
	}
	m, err := b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.Equal(t, Measure{b.create().Flow, 2, []uint64{4 * 1448, 0, 0}}, m)
}

func TestNoAgentIsTheFallbackAlone(t *testing.T) {
	name, params, err := cc.Parse("ccp:reno,fallback=cubic,max_window=50")
	require.NoError(t, err)
	assert.Equal(t, "ccp:reno", name)
	alg, err := cc.New(name, cc.Config{Params: params})
	require.NoError(t, err)
	cubic, err := cc.New("cubic", cc.Config{})
	require.NoError(t, err)
	assert.Equal(t, cubic.Control().Cwnd, alg.Control().Cwnd)
	for _, wrong := range []string{"ccp:", "ccp:Reno", "ccp:reno,fallback=ccp:reno", "ccp"} {
		_, _, err := cc.Parse(wrong)
		assert.Error(t, err, wrong)
	}
}

func TestNothingIsAllocatedForAnAcknowledgement(t *testing.T) {
	b := newBench(t, reports)
	b.ack(1)
	b.say(1)
	for range 200 {
		b.ack(1)
	}
	kept := b.agent.transmit
	b.agent.transmit = func([]byte) error { return nil }
	assert.Zero(t, testing.AllocsPerRun(100, func() { b.ack(2) }))
	b.agent.transmit = kept
}

func BenchmarkAcknowledgement(b *testing.B) {
	var t testing.T
	f := newBench(&t, reports)
	f.ack(1)
	f.say(1)
	f.agent.transmit = func([]byte) error { return nil }
	b.ReportAllocs()
	for b.Loop() {
		f.ack(2)
	}
}

// Another goroutine's tick may come between.
func TestTheAgentHearsOfTheDatapathFirst(t *testing.T) {
	b := newBench(t, reports)
	b.agent.Disconnect(b.now)
	b.sent = nil
	transmit := b.agent.transmit
	b.agent.transmit = func(m []byte) error {
		if msg, _, _ := Next(m); msg.Kind == KindReady {
			b.ack(1)
		}
		return transmit(m)
	}
	require.NoError(t, b.agent.Connect(b.now, 7))
	assert.Equal(t, KindReady, b.sent[0].Kind)
}

func TestOneRunThatIsAbortedIsNoFailingProgram(t *testing.T) {
	b := newBench(t, `(def (Report (left 5))) (when (> Ack.lost_pkts_sample 0) (:= Report.left (- 0 1)))`)
	b.ack(1)
	b.say(1)
	b.ack(1)
	b.alg.OnLoss(cc.Loss{State: b.state(), Lost: 1448})
	b.now = b.now.Add(200 * ms)
	b.ack(1)
	assert.True(t, b.steered())
}

func TestARateLetsTheNextReportCome(t *testing.T) {
	b := newBench(t, reports)
	b.ack(1)
	b.say(1, Update{Register{ClassImplicit, implicitRate}, 1})
	assert.GreaterOrEqual(t, b.alg.Control().PacingRate.BytesIn(time.Second), cc.Bytes(1448))
}

// A group's members report each at its own acknowledgement's time, in any order within a tick.
func TestTimeOfAProgramDoesNotRunBackwards(t *testing.T) {
	b := newBench(t, `(def (Report (micros 0) (now 0)))
		(when true (:= Report.now Ack.now) (:= Report.micros Micros) (fallthrough))
		(when (> Micros 20000) (report) (:= Micros 0))`)
	b.ack(1)
	b.say(1)
	for b.count(KindMeasure) == 0 {
		b.ack(1)
	}
	b.now = b.now.Add(-ms - 47*time.Microsecond)
	b.ack(1) // of another member, 47 µs earlier
	assert.Equal(t, 1, b.count(KindMeasure), "20 ms have not passed")
	m, err := b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.Less(t, m.Fields[0], uint64(1<<32))
}

func TestAnAgentsTimeBeginsAnHourUp(t *testing.T) {
	b := newBench(t, `(def (Report (now 0) (micros 0)))
		(when true (:= Report.now Ack.now) (:= Report.micros Micros) (report))`)
	b.now = 1
	b.ack(1)
	b.say(1)
	b.ack(1)
	m, err := b.last(KindMeasure).Measure()
	require.NoError(t, err)
	assert.Equal(t, []uint64{3_600_002_000, 1000}, m.Fields, "ten seconds before that is no negative number")
}

// path is a bench whose acknowledgements are those of a path: bytes arrive at a rate after a round trip.
type path struct {
	*bench
	rtt, minRTT time.Duration
	rate        cc.Rate
	appLimited  bool
}

// onPath has an agent decide over a path on which nothing was measured yet.
func onPath(t *testing.T) *path {
	p := &path{bench: newBench(t, reports), rtt: 40 * ms, minRTT: 40 * ms, rate: 24e6}
	p.alg.OnTick(p.state())
	p.say(1)
	require.True(t, p.steered())
	return p
}

// pass has time pass on the path, an acknowledgement each millisecond.
func (p *path) pass(d time.Duration) {
	for end := p.now.Add(d); p.now < end; {
		p.now = p.now.Add(ms)
		acked := p.rate.BytesIn(ms)
		p.total += acked
		s := p.state()
		s.SRTT, s.MinRTT = p.rtt, p.minRTT
		left := p.now.Add(-p.rtt)
		p.alg.OnAck(cc.Ack{
			State: s, Acked: acked, RTT: p.rtt, DeliveryRate: p.rate,
			Sent: cc.Sent{
				At: left, DeliveredAt: left, Delivered: max(0, p.total-p.rate.BytesIn(p.rtt)), AppLimited: p.appLimited,
			},
		})
	}
}

func TestAWindowIsBoundedByWhatRoundTripsDeliver(t *testing.T) {
	const bdp, all = cc.Bytes(120_000), 16_700_000
	p := onPath(t)
	p.say(0, cwnd(all))
	assert.EqualValues(t, 14480, p.alg.Control().Cwnd, "before anything is delivered")
	p.pass(5 * ms)
	assert.Equal(t, 4*bdp, p.alg.Control().Cwnd)
	p.pass(time.Second)
	assert.Equal(t, 4*bdp, p.alg.Control().Cwnd, "without asking again")
	p.say(0, cwnd(uint64(3*bdp)), Update{Register{ClassImplicit, implicitRate}, uint64(24e6 / 8 * 2.89)})
	assert.Equal(t, 3*bdp, p.alg.Control().Cwnd, "BBR's start is not bounded")
	assert.InDelta(t, 2.89*24e6, float64(p.alg.Control().PacingRate), 8)
	p.say(0, Update{Register{ClassImplicit, implicitRate}, 312_500_000})
	assert.InDelta(t, 4*24e6, float64(p.alg.Control().PacingRate), 1000)
	p.say(0, cwnd(all))

	p.rtt = 400 * ms // a queue
	p.pass(time.Second)
	assert.EqualValues(t, 14480+2*10*bdp, p.alg.Control().Cwnd, "slow start goes on in a deep queue")
	p.rtt, p.rate = 40*ms, 1e6
	p.pass(200 * ms)
	assert.EqualValues(t, 14480+2*10*bdp, p.alg.Control().Cwnd, "for some round trips")
	p.pass(10 * time.Second)
	assert.EqualValues(t, 14480+2*5_000, p.alg.Control().Cwnd)
}

func TestAnApplicationThatPausesLosesNoWindow(t *testing.T) {
	p := onPath(t)
	p.say(0, cwnd(300_000))
	p.pass(time.Second)
	p.rate, p.appLimited = 1e5, true
	p.pass(20 * time.Second)
	assert.EqualValues(t, 300_000, p.alg.Control().Cwnd)
	p.say(0)
	p.now = p.now.Add(time.Minute)
	p.pass(ms)
	assert.EqualValues(t, 300_000, p.alg.Control().Cwnd, "nor after a rest")
}

func TestAWindowThatIsAskedForOnceIsReachedInSlowStart(t *testing.T) {
	p := onPath(t)
	p.say(0, cwnd(100*1448))
	p.rtt, p.minRTT = 100*ms, 100*ms
	for range 4 {
		p.rate = cc.RateOf(p.alg.Control().Cwnd, p.rtt)
		p.pass(p.rtt)
	}
	assert.EqualValues(t, 100*1448, p.alg.Control().Cwnd)
}

func TestAWindowMayDoubleWhereNoFlightIsMeasured(t *testing.T) {
	b := newBench(t, reports)
	b.alg.OnTick(b.state())
	b.say(1, cwnd(1<<30))
	for range 20 {
		b.alg.OnAck(cc.Ack{State: b.state(), Acked: 1448})
	}
	assert.EqualValues(t, 30*1448, b.alg.Control().Cwnd)
}

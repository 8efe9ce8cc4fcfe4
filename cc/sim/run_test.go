package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
)

// path is 12 Mbit/s, 1000 packets a second, with the given round trip.
func path(rtt time.Duration, queue int, refs ...string) Scenario {
	s := Scenario{
		Down:     LinkConfig{Rate: 12e6, Delay: rtt / 2, QueuePackets: queue},
		Up:       LinkConfig{Delay: rtt / 2},
		Duration: time.Minute, Warmup: 30 * time.Second,
	}
	for _, ref := range refs {
		name, params, err := cc.Parse(ref)
		if err != nil {
			panic(err)
		}
		s.Flows = append(s.Flows, FlowConfig{Algorithm: name, Params: params})
	}
	return s
}

func play(t *testing.T, s Scenario) Result {
	t.Helper()
	r, err := Run(s)
	require.NoError(t, err)
	return r
}

// The queue swings between 0 and 2.5/delta packets (NSDI 2018 §3).
func TestCopaHoldsItsQueue(t *testing.T) {
	for _, c := range []struct {
		ref       string
		low, high float64 // mean queue in packets
		p99       time.Duration
	}{
		{"copa:delta=0.5", 2, 5, 6 * ms},
		{"copa:delta=0.1", 10, 25, 29 * ms},
	} {
		r := play(t, path(50*ms, 0, c.ref))
		assert.GreaterOrEqual(t, r.Utilisation, 0.99, c.ref)
		assert.GreaterOrEqual(t, r.QueuePackets, c.low, c.ref)
		assert.LessOrEqual(t, r.QueuePackets, c.high, c.ref)
		assert.LessOrEqual(t, r.Queueing.P99, c.p99, c.ref)
		assert.Zero(t, r.Retransmits, c.ref)
	}
}

func TestCopasShareByTheirDeltas(t *testing.T) {
	r := play(t, path(50*ms, 0, "copa:delta=0.5", "copa:delta=0.5"))
	assert.Greater(t, r.Jain, 0.99)
	s := path(50*ms, 0, "copa:delta=0.5", "copa:delta=0.25")
	s.Down.Rate *= 2
	r = play(t, s)
	ratio := r.Flows[1].Throughput.Mbps() / r.Flows[0].Throughput.Mbps()
	assert.InDelta(t, 2, ratio, 0.4)
}

func TestLossBasedSendersFillTheBuffer(t *testing.T) {
	for ref, utilisation := range map[string]float64{"cubic": 0.99, "reno": 0.99} {
		r := play(t, path(50*ms, 100, ref))
		assert.GreaterOrEqual(t, r.Utilisation, utilisation, ref)
		assert.GreaterOrEqual(t, r.Queueing.P95, 90*ms, ref)
		assert.LessOrEqual(t, r.Queueing.Max, 100*ms, ref)
		assert.Positive(t, r.Drops, ref)
		assert.Equal(t, r.Drops, r.Retransmits, "%s: what is lost, and no more, is sent again", ref)
		assert.Zero(t, r.Flows[0].Timeouts, ref)
	}
}

// 21 packets are on the path when the link is full; the 22nd queues. Each
// waits for its own transmission, too.
func TestStaticWindowIsItsOwnArithmetic(t *testing.T) {
	r := play(t, path(20*ms, 0, "static:cwnd_packets=22"))
	assert.InDelta(t, 1, r.Utilisation, 1e-4)
	assert.Equal(t, Delays{Mean: 2 * ms, P50: 2 * ms, P95: 2 * ms, P99: 2 * ms, Max: 2 * ms}, r.Queueing)
	assert.Equal(t, 12*ms, r.OneWay.P99)
	assert.InDelta(t, 12*1448./1500, r.Flows[0].Throughput.Mbps(), 0.01)

	r = play(t, path(20*ms, 0, "static:cwnd_packets=10"))
	assert.InDelta(t, 10./21, r.Utilisation, 1e-3, "a window of 10 goes round every 21 ms")
}

func TestRawSamplesAndTheLedgerAgree(t *testing.T) {
	s := path(50*ms, 0, "copa:delta=0.5")
	ledger := play(t, s)
	s.RawRTT = true
	raw := play(t, s)
	assert.Equal(t, ledger.Flows[0].Throughput, raw.Flows[0].Throughput)
	assert.Equal(t, ledger.Queueing, raw.Queueing)
}

func TestRetransmissionsReplaceWhatWasLost(t *testing.T) {
	s := path(40*ms, 0, "static:cwnd_packets=40")
	s.Down.Loss, s.Up.Loss, s.Seed, s.Warmup = 0.05, 0.1, 3, 0
	s.Flows[0].Bytes = 10_000_000
	r := play(t, s)
	f := r.Flows[0]
	require.Positive(t, f.Completed, "it completes")
	assert.InDelta(t, 10_000_000*8/f.Completed.Seconds(), float64(f.Throughput), 1e4)
	assert.GreaterOrEqual(t, f.Retransmits, f.Losses)
	assert.LessOrEqual(t, f.Retransmits, f.Losses+f.Losses/50+3, "hardly anything is sent again in vain")
}

// A silence longer than the timer, without a loss: nothing but the probes is
// sent again once the originals arrive after all.
func TestLateIsNotLost(t *testing.T) {
	s := path(40*ms, 0, "static:cwnd_packets=30")
	s.Warmup = 0
	s.Duration = 10 * time.Second
	trace, err := readTrace(t, "1\n").Without(3*time.Second, 5*time.Second, s.Duration)
	require.NoError(t, err)
	s.Down.Trace = trace
	r := play(t, s)
	f := r.Flows[0]
	assert.Equal(t, 3, f.Timeouts, "after 0.2, 0.6 and 1.4 s; the next would be after 3 s")
	assert.LessOrEqual(t, f.Retransmits, f.Timeouts)
	assert.InDelta(t, 30./41*12*1448/1500, f.PerSecond[7].Mbps(), 0.2)
}

func TestStopEndsAFlow(t *testing.T) {
	s := path(40*ms, 0, "static", "static")
	s.Warmup, s.Duration = 0, 10*time.Second
	s.Flows[0].Stop = 5 * time.Second
	s.Flows[1].Start = 2 * time.Second
	r := play(t, s)
	assert.Zero(t, r.Flows[0].PerSecond[6])
	assert.Zero(t, r.Flows[1].PerSecond[1])
	assert.Equal(t, 5*time.Second, r.Flows[0].To)
	assert.InEpsilon(t, float64(r.Flows[0].PerSecond[1]), float64(r.Flows[1].PerSecond[8]), 0.01)
}

func TestRunRefuses(t *testing.T) {
	good := func() Scenario { return path(40*ms, 0, "copa") }
	for complaint, spoil := range map[string]func(*Scenario){
		"duration is 0s":         func(s *Scenario) { s.Duration = 0 },
		"warm-up is 1m0s":        func(s *Scenario) { s.Warmup = s.Duration },
		"there is no flow":       func(s *Scenario) { s.Flows = nil },
		"link down needs a rate": func(s *Scenario) { s.Down.Rate = 0 },
		"link up: packets are reordered, but by no time": func(s *Scenario) { s.Up.Reorder = 0.1 },
		"link down: the part of packets reordered is 1":  func(s *Scenario) { s.Down.Reorder = 1 },
		"link up: the loss is 1":                         func(s *Scenario) { s.Up.Loss = 1 },
		`flow 1: no algorithm "frob"`:                    func(s *Scenario) { s.Flows[0].Algorithm = "frob" },
		"a simulated one has none": func(s *Scenario) {
			s.Flows[0].Algorithm, s.Flows[0].Params = "none", nil
		},
		`copa has no parameter "x"`:    func(s *Scenario) { s.Flows[0].Params = cc.Params{"x": 1} },
		"it must stop after it starts": func(s *Scenario) { s.Flows[0].Start, s.Flows[0].Stop = 2, 1 },
		"periods must not be negative": func(s *Scenario) { s.AckEvery = -1 },
	} {
		s := good()
		spoil(&s)
		_, err := Run(s)
		assert.ErrorContains(t, err, complaint)
	}
}

// TestAcksAreDelayed has windows of one packet and of two: each that is alone on its
// way waits for its acknowledgement, but for the first ones and the last one.
func TestAcksAreDelayed(t *testing.T) {
	const packets, waiting = 20, 20 - quickAcks - 1
	s := path(40*ms, 0, "static")
	s.Flows[0].Params, s.Flows[0].Bytes = cc.Params{"cwnd_packets": 1}, packets*cc.DefaultMSS
	completed := func(transport Transport, delay time.Duration) time.Duration {
		t.Helper()
		s.Transport, s.AckDelay = transport, delay
		r, err := Run(s)
		require.NoError(t, err)
		assert.Equal(t, r.Flows[0].Completed-20*ms, r.Flows[0].Received, "the last acknowledgement is not delayed")
		return r.Flows[0].Completed
	}
	at := completed(Kernel, AckAtOnce)
	assert.Equal(t, at+waiting*25*ms, completed(Kernel, 25*ms))
	assert.Equal(t, at+waiting*40*ms, completed(Kernel, 0), "Linux's own")
	assert.Equal(t, at, completed(Relay, 0))
	assert.Equal(t, at, completed(Relay, 40*ms), "each packet is a write of its own")

	s.Flows[0].Params = cc.Params{"cwnd_packets": 2}
	assert.Less(t, completed(Kernel, 0), completed(Kernel, AckAtOnce)+15*ms, "pairs do not wait")
}

// TestTheKernelsWindowIsTheRelaysWindow has both kinds of transport fill the same window,
// whole pairs of packets, as the kernel's members are told theirs in pairs.
func TestTheKernelsWindowIsTheRelaysWindow(t *testing.T) {
	for _, window := range []float64{4, 8, 30} {
		s := path(40*ms, 0, "static", "static")
		for i := range s.Flows {
			s.Flows[i].Params, s.Flows[i].Group = cc.Params{"cwnd_packets": window}, "g"
		}
		relayed, err := Run(s)
		require.NoError(t, err)
		s.Transport, s.AckDelay = Kernel, AckAtOnce
		held, err := Run(s)
		require.NoError(t, err)
		assert.InEpsilon(t, relayed.Utilisation, held.Utilisation, 0.03, "%v packets", window)
		assert.InDelta(t, 1, held.Jain, 0.02, "%v packets", window)
	}
}

// Whatever the path does, every byte arrives once, nothing is counted twice,
// and the link carries no more than it can.
func TestRunKeepsItsBooks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := Scenario{
			Down: LinkConfig{
				Rate:         cc.Rate(rapid.Int64Range(100_000, 50_000_000).Draw(t, "rate")),
				Delay:        time.Duration(rapid.Int64Range(0, 100).Draw(t, "delay")) * ms,
				QueuePackets: rapid.IntRange(1, 200).Draw(t, "queue"),
				Loss:         rapid.Float64Range(0, 0.2).Draw(t, "loss"),
			},
			Up:       LinkConfig{Delay: 5 * ms, Loss: rapid.Float64Range(0, 0.3).Draw(t, "ack loss")},
			AckEvery: time.Duration(rapid.Int64Range(0, 30).Draw(t, "every")) * ms,
			RawRTT:   rapid.Bool().Draw(t, "raw"),
			Duration: 5 * time.Second,
			Seed:     rapid.Uint64().Draw(t, "seed"),
		}
		s.Transport = rapid.SampledFrom([]Transport{Relay, Kernel}).Draw(t, "transport")
		if rapid.Bool().Draw(t, "delayed") {
			s.AckEvery, s.AckDelay = 0, 40*ms
		}
		if rapid.Bool().Draw(t, "in a cell") {
			s.Cell = &CellConfig{
				Delay: s.Down.Delay, Blocks: rapid.IntRange(2, 50).Draw(t, "blocks"),
				Hosts: []CellHost{
					{QueuePackets: s.Down.QueuePackets}, {Loss: s.Down.Loss, QueuePackets: 100},
				},
			}
			s.Down = LinkConfig{}
		}
		for range rapid.IntRange(1, 3).Draw(t, "flows") {
			s.Flows = append(s.Flows, FlowConfig{
				Algorithm: rapid.SampledFrom([]string{"copa", "cubic", "reno", "vegas", "static"}).Draw(t, "algorithm"),
				Group:     rapid.SampledFrom([]string{"", "shared"}).Draw(t, "group"),
				Weight:    rapid.IntRange(0, 3).Draw(t, "weight"),
				Start:     time.Duration(rapid.Int64Range(0, 3000).Draw(t, "start")) * ms,
				Bytes:     cc.Bytes(rapid.Int64Range(0, 3_000_000).Draw(t, "bytes")),
				Host:      rapid.IntRange(0, 2).Draw(t, "host"),
				Delay:     time.Duration(rapid.Int64Range(0, 20).Draw(t, "own delay")) * ms,
			})
		}
		w := newWorld(s)
		w.plan()
		w.run()
		if w.err != nil {
			t.Fatal(w.err)
		}
		for i, e := range w.endpoints {
			snd := e.(*sender)
			onTheWire, arrivedBytes := cc.Bytes(0), cc.Bytes(0)
			for _, seg := range snd.board.segs {
				switch seg.state {
				case onWire:
					onTheWire += seg.size
				case arrived:
					arrivedBytes += seg.size
				case lost:
				}
			}
			if snd.board.Pipe != onTheWire {
				t.Fatalf("flow %d: the pipe is %d, but %d bytes are on the wire", i, snd.board.Pipe, onTheWire)
			}
			if snd.board.Acked > snd.sent || snd.cfg.Bytes > 0 && snd.sent > snd.cfg.Bytes {
				t.Fatalf("flow %d: acked %d, sent %d of %d", i, snd.board.Acked, snd.sent, snd.cfg.Bytes)
			}
			var first cc.Bytes
			if len(snd.board.segs) > 0 {
				first = snd.board.segs[0].end - snd.board.segs[0].size
			} else {
				first = snd.sent
			}
			if snd.board.Acked != first+arrivedBytes {
				t.Fatalf("flow %d: acked %d, but %d arrived", i, snd.board.Acked, first+arrivedBytes)
			}
			if delivered := snd.arrived; delivered < snd.board.Acked {
				t.Fatalf("flow %d: acknowledged %d bytes, of which %d arrived", i, snd.board.Acked, delivered)
			}
		}
		if r := w.result(); r.Carried > r.Offered+1500 {
			t.Fatalf("the link carried %d of %d bytes", r.Carried, r.Offered)
		}
	})
}

// What waits before the time that counts, or after it, is no part of the mean over it.
func TestTheMeanQueueIsThatOfTheTimeThatCounts(t *testing.T) {
	full := path(40*ms, 0, "cubic")
	full.Duration, full.Warmup, full.Sample = 3*time.Second, time.Second, 10*ms
	cell, managed := full, full
	cell.Down, cell.Cell = LinkConfig{}, &CellConfig{Delay: 20 * ms}
	managed.Down.AQM = CoDel
	for name, s := range map[string]Scenario{"link": full, "cell": cell, "managed": managed} {
		r := play(t, s)
		sum, n := 0, 0
		for _, sample := range r.Flows[0].Samples {
			if sample.At >= s.Warmup {
				sum, n = sum+sample.BacklogPackets, n+1
			}
		}
		assert.InDelta(t, float64(sum)/float64(n), r.QueuePackets, 6, name)
	}
}

func BenchmarkRun(b *testing.B) {
	s := path(50*ms, 100, "copa:delta=0.5")
	packets := 0
	for b.Loop() {
		r, err := Run(s)
		require.NoError(b, err)
		packets += r.Flows[0].Packets
	}
	b.ReportMetric(float64(packets)/b.Elapsed().Seconds(), "packets/s")
}

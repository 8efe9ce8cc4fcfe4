package sim

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestACellGivesEachHostHalf(t *testing.T) {
	r := play(t, Scenario{
		Cell: &CellConfig{Delay: 20 * ms, Hosts: []CellHost{{QueuePackets: 250}}},
		Up:   LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{
			{Algorithm: "cubic", Host: 1},
			{Algorithm: "cubic", Host: 2},
			{Algorithm: "cubic", Host: 1},
		},
		Duration: 20 * time.Second, Warmup: 5 * time.Second,
	})
	assert.GreaterOrEqual(t, r.Utilisation, 0.97)
	assert.GreaterOrEqual(t, flowOf(r, "2").share(r), 0.48)
	assert.LessOrEqual(t, flowOf(r, "2").share(r), 0.52)
}

func TestWhoIsAloneInACellGetsAll(t *testing.T) {
	r := play(t, Scenario{
		Cell: &CellConfig{Delay: 20 * ms, Hosts: []CellHost{{QueuePackets: 400}, {}}},
		Up:   LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{
			{Algorithm: "cubic", Host: 1},
			{Algorithm: "cubic", Host: 2, Stop: 5 * time.Second},
		},
		Duration: 15 * time.Second, Warmup: 7 * time.Second,
	})
	assert.GreaterOrEqual(t, flowOf(r, "1").Throughput.Mbps(), 46.0)
	assert.GreaterOrEqual(t, r.Utilisation, 0.97)
	assert.LessOrEqual(t, r.Utilisation, 1.001)
}

// Each host has a queue of its own: what one floods is not the other's delay.
func TestOneHostsBloatIsNotTheOthers(t *testing.T) {
	shared := Scenario{
		Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{
			{Algorithm: "cubic", Name: "bloated"}, {Algorithm: "cubic", Rate: 2e6, Name: "light"},
		},
		Duration: 20 * time.Second, Warmup: 5 * time.Second,
	}
	own := shared
	own.Cell = &CellConfig{Delay: 20 * ms, Hosts: []CellHost{{QueueBytes: 2_000_000}}}
	r := play(t, own)
	assert.GreaterOrEqual(t, flowOf(r, "bloated").Queueing.P95, 200*ms)
	assert.LessOrEqual(t, flowOf(r, "light").Queueing.P95, 5*ms)
	assert.GreaterOrEqual(t, flowOf(r, "light").Throughput.Mbps(), 1.9)
	shared.Down = LinkConfig{Rate: 50e6, Delay: 20 * ms, QueueBytes: 2_000_000}
	r = play(t, shared)
	assert.GreaterOrEqual(t, flowOf(r, "bloated").Queueing.P95, 200*ms)
	assert.GreaterOrEqual(t, flowOf(r, "light").Queueing.P95, 200*ms)
}

// A better modulation makes more of the same blocks.
func TestEqualPartsOfTheAirAreNotEqualRates(t *testing.T) {
	r := play(t, Scenario{
		Cell: &CellConfig{Delay: 20 * ms, Hosts: []CellHost{
			{BitsPerBlock: 600, QueuePackets: 200},
			{BitsPerBlock: 200, QueuePackets: 200},
		}},
		Up: LinkConfig{Delay: 20 * ms}, Flows: []FlowConfig{{Algorithm: "cubic"}, {Algorithm: "cubic"}},
		Duration: 20 * time.Second, Warmup: 5 * time.Second,
	})
	assert.GreaterOrEqual(t, r.Utilisation, 0.97)
	assert.LessOrEqual(t, r.Utilisation, 1.001)
	assert.InEpsilon(t, 3, r.Flows[0].Throughput.Mbps()/r.Flows[1].Throughput.Mbps(), 0.05)
	assert.InDelta(t, 0.5, r.Flows[1].Utilisation, 0.02, "of what it would carry for that host alone")
}

// Two listeners of 4 and 30 Mbit/s on a cell of 50: the first may have its own
// and half of what is idle.
func TestACellTellsItsHosts(t *testing.T) {
	heard := hear(t, Scenario{
		Cell: &CellConfig{Delay: 20 * ms}, Up: LinkConfig{Delay: 20 * ms},
		Flows: []FlowConfig{paced(4), paced(30)}, Hints: 10 * ms, Duration: 2 * time.Second,
	})
	wire := func(mbit float64) float64 { return mbit * 1500 / 1448 }
	idle := 50 - wire(34)
	for i, own := range []float64{4, 30} {
		h := heard[i].last(t, time.Second)
		assert.InEpsilon(t, 0.932e6*(wire(own)+idle/2), float64(h.Capacity), 0.06, "flow %d", i+1)
		assert.InEpsilon(t, 0.932*25e6, float64(h.FairShare), 0.001)
		assert.EqualValues(t, 50e6, h.LinkRate)
		assert.Equal(t, 2, h.Flows)
		assert.InDelta(t, float64(20*ms), float64(h.at.Sub(h.At)), float64(11*ms),
			"it takes the way of the acknowledgements")
	}
}

func TestPBEFollowsItsCell(t *testing.T) {
	r := play(t, Scenario{
		Cell: &CellConfig{Delay: 20 * ms, Hosts: []CellHost{{QueueBytes: 2000000}}},
		Up:   LinkConfig{Delay: 20 * ms}, Hints: 10 * ms,
		Flows: []FlowConfig{
			{Algorithm: "pbe", Name: "phone"},
			{Algorithm: "cubic", Name: "other", Start: 10 * time.Second, Stop: 20 * time.Second},
		},
		Duration: 30 * time.Second, Warmup: 2 * time.Second,
	})
	assert.GreaterOrEqual(t, mean(flowOf(r, "phone").PerSecond, 5*time.Second, 10*time.Second).Mbps(), 42.0)
	assert.GreaterOrEqual(t, mean(flowOf(r, "phone").PerSecond, 12*time.Second, 20*time.Second).Mbps(), 20.0)
	assert.LessOrEqual(t, mean(flowOf(r, "phone").PerSecond, 12*time.Second, 20*time.Second).Mbps(), 25.0)
	assert.GreaterOrEqual(t, mean(flowOf(r, "phone").PerSecond, 22*time.Second, 30*time.Second).Mbps(), 42.0)
	assert.LessOrEqual(t, millis(flowOf(r, "phone").Queueing.P95), 20.0)
}

func TestAFlowsOwnDelay(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 10 * ms}, Up: LinkConfig{Delay: 10 * ms},
		Flows: []FlowConfig{
			{Algorithm: "static", Params: cc.Params{"cwnd_packets": 2}},
			{Algorithm: "static", Params: cc.Params{"cwnd_packets": 2}, Delay: 30 * ms},
		},
		Duration: 5 * time.Second, Warmup: time.Second, Sample: 10 * ms,
	})
	near, far := r.Flows[0], r.Flows[1]
	assert.InDelta(t, float64(30*ms), float64(far.OneWay.P50-near.OneWay.P50), float64(2*ms),
		"half of it on the way there")
	assert.InDelta(t, float64(60*ms), float64(far.Final.MinRTT-near.Final.MinRTT), float64(2*ms))
	assert.InDelta(t, 4, near.Throughput.Mbps()/far.Throughput.Mbps(), 0.4)
}

func TestHostsOfFlows(t *testing.T) {
	s := Scenario{Flows: []FlowConfig{{}, {Group: "a"}, {Host: 3}, {Group: "a"}, {}, {Host: 1}}}
	for i, host := range []int{2, 4, 3, 4, 5, 1} {
		assert.Equal(t, host, s.identify().Flows[i].Host)
	}
	assert.Equal(t, "10.0.0.4", newWorld(s).terms(1).Host.String())
}

// 1428 bytes on the wire for 1400 of payload, 20 Mbit/s of them on a link of 12.
func TestDatagramsComeWhateverBecomesOfThem(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 10 * ms, QueuePackets: 50}, Up: LinkConfig{Delay: 10 * ms},
		Flows: []FlowConfig{
			{Algorithm: UDP, Rate: 20e6, Start: time.Second, Stop: 9 * time.Second, Name: "cross"},
			{Algorithm: "reno", Start: 11 * time.Second},
		},
		Duration: 15 * time.Second,
	})
	u := r.Flows[0]
	assert.InDelta(t, 8*20e6/8/1428, float64(u.Packets), 1)
	assert.InDelta(t, 8*12e6/8/1428, float64(u.Arrived), 60, "but for those on the way at the end")
	assert.InDelta(t, float64(u.Packets-u.Arrived), float64(u.Drops), 60)
	assert.InEpsilon(t, 12*1400./1428, u.Throughput.Mbps(), 0.01)
	assert.InDelta(t, 1, r.Jain, 1e-9, "cross traffic is no party to fairness")
	assert.InEpsilon(t, 11.5, r.Flows[1].PerSecond[13].Mbps(), 0.05)
}

func TestDatagramsRest(t *testing.T) {
	u := play(t, Scenario{
		Down: LinkConfig{Rate: 50e6, Delay: 10 * ms}, Up: LinkConfig{Delay: 10 * ms},
		Flows:    []FlowConfig{{Algorithm: UDP, Rate: 20e6, On: 2 * time.Second, Off: 3 * time.Second}},
		Duration: 10 * time.Second,
	}).Flows[0]
	for k, on := range []bool{true, true, false, false, false, true, true, false, false, false} {
		assert.Equal(t, on, u.PerSecond[k].Mbps() > 15, "second %d", k)
	}
}

// On and off at random: means are kept, the seed decides, and each flow has times
// of its own.
func TestRandomRests(t *testing.T) {
	run := func(seed uint64) Result {
		return play(t, Scenario{
			Down: LinkConfig{Rate: 100e6, Delay: 5 * ms}, Up: LinkConfig{Delay: 5 * ms},
			Flows: []FlowConfig{
				{Algorithm: UDP, Random: true, Rate: 1e6, On: time.Second, Off: 3 * time.Second},
				{Algorithm: UDP, Random: true, Rate: 1e6, On: time.Second, Off: 3 * time.Second},
			},
			Duration: 1000 * time.Second, Seed: seed,
		})
	}
	r := run(1)
	for _, f := range r.Flows {
		assert.InDelta(t, 0.25, f.Throughput.Mbps(), 0.05, "a quarter of the time")
	}
	assert.NotEqual(t, r.Flows[0].PerSecond, r.Flows[1].PerSecond)
	assert.Equal(t, r, run(1))
	assert.NotEqual(t, r.Flows[0].PerSecond, run(2).Flows[0].PerSecond)
	tcp := play(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 5 * ms, QueuePackets: 50}, Up: LinkConfig{Delay: 5 * ms},
		Flows: []FlowConfig{
			{Algorithm: "cubic", Random: true, On: 2 * time.Second, Off: 2 * time.Second},
		},
		Duration: 400 * time.Second, Seed: 3,
	}).Flows[0]
	assert.InDelta(t, 5.8, tcp.Throughput.Mbps(), 1.5, "half of the time")
}

func TestAnObjectEverySoOften(t *testing.T) {
	r := play(t, Scenario{
		Down: LinkConfig{Rate: 12e6, Delay: 20 * ms, QueuePackets: 100}, Up: LinkConfig{Delay: 20 * ms},
		Flows:    []FlowConfig{{Algorithm: "cubic", Bytes: 100000, Every: 2 * time.Second}},
		Duration: 11 * time.Second,
	})
	f := r.Flows[0]
	assert.EqualValues(t, 6, flowOf(r, "1").completions())
	assert.LessOrEqual(t, millis(flowOf(r, "1").FCT.P50), 200.0)
	assert.GreaterOrEqual(t, millis(flowOf(r, "1").FCT.Max), 107.0)
	for i, o := range f.Objects {
		assert.Equal(t, time.Duration(2*i)*time.Second, o.At)
		assert.GreaterOrEqual(t, o.Took, 40*ms+67*ms, "a round trip and its transmission")
	}
	assert.InEpsilon(t, 8*6*100e3, 11*float64(f.Throughput), 0.001)

	f = play(t, Scenario{
		Down: LinkConfig{Rate: 1e6, Delay: 20 * ms, QueuePackets: 100}, Up: LinkConfig{Delay: 20 * ms},
		Flows:    []FlowConfig{{Algorithm: "cubic", Bytes: 200000, Every: time.Second}},
		Duration: 10 * time.Second,
	}).Flows[0]
	require.Greater(t, len(f.Objects), 2)
	for i, o := range f.Objects[1:] {
		assert.Equal(t, f.Objects[i].At+f.Objects[i].Took, o.At, "the next waits until the last has come")
	}
	assert.Zero(t, f.Objects[len(f.Objects)-1].Took, "not ended")
}

// A video of 4 Mbit/s plays smoothly on 6 Mbit/s, and asks for no more than its
// buffer holds; with an outage longer than that it stops once.
func TestAVideo(t *testing.T) {
	watch := func(down LinkConfig) FlowResult {
		down.Delay, down.QueuePackets = 20*ms, 100
		return play(t, Scenario{
			Down: down, Up: LinkConfig{Delay: 20 * ms}, Duration: time.Minute,
			Flows: []FlowConfig{{
				Algorithm: "cubic", Video: Video{Rate: 4e6, Chunk: 4 * time.Second, Buffer: 12 * time.Second},
			}},
		}).Flows[0]
	}
	f := watch(LinkConfig{Rate: 6e6})
	assert.Zero(t, f.Video.Rebuffers)
	assert.InDelta(t, 3.05, f.Video.StartUp.Seconds(), 0.45)
	assert.Equal(t, time.Minute-f.Video.StartUp, f.Video.Played)
	assert.InDelta(t, 4, cc.RateOf(cc.Bytes(float64(f.Throughput)*60/8), 60*time.Second).Mbps(), 0.9)
	cut, err := steps(time.Minute, Step{Rate: 6e6}).Without(20*time.Second, 40*time.Second, time.Minute)
	require.NoError(t, err)
	f = watch(LinkConfig{Trace: cut})
	assert.Equal(t, 1, f.Video.Rebuffers)
	assert.GreaterOrEqual(t, f.Video.Rebuffer, 8*time.Second)
	assert.Equal(t, time.Minute-f.Video.StartUp-f.Video.Rebuffer, f.Video.Played)
	f = watch(LinkConfig{Rate: 2e6})
	assert.GreaterOrEqual(t, f.Video.Rebuffers, 3)
	assert.GreaterOrEqual(t, f.Video.Rebuffer, 20*time.Second)
}

func TestPlayer(t *testing.T) {
	p := Player{Video: Video{Chunk: 4 * time.Second, Buffer: 10 * time.Second}}
	at := func(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
	assert.Equal(t, Playback{}, p.Playback(at(2)), "nothing has come")
	p.Arrived(at(2))
	assert.Equal(t, at(2), p.Room(at(2)))
	p.Arrived(at(3)) // 7 s ahead
	assert.Equal(t, at(4), p.Room(at(3)), "when 6 s are left")
	assert.Equal(t, Playback{StartUp: at(2), Played: at(8), Rebuffers: 1, Rebuffer: at(1)}, p.Playback(at(11)),
		"dry at 10 s")
	p.Arrived(at(12))
	assert.Equal(t, Playback{StartUp: at(2), Played: at(9), Rebuffers: 1, Rebuffer: at(2)}, p.Playback(at(13)))
}

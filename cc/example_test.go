package cc_test

import (
	"fmt"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// An algorithm is built by its name, takes events, and says after each what may be in flight.
func ExampleNew() {
	const mss = 1000
	reno, err := cc.New("reno", cc.Config{MSS: mss, InitialCwnd: 10 * mss})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("at first:", reno.Control().Cwnd)

	now := cc.Time(100 * time.Millisecond)
	state := cc.State{Now: now, MSS: mss, CwndLimited: true, SRTT: 50 * time.Millisecond}
	reno.OnAck(cc.Ack{State: state, Acked: 10 * mss, RTT: 50 * time.Millisecond})
	fmt.Println("after a round trip of slow start:", reno.Control().Cwnd)

	reno.OnLoss(cc.Loss{State: state, Lost: mss, SentAt: now})
	fmt.Println("after a loss:", reno.Control().Cwnd, reno.Control().Phase)
	// Output:
	// at first: 10000B
	// after a round trip of slow start: 20000B
	// after a loss: 10000B recovery
}

// aimd adds a packet for each window that is acknowledged, and halves the window at a loss.
type aimd struct {
	mss, cwnd cc.Bytes
	cutAt     cc.Time // what left before the last cut has been answered
}

func (a *aimd) OnAck(ack cc.Ack) {
	if ack.CwndLimited {
		a.cwnd += a.mss * ack.Acked / a.cwnd
	}
}

func (a *aimd) OnLoss(loss cc.Loss) {
	if loss.SentAt >= a.cutAt { // once a round trip
		a.cwnd, a.cutAt = max(a.cwnd/2, 2*a.mss), loss.Now
	}
}

func (a *aimd) OnTick(cc.State) {}

func (a *aimd) Control() cc.Control { return cc.Control{Cwnd: a.cwnd, Phase: "avoidance"} }

// registerAIMD stands for the init of a new algorithm's file. Here it is called late, so that tests of all algorithms
// do not find this one.
var registerAIMD = sync.OnceFunc(func() {
	cc.Register(cc.Spec{
		Name: "aimd", About: "One packet more per round trip, half the window at a loss.", Source: "RFC 5681 §3.1",
		New:   func(cfg cc.Config) cc.Algorithm { return &aimd{mss: cfg.MSS, cwnd: cfg.InitialCwnd} },
		Needs: []cc.Signal{cc.NeedsLoss}, Marks: cc.MarksAreLosses,
	})
})

// A new algorithm is a type of four methods and its Spec, which its file's init registers. Then every part of the
// program knows it by its name: here a run in virtual time, 30 seconds over a link of 10 Mbit/s and 40 ms.
func ExampleRegister() {
	registerAIMD()
	result, err := sim.Run(sim.Scenario{
		Down:   sim.LinkConfig{Rate: 10_000_000, Delay: 20 * time.Millisecond, QueueBytes: 50_000},
		Up:     sim.LinkConfig{Delay: 20 * time.Millisecond},
		Flows:  []sim.FlowConfig{{Algorithm: "aimd"}, {Algorithm: "reno"}},
		Warmup: 10 * time.Second, Duration: 30 * time.Second, Seed: 1,
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for _, flow := range result.Flows {
		fmt.Printf("%s: %.1f Mbit/s\n", flow.Algorithm, flow.Throughput.Mbps())
	}
	fmt.Printf("link: %.0f %% used, %v queued on average\n", 100*result.Utilisation,
		result.Queueing.Mean.Round(time.Millisecond))
	// Output:
	// aimd: 4.0 Mbit/s
	// reno: 5.5 Mbit/s
	// link: 99 % used, 22ms queued on average
}

package flow_test

import (
	"fmt"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// A relay opens a flow, asks before each write, and reports what its transport knows. The algorithm opens the window
// with each acknowledgement, and the limit is pushed to the leg.
func Example() {
	var flows flow.Manager
	now := cc.Time(time.Second)
	leg := flow.Leg{Apply: func(l flow.Limit) { fmt.Println("limit:", l.Cwnd) }}
	f, err := flows.Open(now, flow.Terms{Group: "client", Algorithm: "reno"}, leg)
	if err != nil {
		panic(err)
	}
	defer f.Close(now)

	sent := f.Take(now, 100_000).Bytes // more than the window: what is granted is the initial window
	fmt.Println("granted:", sent)

	now = now.Add(40 * time.Millisecond) // a round trip later half of it has arrived
	f.Report(flow.Report{At: now, Written: sent, Acked: sent / 2, Pipe: sent / 2, MSS: 1448})
	fmt.Println("granted:", f.Take(now, 100_000).Bytes)

	s := f.Snapshot()
	fmt.Println("RTT:", s.LatestRTT, "limited by:", s.LimitedBy)
	// Output:
	// limit: 14480B
	// granted: 14480B
	// limit: 21720B
	// granted: 14480B
	// RTT: 40ms limited by: cwnd
}

// Flows with the same group, algorithm and parameters share one window. What one of them does not use, the other has.
func ExampleManager_Open_shared() {
	var flows flow.Manager
	now := cc.Time(time.Second)
	terms := flow.Terms{Group: "client", Algorithm: "static", Params: cc.Params{"cwnd_packets": 40}}
	open := func(weight int) *flow.Flow {
		terms.Weight = weight
		f, err := flows.Open(now, terms, flow.Leg{})
		if err != nil {
			panic(err)
		}
		return f
	}
	light, heavy := open(1), open(3)
	show := func(when string) {
		flows.Tick(0, now)
		segments := func(f *flow.Flow) cc.Bytes { return f.Snapshot().Share / cc.DefaultMSS }
		fmt.Printf("%s: %d and %d segments\n", when, segments(light), segments(heavy))
	}

	light.Take(now, 1_000_000)
	show("one sends")
	heavy.Take(now, 1_000_000)
	show("both send")
	heavy.Close(now)
	show("one is closed")
	// Output:
	// one sends: 40 and 0 segments
	// both send: 10 and 30 segments
	// one is closed: 40 and 0 segments
}

// Packets of other transports to the same peer weigh as a flow does. Echo requests acknowledge them.
func ExampleManager_OpenEcho() {
	var flows flow.Manager
	now := cc.Time(time.Second)
	terms := flow.Terms{Group: "client", Algorithm: "static", Params: cc.Params{"cwnd_packets": 10}}
	packets, err := flows.OpenEcho(now, terms, flow.ByEcho, func() { fmt.Println("room for a packet") })
	if err != nil {
		panic(err)
	}
	defer packets.Close(now)

	sent, echo := 0, uint16(0)
	for packets.Take(now, cc.DefaultMSS, false) {
		if sent++; packets.NextEcho() <= now {
			echo = packets.SendEcho(now) // the owner sends an ICMP message with this number
		}
	}
	fmt.Println("packets in flight:", sent)
	packets.ReceiveEcho(now.Add(20*time.Millisecond), echo)
	// Output:
	// packets in flight: 10
	// room for a packet
}

// A receiver bounds a sender that knows nothing of it by the window that it advertises.
func ExampleManager_Receive() {
	var flows flow.Manager
	now := cc.Time(time.Second)
	r, err := flows.Receive(now, flow.Terms{Group: "server", Algorithm: "reno"}, func(window cc.Bytes) {
		fmt.Println("advertise:", window)
	})
	if err != nil {
		panic(err)
	}
	defer r.Close(now)

	a := flow.Arrivals{At: now, RTT: 20 * time.Millisecond, Window: 128 << 10, MSS: 1448}
	for range 3 { // each round trip as much comes as the window lets the peer send
		r.Arrived(a)
		a.At, a.Received = a.At.Add(20*time.Millisecond), a.Received+a.Window
	}
	// Output:
	// advertise: 64KiB
	// advertise: 128KiB
	// advertise: 256KiB
	// advertise: 384KiB
}

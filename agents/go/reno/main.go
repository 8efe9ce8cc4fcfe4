// Reno (RFC 5681), decided once per round trip: go run ./agents/go/reno [SOCKET]
//
// Flows that ask for the algorithm 10ms report as often as that, and those that ask for ack
// with each acknowledgement.
package main

import (
	"fmt"
	"math"

	"github.com/penstock-net/penstock/agents/go/ccpagent"
)

// Below the threshold, which is slow start, the datapath opens the window by itself. Before the first sample of
// the round trip, which reads as +infinity, it is taken for 1 s.
const program = `
	(def (Report (volatile acked 0) (volatile lost 0) (volatile timeout false) (cwnd 0) (now 0) (rtt 1000000))
		(threshold +infinity))
	(when true
		(:= Report.acked (+ Report.acked Ack.bytes_acked))
		(:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
		(:= Report.timeout (|| Report.timeout Flow.was_timeout))
		(:= Report.now Ack.now)
		(:= Report.rtt (if (< Flow.rtt_sample_us +infinity) Flow.rtt_sample_us))
		(fallthrough))
	(when (< Cwnd threshold) (:= Cwnd (+ Cwnd Ack.bytes_acked)) (fallthrough))
	(when true (:= Report.cwnd Cwnd) (fallthrough))
	(when (|| Report.timeout (> Report.lost 0)) (report) (:= Micros 0))
	(when (> Micros %s) (report) (:= Micros 0))`

// every is how long it is from one report to the next, µs.
var every = map[string]string{"rtt": "Flow.rtt_sample_us", "10ms": "10000", "ack": "0"}

// reno is one flow's.
type reno struct {
	flow            *ccpagent.Flow
	cwnd, threshold float64 // bytes
	recovered       uint64  // µs: until then losses are repaired for which the window was halved
}

func start(f *ccpagent.Flow) ccpagent.Controller {
	asked := f.Algorithm
	if every[asked] == "" {
		asked = "rtt"
	}
	f.Run(asked, ccpagent.Set{"Cwnd": uint64(f.InitialCwnd)})
	return &reno{flow: f, threshold: math.MaxUint32}
}

// Report is RFC 5681 as far as a round trip's report allows.
func (r *reno) Report(report ccpagent.Report) {
	now, mss := report.Field("now"), float64(r.flow.MSS)
	if r.cwnd < r.threshold {
		r.cwnd = float64(report.Field("cwnd"))
	}
	before := r.cwnd
	switch lost := report.Field("lost") > 0; {
	case report.Field("timeout") != 0:
		r.threshold, r.cwnd = max(r.cwnd/2, 2*mss), mss
	case lost && now < r.recovered:
	case lost:
		r.cwnd = max(r.cwnd/2, 2*mss)
		r.threshold, r.recovered = r.cwnd, now+2*report.Field("rtt")
	case r.cwnd < r.threshold:
	default:
		r.cwnd += mss * float64(report.Field("acked")) / r.cwnd
	}
	set := ccpagent.Set{"threshold": uint64(r.threshold)}
	if r.cwnd != before {
		set["Cwnd"] = uint64(r.cwnd)
	}
	r.flow.Update(set)
}

func main() {
	programs := map[string]string{}
	for name, micros := range every {
		programs[name] = fmt.Sprintf(program, micros)
	}
	agent := ccpagent.Agent{Programs: programs, New: start}
	agent.Main()
}

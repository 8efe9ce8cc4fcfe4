// Slow start (RFC 5681 §3.1) in three ways, until the first loss: go run ./agents/go/slowstart [SOCKET]
//
// What a flow asks for decides who doubles: agent, with a report for each round trip, or
// window or rate, which the datapath raises by itself.
package main

import "github.com/penstock-net/penstock/agents/go/ccpagent"

// Each ends with the same: a loss is reported at once.
const losses = `
	(when true
		(:= Report.acked (+ Report.acked Ack.bytes_acked))
		(:= Report.lost (+ Report.lost Ack.lost_pkts_sample))
		(:= Report.inflight Flow.bytes_in_flight)
		(fallthrough))
	(when (> Report.lost 0) (report))`

const variables = `(def (Report (volatile acked 0) (volatile lost 0) (inflight 0)) (started 0))`

var programs = map[string]string{
	"agent": variables + losses + `
		(when (> Micros Flow.rtt_sample_us) (report) (:= Micros 0))`,
	"window": variables + `
		(when true (:= Cwnd (+ Cwnd Ack.bytes_acked)) (fallthrough))` + losses,
	// A window's worth in a round trip, and from then on twice as much after each.
	"rate": variables + `
		(when (== started 0)
			(:= Rate (/ (* Cwnd 1000000) Flow.rtt_sample_us))
			(:= Cwnd 1000000000)
			(:= started 1)
			(:= Micros 0)
			(fallthrough))
		(when (> Micros Flow.rtt_sample_us) (:= Rate (* Rate 2)) (:= Micros 0) (fallthrough))` + losses,
	"after": variables + losses,
}

// starting is one flow's.
type starting struct {
	flow *ccpagent.Flow
	cwnd uint64 // bytes
	over bool
}

func start(f *ccpagent.Flow) ccpagent.Controller {
	asked := f.Algorithm
	if programs[asked] == "" {
		asked = "agent"
	}
	f.Run(asked, ccpagent.Set{"Cwnd": uint64(f.InitialCwnd)})
	return &starting{flow: f, cwnd: uint64(f.InitialCwnd)}
}

func (s *starting) Report(report ccpagent.Report) {
	switch {
	case s.over:
	case report.Field("lost") > 0: // half of what was on its way, from then on
		s.over = true
		s.cwnd = max(report.Field("inflight")/2, uint64(s.flow.InitialCwnd))
		s.flow.Run("after", ccpagent.Set{"Cwnd": s.cwnd, "Rate": 1<<32 - 1})
	case report.Program() == "agent":
		s.cwnd += report.Field("acked")
		s.flow.Update(ccpagent.Set{"Cwnd": s.cwnd})
	}
}

func main() {
	agent := ccpagent.Agent{Programs: programs, New: start}
	agent.Main()
}

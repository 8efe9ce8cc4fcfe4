// CUBIC (RFC 9438), decided once per round trip: go run ./agents/go/cubic [SOCKET]
package main

import (
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
	(when (> Micros Flow.rtt_sample_us) (report) (:= Micros 0))`

const (
	beta  = 0.7 // RFC 9438 §4.6
	rise  = 0.4 // C of RFC 9438 §5, packets/s³
	alpha = 3 * (1 - beta) / (1 + beta)
)

// cubic is one flow's; windows are in packets, times in seconds.
type cubic struct {
	flow            *ccpagent.Flow
	cwnd, threshold float64
	top, reno       float64 // where the cubic levels off; what Reno's window would be
	epoch, k        float64 // its start (0: none), and the time to the top
	recovered       float64 // until then losses are repaired for which the window was reduced
}

func start(f *ccpagent.Flow) ccpagent.Controller {
	f.Run("cubic", ccpagent.Set{"Cwnd": uint64(f.InitialCwnd)})
	return &cubic{flow: f, threshold: math.MaxUint32}
}

func (c *cubic) Report(report ccpagent.Report) {
	now, rtt, mss := float64(report.Field("now"))/1e6, float64(report.Field("rtt"))/1e6, float64(c.flow.MSS)
	if c.cwnd < c.threshold {
		c.cwnd = float64(report.Field("cwnd")) / mss
	}
	before := c.cwnd
	switch lost := report.Field("lost") > 0; {
	case report.Field("timeout") != 0:
		c.reduce()
		c.cwnd = 1
	case lost && now < c.recovered:
	case lost:
		c.reduce()
		c.recovered = now + 2*rtt
	case c.cwnd < c.threshold || now < c.recovered:
	default:
		c.grow(now, float64(report.Field("acked"))/mss)
	}
	set := ccpagent.Set{"threshold": uint64(c.threshold * mss)}
	if c.cwnd != before {
		set["Cwnd"] = uint64(c.cwnd * mss)
	}
	c.flow.Update(set)
}

// reduce is RFC 9438 §4.6 and, as fast convergence, §4.7.
func (c *cubic) reduce() {
	if c.cwnd < c.top {
		c.top = c.cwnd * (1 + beta) / 2
	} else {
		c.top = c.cwnd
	}
	c.cwnd = max(beta*c.cwnd, 2)
	c.threshold, c.epoch = c.cwnd, 0
}

// grow is RFC 9438 §4.2 and §4.3.
func (c *cubic) grow(now, acked float64) {
	if c.epoch == 0 {
		c.top = max(c.top, c.cwnd)
		c.epoch, c.reno, c.k = now, c.cwnd, math.Cbrt((c.top-c.cwnd)/rise)
	}
	c.reno += alpha * acked / c.cwnd
	t := now - c.epoch - c.k
	c.cwnd = min(max(rise*t*t*t+c.top, c.reno, c.cwnd), 1.5*c.cwnd)
}

func main() {
	agent := ccpagent.Agent{Programs: map[string]string{"cubic": program}, New: start}
	agent.Main()
}

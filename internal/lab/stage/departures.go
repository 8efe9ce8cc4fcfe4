package stage

import (
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/netlab"
)

// Departures say how the packets left towards the link, as recorded at the edge's
// device for the length of the run.
type Departures struct {
	Packets int `json:"packets"`       // with data
	Again   int `json:"retransmitted"` // the part that was sent before
	Missed  int `json:"missed"`        // packets that the record lacks; the other figures are doubtful then

	// Not yet acknowledged, neither cumulatively nor selectively, in segments, by
	// the time it lasted; and the part that is not lost either (RFC 6675's pipe).
	Inflight Occupancy `json:"inflight_packets"`
	Pipe     Occupancy `json:"pipe_packets"`

	Gaps Tails `json:"gap_us"` // between one data packet and the next
	// Of gaps to that which the algorithm's fixed pacing rate asks for; absent
	// without one. A rate counts payload, as TCP's own pacing does.
	IdealGap float64 `json:"ideal_gap_us,omitempty"` // after a full segment
	Ratio    *Tails  `json:"gap_of_ideal,omitempty"`
}

// Occupancy summarises how much there was over time.
type Occupancy struct {
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
	Max float64 `json:"max"`
}

// Tails is where a distribution lies, but for a twentieth at either end.
type Tails struct {
	P5  float64 `json:"p5"`
	P50 float64 `json:"p50"`
	P95 float64 `json:"p95"`
}

// departures summarises what was sent during the run; nil when nothing was.
func departures(s netlab.Sending, missed int, length time.Duration, pacing cc.Rate) *Departures {
	first, ok := s.First()
	if !ok {
		return nil
	}
	s = s.Between(first, first+length)
	d := &Departures{Missed: missed}
	for _, p := range s.Steps {
		if p.Payload > 0 {
			d.Packets++
		}
	}
	d.Again = len(s.Again())
	inflight, pipe := s.Levels()
	d.Inflight, d.Pipe = occupancy(inflight, s.MSS), occupancy(pipe, s.MSS)
	var gaps, ratios []float64
	for _, g := range s.Gaps() {
		gaps = append(gaps, float64(g.Length)/float64(time.Microsecond))
		ratios = append(ratios, g.Against(pacing, g.Payload))
	}
	d.Gaps = tails(gaps)
	if pacing > 0 {
		ratio := tails(ratios)
		d.Ratio, d.IdealGap = &ratio, float64(pacing.TimeFor(s.MSS))/float64(time.Microsecond)
	}
	return d
}

func occupancy(l netlab.Level, mss cc.Bytes) Occupancy {
	packets := func(n cc.Bytes) float64 { return float64(n) / float64(mss) }
	return Occupancy{P50: packets(l.P50), P95: packets(l.P95), Max: packets(l.Max)}
}

// tails sorts v in place; each value is one that occurred (nearest rank).
func tails(v []float64) Tails {
	if len(v) == 0 {
		return Tails{}
	}
	slices.Sort(v)
	return Tails{P5: figures.NearestRank(v, 0.05), P50: figures.NearestRank(v, 0.50), P95: figures.NearestRank(v, 0.95)}
}

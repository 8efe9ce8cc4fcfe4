package cc

import "time"

// TCP Prague as its draft has it, over a transport that retransmits by itself.

func init() {
	Register(Spec{
		Name:   "prague",
		About:  "Prague: answers marks on ECT(1) packets in proportion: an L4S queue stays near 1 ms; else Reno.",
		Source: "draft-briscoe-iccrg-prague-congestion-control; RFC 9331 §4",
		New:    func(cfg Config) Algorithm { return &prague{scalable: newScalable(newLossWindow(cfg))} },

		Needs: []Signal{NeedsRTT, NeedsLoss, NeedsPacing},
		Marks: MarksAreLosses,
		L4S:   true,
		Internals: []Internal{
			showSsthresh,
			{Name: "alpha", About: "average fraction of marked bytes"},
			{
				Name:  "classic_rounds",
				About: "rounds with marks from a standing queue, less those from a short one; 4: marks are losses",
			},
		},
	})
}

type prague struct {
	NoTick
	scalable
	srtt time.Duration
}

func (p *prague) OnAck(a Ack) {
	p.srtt = a.SRTT
	if !a.L4S {
		p.growWindow(p.growthCredit(a))
		return
	}
	p.onAck(a)
	p.answerMark(a)
	p.growUnmarked(a)
}

func (p *prague) OnLoss(l Loss) { p.cutWindow(l, renoBeta) }

// Inspect shows what Spec.Internals lists.
func (p *prague) Inspect() Internals {
	return Internals{finiteOrZero(p.ssthresh), p.alpha, float64(p.classic)}
}

func (p *prague) Control() Control {
	rate := p.pacingRate(p.pacingGain(), p.cwnd, p.srtt)
	return Control{Cwnd: p.toBytes(p.cwnd), PacingRate: rate, Phase: p.phaseName()}
}

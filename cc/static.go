package cc

func init() {
	Register(Spec{
		Name:   "static",
		About:  "A fixed window and, if wanted, a fixed pacing rate, whatever losses and delays say: for experiments.",
		Source: "the fixed-window experiment of ALCC §3.1",
		Fixed:  true,
		Params: []Param{
			{Name: "cwnd_packets", About: "window", Unit: "packets", Default: 22, Min: 1, Max: 1e6},
			{Name: "pacing_mbit", About: "pacing rate; 0: not paced", Unit: "Mbit/s", Default: 0, Min: 0, Max: 1e6},
		},
		New: func(cfg Config) Algorithm {
			return &static{
				segments: segments{cfg.MSS},
				cwnd:     cfg.Params["cwnd_packets"],
				rate:     Rate(cfg.Params["pacing_mbit"] * 1e6),
			}
		},
	})
}

type static struct {
	NoTick
	segments
	cwnd float64
	rate Rate
}

func (s *static) OnAck(a Ack)   { s.setMSS(a.MSS) }
func (s *static) OnLoss(l Loss) { s.setMSS(l.MSS) }

func (s *static) Control() Control {
	return Control{Cwnd: s.toBytes(s.cwnd), PacingRate: s.rate, Phase: "static"}
}

package cc

func init() {
	Register(Spec{
		Name:   "none",
		About:  "No limit of ours: the transport's own congestion control decides alone.",
		Source: "baseline",
		New:    func(Config) Algorithm { return none{} },
		Marks:  MarksPass,
	})
}

type none struct{ NoTick }

func (none) OnAck(Ack)   {}
func (none) OnLoss(Loss) {}

func (none) Control() Control { return Control{Cwnd: MaxCwnd, Phase: "unlimited"} }

package cc

import "time"

// NACC (Venkatesh Bhat et al., J. Commun. Netw. 25(6), 2023): windows from what
// the network's nodes tell of themselves in the packets they forward. Equation
// numbers are the paper's. Here what the network says is State.Hint, whatever brings
// it, and it may be late or missing:
//
//	unaided ──(a hint, a round trip)──▶ guided ◀──(a hint)── frozen
//	(Reno)                                └──(3 RTT without)──▲ │
//	   ▲                                                        │
//	   └────────────────────(a second without)──────────────────┘
//
// What the paper's equations leave open, or have in units that do not fit, is
// settled as follows. Bounds use the least round trip, so that a queue does not
// raise them. Equation 6 becomes free room in bits over the bits that arrive in a
// round trip, at most the window, added over each round trip. Cuts come once per
// report and round trip. A cut for a loss leaves 95 % at most, at any priority.

func init() {
	Register(Spec{
		Name:   "nacc",
		About:  "NACC: a window within bounds that hints of the network set; Reno without them.",
		Source: "Venkatesh Bhat et al., J. Commun. Netw. 25(6) 2023",
		Params: []Param{
			{
				Name: "mode", Default: float64(naccNetwork), Choices: []string{"network", "application"},
				About: "flows share by making room for each other, or by the shares and priorities that the " +
					"network knows",
			},
			{
				Name: "priority", Default: 1, Min: 1, Max: naccMaxLevels,
				About: "of the application, 1 the least; only in application mode",
			},
			{Name: "max_priority", Default: 4, Min: 1, Max: naccMaxLevels, About: "the highest that there is"},
			{
				Name: "usable_fraction", Default: 0.16, Min: 0.01, Max: 1,
				About: "of the link's rate that data may use: 0.16 for WiFi's nominal rate, as the paper reckons",
			},
		},
		Profiles: []Profile{
			{
				Name: "wired", About: "for links whose rate is what they carry",
				Params: Params{"usable_fraction": naccWired},
			},
			{Name: "application", About: "by priority", Params: Params{"mode": float64(naccApplication)}},
		},
		New: func(cfg Config) Algorithm { return newNacc(cfg) },

		Needs: []Signal{NeedsHints, NeedsRTT, NeedsLoss},
		Internals: []Internal{
			{Name: "lower_packets", About: "least window; 0: no hint"},
			{Name: "upper_packets", About: "largest window; 0: no hint"},
			{Name: "arrival_limit_mbit", About: "rate at the link's queue above which the window is cut"},
			{Name: "step_packets", About: "by how much the window grows each round trip"},
			{Name: "hint_age_ms", About: "age of the newest hint; 0: none"},
			{Name: "radio_packets", About: "lost by the radio, says the network, and not yet missed here"},
			showSsthresh,
		},
	})
}

const (
	naccNetwork = iota
	naccApplication
)

const (
	naccFloor     = 10.0 // packets; equation 1
	naccCut       = 0.1  // what a cut takes off, equations 5 and 7; per level of priority, equation 12
	naccLeastCut  = 0.05 // at a loss, of the highest priority; ours
	naccMaxLevels = 8    // so that equation 12 leaves something
	naccWired     = 0.9  // ours: a link's own rate, headers and a margin off
	naccMostRoom  = 0.5  // of the window that a newcomer may take; ours
	naccRTTWindow = 10 * time.Second
	// round trips without a report: it no longer says what there is to gain; ours
	naccPatience   = 3
	naccLeastWait  = 100 * time.Millisecond // but reports may be rarer than round trips; ours
	naccGuideWait  = time.Second            // without a report: on one's own; ours
	naccGuideWaits = 5                      // but at least this many times the patience; ours
)

// naccTrust is how far hints reach.
type naccTrust uint8

const (
	naccUnaided naccTrust = iota
	naccFrozen
	naccGuided
)

type nacc struct {
	NoTick
	lossWindow
	byPriority       bool
	priority, levels float64
	usable           float64

	trust  naccTrust
	hint   Hint // the newest
	heard  bool // there has been one
	age    time.Duration
	minRTT windowedFilter

	lower, upper float64 // packets; 0: unknown
	ceiling      float64 // of upper, what losses since the last report have left of it
	step         float64 // packets per round trip
	cutAt        Time    // the last cut
	radio        radioLosses
}

func newNacc(cfg Config) *nacc {
	levels := cfg.Params["max_priority"]
	return &nacc{
		lossWindow: newLossWindow(cfg),
		byPriority: cfg.Params["mode"] == naccApplication,
		priority:   min(cfg.Params["priority"], levels),
		levels:     levels,
		usable:     cfg.Params["usable_fraction"],
		minRTT:     newMinFilter(),
		ceiling:    1,
	}
}

func (c *nacc) OnAck(a Ack) {
	n := c.growthCredit(a)
	if a.RTT > 0 {
		c.minRTT.addSample(a.Now, max(a.RTT, minDivisor), naccRTTWindow)
	}
	before := c.hint
	fresh := c.readHint(a.State)
	if c.trust == naccUnaided {
		c.growWindow(n)
		return
	}
	c.setBounds()
	if fresh {
		c.makeRoom(before)
	}
	switch {
	case c.cwnd > c.upper:
	case c.hint.ArrivalRate > c.arrivalLimit():
		// What a report says of the time before the last cut, that cut has answered.
		if fresh && (c.cutAt == 0 || c.hint.At.Sub(c.cutAt) >= a.SRTT) {
			c.scaleWindow(a.Now, c.cutFactor(0))
		}
	case c.trust == naccGuided:
		c.step = c.growthPerRound(a.SRTT)
		c.cwnd += c.step * n / c.cwnd
	}
	c.applyBounds()
}

// readHint takes in a hint and reports whether it is new.
func (c *nacc) readHint(s State) (fresh bool) {
	c.age = s.Hint.Age(s.Now)
	fresh = s.Hint != nil && (!c.heard || s.Hint.At > c.hint.At)
	if fresh {
		c.hint, c.heard = *s.Hint, true
		c.ceiling = 1
		c.cwnd = max(c.cwnd, c.radio.addReport(s, c.hintLifetime(s)))
	}
	patience := c.hintLifetime(s)
	was := c.trust
	switch {
	case !c.heard || c.hint.LinkRate <= 0 || c.minRTT.extreme() <= 0,
		c.age > max(naccGuideWait, naccGuideWaits*patience):
		c.trust = naccUnaided
	case c.age > patience:
		c.trust = naccFrozen
	default:
		c.trust = naccGuided
	}
	if c.trust == naccUnaided && was != naccUnaided {
		c.ssthresh = c.cwnd // what it has proven; no slow start from here
		c.lower, c.upper, c.step = 0, 0, 0
	}
	return fresh
}

// hintLifetime is how long a report holds.
func (c *nacc) hintLifetime(s State) time.Duration { return max(naccLeastWait, naccPatience*s.SRTT) }

// linkShare is the part of the link's rate that the flow may count on.
func (c *nacc) linkShare() float64 {
	switch {
	case !c.byPriority:
		return 1
	case c.hint.Share > 0:
		return min(c.hint.Share, 1)
	default:
		return 1 / float64(max(c.hint.Flows, 1))
	}
}

// arrivalLimit is A_UP (equation 3).
func (c *nacc) arrivalLimit() Rate { return Rate(c.usable * float64(c.hint.LinkRate)) }

// setBounds sets the window's bounds (equations 1 and 2, or 9 and 10).
func (c *nacc) setBounds() {
	c.lower = naccFloor
	if c.byPriority {
		c.lower *= c.priority
	}
	bits := c.linkShare() * c.usable * float64(c.hint.LinkRate) * c.minRTT.extreme().Seconds()
	c.upper = c.clampWindow((c.lower+bits/8/float64(c.mss))*c.ceiling, c.lower)
}

// applyBounds keeps the window within its bounds.
func (c *nacc) applyBounds() {
	c.cwnd = c.clampWindow(min(max(c.cwnd, c.lower), c.upper), timeoutWindow)
	c.ssthresh = c.cwnd
}

// makeRoom cuts the window when there are more flows than before (equation 4).
// Where the network divides the link by priority, it has made room itself.
func (c *nacc) makeRoom(before Hint) {
	if c.byPriority || before.Flows <= 0 || c.hint.Flows <= before.Flows {
		return
	}
	newcomers := 1 - float64(before.Flows)/float64(c.hint.Flows)
	load := 0.0
	if c.hint.ArrivalRate > before.ArrivalRate && before.ArrivalRate > 0 {
		load = 1 - float64(before.ArrivalRate)/float64(c.hint.ArrivalRate)
	}
	c.cwnd *= max(1-newcomers-load, naccMostRoom)
}

// growthPerRound is what a round trip may add (equations 6 and 11).
func (c *nacc) growthPerRound(rtt time.Duration) float64 {
	if c.hint.QueueRoom <= 0 { // not known: as Reno would
		return 1
	}
	arriving := float64(c.hint.ArrivalRate) * max(rtt, minDivisor).Seconds() // bits
	if arriving <= 0 {
		return c.cwnd
	}
	step := float64(c.hint.QueueRoom) * 8 / arriving
	if c.byPriority {
		step *= c.priority
	}
	return min(step, c.cwnd)
}

// cutFactor is the factor of a cut, which takes off atLeast (equations 5, 7 and 12).
func (c *nacc) cutFactor(atLeast float64) float64 {
	if !c.byPriority {
		return 1 - naccCut
	}
	return 1 - max(naccCut*(c.levels-c.priority), atLeast)
}

func (c *nacc) scaleWindow(now Time, factor float64) {
	c.cutAt = now
	c.cwnd *= factor
}

func (c *nacc) OnLoss(l Loss) {
	c.setMSS(l.MSS)
	c.readHint(l.State)
	switch {
	case c.trust == naccUnaided:
		c.cutWindow(l, renoBeta)
		return
	case l.Timeout:
		c.epoch.reacted = l.Now
		c.recovering, c.timedOut = true, true
		c.cwnd, c.ceiling = naccFloor, 1
		c.radio.forgetAll()
		c.ssthresh = c.cwnd
		return
	case c.radio.explainsLoss(l, c.cwnd, c.hintLifetime(l.State)):
		return
	}
	if c.epoch.beginEpoch(l) {
		c.recovering, c.timedOut = true, false
		c.scaleWindow(l.Now, c.cutFactor(naccLeastCut))
		c.ceiling *= c.cutFactor(naccLeastCut)
	}
	c.setBounds()
	c.applyBounds()
}

// Inspect shows what Spec.Internals lists.
func (c *nacc) Inspect() Internals {
	in := Internals{c.lower, c.upper, 0, c.step, 0, c.toPackets(c.radio.credit), finiteOrZero(c.ssthresh)}
	if c.heard {
		in[2], in[4] = c.arrivalLimit().Mbps(), toMillis(c.age)
	}
	return in
}

func (c *nacc) Control() Control {
	ctl := Control{Cwnd: c.toBytes(c.cwnd)}
	switch c.trust {
	case naccGuided:
		ctl.Phase = "guided"
	case naccFrozen:
		ctl.Phase = "frozen"
	default:
		ctl.Phase = c.phaseName()
	}
	return ctl
}

// radioLosses sets losses against those that the network blames on the radio.
// The network's report of one may come before the transport misses the bytes or
// after: then the loss has been taken for congestion's, and that is undone. The
// network counts by host, so flows of several groups to one host may each
// set their own against all of the host's.
type radioLosses struct {
	total    Bytes // the network's count
	heard    bool
	credit   Bytes // reported and not yet missed
	creditAt Time
	owed     Bytes // missed and not reported
	owedAt   Time
	uncut    float64 // packets; the window before owed was held against it
}

// addReport takes in the network's count. Where that explains, within patience, all
// that was taken for congestion's, it returns the window from before; 0 otherwise.
func (r *radioLosses) addReport(s State, patience time.Duration) (uncut float64) {
	more := max(0, s.Hint.RadioLost-r.total)
	if !r.heard {
		more = 0 // before our time
	}
	r.total, r.heard = s.Hint.RadioLost, true
	if more == 0 {
		return 0
	}
	r.dropExpired(s.Now, patience)
	paid := min(more, r.owed)
	r.owed -= paid
	r.credit, r.creditAt = min(r.credit+more-paid, MaxCwnd), s.Now
	if paid > 0 && r.owed == 0 {
		return r.uncut
	}
	return 0
}

// explainsLoss reports whether all of a loss was the radio's; cwnd is the window, in
// packets, that it may cost otherwise.
func (r *radioLosses) explainsLoss(l Loss, cwnd float64, patience time.Duration) bool {
	r.dropExpired(l.Now, patience)
	lost := max(l.Lost, 0)
	paid := min(lost, r.credit)
	r.credit -= paid
	if lost == paid {
		return true
	}
	if r.owed == 0 {
		r.uncut = cwnd
	}
	r.owed, r.owedAt = min(r.owed+lost-paid, MaxCwnd), l.Now
	return false
}

// dropExpired drops what is too old to belong to anything.
func (r *radioLosses) dropExpired(now Time, patience time.Duration) {
	if r.credit > 0 && now.Sub(r.creditAt) > patience {
		r.credit = 0
	}
	if r.owed > 0 && now.Sub(r.owedAt) > patience {
		r.owed = 0
	}
}

func (r *radioLosses) forgetAll() { r.credit, r.owed = 0, 0 }

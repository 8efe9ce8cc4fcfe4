package cc

import "time"

// PBE-CC (Xie et al., SIGCOMM 2020): a cellular link's own account of its
// capacity sets the rate, so nothing needs to be probed. Where the path's
// bottleneck is not that link, delay tells, and BBR takes over, which may not ask
// for more than the link's fair share. The account is State.Hint.
//
//	        a hint            3 RTprop              delay
//	alone ─────────▶ ramp ─────────────▶ wireless ────────▶ drain
//	(BBR)             │                   ▲     │ no hint     │ an RTprop
//	  ▲               └──────delay────────┼─────┼────────┐    ▼
//	  └──────(a second without)────── internet ◀┴────────┴─ (BBR, capped)
//
// The paper's receiver measures delay one way and decides; here the sender does,
// by round trips: their variable part is the same.

func init() {
	Register(Spec{
		Name:   "pbe",
		About:  "PBE-CC: sends at the capacity that a cellular link says it has; BBR where it says nothing.",
		Source: "Xie, Yi & Jamieson, SIGCOMM 2020",
		Params: []Param{
			{
				Name: "ramp_rtts", Default: 3, Min: 0, Max: 100,
				About: "round trips in which the rate rises to the fair share at the start",
			},
			{
				Name: "late_ms", Unit: "ms", Default: pbeLate, Min: 1, Max: 10_000,
				About: "above the least round trip: what scheduling and retransmissions of the link explain",
			},
			{
				Name: "detect", Default: float64(pbeByRate), Choices: []string{"delay", "rate"},
				About: "a queue is elsewhere when packets are late; or when they are and arrive slower than the " +
					"link would carry them",
			},
			{
				Name: "claim", Default: float64(pbeFairShare), Choices: []string{"capacity", "fair_share"},
				About: "send at what the link has for this host now; or at its fair share where that is more, so " +
					"that one who had little can have as much as the others",
			},
			{
				Name: "subframes", Unit: "ms", Default: 6, Min: 1, Max: 1000,
				About: "so long a row of packets that are late means a queue elsewhere on the path",
			},
			{
				Name: "headroom", Default: 1.25, Min: 1, Max: 4,
				About: "what may be in flight, over what the rate sends in the least round trip",
			},
		},
		Profiles: []Profile{
			{
				Name: "paper", About: "as its paper has it",
				Params: Params{"detect": float64(pbeByDelay), "claim": float64(pbeCapacity)},
			},
		},
		New: func(cfg Config) Algorithm { return newPbe(cfg) },

		Needs: []Signal{NeedsHints, NeedsRTT, NeedsRate, NeedsTicks, NeedsPacing},
		Internals: []Internal{
			{Name: "capacity_mbit", About: "what the link offers, as last heard"},
			{Name: "fair_share_mbit", About: "what it would if all had as much"},
			{Name: "rate_mbit", About: "sending rate, where BBR does not set it"},
			{Name: "btlbw_mbit", About: "most that the path delivered over ten round trips"},
			{Name: "rtprop_ms", About: "least round trip of ten seconds"},
			{Name: "late_packets", About: "row of packets that took longer than the link explains"},
			{Name: "row_packets", About: "row that means a queue elsewhere"},
			{Name: "hint_age_ms", About: "age of the newest hint; 0: none"},
		},
	})
}

const (
	pbeByDelay = iota
	pbeByRate
)

const (
	pbeCapacity = iota
	pbeFairShare
)

const (
	// pbeLate is three retransmissions on the radio of 8 ms each, and jitter
	// (SIGCOMM 2020 §4.2.3).
	pbeLate      = 3*8 + 3
	pbeDrainGain = 0.5  // of BtlBw
	pbeReached   = 0.95 // of a rate, measured over a round trip, counts as all of it; ours
	pbeFull      = 0.9  // of the link's capacity is delivered: it is the bottleneck; ours
	pbeMinCwnd   = 4.0  // packets; as BBR, and after a timeout
	pbeQuanta    = 3.0  // packets that bursts at the hosts hold back; ours
	pbeLeastRow  = 6.0  // packets; one in each subframe; ours
	pbeFlights   = 2    // of a packet: in so long its delivery and the link's word on it have met; ours
	pbeWindow    = 10 * time.Second
	pbeTick      = 10 * time.Millisecond // news come while no acknowledgement does; ours

	pbeStaleRTTs = 2                      // round trips without a hint: it no longer says what there is; ours
	pbeStale     = 100 * time.Millisecond // but hints may be rarer than round trips; ours
	pbeSilence   = time.Second            // without a hint: on one's own; ours
)

type pbeMode uint8

const (
	pbeAlone pbeMode = iota
	pbeRamp
	pbeWireless
	pbeDrain
	pbeInternet
)

var pbePhases = [...]string{"", "ramp", "wireless", "drain", "internet"} // alone: BBR's

type pbe struct {
	bbr                         *bbr
	rampRTTs, rowSpan, headroom float64
	late                        time.Duration
	byRate, claims              bool

	mode   pbeMode
	since  Time // when it began
	least  windowedFilter
	flight time.Duration // the newest round trip
	ticks  Time          // when to look for news; 0: with the next acknowledgement

	capacity, fair Rate           // as last heard
	slowest        windowedFilter // the longest that the link would have taken for a segment
	age            time.Duration
	stale          bool // internet mode is for want of hints, not for delay

	floor       float64 // packets per round trip that the ramp begins with
	rate        Rate
	cwnd        float64 // packets
	over, under float64 // row of packets that were late, or were not
}

func newPbe(cfg Config) *pbe {
	p := &pbe{
		rampRTTs: cfg.Params["ramp_rtts"],
		rowSpan:  cfg.Params["subframes"],
		headroom: cfg.Params["headroom"],
		late:     time.Duration(cfg.Params["late_ms"] * float64(time.Millisecond)),
		byRate:   cfg.Params["detect"] == pbeByRate,
		claims:   cfg.Params["claim"] == pbeFairShare,
		least:    newMinFilter(),
		slowest:  newMaxFilter(),
	}
	spec, err := Lookup("bbr")
	if err == nil {
		cfg.Params, err = spec.Resolve(nil)
	}
	if err != nil {
		panic("cc: pbe stands on bbr: " + err.Error())
	}
	p.bbr = newBbr(cfg)
	p.floor = p.bbr.initial
	return p
}

func (p *pbe) OnAck(a Ack) {
	p.bbr.setMSS(a.MSS)
	if a.RTT > 0 {
		p.flight = max(a.RTT, minDivisor)
		p.least.addSample(a.Now, p.flight, pbeWindow)
	}
	if p.mode == pbeRamp || p.mode == pbeWireless {
		// The queue is short as it is: BBR need not drain it to see RTprop.
		p.bbr.rtprop, p.bbr.rtpropAt = p.least.extreme(), a.Now
	}
	p.bbr.OnAck(a)
	p.readHint(a.State)
	p.countLatePackets(a)
	p.locateBottleneck(a)
	p.setLimits(a.State)
}

// rtprop is the least round trip of the last ten seconds.
func (p *pbe) rtprop() time.Duration { return p.least.extreme() }

// readHint takes in a hint, or that there is none.
func (p *pbe) readHint(s State) {
	p.age = s.Hint.Age(s.Now)
	told := s.Hint != nil && s.Hint.Capacity > 0 && p.rtprop() > 0
	if told {
		p.capacity, p.fair = min(s.Hint.Capacity, maxBbrRate), min(s.Hint.FairShare, maxBbrRate)
		if p.fair <= 0 {
			p.fair = p.capacity
		}
		p.slowest.addSample(s.Now, p.capacity.TimeFor(p.bbr.mss), pbeFlights*max(s.SRTT, p.flight))
	}
	fresh := told && p.age <= max(pbeStale, pbeStaleRTTs*p.rtprop())
	switch {
	case !fresh && p.mode == pbeInternet:
		p.stale = true
		if !told || p.age > max(pbeSilence, pbeStaleRTTs*pbeStaleRTTs*p.rtprop()) {
			p.enterMode(pbeAlone, s)
		}
	case !fresh && p.mode != pbeAlone:
		p.stale = true
		p.enterMode(pbeInternet, s)
	case fresh && p.mode == pbeAlone && !p.bbr.fullPipe:
		p.enterMode(pbeRamp, s)
	case fresh && (p.mode == pbeAlone || p.mode == pbeInternet && p.stale):
		p.enterMode(pbeWireless, s)
	}
}

func (p *pbe) enterMode(m pbeMode, s State) {
	from := p.mode
	p.mode, p.since = m, s.Now
	p.over, p.under = 0, 0
	switch m {
	case pbeAlone:
		p.bbr.maxRate = 0
	case pbeRamp, pbeWireless:
		p.stale = false
	case pbeInternet:
		if from != pbeAlone {
			p.bbr.startFromModel(s)
		}
	}
}

// startFromModel begins to probe from what the model has learnt under another's rate.
func (b *bbr) startFromModel(s State) {
	b.recovering, b.conserving = false, false
	b.drained = drained{}
	b.fullPipe = true
	b.enterProbeBW(s.Now)
	b.setPacing(s.SRTT)
	b.cwnd = b.clampWindow(b.addBurstAllowance(b.bdpPackets(b.sendingRate(), b.gain)), bbrMinCwnd)
}

// lateThreshold is the round trip beyond which a packet is late.
func (p *pbe) lateThreshold() time.Duration { return p.rtprop() + p.late }

// lateRow is how many late packets in a row mean a queue elsewhere.
func (p *pbe) lateRow() float64 {
	span := time.Duration(p.rowSpan * float64(time.Millisecond))
	return max(p.bbr.toPackets(p.capacity.BytesIn(span)), pbeLeastRow)
}

// countLatePackets notes whether packets are late.
func (p *pbe) countLatePackets(a Ack) {
	if a.RTT <= 0 {
		return
	}
	n := p.bbr.toPackets(min(a.Acked, MaxCwnd))
	switch {
	case a.RTT <= p.lateThreshold():
		p.over, p.under = 0, p.under+n
	case p.byRate && a.DeliveryRate <= 0: // there is no telling
	case p.byRate && p.linkIsFull(a):
		p.over, p.under = 0, p.under+n
	default:
		p.over, p.under = p.over+n, 0
	}
}

// linkIsFull reports whether the link carried all it could while the newest
// acknowledged packet was under way, as far as is known: then what queues does
// so there. PBE-CC's judgement is by delay alone, which takes each fade of the
// link for a queue elsewhere.
func (p *pbe) linkIsFull(a Ack) bool {
	segment := p.slowest.extreme()
	return segment > 0 && a.DeliveryRate >= RateOf(p.bbr.mss, segment).scaleBy(pbeFull)
}

// locateBottleneck decides where the bottleneck is.
func (p *pbe) locateBottleneck(a Ack) {
	elsewhere := p.over >= p.lateRow()
	switch p.mode {
	case pbeRamp:
		switch {
		case elsewhere:
			p.enterMode(pbeDrain, a.State)
		case p.rampProgress(a.Now) >= 1 || p.deliversAt(a, max(p.capacity, p.fair)):
			p.enterMode(pbeWireless, a.State)
		}
	case pbeWireless:
		if elsewhere {
			p.enterMode(pbeDrain, a.State)
		}
	case pbeDrain:
		if a.Now.Sub(p.since) >= p.rtprop() {
			p.enterMode(pbeInternet, a.State)
		}
	case pbeInternet:
		if !p.stale && p.under >= p.lateRow() && p.deliversAt(a, min(p.capacity, p.fair)) {
			p.enterMode(pbeWireless, a.State)
		}
	}
}

// deliversAt reports whether the path delivers at a rate.
func (p *pbe) deliversAt(a Ack, r Rate) bool { return a.DeliveryRate >= r.scaleBy(pbeReached) }

// rampProgress is how much of the ramp is over.
func (p *pbe) rampProgress(now Time) float64 {
	span := p.rampRTTs * float64(p.rtprop())
	if span <= 0 {
		return 1
	}
	return min(float64(now.Sub(p.since))/span, 1)
}

// setLimits sets rate and window where BBR does not, and what BBR may ask for.
func (p *pbe) setLimits(s State) {
	p.ticks = 0
	b := p.bbr
	// The link may be silent; but the news that it no longer is come with
	// acknowledgements.
	least := b.pacingRate(1, pbeMinCwnd, p.rtprop())
	switch p.mode {
	case pbeAlone:
		return
	case pbeInternet:
		b.maxRate = p.fair
		if p.stale { // what has been delivered is all that is known
			b.maxRate = b.sendingRate()
		}
		b.maxRate = max(b.maxRate, least)
		return
	case pbeRamp:
		p.rate = max(p.fair.scaleBy(p.rampProgress(s.Now)), b.pacingRate(1, p.floor, p.rtprop()))
	case pbeWireless:
		p.rate = p.capacity
		if p.claims { // what the host had is what it asked for, a round trip ago
			p.rate = max(p.rate, p.fair)
		}
	case pbeDrain:
		p.rate = b.sendingRate().scaleBy(pbeDrainGain)
	}
	p.rate = min(max(p.rate, least), maxBbrRate)
	if p.mode == pbeDrain {
		p.cwnd = b.clampWindow(b.gain*b.bdpAt(b.sendingRate()), pbeMinCwnd)
	} else {
		p.cwnd = b.clampWindow(p.headroom*b.bdpAt(p.rate)+pbeQuanta, pbeMinCwnd)
	}
	if s.Inflight > 0 {
		p.ticks = s.Now.Add(pbeTick)
	}
}

// OnLoss lets only a timeout mean something: the rate is the link's, and what
// is lost was lost to the radio.
func (p *pbe) OnLoss(l Loss) {
	p.bbr.OnLoss(l)
	p.readHint(l.State)
	if l.Timeout && p.mode != pbeAlone && !p.stale {
		p.floor = pbeMinCwnd
		p.enterMode(pbeRamp, l.State)
	}
	p.setLimits(l.State)
}

// OnTick looks for news while no acknowledgement comes.
func (p *pbe) OnTick(s State) {
	p.bbr.OnTick(s)
	p.readHint(s)
	p.setLimits(s)
}

// Inspect shows what Spec.Internals lists.
func (p *pbe) Inspect() Internals {
	in := Internals{
		p.capacity.Mbps(), p.fair.Mbps(), 0, p.bbr.bw.maxRate().Mbps(), toMillis(p.rtprop()), p.over, p.lateRow(), 0,
	}
	if p.mode != pbeAlone && p.mode != pbeInternet {
		in[2] = p.rate.Mbps()
	}
	if p.mode != pbeAlone {
		in[7] = toMillis(p.age)
	}
	return in
}

func (p *pbe) Control() Control {
	switch p.mode {
	case pbeAlone:
		return p.bbr.Control()
	case pbeInternet:
		ctl := p.bbr.Control()
		ctl.Phase = pbePhases[pbeInternet]
		return ctl
	}
	return Control{Cwnd: p.bbr.toBytes(p.cwnd), PacingRate: max(p.rate, 1), NextTick: p.ticks, Phase: pbePhases[p.mode]}
}

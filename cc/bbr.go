package cc

import (
	"math"
	"math/rand/v2"
	"time"
)

// BBR (Cardwell et al., ACM Queue 2016), version 1 as Linux's tcp_bbr.c has it.
// It models the path by the most it has delivered (BtlBw) and the least its
// round trip has taken (RTprop), paces at a gain times the one, and keeps in
// flight a gain times their product:
//
//	  Startup ──(3 round trips without a quarter more)──▶ Drain
//	  ▲                                                   │ in flight ≤ BDP
//	  │ the pipe was never full                           ▼
//	ProbeRTT ◀──(RTprop not seen for 10 s)────────── ProbeBW: 1.25, 0.75, 1×6
//	  └───────────────(200 ms, a round trip)──────────────▲
//
// Segments take the place of Linux's packets. Linux learns of a restart after a pause from the transport,
// this one from the first acknowledgement after it.

func init() {
	Register(Spec{
		Name:   "bbr",
		About:  "BBR v1: sends at the rate that the path has delivered, and keeps up to twice what fills it in flight.",
		Source: "Cardwell et al., ACM Queue 14(5) 2016; Linux tcp_bbr.c",
		Params: []Param{
			{
				Name: "cwnd_gain", Default: 2, Min: 1, Max: 4,
				About: "what may be in flight in ProbeBW, in bandwidth-delay products",
			},
			{
				Name: "rtprop_window", Unit: "s", Default: 10, Min: 1, Max: 600,
				About: "how long the least round trip is believed before all but four packets are drained to see " +
					"it again",
			},
			{
				Name: "policer", Default: 1, Choices: []string{"ignore", "detect"},
				About: "send at the rate of a token bucket, where heavy losses tell of one",
			},
		},
		New: func(cfg Config) Algorithm { return newBbr(cfg) },

		Needs: []Signal{NeedsRTT, NeedsRate, NeedsLoss, NeedsPacing},
		Internals: []Internal{
			{Name: "btlbw_mbit", About: "most that the path delivered over ten round trips"},
			{Name: "rtprop_ms", About: "least round trip, of the last ten seconds"},
			{Name: "pacing_gain", About: "sending rate over BtlBw"},
			{Name: "cwnd_gain", About: "in flight over the bandwidth-delay product"},
			{Name: "extra_acked_packets", About: "by how much acknowledgements come in bunches"},
			{Name: "policer_mbit", About: "rate of the token bucket found; 0: none"},
			{Name: "bdp_packets", About: "what fills the path without a queue"},
		},
	})
}

// tcp_bbr.c, unless it says otherwise.
const (
	bbrHighGain          = 2 / math.Ln2 // doubles the rate each round trip
	bbrDrainGain         = 1 / bbrHighGain
	bbrPacingMargin      = 0.99 // of BtlBw, so that no queue builds up at its very rate
	bbrProbeRTT          = 200 * time.Millisecond
	bbrMinCwnd           = 4.0  // packets; what is in flight in ProbeRTT, too
	bbrFullGrowth        = 1.25 // less growth than this, in
	bbrFullRounds        = 3    // round trips: the pipe is full
	bbrUnknownRTT        = time.Millisecond
	bbrQuanta            = 3           // bursts that the hosts hold back at a time, and that count as in flight
	bbrLowRate      Rate = 1_200_000   // below, a burst may be a single packet; tcp_tso_autosize
	bbrMaxBurst          = 65215 * 1.0 // bytes; GSO_MAX_SIZE−1−MAX_TCP_HEADER
	bbrBurst             = time.Second / 1024
)

type bbrState uint8

const (
	bbrStartup bbrState = iota
	bbrDrain
	bbrProbingBW
	bbrProbingRTT
)

var bbrPhases = [...]string{"startup", "drain", "probe_bw", "probe_rtt"}

type bbr struct {
	bbrModel
	bw       roundMax
	bwRounds int64 // round trips with a delivery rate
	rated    bool  // there is one in this round trip
	rng      *rand.Rand
	initial  float64       // packets
	gain     float64       // the parameter cwnd_gain
	window   time.Duration // the parameter rtprop_window
	policing bool          // the parameter policer
	// maxRate bounds pacing while it asks for more than BtlBw; 0: nothing does.
	maxRate Rate

	state   bbrState
	cycle   bbrCycle
	policer policer
	cwnd    float64 // packets
	pacing  Rate    // 0: before the first round trip
	seenRTT bool    // pacing follows from a round trip

	fullBw     Rate // a rate of a quarter more counts as growth
	fullRounds int  // round trips without growth
	fullPipe   bool

	probeRTTDone  Time // when ProbeRTT may end; 0: not yet drained
	probeRTTRound bool // a round trip has passed since it was

	recovery   epoch
	expiry     epoch // what left before the last timeout counts as lost by it, even if it is reported later
	recovering bool
	timedOut   bool    // by a timeout; an outage may be the cause of its losses, and no token bucket
	entering   bool    // since the last acknowledgement
	conserving bool    // the first round trip of it: send what is delivered
	priorCwnd  float64 // packets; the window to return to
	lost       float64 // packets since the last acknowledgement
	idle       bool    // nothing was in flight, and nothing to send
}

func newBbr(cfg Config) *bbr {
	b := &bbr{
		bbrModel: bbrModel{segments: segments{cfg.MSS}},
		rng:      cfg.Rand,
		gain:     cfg.Params["cwnd_gain"],
		window:   time.Duration(cfg.Params["rtprop_window"] * float64(time.Second)),
		policing: cfg.Params["policer"] != 0,
	}
	b.initial = b.toPackets(cfg.InitialCwnd)
	b.cwnd = b.clampWindow(b.initial, bbrMinCwnd)
	b.startPacing(0)
	return b
}

// startPacing sets the rate from the window, until there is a delivery rate.
func (b *bbr) startPacing(srtt time.Duration) {
	b.seenRTT = srtt > 0
	if srtt <= 0 {
		srtt = bbrUnknownRTT
	}
	b.pacing = min(b.pacingRate(bbrHighGain*bbrPacingMargin, b.cwnd, srtt), maxBbrRate)
}

func (b *bbr) OnAck(a Ack) {
	b.setMSS(a.MSS)
	restarted := b.idle && a.Sent.AppLimited
	if restarted {
		b.bunched.restartEpoch(a.sentTime())
	}
	b.countRound(a)
	if b.newRound {
		b.conserving = false
	}
	lossy := b.lost > 0
	understates := a.Sent.AppLimited || b.drained.understatesRate(a, b.state == bbrProbingRTT)
	b.sampleRate(a, understates)
	b.checkPolicer(a.State, b.newRound, lossy, understates)
	b.bunched.onAck(a, &b.bbrModel, b.sendingRate(), b.cwnd, bunchRounds)

	inflight := b.toPackets(a.Inflight + a.Acked)
	high, low := b.inflightForGain(b.cycle.pacingGain()), b.inflightForGain(1)
	if b.state == bbrProbingBW && b.cycle.phaseIsOver(a.Now, b.rtprop, inflight+b.lost, high, low, lossy) {
		b.cycle.nextPhase(a.Now)
	}
	if b.newRound && !understates {
		b.checkFullPipe()
	}
	if b.state == bbrStartup && b.fullPipe {
		b.state = bbrDrain
	}
	if b.state == bbrDrain && b.toPackets(a.Inflight) <= b.inflightForGain(1) {
		b.enterProbeBW(a.Now)
	}
	b.checkRTprop(a, restarted)
	b.setPacing(a.SRTT)
	b.setCwnd(a)
	b.lost = 0
	b.idle = a.Inflight <= 0 && !a.CwndLimited
}

// checkPolicer looks for a token bucket, and ends the use of one that was found.
func (b *bbr) checkPolicer(s State, newRound, lossy, understates bool) {
	switch {
	case !b.policing || b.timedOut:
	case !b.policer.found:
		b.policer.checkInterval(s, newRound, lossy, understates)
	case b.state == bbrProbingBW && newRound:
		if b.policer.rounds++; b.policer.rounds >= policerUse {
			b.policer.restartSampling(s)
			b.enterProbeBW(s.Now)
		}
	}
}

// sendingRate returns BtlBw, or the rate of a token bucket.
func (b *bbr) sendingRate() Rate {
	if b.policer.found {
		return b.policer.bw
	}
	return b.bw.maxRate()
}

// currentGains returns the gains of pacing and window in force.
func (b *bbr) currentGains() (pacing, cwnd float64) {
	switch b.state {
	case bbrStartup:
		return bbrHighGain, bbrHighGain
	case bbrDrain:
		return bbrDrainGain, bbrHighGain
	case bbrProbingRTT:
		return 1, 1
	}
	if b.policer.found {
		return 1, b.gain
	}
	return b.cycle.pacingGain(), b.gain
}

// enterProbeBW begins the cycle.
func (b *bbr) enterProbeBW(now Time) {
	b.state = bbrProbingBW
	b.cycle.startCycle(now, b.rng)
}

// checkFullPipe checks once per round trip whether the rate has stopped growing, which ends Startup.
func (b *bbr) checkFullPipe() {
	if bw := b.bw.maxRate(); float64(bw) >= bbrFullGrowth*float64(b.fullBw) {
		b.fullBw, b.fullRounds = bw, 0
		return
	}
	b.fullRounds++
	b.fullPipe = b.fullPipe || b.fullRounds >= bbrFullRounds
}

// checkRTprop watches the least round trip, and drains the path to see it.
func (b *bbr) checkRTprop(a Ack, restarted bool) {
	if b.sampleRTT(a, b.window) && !restarted && b.state != bbrProbingRTT {
		b.saveCwnd()
		b.state = bbrProbingRTT
		b.probeRTTDone = 0
		b.drained.beginDrain(a.Now)
	}
	if b.state != bbrProbingRTT {
		return
	}
	b.drained.noteInflight(a.State)
	switch {
	case b.probeRTTDone == 0 && b.toPackets(a.Inflight) <= bbrMinCwnd:
		b.probeRTTDone, b.probeRTTRound = a.Now.Add(bbrProbeRTT), false
		b.round.start = a.Now
	case b.probeRTTDone != 0:
		b.probeRTTRound = b.probeRTTRound || b.newRound
		if b.probeRTTRound {
			b.endProbeRTT(a.Now)
		}
	}
}

// endProbeRTT returns to the interrupted state once ProbeRTT may end.
func (b *bbr) endProbeRTT(now Time) {
	if b.probeRTTDone == 0 || now <= b.probeRTTDone {
		return
	}
	b.rtpropAt = now
	b.cwnd = max(b.cwnd, b.priorCwnd)
	if b.fullPipe {
		b.enterProbeBW(now)
	} else {
		b.state = bbrStartup
	}
}

// setPacing follows the model; until the pipe has been full it only rises.
func (b *bbr) setPacing(srtt time.Duration) {
	if !b.seenRTT && srtt > 0 {
		b.startPacing(srtt)
	}
	gain, _ := b.currentGains()
	if r := b.sendingRate().scaleBy(gain * bbrPacingMargin); r > b.pacing || b.fullPipe && r > 0 {
		b.pacing = r
	}
}

// inflightForGain returns gain bandwidth-delay products at BtlBw, with the allowance for bursts.
func (b *bbr) inflightForGain(gain float64) float64 {
	return b.addBurstAllowance(b.bdpPackets(b.bw.maxRate(), gain))
}

// bdpPackets is gain bandwidth-delay products, in whole packets.
func (b *bbr) bdpPackets(bw Rate, gain float64) float64 {
	if bw <= 0 || b.rtprop <= 0 {
		return b.initial
	}
	return math.Ceil(gain * b.bdpAt(bw))
}

// addBurstAllowance adds the packets in bursts at the hosts, and rounds to an even number, since receivers
// acknowledge every second packet.
func (b *bbr) addBurstAllowance(packets float64) float64 {
	packets += bbrQuanta * b.burstPackets()
	packets = 2 * math.Ceil(packets/2)
	if b.state == bbrProbingBW && b.cycle.phase == 0 {
		packets += 2 // so that a small window asks for more, too
	}
	return packets
}

// burstPackets returns the size of a pacing host's bursts, in packets.
func (b *bbr) burstPackets() float64 {
	least := 2.0
	if b.pacing < bbrLowRate {
		least = 1
	}
	burst := min(float64(b.pacing.BytesIn(bbrBurst)), bbrMaxBurst)
	return max(math.Floor(burst/float64(b.mss)), least)
}

func (b *bbr) setCwnd(a Ack) {
	acked := b.toPackets(a.Acked)
	if b.recovering && !b.recovery.covers(a.sentTime()) {
		b.endRecovery()
	}
	if b.entering {
		b.entering, b.conserving = false, true
		b.round.start = a.Now // for one round trip from here
	}
	if b.conserving {
		b.cwnd = max(b.cwnd, b.toPackets(a.Inflight)+acked)
	} else {
		_, gain := b.currentGains()
		bw := b.sendingRate()
		target := b.bdpPackets(bw, gain)
		if b.fullPipe {
			target += b.bunched.allowance(&b.bbrModel, bw)
		}
		target = b.addBurstAllowance(target)
		switch {
		case b.fullPipe:
			b.cwnd = min(b.cwnd+acked, target)
		case b.cwnd < target || b.toPackets(a.Delivered) < b.initial:
			b.cwnd += acked
		}
	}
	b.cwnd = b.clampWindow(b.cwnd, bbrMinCwnd)
	if b.state == bbrProbingRTT {
		b.cwnd = min(b.cwnd, bbrMinCwnd)
	}
}

// saveCwnd remembers the window that a recovery or ProbeRTT will take away.
func (b *bbr) saveCwnd() {
	if b.recovering || b.state == bbrProbingRTT {
		b.priorCwnd = max(b.priorCwnd, b.cwnd)
		return
	}
	b.priorCwnd = b.cwnd
}

func (b *bbr) endRecovery() {
	b.recovering, b.entering, b.conserving, b.timedOut = false, false, false, false
	b.cwnd = max(b.cwnd, b.priorCwnd)
}

func (b *bbr) OnLoss(l Loss) {
	b.setMSS(l.MSS)
	if !l.Timeout && b.expiry.covers(l.SentAt) {
		return
	}
	lost := b.toPackets(l.Lost)
	b.lost += lost
	b.policer.lost += l.Lost
	if l.Timeout {
		b.onTimeout(l)
		return
	}
	switch begins := b.recovery.beginEpoch(l); {
	case begins:
		if b.recovering {
			b.endRecovery()
		}
		b.saveCwnd()
		b.recovering, b.entering = true, true
		b.cwnd = b.toPackets(l.Inflight)
	case !b.recovering: // the recovery that the lost bytes belong to is over
		b.saveCwnd()
		b.recovering, b.recovery.reacted = true, l.Now
		fallthrough
	default:
		b.cwnd -= lost
	}
	b.cwnd = b.clampWindow(b.cwnd, 1)
}

// onTimeout sets the window to one packet, and keeps the model.
func (b *bbr) onTimeout(l Loss) {
	b.saveCwnd()
	b.recovery.reacted, b.expiry.reacted = l.Now, l.Now
	b.recovering, b.entering, b.conserving = true, false, false
	b.cwnd = 1
	b.fullBw = 0
	b.lost = max(b.lost, 1)
	b.timedOut = true
	if !b.policer.found {
		b.policer.restartSampling(l.State)
	}
}

// OnTick ends ProbeRTT where nothing is sent.
func (b *bbr) OnTick(s State) {
	b.setMSS(s.MSS)
	if b.state == bbrProbingRTT && s.Inflight <= 0 {
		b.endProbeRTT(s.Now)
	}
}

// Inspect shows what Spec.Internals lists.
func (b *bbr) Inspect() Internals {
	pacing, cwnd := b.currentGains()
	in := Internals{
		b.bw.maxRate().Mbps(), toMillis(b.rtprop), pacing, cwnd, max(b.bunched.most[0], b.bunched.most[1]), 0,
		b.bdpAt(b.sendingRate()),
	}
	if b.policer.found {
		in[5] = b.policer.bw.Mbps()
	}
	return in
}

func (b *bbr) Control() Control {
	ctl := Control{Cwnd: b.toBytes(b.cwnd), PacingRate: max(b.pacing, 1), Phase: bbrPhases[b.state]}
	gain, _ := b.currentGains()
	switch {
	case b.idle && b.state == bbrProbingBW: // a restart does not ask for more
		ctl.PacingRate = max(b.sendingRate().scaleBy(bbrPacingMargin), 1)
	case gain > 1 && b.maxRate > 0:
		ctl.PacingRate = min(ctl.PacingRate, b.maxRate)
	}
	if b.idle && b.state == bbrProbingRTT && b.probeRTTDone != 0 {
		ctl.NextTick = b.probeRTTDone + 1
	}
	return ctl
}

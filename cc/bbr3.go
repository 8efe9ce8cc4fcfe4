package cc

import (
	"math/rand/v2"
	"time"
)

// BBR, version 3 (draft-ietf-ccwg-bbr-06). Like version 1 it paces by the highest delivery rate, and has up
// to two bandwidth-delay products in flight. Losses bound both. Losses of a probe for bandwidth bound the
// bytes in flight (inflight_longterm). Other losses bound rate and window until the next probe
// (bw_shortterm, inflight_shortterm).
//
//	  Startup ──(3 rounds without a quarter more, or heavy loss)──▶ Drain
//	  ▲                                                               │ in flight ≤ BDP
//	  │ the pipe was never full                                       ▼
//	ProbeRTT ◀──(5 s without a shorter round trip)── ProbeBW: Down ─▶ Cruise ─▶ Refill ─▶ Up
//	  └───(200 ms, a round trip)───────────────────▶            ▲─────────────────────────┘
//
// Transports report lost bytes, not packets, so losses are judged with the next acknowledgement. They do not
// report spurious losses, so no reaction is undone (§5.5.11). The draft leaves the answer to ECN marks open:
// see Spec.Marks.

func init() {
	Register(Spec{
		Name:   "bbr3",
		About:  "BBR v3: as bbr, with bounds that losses set on the rate and on what is in flight.",
		Source: "draft-ietf-ccwg-bbr-06",
		Params: []Param{
			{
				Name: "cwnd_gain", Default: 2, Min: 1, Max: 4,
				About: "what may be in flight, in bandwidth-delay products; an eighth more in probes",
			},
			{
				Name: "loss_threshold", Default: 0.02, Min: 0.001, Max: 0.5,
				About: "part of a round trip's packets whose loss means that too much is in flight",
			},
		},
		New: func(cfg Config) Algorithm { return newBbr3(cfg) },

		Needs: []Signal{NeedsRTT, NeedsRate, NeedsLoss, NeedsPacing},
		Internals: []Internal{
			{Name: "max_bw_mbit", About: "most that the path delivered in this cycle of probing and the last"},
			{Name: "bw_mbit", About: "that, within what losses since the last probe leave of it"},
			{Name: "min_rtt_ms", About: "least round trip of the last ten seconds"},
			{Name: "pacing_gain", About: "sending rate over bw"},
			{Name: "inflight_longterm_packets", About: "what may be in flight without too much loss; 0: no bound"},
			{Name: "inflight_shortterm_packets", About: "likewise until the next probe; 0: no bound"},
			{Name: "extra_acked_packets", About: "by how much acknowledgements come in bunches"},
			{Name: "bdp_packets", About: "what fills the path without a queue"},
		},
	})
}

// The draft's constants.
const (
	bbr3StartupGain  = 2.77
	bbr3DrainGain    = 0.5
	bbr3DownGain     = 0.9
	bbr3UpGain       = 1.25
	bbr3UpCwnd       = 1.125 // times the window's gain, which is 2.25 by default
	bbr3ProbeRTTCwnd = 0.5
	bbr3Beta         = 0.7
	bbr3Headroom     = 0.15
	bbr3FullLosses   = 6 // reports of loss in a round trip that end Startup
	bbr3DrainRounds  = 3
	bbr3RTTInterval  = 5 * time.Second
	bbr3RTTWindow    = 10 * time.Second
	bbr3MaxQuantum   = 64 << 10
)

type bbr3State uint8

const (
	bbr3Startup bbr3State = iota
	bbr3Drain
	bbr3Down // ProbeBW, to Up
	bbr3Cruise
	bbr3Refill
	bbr3Up
	bbr3ProbeRTT
)

var bbr3Phases = [...]string{
	"startup", "drain", "probe_bw_down", "probe_bw_cruise", "probe_bw_refill", "probe_bw_up", "probe_rtt",
}

// isProbing reports whether the sender sends more than the known bandwidth, so that losses are expected.
func (s bbr3State) isProbing() bool { return s == bbr3Startup || s == bbr3Refill || s == bbr3Up }

func (s bbr3State) isProbeBW() bool { return s >= bbr3Down && s <= bbr3Up }

type bbr3 struct {
	bbrModel
	rng       *rand.Rand
	initial   float64 // packets
	gain      float64 // the parameter cwnd_gain
	tolerated float64 // the parameter loss_threshold

	state      bbr3State
	cwnd       float64 // packets
	pacing     Rate
	seenRTT    bool // pacing follows from a round trip
	drainRound int64
	sample     bbr3Sample

	maxBw  [2]Rate // of the last cycle and this one
	fullBw bbr3FullBw
	cycle  bbr3Cycle

	inflightLong  float64 // packets; infinite: no bound
	inflightShort float64 // packets; infinite: no bound
	bwShort       Rate    // maxBbrRate: no bound

	lossRound      round   // from the first loss, or else from the end of the last
	lossInRound    bool    // there was one
	lossReports    int     // in it
	bwLatest       Rate    // most of a sample in it
	inflightLatest float64 // most packets of one
	losses         lossLog
	newlyLost      Bytes // since the last acknowledgement

	recovery   epoch
	timeout    epoch
	recovering bool
	priorCwnd  float64 // packets; the window to return to

	shortest   time.Duration // round trip of the last five seconds; 0: no sample
	shortestAt Time
	rttDone    Time // when ProbeRTT may end; 0: the path is not drained yet
	rttRound   bool // a round trip has passed since it was
	drained    drained
	idle       bool // nothing was in flight, and nothing to send
}

// bbr3Sample describes the flight of the newest byte of an acknowledgement.
type bbr3Sample struct {
	rate      Rate    // 0: nothing
	delivered float64 // packets, since the byte left
	inflight  float64 // packets, when it left
	lost      float64 // packets, since
	newlyLost float64 // packets, since the last acknowledgement
	limited   bool    // the rate understates the path
}

// bbr3FullBw detects a full pipe: three round trips in which the delivery rate does not grow by a quarter
// (§5.3.1.2).
type bbr3FullBw struct {
	rate    Rate // a rate of a quarter more counts as growth
	rounds  int  // round trips without growth
	now     bool
	reached bool // ever
}

func (f *bbr3FullBw) setBaseline(rate Rate) { f.rate, f.rounds, f.now = rate, 0, false }

func (f *bbr3FullBw) addRoundRate(rate Rate) {
	if float64(rate) >= bbrFullGrowth*float64(f.rate) {
		f.setBaseline(rate)
		return
	}
	f.rounds++
	f.now = f.rounds >= bbrFullRounds
	f.reached = f.reached || f.now
}

func newBbr3(cfg Config) *bbr3 {
	b := &bbr3{
		bbrModel:      bbrModel{segments: segments{cfg.MSS}},
		rng:           cfg.Rand,
		gain:          cfg.Params["cwnd_gain"],
		tolerated:     cfg.Params["loss_threshold"],
		inflightLong:  infinite,
		inflightShort: infinite,
		bwShort:       maxBbrRate,
	}
	b.initial = b.toPackets(cfg.InitialCwnd)
	b.cwnd = b.clampWindow(b.initial, bbrMinCwnd)
	b.startPacing(0)
	return b
}

// startPacing sets the rate from the window, until there is a delivery rate.
func (b *bbr3) startPacing(srtt time.Duration) {
	b.seenRTT = srtt > 0
	if srtt <= 0 {
		srtt = bbrUnknownRTT
	}
	b.pacing = min(b.pacingRate(bbr3StartupGain, b.cwnd, srtt), maxBbrRate)
}

func (b *bbr3) OnAck(a Ack) {
	b.setMSS(a.MSS)
	restarted := b.idle && a.Sent.AppLimited
	if restarted {
		b.bunched.restartEpoch(a.sentTime())
	}
	if b.countRound(a); b.newRound {
		b.cycle.roundsSinceUp++
	}
	b.takeSample(a)
	lossRound := b.lossRound.endsWith(a)
	if lossRound && b.lossInRound && !b.state.isProbing() {
		b.lowerShortTerm()
	}
	rounds := 1
	if b.fullBw.reached {
		rounds = bunchRounds
	}
	b.bunched.onAck(a, &b.bbrModel, b.bandwidth(), b.cwnd, rounds)

	if b.newRound && !b.fullBw.now && !b.sample.limited && b.sample.rate > 0 {
		b.fullBw.addRoundRate(b.sample.rate)
	}
	b.checkStartup(lossRound)
	b.checkDrain(a)
	b.advanceCycle(a)
	b.checkMinRTT(a, restarted)
	if lossRound {
		b.lossInRound, b.lossReports = false, 0
		b.bwLatest, b.inflightLatest = b.sample.rate, b.sample.delivered
	}
	b.setPacing(a.SRTT)
	b.setCwnd(a)
	b.newlyLost = 0
	b.idle = a.Inflight <= 0 && !a.CwndLimited
}

// takeSample returns the sample of a. All bytes in flight when its newest byte left have arrived or were
// lost since, so their sum corrects a coarse record of the sender.
func (b *bbr3) takeSample(a Ack) {
	s := bbr3Sample{
		rate: a.DeliveryRate, lost: b.toPackets(b.losses.lostSince(a.sentTime())), newlyLost: b.toPackets(b.newlyLost),
		limited: a.Sent.AppLimited || b.drained.understatesRate(a, b.state == bbr3ProbeRTT),
	}
	if a.Sent.At != 0 {
		s.delivered = b.clampWindow(b.toPackets(a.Delivered-a.Sent.Delivered), 0)
		s.inflight = b.clampWindow(max(b.toPackets(a.Sent.Inflight), s.delivered+s.lost), 0)
	}
	if s.rate > 0 && (!s.limited || s.rate >= b.maxBandwidth()) {
		b.maxBw[1] = max(b.maxBw[1], min(s.rate, maxBbrRate))
	}
	b.bwLatest = max(b.bwLatest, s.rate)
	b.inflightLatest = max(b.inflightLatest, s.delivered)
	b.sample = s
}

func (b *bbr3) maxBandwidth() Rate { return max(b.maxBw[0], b.maxBw[1]) }

// bandwidth returns the known bandwidth of the path.
func (b *bbr3) bandwidth() Rate { return min(b.maxBandwidth(), b.bwShort) }

// lowerShortTerm lowers the short-term bounds after a round trip with losses outside of a probe: to the
// values delivered in it, but no lower than beta of the former bounds (§5.5.10.3). The window after a
// timeout does not count as a former bound.
func (b *bbr3) lowerShortTerm() {
	if b.bwShort == maxBbrRate {
		b.bwShort = b.maxBandwidth()
	}
	if b.inflightShort == infinite {
		b.inflightShort = b.cwnd
		if b.recovering {
			b.inflightShort = max(b.cwnd, b.priorCwnd)
		}
	}
	b.bwShort = max(b.bwLatest, b.bwShort.scaleBy(bbr3Beta))
	b.inflightShort = max(b.inflightLatest, bbr3Beta*b.inflightShort)
}

func (b *bbr3) resetShortTerm() { b.bwShort, b.inflightShort = maxBbrRate, infinite }

// checkStartup ends Startup when the pipe is full, by the rate or by losses.
func (b *bbr3) checkStartup(lossRound bool) {
	if b.state != bbr3Startup {
		return
	}
	if lossRound && b.recovering && b.lossReports >= bbr3FullLosses && b.lossIsTooHigh() {
		b.fullBw.reached = true
		b.inflightLong = max(b.bdpAt(b.bandwidth()), b.inflightLatest, bbrMinCwnd)
	}
	if b.fullBw.reached {
		b.state, b.drainRound = bbr3Drain, b.rounds
	}
}

func (b *bbr3) checkDrain(a Ack) {
	if b.state != bbr3Drain {
		return
	}
	if b.toPackets(a.Inflight) <= b.inflightForRate(b.bandwidth()) || b.rounds > b.drainRound+bbr3DrainRounds {
		b.startDown(a.Now)
	}
}

// currentGains returns the gains of pacing and window in force.
func (b *bbr3) currentGains() (pacing, cwnd float64) {
	switch b.state {
	case bbr3Startup:
		return bbr3StartupGain, b.gain
	case bbr3Drain:
		return bbr3DrainGain, b.gain
	case bbr3Down:
		return bbr3DownGain, b.gain
	case bbr3Up:
		return bbr3UpGain, bbr3UpCwnd * b.gain
	case bbr3ProbeRTT:
		return 1, bbr3ProbeRTTCwnd
	}
	return 1, b.gain
}

// setPacing follows the model; until the pipe has been full it only rises.
func (b *bbr3) setPacing(srtt time.Duration) {
	if !b.seenRTT && srtt > 0 {
		b.startPacing(srtt)
	}
	gain, _ := b.currentGains()
	if r := b.bandwidth().scaleBy(gain * bbrPacingMargin); r > b.pacing || b.fullBw.reached && r > 0 {
		b.pacing = r
	}
}

// bdpPackets is gain bandwidth-delay products at rate bw.
func (b *bbr3) bdpPackets(bw Rate, gain float64) float64 {
	if bw <= 0 || b.rtprop <= 0 {
		return b.initial
	}
	return gain * b.bdpAt(bw)
}

// inflightForRate returns the packets that fill the path at rate bw, with the allowance for bursts.
func (b *bbr3) inflightForRate(bw Rate) float64 { return b.addBurstAllowance(b.bdpPackets(bw, 1)) }

// addBurstAllowance raises a window to the packets in bursts at the hosts, and to a size that is enough for a
// receiver that acknowledges every second packet (§5.6.4.2).
func (b *bbr3) addBurstAllowance(packets float64) float64 {
	quantum := max(min(b.toPackets(b.pacing.BytesIn(time.Millisecond)), b.toPackets(bbr3MaxQuantum)), 2)
	packets = max(packets, bbrQuanta*quantum, bbrMinCwnd)
	if b.state == bbr3Up {
		packets += 2
	}
	return packets
}

func (b *bbr3) setCwnd(a Ack) {
	acked := b.toPackets(a.Acked)
	if b.recovering && !b.recovery.covers(a.sentTime()) {
		b.recovering = false
		b.cwnd = max(b.cwnd, b.priorCwnd)
	}
	_, gain := b.currentGains()
	most := b.addBurstAllowance(b.bdpPackets(b.bandwidth(), gain) + max(b.bunched.most[0], b.bunched.most[1]))
	switch {
	case b.fullBw.reached:
		b.cwnd = min(b.cwnd+acked, most)
	case b.cwnd < most || b.toPackets(a.Delivered) < b.initial:
		b.cwnd += acked
	}
	if b.state == bbr3ProbeRTT {
		b.cwnd = min(b.cwnd, b.probeRTTCwnd())
	}
	bound := b.inflightShort
	switch {
	case b.state == bbr3ProbeRTT || b.state == bbr3Cruise:
		bound = min(bound, b.longTermWithHeadroom())
	case b.state.isProbeBW():
		bound = min(bound, b.inflightLong)
	}
	b.cwnd = b.clampWindow(min(b.cwnd, bound), bbrMinCwnd)
}

func (b *bbr3) OnLoss(l Loss) {
	b.setMSS(l.MSS)
	if !l.Timeout && b.timeout.covers(l.SentAt) { // sent again, and known to be lost since the timer fired
		return
	}
	b.losses.addLoss(l)
	b.newlyLost = min(b.newlyLost+max(l.Lost, 0), MaxCwnd)
	if !b.lossInRound {
		b.lossRound.start = l.Now
	}
	b.lossInRound = true
	b.lossReports++
	switch {
	case l.Timeout:
		if b.cycle.sample { // all that the probe had in flight
			b.endProbeAt(l.Now, b.sample.inflight)
		}
		b.saveCwnd()
		b.recovering, b.recovery.reacted, b.timeout.reacted = true, l.Now, l.Now
		b.cwnd = b.clampWindow(b.toPackets(l.Inflight)+1, 1)
	case b.recovery.beginEpoch(l):
		b.saveCwnd()
		b.recovering = true
	}
}

// saveCwnd remembers the window that a recovery or ProbeRTT will take away.
func (b *bbr3) saveCwnd() {
	if b.recovering || b.state == bbr3ProbeRTT {
		b.priorCwnd = max(b.priorCwnd, b.cwnd)
		return
	}
	b.priorCwnd = b.cwnd
}

// OnTick ends ProbeRTT where nothing is sent.
func (b *bbr3) OnTick(s State) {
	b.setMSS(s.MSS)
	if b.state == bbr3ProbeRTT && s.Inflight <= 0 {
		b.endProbeRTT(s.Now)
	}
}

// Inspect shows what Spec.Internals lists.
func (b *bbr3) Inspect() Internals {
	pacing, _ := b.currentGains()
	return Internals{
		b.maxBandwidth().Mbps(), b.bandwidth().Mbps(), toMillis(b.rtprop), pacing,
		finiteOrZero(b.inflightLong), finiteOrZero(b.inflightShort),
		max(b.bunched.most[0], b.bunched.most[1]), b.bdpAt(b.bandwidth()),
	}
}

func (b *bbr3) Control() Control {
	ctl := Control{Cwnd: b.toBytes(b.cwnd), PacingRate: max(b.pacing, 1), Phase: bbr3Phases[b.state]}
	if b.idle && b.state.isProbeBW() { // a restart does not ask for more
		ctl.PacingRate = max(b.bandwidth().scaleBy(bbrPacingMargin), 1)
	}
	if b.idle && b.state == bbr3ProbeRTT && b.rttDone != 0 {
		ctl.NextTick = b.rttDone + 1
	}
	return ctl
}

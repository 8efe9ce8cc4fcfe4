package cc

import (
	"math"
	"time"
)

// Verus (Zaki et al., SIGCOMM 2015) learns which delay each sending window is
// met with. Every epoch it moves the delay that it aims for, and sends what the
// window for that delay leaves room for:
//
//	slow start ──(delay too long, or loss)──▶ recovery ──(a packet sent in the──▶ profile
//	     ▲                                    +1/window    new window arrives)    target ± per epoch
//	     └──(timeout)                         per ack ◀──(loss: window·m)────────
//
// Constants and what the paper leaves open follow its authors' yzaki/verus, but
// the profile (verus_profile.go) is monotone, and credit that an epoch has not
// spent is gone. Windows that were not used neither enter the profile nor raise
// the target, and the least delay grows only by what a lone packet has met.

func init() {
	Register(Spec{
		Name:   "verus",
		About:  "Verus: learns which delay each window is met with and keeps it below r times the least.",
		Source: "Zaki et al., SIGCOMM 2015",
		Params: []Param{
			{Name: "r", Default: 6, Min: 1.1, Max: 50, About: "how much longer than the least the round trip may " +
				"become"},
			{Name: "m", Default: 0.7, Min: 0.1, Max: 0.95, About: "what a loss leaves of the window"},
			{
				Name: "delta1_ms", Unit: "ms", Default: 1, Min: 0.1, Max: 20,
				About: "step of the target, per epoch, when the delay rises",
			},
			{
				Name: "delta2_ms", Unit: "ms", Default: 2, Min: 0.1, Max: 20,
				About: "step when it does not, and down when it is too long",
			},
			{Name: "epoch_ms", Unit: "ms", Default: 5, Min: 1, Max: 100, About: "how often the window is set anew"},
			{
				Name: "refresh_s", Unit: "s", Default: 1, Min: 0.1, Max: 60,
				About: "how often the profile is fitted anew",
			},
			{
				Name: "exit_ms", Unit: "ms", Default: 500, Min: 100, Max: 5000,
				About: "delay at which slow start ends, at the latest: 15 times the least do so before, from 100 ms on",
			},
		},
		Profiles: []Profile{
			{
				Name: "paper", About: "halves at a loss, and with the shortest of the delays its paper studies",
				Params: Params{"r": 2, "m": 0.5},
			},
		},
		New: func(cfg Config) Algorithm { return newVerus(cfg) },

		Needs: []Signal{NeedsRTT, NeedsLoss, NeedsSent, NeedsTicks, NeedsPacing},
		Internals: []Internal{
			{Name: "window_packets", About: "what the profile allows in flight"},
			{Name: "target_delay_ms", About: "round trip that the window is looked up for"},
			{Name: "max_delay_ms", About: "longest round trip of an epoch, smoothed"},
			{Name: "min_delay_ms", About: "least round trip"},
			{Name: "profile_points", About: "windows whose delay has been measured"},
			{Name: "profile_packets", About: "largest window of the fitted profile; 0: there is none"},
		},
	})
}

// yzaki/verus, where nothing else is said.
const (
	verusKeep        = 0.875  // weight of the smoothed delay's past
	verusKeepMax     = 0.2    // and of the smoothed maximum's
	verusRising      = 0.0001 // ms: by less, the delay has not risen
	verusBaseStep    = 10.0   // ms, by which the least round trip is corrected
	verusAlone       = 2.0    // packets: fewer in flight are no queue
	verusPatience    = 2      // round trips; losses for longer are a new event
	verusLeaveWindow = 20.0   // packets; a loss in slow start below it does not end it
	verusLeastCut    = 100.0  // packets: points below stay when slow start ends in loss
	// verusExitBase times the least round trip ends slow start (SIGCOMM 2015
	// §5.1), but not below verusExitFloor, in ms: jitter of a short path would.
	verusExitBase  = 15.0
	verusExitFloor = 100.0
)

type verus struct {
	segments
	r, m                 float64
	delta1, delta2, exit float64 // ms
	epoch, refresh       time.Duration

	slowStart bool
	recovery  bool    // the loss phase: the profile rests
	leaving   bool    // the queue that slow start has built drains: the target rests
	wBar      float64 // packets; sending window
	dEst      float64 // ms; target delay
	dMin      float64 // ms; least delay; 0: none yet
	dMax      float64 // ms; longest delay of this epoch; 0: none yet
	dMaxLast  float64 // ms; longest delay of the epochs before, smoothed; 0: none yet
	dTBar     float64 // ms; smoothed delay; 0: none yet
	alone     float64 // ms; delay of the newest packet, if it met no queue of ours; 0: it did
	profile   delayProfile
	windows   windowLog
	cut       epoch
	lost      Time // newest loss

	started Time    // of this session; what left before says nothing; 0: from the start
	sampled Time    // when a delay was last measured
	next    Time    // end of this epoch; 0: nothing is in flight, so none runs
	refit   Time    // when the profile is due; 0: no epoch has run since slow start
	credit  float64 // packets; what may be in flight until then
	rate    Rate
}

func newVerus(cfg Config) *verus {
	p := cfg.Params
	v := &verus{
		segments: segments{cfg.MSS},
		r:        p["r"], m: p["m"], delta1: p["delta1_ms"], delta2: p["delta2_ms"], exit: p["exit_ms"],
		epoch:   time.Duration(p["epoch_ms"] * float64(time.Millisecond)),
		refresh: time.Duration(p["refresh_s"] * float64(time.Second)),
	}
	v.restart(0, v.toPackets(cfg.InitialCwnd))
	return v
}

// restart forgets the path and begins a session in slow start.
func (v *verus) restart(now Time, window float64) {
	v.slowStart, v.recovery, v.leaving = true, false, false
	v.dEst, v.dMin, v.dMax, v.dMaxLast, v.dTBar, v.alone = 0, 0, 0, 0, 0, 0
	v.profile.reset()
	v.windows.reset()
	v.started, v.sampled, v.refit = now, now, 0
	v.setWindow(now, window)
}

// setWindow sets the window and remembers it for what leaves from now on.
func (v *verus) setWindow(now Time, window float64) {
	v.wBar = min(max(window, 1), profileMaxWindow-1)
	v.windows.addChange(now, v.wBar, time.Duration(v.dTBar*float64(time.Millisecond))/(windowLogSlots/2))
}

func (v *verus) OnAck(a Ack) {
	v.setMSS(a.MSS)
	n := v.toPackets(a.Acked)
	v.credit = max(0, v.credit-n)
	if v.next == 0 {
		v.next = a.Now.Add(v.epoch)
		v.profile.reserveWindows(2 * v.wBar)
	}
	left := a.sentTime()
	if left < v.started {
		return
	}
	w := v.windows.windowAt(left, v.wBar)
	delay := toMillis(a.Now.Sub(v.sampled)) // at least, where there is no sample
	if a.RTT > 0 {
		delay = toMillis(max(a.RTT, minDivisor))
		v.addRTTSample(a, delay)
	}
	if v.slowStart && v.dMin > 0 && delay > v.exitDelay() {
		v.leaveSlowStart(a.Now, w, delay)
	}
	if v.recovery && left >= v.lost && math.Trunc(w) <= v.wBar {
		v.recovery, v.leaving = false, false
		v.dMax = 0
		if a.RTT > 0 {
			v.dMax = delay
		}
	}
	// A window that is not used says nothing about the delay it would be met with.
	used := a.CwndLimited && !a.Sent.AppLimited
	switch {
	case v.recovery:
		if a.CwndLimited {
			v.setWindow(a.Now, v.wBar+min(n, v.wBar)/v.wBar)
		}
		if v.profile.isFitted() {
			v.dEst = min(v.dEst, v.profile.delayAt(int(v.wBar)))
		}
	case a.RTT > 0 && used:
		v.profile.addPoint(w, delay)
	}
	if v.slowStart && a.CwndLimited {
		v.setWindow(a.Now, v.wBar+min(n, v.wBar))
	}
}

// addRTTSample takes in the newest delay, in ms.
func (v *verus) addRTTSample(a Ack, delay float64) {
	v.sampled = a.Now
	if v.dMin == 0 || delay < v.dMin {
		v.dMin = delay
	}
	v.dMax = max(v.dMax, delay)
	if v.dTBar == 0 {
		v.dTBar = delay
	}
	v.dTBar += (1 - verusKeep) * (delay - v.dTBar)
	v.alone = 0
	if a.Sent.At != 0 && v.toPackets(a.Sent.Inflight) < verusAlone {
		v.alone = delay
	}
}

// exitDelay ends slow start, in ms. A long path is above the first of the
// limits from the start, which is no queue.
func (v *verus) exitDelay() float64 {
	return max(min(v.exit, verusExitBase*v.dMin), verusExitFloor, 2*v.dMin)
}

// leaveSlowStart takes the window back, below that of the packet that met the delay.
func (v *verus) leaveSlowStart(now Time, w, delay float64) {
	v.slowStart, v.recovery, v.leaving = false, true, true
	v.lost = now
	v.setWindow(now, v.m*w)
	v.dEst = delay / 2
	v.fitProfile(now)
	v.setTargetFromWindow()
}

// setTargetFromWindow sets the target to the delay of the window.
func (v *verus) setTargetFromWindow() {
	if v.profile.isFitted() {
		v.dEst = v.profile.delayAt(int(v.wBar))
	}
	v.dEst = max(v.dMin, v.dEst)
}

func (v *verus) fitProfile(now Time) {
	v.profile.fitCurve(v.dMin)
	v.refit = now.Add(v.refresh)
}

func (v *verus) OnLoss(l Loss) {
	v.setMSS(l.MSS)
	if v.next == 0 {
		v.next = l.Now.Add(v.epoch)
	}
	switch {
	case l.Timeout && v.slowStart:
		v.restart(l.Now, 1)
		return
	case l.Timeout:
		v.cut.reacted = l.Now
		v.dEst = v.dMin
		v.setWindowFromTarget(l.Now, falling)
	case !v.recovery && v.cut.beginEpoch(l):
		v.onFirstLoss(l.Now, v.windows.windowAt(l.SentAt, v.wBar))
	case l.SRTT > 0 && l.Now.Sub(v.cut.reacted) > verusPatience*l.SRTT:
		v.cut.reacted = l.Now
		v.onFirstLoss(l.Now, v.wBar) // what was sent since is lost, too
	}
	v.recovery, v.lost = true, l.Now
	// What is sent again is sent: no burst takes the place of what was lost.
	inflight := v.toPackets(l.Inflight)
	v.credit = min(v.credit, inflight+v.packetsPerEpoch(inflight))
}

// onFirstLoss reacts to the first loss of a phase, of a packet sent in window w.
func (v *verus) onFirstLoss(now Time, w float64) {
	v.setWindow(now, min(v.wBar, v.m*w))
	if v.slowStart {
		if v.wBar <= verusLeaveWindow {
			return
		}
		// The delays just before the loss are those of a full queue.
		v.slowStart, v.dEst = false, v.dTBar/2
		v.profile.dropFrom(max(verusLeastCut, w))
		v.fitProfile(now)
	}
	v.setTargetFromWindow()
}

// OnTick ends an epoch. However many have passed, it is one.
func (v *verus) OnTick(s State) {
	v.setMSS(s.MSS)
	if v.next == 0 || s.Now < v.next {
		return
	}
	v.next = s.Now.Add(v.epoch - s.Now.Sub(v.next)%v.epoch)
	if s.Inflight <= 0 {
		v.next = 0 // until something is heard again
	}
	v.profile.reserveWindows(2 * v.wBar)
	if v.slowStart {
		return
	}
	if s.Now >= v.refit {
		v.fitProfile(s.Now)
	}
	inflight := v.toPackets(s.Inflight)
	rest := v.moveTarget(s, inflight)
	send := 0.0
	if !rest {
		send = v.packetsPerEpoch(inflight)
	}
	v.credit = inflight + send
	v.rate = RateOf(v.toBytes(send), v.epoch)
	if v.next == 0 && v.dMin > 0 {
		// Who begins again has no epoch's packets to send, but a window, and finds no queue.
		v.rate = v.pacingRate(1, v.wBar, time.Duration(v.dMin*float64(time.Millisecond)))
	}
}

// moveTarget moves the target by what this epoch has shown, and the window with it. It
// reports whether to send nothing in the next: the queue must drain.
func (v *verus) moveTarget(s State, inflight float64) (rest bool) {
	longest := v.dMax
	if longest == 0 {
		longest = max(v.dMaxLast, toMillis(s.Now.Sub(v.sampled)))
	}
	v.dMax = 0
	if v.dMaxLast == 0 {
		v.dMaxLast = longest
	}
	dir := still
	switch {
	case v.dMin == 0: // nothing has been measured
	case v.dMaxLast > v.r*v.dMin:
		if v.leaving {
			break
		}
		dir = falling
		v.dEst -= v.delta2
		if v.dEst <= v.dMin {
			v.dEst = v.dMin
			if inflight >= verusAlone {
				rest = true
			} else if v.alone > v.dMin {
				// There is no queue: the path has become longer.
				v.dMin = min(v.dMin+verusBaseStep, v.alone)
			}
		}
	case longest-v.dMaxLast > verusRising:
		dir = falling
		v.dEst = max(v.dMin, v.dEst-v.delta1)
	case s.CwndLimited && !v.recovery:
		dir = rising
		v.dEst += v.delta2
	}
	if dir == falling || !v.recovery {
		v.setWindowFromTarget(s.Now, dir)
	}
	v.dMaxLast = verusKeepMax*v.dMaxLast + (1-verusKeepMax)*longest
	return rest
}

// setWindowFromTarget sets the window that the profile has for the target. Without a profile
// it moves by a packet.
func (v *verus) setWindowFromTarget(now Time, dir direction) {
	if v.profile.isFitted() {
		w := v.profile.windowForDelay(v.dEst)
		v.setWindow(now, float64(w))
		// A target out of reach would take as long to come back.
		v.dEst = max(v.dMin, min(v.dEst, v.profile.delayAt(w+1)))
		return
	}
	switch dir {
	case rising:
		v.setWindow(now, v.wBar+1)
	case falling:
		v.setWindow(now, v.wBar-1)
	}
}

// packetsPerEpoch returns how many packets the next epoch sends, so that the window is
// in flight a round trip from now (SIGCOMM 2015 eq. 5; yzaki/verus truncates).
func (v *verus) packetsPerEpoch(inflight float64) float64 {
	n := math.Ceil(v.dTBar / toMillis(v.epoch))
	if n <= 1 {
		return math.Trunc(max(0, v.wBar-inflight))
	}
	return math.Trunc(max(0, v.wBar+math.Trunc(inflight*(2-n)/(n-1))))
}

// Inspect shows what Spec.Internals lists.
func (v *verus) Inspect() Internals {
	return Internals{v.wBar, v.dEst, v.dMaxLast, v.dMin, float64(v.profile.count), float64(v.profile.last)}
}

func (v *verus) Control() Control {
	ctl := Control{Cwnd: v.toBytes(v.credit), PacingRate: v.rate, NextTick: v.next, Phase: "profile"}
	switch {
	case v.slowStart:
		ctl.Cwnd, ctl.PacingRate, ctl.Phase = v.toBytes(v.wBar), 0, "slow_start"
	case v.recovery:
		ctl.Phase = "recovery"
	}
	return ctl
}

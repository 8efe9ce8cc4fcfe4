package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// freshHint is how old a hint may be and still describe the path: the longer of this and three smoothed round trips.
const freshHint = time.Second

// hints is what the network says of the path to a group's hosts, and how far it is believed.
type hints struct {
	newest   cc.Hint // as received; valid if known
	known    bool
	check    hintCheck
	believed cc.Hint // newest, corrected by check
}

// lifetime returns how old a hint may be and still describe the path.
func (h *hints) lifetime(srtt time.Duration) time.Duration { return max(freshHint, 3*srtt) }

// isFresh reports whether there is a hint that still describes the path.
func (h *hints) isFresh(now cc.Time, srtt time.Duration) bool {
	return h.known && h.newest.Age(now) <= h.lifetime(srtt)
}

// keepHint stores a hint, unless a newer one is known, and reports whether it did. others is the rate delivered to the
// same host by other groups.
func (h *hints) keepHint(hint cc.Hint, others cc.Rate) bool {
	if h.known && hint.At < h.newest.At {
		return false
	}
	h.newest, h.known = hint, true
	h.check.addClaim(&hint, others)
	h.believed = h.check.correctedHint(hint)
	return true
}

// hintCheck compares what hints state of a path with what is delivered over it. PBE-CC (SIGCOMM 2020 §7) leaves that
// to future work. A hint is believed at once, whether it states more or less than the one before. It is doubted where
// delivery contradicts it, interval by interval:
//
//   - It is too high if less than stated is delivered, and a queue stands on the way there for four intervals. Only the
//     hint may have made the sender send that much. What is believed is then cut to a little less than what is
//     delivered. If the queue still stands, it is not ours, or the path got longer: the cut is undone.
//   - It is too low if more than stated is delivered without a queue. To find out, a quarter more is sent for about a
//     round trip, and a quarter less after it. This begins once the hint has held the sender back for a second.
//     Attempts that show nothing become rarer and rarer.
//
// A doubted hint is replaced by a rate that grows while no queue stands and is cut while one does. It bounds a hint
// that was too high from above, and one that was too low from below. A hint that is right for a while is believed
// again; the while doubles each time.
//
//	            ┌─ cut: queue drains ──▶ too high ─┐
//	believed ───┤                                  ├─ agrees for proofTime ──▶ believed
//	            └─ rise: more arrives ─▶ too low ──┘
//
// All rates of a hint are believed in the same part.
type hintCheck struct {
	doubt
	claimed                    cc.Rate   // what the newest hint has for the group; 0: nothing
	thisInterval, prevInterval claimSpan // what hints claimed during the running interval and the one before
	baseRTTs                   [2]baseRTT

	intervalStart   cc.Time       // 0: no interval is running
	deliveredBefore cc.Bytes      // delivered by intervalStart
	intervalQueue   time.Duration // least queueing delay of the interval
	unbound         bool          // in the interval, something other than the hint held the sender back
	deliveredRate   cc.Rate       // over the last whole interval

	contradictions int // intervals in a row that contradict the hint
	queueFree      int // intervals in a row without a queue
	quietIntervals int // without a queue, the hint holding the sender back; an interval with a queue takes four of them

	trial                   trial
	cutBackoff, riseBackoff backoff
	agreesSince             cc.Time       // since when a doubted hint has been right; 0: it is not
	proofTime               time.Duration // how long it must be right before it is believed again; 0: leastProof
	reported                HintDoubt     // by takeHintNews
}

// doubt is how hints are wrong; the zero value: they are believed.
type doubt struct {
	tooHigh, tooLow bool    // they state more, or less, than is delivered
	actualRate      cc.Rate // used instead
}

// believedRate returns what is believed of a hint that states a rate.
func (d doubt) believedRate(stated cc.Rate) cc.Rate {
	if d.tooHigh {
		stated = min(stated, d.actualRate)
	}
	if d.tooLow {
		stated = max(stated, d.actualRate)
	}
	return stated
}

// trial is a change of the doubt that has not shown its effect yet; the zero value: none runs.
type trial struct {
	cut, rise    bool // which one it is
	doubtBefore  doubt
	endsAt       cc.Time
	queueAtStart time.Duration // of a cut

	// Of a rise, which sends more until pulseEnds and less after it.
	began, pulseEnds cc.Time
	showsFrom        cc.Time   // acknowledgements show the effect from then on
	claimed          claimSpan // by hints since showsFrom
	deliveredSum     cc.Rate   // over intervals since showsFrom
	intervals        int
	drainedAt        cc.Time // it failed, and what it queued has drained by then; 0: it has not failed
}

// isRunning reports whether a trial runs.
func (t *trial) isRunning() bool { return t.cut || t.rise }

// backoff spaces trials that fail.
type backoff struct {
	wait   time.Duration // after the last one
	freeAt cc.Time       // the next one may begin
}

// backOff delays the next trial after one that failed at now.
func (b *backoff) backOff(now cc.Time) {
	b.wait = min(max(leastWait, waitLonger*b.wait), mostWait)
	b.freeAt = now.Add(b.wait)
}

// claimSpan summarizes the rates that hints claimed during some time.
type claimSpan struct {
	least, most cc.Rate
	sum, count  float64
}

// spanOf returns a span with one hint.
func spanOf(r cc.Rate) claimSpan { return claimSpan{r, r, float64(r), 1} }

// addSpan adds the hints of another span.
func (s *claimSpan) addSpan(o claimSpan) {
	if s.count == 0 || o.count > 0 && o.least < s.least {
		s.least = o.least
	}
	s.most, s.sum, s.count = max(s.most, o.most), s.sum+o.sum, s.count+o.count
}

// meanRate returns the mean; 0 without hints.
func (s claimSpan) meanRate() cc.Rate { return cc.Rate(s.sum / max(1, s.count)) }

// baseRTT is the least round trip, without the queue on the way back, since a time.
type baseRTT struct {
	least time.Duration
	from  cc.Time
}

// The constants of hintCheck.
const (
	checkEvery           = 50 * time.Millisecond // least length of an interval, or the least round trip if longer
	contradictionsNeeded = 4                     // intervals before a hint is doubted, and before a cut is judged
	baseRTTWindow        = 10 * time.Second      // of the least round trip; up to twice that

	standingQueue = 5 * time.Millisecond // queueing delay that counts as a queue, or
	queuePart     = 0.125                // this part of the least round trip if longer

	leastFulfilled = 0.95 // part of the least claim that must be delivered for a hint to be right
	meanFulfilled  = 0.75 // part of the mean claim; it is less, because hints are late
	cutTo          = 0.95 // part of the delivered rate that a cut leaves
	growBy         = 1.1  // per interval without a queue
	growFaster     = 1.25 // per interval, from the fifth without a queue on
	quietNeeded    = 20   // quietIntervals before a rise
	riseBy         = 1.25 // factor of a rise
	riseProof      = 1.1  // delivered part of the claim that proves a rise right
	mostAbove      = 1.25 // factor by which actualRate may exceed a right hint that was too low
	mostCorrection = 64   // factor by which hints are corrected

	leastWait  = time.Second // before a failed trial is repeated
	waitLonger = 4           // factor, after each failure
	mostWait   = 64 * time.Second
	leastProof = 4 * time.Second // for which a doubted hint must be right
)

// claimedRate returns what h has for a group, given the rate that is delivered to the group.
func claimedRate(h *cc.Hint, delivered cc.Rate) cc.Rate {
	others := max(0, h.ArrivalRate-delivered)
	return max(h.Capacity, h.FairShare, h.LinkRate-others)
}

// addClaim takes in a new hint. others is the rate delivered to the same host by other groups.
func (k *hintCheck) addClaim(h *cc.Hint, others cc.Rate) {
	claimed := claimedRate(h, k.deliveredRate)
	k.claimed = max(claimed-others, claimed/mostCorrection)
	k.thisInterval.addSpan(spanOf(k.claimed))
}

// recentRate returns what was delivered during the last interval; 0 if that is long ago.
func (k *hintCheck) recentRate(now cc.Time) cc.Rate {
	if k.intervalStart == 0 || now.Sub(k.intervalStart) > freshHint {
		return 0
	}
	return k.deliveredRate
}

// correctedHint returns h as far as it is believed.
func (k *hintCheck) correctedHint(h cc.Hint) cc.Hint {
	part := k.believedPart()
	if part == 1 {
		return h
	}
	for _, r := range []*cc.Rate{&h.Capacity, &h.FairShare, &h.LinkRate} {
		if *r > 0 { // 0: not known
			*r = max(1, cc.Rate(float64(*r)*part))
		}
	}
	return h
}

// believedPart returns what is believed of the newest hint, as a part of what it states.
func (k *hintCheck) believedPart() float64 {
	if k.claimed <= 0 || !k.tooHigh && !k.tooLow {
		return 1
	}
	return float64(k.believedRate(k.claimed)) / float64(k.claimed)
}

// hintEvidence is what an acknowledgement shows of a hint.
type hintEvidence struct {
	now        cc.Time
	forwardRTT time.Duration // the round trip without the queue on the way back
	srtt       time.Duration
	delivered  cc.Bytes // in all
	usedPart   float64  // part of what hints state that the sender tries to use
	unbound    bool     // something other than the hint holds the sender back
}

// onAck takes in an acknowledgement and reports whether more or less is believed than before.
func (k *hintCheck) onAck(a hintEvidence) (changed bool) {
	if k.claimed <= 0 || a.forwardRTT <= 0 {
		return false
	}
	base := k.updateBaseRTT(a.now, a.forwardRTT)
	if k.intervalStart == 0 {
		k.beginInterval(a)
		return false
	}
	k.intervalQueue = min(k.intervalQueue, a.forwardRTT-base)
	k.unbound = k.unbound || a.unbound
	if a.now.Sub(k.intervalStart) < max(checkEvery, base) {
		return false
	}
	k.deliveredRate = cc.RateOf(a.delivered-k.deliveredBefore, a.now.Sub(k.intervalStart))
	before := k.doubt
	k.judgeInterval(a, base)
	k.maybeTrustAgain(a.now)
	k.beginInterval(a)
	return k.doubt != before
}

// beginInterval starts an interval.
func (k *hintCheck) beginInterval(a hintEvidence) {
	k.intervalStart, k.deliveredBefore, k.intervalQueue, k.unbound = a.now, a.delivered, a.forwardRTT, a.unbound
	k.prevInterval, k.thisInterval = k.thisInterval, spanOf(k.claimed)
}

// updateBaseRTT takes in a round trip and returns the least one of the last 10 to 20 s.
func (k *hintCheck) updateBaseRTT(now cc.Time, rtt time.Duration) time.Duration {
	cur, old := &k.baseRTTs[0], &k.baseRTTs[1]
	if cur.least == 0 || now.Sub(cur.from) > baseRTTWindow {
		*old, *cur = *cur, baseRTT{rtt, now}
	}
	cur.least = min(cur.least, rtt)
	if old.least == 0 || now.Sub(old.from) > 2*baseRTTWindow {
		return cur.least
	}
	return min(cur.least, old.least)
}

// judgeInterval judges the interval that has ended: it continues a trial, begins one, or raises what is believed.
func (k *hintCheck) judgeInterval(a hintEvidence, base time.Duration) {
	hasQueue := k.intervalQueue > max(standingQueue, time.Duration(queuePart*float64(base)))
	k.countInterval(hasQueue)
	switch claims := k.recentClaims(); {
	case k.trial.cut:
		k.judgeCut(a.now, hasQueue)
	case k.trial.rise:
		k.judgeRise(a.now, hasQueue)
	case hasQueue && a.now >= k.cutBackoff.freeAt && !k.unbound &&
		(k.tooHigh || k.tooLow || k.isUnfulfilled(claims, a.usedPart)):
		if k.contradictions++; k.contradictions >= contradictionsNeeded {
			k.beginTrial(trial{cut: true, endsAt: a.now.Add(2*a.srtt + contradictionsNeeded*max(checkEvery, base))})
			k.actualRate = max(1, cc.Rate(cutTo/a.usedPart*float64(k.deliveredRate)))
			k.tooHigh = k.tooHigh || k.actualRate < k.claimed
		}
		return
	case hasQueue || k.unbound:
	case k.tooHigh || k.tooLow:
		k.raiseBelieved(claims.most)
	case k.quietIntervals >= quietNeeded && a.now >= k.riseBackoff.freeAt &&
		float64(k.deliveredRate) > leastFulfilled*float64(claims.meanRate()):
		pulse := 7 * max(checkEvery, base) / 4 // long enough to contain a whole interval
		shows := a.now.Add(a.srtt * 9 / 10)
		k.beginTrial(trial{rise: true, began: a.now, pulseEnds: a.now.Add(pulse), showsFrom: shows, endsAt: shows.Add(pulse)})
		k.tooLow, k.actualRate = true, cc.Rate(riseBy*float64(k.claimed))
	}
	k.contradictions = 0
}

// countInterval counts the interval that has ended; hasQueue: a queue stood during all of it.
func (k *hintCheck) countInterval(hasQueue bool) {
	switch {
	case hasQueue:
		k.queueFree, k.quietIntervals = 0, max(0, k.quietIntervals-contradictionsNeeded)
	case k.unbound:
		k.queueFree = 0
	default:
		k.queueFree++
		k.quietIntervals++
	}
}

// recentClaims returns what hints claimed during the last two intervals. Hints are averages, and late.
func (k *hintCheck) recentClaims() claimSpan {
	claims := k.thisInterval
	claims.addSpan(k.prevInterval)
	return claims
}

// isUnfulfilled reports whether clearly less is delivered than was claimed. usedPart is the part of the claim that the
// sender tries to use.
func (k *hintCheck) isUnfulfilled(claims claimSpan, usedPart float64) bool {
	least, mean := float64(k.believedRate(claims.least)), float64(k.believedRate(claims.meanRate()))
	return float64(k.deliveredRate) < usedPart*max(leastFulfilled*least, meanFulfilled*mean)
}

// beginTrial begins a trial.
func (k *hintCheck) beginTrial(t trial) {
	t.doubtBefore, t.queueAtStart = k.doubt, k.intervalQueue
	k.trial, k.contradictions, k.quietIntervals = t, 0, 0
}

// judgeCut keeps a cut that drains the queue, and undoes one that has not when its time is over.
func (k *hintCheck) judgeCut(now cc.Time, hasQueue bool) {
	switch {
	case !hasQueue || k.intervalQueue <= k.trial.queueAtStart/2:
		k.cutBackoff, k.trial = backoff{}, trial{}
	case now >= k.trial.endsAt:
		k.doubt, k.trial = k.trial.doubtBefore, trial{}
		k.cutBackoff.backOff(now)
	}
}

// judgeRise doubts the hint if what was sent beyond it was delivered without a queue. Otherwise it waits until the
// pulse has drained, and undoes the rise.
func (k *hintCheck) judgeRise(now cc.Time, hasQueue bool) {
	t := &k.trial
	if k.intervalStart >= t.showsFrom && now <= t.endsAt {
		t.claimed.addSpan(k.thisInterval)
		t.deliveredSum, t.intervals = t.deliveredSum+k.deliveredRate, t.intervals+1
	}
	more := min(now, t.pulseEnds).Sub(t.began)
	switch {
	case t.drainedAt > 0:
	case hasQueue || k.unbound || now >= t.endsAt && !t.deliveredMore():
		t.drainedAt = t.began.Add(more + time.Duration(riseBy*float64(more)))
		k.riseBackoff.backOff(now)
	case now >= t.endsAt:
		k.doubt = doubt{tooLow: true, actualRate: cc.Rate(riseBy * float64(k.claimed))}
		k.trial, k.riseBackoff = trial{}, backoff{}
		return
	case now < t.pulseEnds:
		return
	}
	k.doubt = doubt{tooHigh: true, actualRate: cc.Rate(float64(k.claimed) / riseBy)}
	if t.drainedAt > 0 && now >= t.drainedAt {
		k.doubt, k.trial = t.doubtBefore, trial{}
	}
}

// deliveredMore reports whether clearly more was delivered than hints claimed.
func (t *trial) deliveredMore() bool {
	return t.intervals > 0 && float64(t.deliveredSum) >= riseProof*float64(t.claimed.meanRate())*float64(t.intervals)
}

// raiseBelieved raises the rate that replaces a doubted hint. most is the highest recent claim.
func (k *hintCheck) raiseBelieved(most cc.Rate) {
	if k.tooLow {
		most *= mostCorrection
	}
	by := growBy
	if k.queueFree > contradictionsNeeded {
		by = growFaster
	}
	grown := max(cc.Rate(by*float64(k.actualRate)), k.deliveredRate)
	k.actualRate = max(k.actualRate, min(grown, most))
}

// maybeTrustAgain ends the doubt of hints that have been right for long enough.
func (k *hintCheck) maybeTrustAgain(now cc.Time) {
	switch {
	case !k.tooHigh && !k.tooLow || k.trial.isRunning():
	case k.tooHigh && k.claimed > k.actualRate, k.tooLow && mostAbove*float64(k.claimed) < float64(k.actualRate):
		k.agreesSince = 0
	case k.agreesSince == 0:
		k.agreesSince = now
	case now.Sub(k.agreesSince) >= max(leastProof, k.proofTime):
		k.doubt, k.agreesSince = doubt{}, 0
		k.proofTime = min(2*max(leastProof, k.proofTime), mostWait)
	}
}

// HintDoubt is how a group's hints are wrong; empty: they are believed.
type HintDoubt string

// The doubts.
const (
	HintTooHigh HintDoubt = "high" // hints state more than is delivered
	HintTooLow  HintDoubt = "low"  // hints state less than is delivered without a queue
)

// HintNews says that a group's hints are doubted from now on, or no longer.
type HintNews struct {
	Group, Algorithm             string
	Doubt                        HintDoubt // empty: no longer
	Claimed, Delivered, Believed cc.Rate   // what the newest hint claims, what arrives, and what is used
}

// certainDoubt returns the doubt without that of a trial that still runs.
func (k *hintCheck) certainDoubt() HintDoubt {
	d := k.doubt
	if k.trial.isRunning() {
		d = k.trial.doubtBefore
	}
	switch {
	case d.tooHigh:
		return HintTooHigh
	case d.tooLow:
		return HintTooLow
	}
	return ""
}

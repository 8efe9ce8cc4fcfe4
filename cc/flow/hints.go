package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// freshHint is how old a hint may be at the most and still say how the path is:
// the longer of this and three smoothed round trips.
const freshHint = time.Second

// hints is what the network says of a group's path.
type hints struct {
	newest   cc.Hint
	known    bool // there has been one
	check    hintCheck
	believed cc.Hint // newest as far as it is believed
}

// lifetime is how old a hint may be at the most and still say how the path is.
func (h *hints) lifetime(srtt time.Duration) time.Duration { return max(freshHint, 3*srtt) }

// isFresh reports whether there is a hint that still says how the path is.
func (h *hints) isFresh(now cc.Time, srtt time.Duration) bool {
	return h.known && h.newest.Age(now) <= h.lifetime(srtt)
}

// addHint takes in a hint, unless a newer one is known, and reports whether it did.
func (h *hints) addHint(hint cc.Hint, others cc.Rate) bool {
	if h.known && hint.At < h.newest.At {
		return false
	}
	h.newest, h.known = hint, true
	h.check.addHint(&hint, others)
	h.believed = h.check.correctedHint(hint)
	return true
}

// hintCheck holds what hints say of a path against what is delivered over it, which
// PBE-CC (SIGCOMM 2020 §7) leaves to future work. A hint is believed at once, whether it
// says more than the one before or less. It is doubted where delivery contradicts it:
//
//   - It is too high where less than that is delivered and a queue stands on the way there
//     for four intervals, nothing but the hint being why so much was sent. Then what is
//     believed is cut to a little less than what is delivered. If the queue stands all the
//     same, it is others' or the path is longer: the cut is taken back.
//   - It is too low where more than that is delivered without a queue. To see it a quarter
//     more is sent for about a round trip, and a quarter less after it, once the hint has
//     held the sender back for a second. As long as that shows nothing, it is tried ever
//     more rarely.
//
// In place of a doubted hint there is a rate that grows while no queue stands and is cut
// while one does; of a hint that was too high only what is above that rate is ignored, and
// of one that was too low what is below. A hint that says what is so for a while, longer
// each time, is believed again.
//
// All rates of a hint are believed in the same part.
type hintCheck struct {
	doubt
	told     cc.Rate // the newest hint has for the group; 0: nothing
	now, was span    // what hints said in the running interval, and in the one before
	base     [2]baseRTT

	since     cc.Time       // the interval began; 0: none runs
	delivered cc.Bytes      // by then
	queue     time.Duration // least of the interval
	free      bool          // something other than the hint held the sender back
	got       cc.Rate       // delivered in the last interval

	row   int // intervals one after another that contradict the hint
	short int // intervals one after another without a queue
	calm  int // intervals without a queue in which the hint held the sender back; one with a queue takes some away

	trial       trial
	cuts, rises backoff
	agrees      cc.Time       // since when a doubted hint has said what is so; 0: it does not
	proof       time.Duration // for which it is to say so before it is believed again
	reported    HintDoubt
}

// doubt is how far hints are believed.
type doubt struct {
	high, low bool    // they say more, or less, than is so
	rate      cc.Rate // what is so
}

// believedRate is what is believed of a hint that says so much.
func (d doubt) believedRate(told cc.Rate) cc.Rate {
	if d.high {
		told = min(told, d.rate)
	}
	if d.low {
		told = max(told, d.rate)
	}
	return told
}

// trial is a change of what is believed until its effect is seen.
type trial struct {
	cut, rise bool
	before    doubt
	until     cc.Time       // it ends
	queue     time.Duration // of a cut: when it began

	began, turn cc.Time // of a rise: it began, and is followed by less
	from        cc.Time // its effect shows
	told        span    // meanwhile
	got         cc.Rate // sum over intervals
	n           int
	drained     cc.Time // it failed, and what it queued has drained then; 0: it has not failed
}

func (t *trial) isRunning() bool { return t.cut || t.rise }

// backoff keeps trials that fail apart.
type backoff struct {
	wait time.Duration
	free cc.Time // for the next one
}

func (b *backoff) backOff(now cc.Time) {
	b.wait = min(max(leastWait, waitLonger*b.wait), mostWait)
	b.free = now.Add(b.wait)
}

// span is what hints said in some time.
type span struct {
	least, most cc.Rate
	sum, n      float64
}

// spanOf is a span with one hint.
func spanOf(r cc.Rate) span { return span{r, r, float64(r), 1} }

func (s *span) addSpan(o span) {
	if s.n == 0 || o.n > 0 && o.least < s.least {
		s.least = o.least
	}
	s.most, s.sum, s.n = max(s.most, o.most), s.sum+o.sum, s.n+o.n
}

func (s span) meanRate() cc.Rate { return cc.Rate(s.sum / max(1, s.n)) }

// baseRTT is the least round trip since some time, without the queue on the way back.
type baseRTT struct {
	least time.Duration
	from  cc.Time
}

// The constants of hintCheck.
const (
	checkEvery = 50 * time.Millisecond // or the least round trip: an interval, at least
	checkRow   = 4                     // intervals that contradict a hint; those that show what a cut does
	baseLasts  = 10 * time.Second      // or up to twice that

	leastQueue = 5 * time.Millisecond // or this part of the least round trip: a queue
	queuePart  = 0.125

	fulfilled = 0.95 // of the least that was said is delivered, it is so
	roughly   = 0.75 // likewise of the mean, since hints are late
	cutTo     = 0.95 // of what is delivered
	growBy    = 1.1  // in an interval without a queue
	growMore  = 1.25 // in the fifth without one, and on
	calmFor   = 20   // intervals before a rise
	riseBy    = 1.25
	risen     = 1.1  // of what was said is delivered: the rise was right
	nearly    = 1.25 // above a hint that says what is so, at most
	mostBelow = 64   // times what a hint says is never believed

	leastWait  = time.Second // until a trial that failed is repeated
	waitLonger = 4           // times, after each that fails
	mostWait   = 64 * time.Second
	leastProof = 4 * time.Second // that a doubted hint says what is so
)

// claimedRate is what h has for a group to which so much is delivered.
func claimedRate(h *cc.Hint, delivered cc.Rate) cc.Rate {
	others := max(0, h.ArrivalRate-delivered)
	return max(h.Capacity, h.FairShare, h.LinkRate-others)
}

// addHint takes in a new hint about a host to which so much is delivered to other groups.
func (k *hintCheck) addHint(h *cc.Hint, others cc.Rate) {
	told := claimedRate(h, k.got)
	k.told = max(told-others, told/mostBelow)
	k.now.addSpan(spanOf(k.told))
}

// recentRate is what was delivered in the last interval, if that is not long ago.
func (k *hintCheck) recentRate(now cc.Time) cc.Rate {
	if k.since == 0 || now.Sub(k.since) > freshHint {
		return 0
	}
	return k.got
}

// correctedHint is h as far as it is believed.
func (k *hintCheck) correctedHint(h cc.Hint) cc.Hint {
	part := k.believedPart()
	if part == 1 {
		return h
	}
	for _, r := range []*cc.Rate{&h.Capacity, &h.FairShare, &h.LinkRate} {
		if *r > 0 { // 0 stands for not knowing
			*r = max(1, cc.Rate(float64(*r)*part))
		}
	}
	return h
}

// believedPart is what is believed of the newest hint, over what it says.
func (k *hintCheck) believedPart() float64 {
	if k.told <= 0 || !k.high && !k.low {
		return 1
	}
	return float64(k.believedRate(k.told)) / float64(k.told)
}

// acked is what an acknowledgement shows.
type acked struct {
	now       cc.Time
	forward   time.Duration // the round trip without the queue on the way back
	srtt      time.Duration
	delivered cc.Bytes // in all
	uses      float64  // the part of what hints say that the sender goes for
	free      bool     // something other than the hint holds the sender back
}

// onAck takes in an acknowledgement, and tells whether more or less is believed than before.
func (k *hintCheck) onAck(a acked) (changed bool) {
	if k.told <= 0 || a.forward <= 0 {
		return false
	}
	base := k.leastRTT(a.now, a.forward)
	if k.since == 0 {
		k.beginInterval(a)
		return false
	}
	k.queue = min(k.queue, a.forward-base)
	k.free = k.free || a.free
	if a.now.Sub(k.since) < max(checkEvery, base) {
		return false
	}
	k.got = cc.RateOf(a.delivered-k.delivered, a.now.Sub(k.since))
	before := k.doubt
	k.judgeInterval(a, base)
	k.maybeTrustAgain(a.now)
	k.beginInterval(a)
	return k.doubt != before
}

// beginInterval starts an interval.
func (k *hintCheck) beginInterval(a acked) {
	k.since, k.delivered, k.queue, k.free = a.now, a.delivered, a.forward, a.free
	k.was, k.now = k.now, spanOf(k.told)
}

// leastRTT is the least round trip of the last 10 to 20 s.
func (k *hintCheck) leastRTT(now cc.Time, rtt time.Duration) time.Duration {
	cur, old := &k.base[0], &k.base[1]
	if cur.least == 0 || now.Sub(cur.from) > baseLasts {
		*old, *cur = *cur, baseRTT{rtt, now}
	}
	cur.least = min(cur.least, rtt)
	if old.least == 0 || now.Sub(old.from) > 2*baseLasts {
		return cur.least
	}
	return min(cur.least, old.least)
}

// judgeInterval looks at the interval that has ended.
func (k *hintCheck) judgeInterval(a acked, base time.Duration) {
	stands := k.queue > max(leastQueue, time.Duration(queuePart*float64(base)))
	k.countInterval(stands)
	switch said := k.recentlySaid(); {
	case k.trial.cut:
		k.judgeCut(a.now, stands)
	case k.trial.rise:
		k.judgeRise(a.now, stands)
	case stands && a.now >= k.cuts.free && !k.free && (k.high || k.low || k.isUnfulfilled(said, a.uses)):
		if k.row++; k.row >= checkRow {
			k.beginTrial(trial{cut: true, until: a.now.Add(2*a.srtt + checkRow*max(checkEvery, base))})
			k.rate = max(1, cc.Rate(cutTo/a.uses*float64(k.got)))
			k.high = k.high || k.rate < k.told
		}
		return
	case stands || k.free:
	case k.high || k.low:
		k.raiseBelieved(said.most)
	case k.calm >= calmFor && a.now >= k.rises.free && float64(k.got) > fulfilled*float64(said.meanRate()):
		pulse := 7 * max(checkEvery, base) / 4 // has an interval in it, whenever that begins
		shows := a.now.Add(a.srtt * 9 / 10)
		k.beginTrial(trial{rise: true, began: a.now, turn: a.now.Add(pulse), from: shows, until: shows.Add(pulse)})
		k.low, k.rate = true, cc.Rate(riseBy*float64(k.told))
	}
	k.row = 0
}

// countInterval counts the interval that has ended.
func (k *hintCheck) countInterval(stands bool) {
	switch {
	case stands:
		k.short, k.calm = 0, max(0, k.calm-checkRow)
	case k.free:
		k.short = 0
	default:
		k.short++
		k.calm++
	}
}

// recentlySaid is what hints said in the interval that has ended and in the one before it: they
// are averages, and late.
func (k *hintCheck) recentlySaid() span {
	said := k.now
	said.addSpan(k.was)
	return said
}

// isUnfulfilled reports whether clearly less is delivered than was said, to a sender that
// goes for a part of that.
func (k *hintCheck) isUnfulfilled(said span, uses float64) bool {
	least, mean := float64(k.believedRate(said.least)), float64(k.believedRate(said.meanRate()))
	return float64(k.got) < uses*max(fulfilled*least, roughly*mean)
}

// beginTrial begins a trial.
func (k *hintCheck) beginTrial(t trial) {
	t.before, t.queue = k.doubt, k.queue
	k.trial, k.row, k.calm = t, 0, 0
}

// judgeCut keeps a cut that drains the queue.
func (k *hintCheck) judgeCut(now cc.Time, stands bool) {
	switch {
	case !stands || k.queue <= k.trial.queue/2:
		k.cuts, k.trial = backoff{}, trial{}
	case now >= k.trial.until:
		k.doubt, k.trial = k.trial.before, trial{}
		k.cuts.backOff(now)
	}
}

// judgeRise has a hint be doubted if what was sent beyond it was delivered without a queue.
func (k *hintCheck) judgeRise(now cc.Time, stands bool) {
	t := &k.trial
	if k.since >= t.from && now <= t.until {
		t.told.addSpan(k.now)
		t.got, t.n = t.got+k.got, t.n+1
	}
	more := min(now, t.turn).Sub(t.began)
	switch {
	case t.drained > 0:
	case stands || k.free || now >= t.until && !t.deliveredMore():
		t.drained = t.began.Add(more + time.Duration(riseBy*float64(more)))
		k.rises.backOff(now)
	case now >= t.until:
		k.doubt, k.trial, k.rises = doubt{low: true, rate: cc.Rate(riseBy * float64(k.told))}, trial{}, backoff{}
		return
	case now < t.turn:
		return
	}
	k.doubt = doubt{high: true, rate: cc.Rate(float64(k.told) / riseBy)}
	if t.drained > 0 && now >= t.drained {
		k.doubt, k.trial = t.before, trial{}
	}
}

// deliveredMore reports whether clearly more was delivered than hints said.
func (t *trial) deliveredMore() bool {
	return t.n > 0 && float64(t.got) >= risen*float64(t.told.meanRate())*float64(t.n)
}

// raiseBelieved raises what is believed in place of hints that said most at most.
func (k *hintCheck) raiseBelieved(most cc.Rate) {
	if k.low {
		most *= mostBelow
	}
	by := growBy
	if k.short > checkRow {
		by = growMore
	}
	grown := max(cc.Rate(by*float64(k.rate)), k.got)
	k.rate = max(k.rate, min(grown, most))
}

// maybeTrustAgain has a hint be believed again that has said what is so for a while.
func (k *hintCheck) maybeTrustAgain(now cc.Time) {
	switch {
	case !k.high && !k.low || k.trial.isRunning():
	case k.high && k.told > k.rate, k.low && nearly*float64(k.told) < float64(k.rate):
		k.agrees = 0
	case k.agrees == 0:
		k.agrees = now
	case now.Sub(k.agrees) >= max(leastProof, k.proof):
		k.doubt, k.agrees = doubt{}, 0
		k.proof = min(2*max(leastProof, k.proof), mostWait)
	}
}

// HintDoubt is how a group's hints are wrong.
type HintDoubt string

// The doubts; hints that are believed have none.
const (
	HintTooHigh HintDoubt = "high" // they say more than is delivered
	HintTooLow  HintDoubt = "low"  // they say less than is delivered without a queue
)

// HintNews tells that a group's hints are doubted from now on, or no longer.
type HintNews struct {
	Group, Algorithm          string
	Doubt                     HintDoubt
	Told, Delivered, Believed cc.Rate
}

// certainDoubt is how hints are wrong, as far as it is certain: while a trial runs, as before.
func (k *hintCheck) certainDoubt() HintDoubt {
	d := k.doubt
	if k.trial.isRunning() {
		d = k.trial.before
	}
	switch {
	case d.high:
		return HintTooHigh
	case d.low:
		return HintTooLow
	}
	return ""
}

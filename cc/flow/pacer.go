package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// pacerBurst is how much sending time a pacer lets accumulate: a driver that
// ticks every millisecond, and is sometimes late, must not lose rate.
const pacerBurst = 4 * time.Millisecond

// limitBurst is the same for the maximum rate of a group, which promises a sum rather
// than short queues, and holds it on a busy machine, too.
const limitBurst = 20 * time.Millisecond

// pacer spreads bytes over time: a virtual-scheduling leaky bucket. Rate 0 does not
// pace. setRate changes the rate.
type pacer struct {
	rate cc.Rate
	tat  cc.Time       // when the bytes sent so far would have left at exactly rate
	most time.Duration // sending time that may accumulate; 0: pacerBurst
}

// setRate paces at rate from now on. Bytes that were sent ahead of the old rate take
// the new rate's time: a raise is in force at once.
func (p *pacer) setRate(now cc.Time, rate cc.Rate) {
	if rate != p.rate {
		p.tat, p.rate = cc.Repace(now, p.tat, p.rate, rate), rate
	}
}

func (p *pacer) burstTime(mss cc.Bytes) time.Duration {
	if p.most == 0 {
		return max(pacerBurst, p.rate.TimeFor(2*mss))
	}
	// At a low rate four segments, or one and time to be late.
	return max(p.most, min(p.rate.TimeFor(4*mss), p.rate.TimeFor(mss)+2*p.most))
}

// creditBytes returns how many bytes may leave now.
func (p *pacer) creditBytes(now cc.Time, mss cc.Bytes) cc.Bytes {
	if p.rate == 0 {
		return cc.MaxCwnd
	}
	return p.rate.BytesIn(now.Add(p.burstTime(mss)).Sub(max(p.tat, now)))
}

// readyAt returns when n bytes may leave.
func (p *pacer) readyAt(now cc.Time, n, mss cc.Bytes) cc.Time {
	if p.rate == 0 {
		return now
	}
	return max(now, max(p.tat, now).Add(p.rate.TimeFor(n)-p.burstTime(mss)))
}

func (p *pacer) spendBytes(now cc.Time, n cc.Bytes) {
	if p.rate != 0 {
		p.tat = max(p.tat, now).Add(p.rate.TimeFor(n))
	}
}

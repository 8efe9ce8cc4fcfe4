package sim

import (
	"fmt"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// DatagramConfig describes datagrams of 1200 bytes that somebody sends at a
// constant rate, whatever becomes of them.
type DatagramConfig struct {
	Name   string
	Rate   cc.Rate // of payload
	Beside string  // the flow in whose macroflow they have a share; empty: they pass unseen
	Share  float64 // of its window, at most
	Start  time.Duration
	Stop   time.Duration // 0: never
}

func (c DatagramConfig) check(s Scenario) error {
	switch {
	case c.Name == "" || s.named(c.Name) >= 0:
		return fmt.Errorf("they need a name of their own")
	case c.Rate <= 0:
		return fmt.Errorf("they need a rate")
	case c.Start < 0 || c.Stop < 0 || c.Stop > 0 && c.Stop <= c.Start:
		return fmt.Errorf("they must stop after they start, at 0 or later")
	case c.Beside != "" && s.named(c.Beside) < 0:
		return fmt.Errorf("there is no flow %q", c.Beside)
	case c.Beside != "" && !(c.Share > 0 && c.Share <= 1):
		return fmt.Errorf("their share is %v, but must be above 0 and at most 1", c.Share)
	}
	return nil
}

const (
	datagramBytes   cc.Bytes = 1200
	datagramHeaders cc.Bytes = 28 // of IPv4 and UDP
	// A gateway keeps so many that may not go yet, and none for longer.
	datagramQueue = 64
	datagramWait  = 50 * time.Millisecond
)

// blaster sends datagrams, by way of a gateway that asks for them.
type blaster struct {
	w      *world
	cfg    DatagramConfig
	member *flow.Datagrams // nil: nobody is asked
	queue  []cc.Time       // when those came that wait
	stats  stats
}

func newBlaster(w *world, cfg DatagramConfig) *blaster {
	return &blaster{w: w, cfg: cfg, stats: newStats(w, FlowConfig{Start: cfg.Start})}
}

func (b *blaster) start() {
	if b.cfg.Beside != "" {
		terms := b.w.scenario.terms(b.w.scenario.named(b.cfg.Beside))
		b.member, b.w.err = b.w.manager.OpenDatagrams(terms, b.cfg.Share, func() { b.w.at(b.w.now, b.drain) })
		if b.w.err != nil {
			return
		}
	}
	b.produce()
}

func (b *blaster) produce() {
	now := b.w.now
	if b.cfg.Stop > 0 && now >= b.w.origin.Add(b.cfg.Stop) {
		return
	}
	switch {
	case len(b.queue) == datagramQueue:
		b.drop()
	default:
		b.queue = append(b.queue, now)
		if len(b.queue) == 1 {
			b.drain()
		}
	}
	b.w.at(now.Add(b.cfg.Rate.TimeFor(datagramBytes)), b.produce)
}

// drop notes one that the gateway threw away.
func (b *blaster) drop() {
	if b.w.now >= b.stats.from {
		b.stats.drops++
	}
}

// drain sends what waits as far as it may go.
func (b *blaster) drain() {
	now := b.w.now
	for len(b.queue) > 0 {
		size := datagramBytes + datagramHeaders
		late := now.Sub(b.queue[0]) > datagramWait
		if !late && b.member != nil && !b.member.Take(now, size) {
			return
		}
		b.queue = slices.Delete(b.queue, 0, 1)
		if late {
			b.drop()
			continue
		}
		v := b.w.down.Send(now, size)
		b.stats.packet(now, size, v)
		b.w.show(false, size, v)
		if v.Dropped == DropNone {
			b.w.at(v.Arrives, func() { b.stats.delivered(b.w.now, datagramBytes) })
		}
	}
}

func (b *blaster) result() FlowResult {
	st := &b.stats
	from := max(b.cfg.Start, b.w.scenario.Warmup)
	to := b.w.scenario.Duration
	if b.cfg.Stop > 0 {
		to = min(to, b.cfg.Stop)
	}
	return FlowResult{
		Name: b.cfg.Name, Algorithm: "none", From: from, To: to,
		Throughput: cc.RateOf(st.arrived, to-from), Packets: st.packets, Drops: st.drops, Losses: st.losses,
		Queueing: delaysOf(st.queueing), OneWay: delaysOf(st.oneWay), PerSecond: st.rates(b.w.scenario.Duration),
	}
}

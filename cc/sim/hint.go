package sim

import (
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// HintWindow is the time that what a link tells of itself is an average over:
// as many subframes of a millisecond as PBE-CC averages over on a path of 40 ms.
const HintWindow = 40 * time.Millisecond

// hints is the bottleneck's account of who uses it, by host, and tells each
// host's senders of it. It answers as a base station would that keeps a queue for
// each host and serves them equally (max-min), whatever order the packets of
// the one queue there is really leave in: what it tells is what each may have,
// not what the greediest took.
type hints struct {
	w       *world
	hosts   []*host    // in the order of their first flow
	offered []cc.Bytes // by the link in each period of the window, the oldest first
}

// host is where a group of flows lead, as the link sees it. A nil one keeps no account.
type host struct {
	addr      netip.Addr
	flows     []*sender
	radioLost cc.Bytes // payload

	came    cc.Bytes // to the queue in this period, dropped there or not
	waiting cc.Bytes // in the queue of its own
	usage   []usage  // in each period of the window, the oldest first
}

// usage is what a host asked of the link in one period, and may have had.
type usage struct {
	came, wanted, part cc.Bytes
}

// underWay reports whether the flow is open.
func (s *sender) underWay() bool { return s.flow != nil && !s.closed }

// add opens an account for s, with those of its host.
func (h *hints) add(addr netip.Addr, s *sender) {
	for _, account := range h.hosts {
		if account.addr == addr {
			account.flows = append(account.flows, s)
			s.host = account
			return
		}
	}
	s.host = &host{addr: addr, flows: []*sender{s}}
	h.hosts = append(h.hosts, s.host)
}

// note takes in what became of a packet with size bytes of payload.
func (h *host) note(size cc.Bytes, v Verdict) {
	if h == nil {
		return
	}
	switch v.Dropped {
	case DropLoss:
		h.radioLost += size
	case DropQueue:
		h.came += size + HeaderBytes
	case DropNone:
		h.came += size + HeaderBytes
		h.waiting += size + HeaderBytes
	}
}

// everyone is all hosts there are.
var everyone = netip.MustParsePrefix("0.0.0.0/0")

func (h *host) prefix() netip.Prefix { return netip.PrefixFrom(h.addr, h.addr.BitLen()) }

// running counts the host's flows that are under way.
func (h *host) running() (n int) {
	for _, f := range h.flows {
		if f.underWay() {
			n++
		}
	}
	return n
}

// sum adds up what a host used in the window.
func (h *host) sum() (u usage) {
	for _, each := range h.usage {
		u.came += each.came
		u.wanted += each.wanted
		u.part += each.part
	}
	return u
}

// report lets the link tell all hosts of itself, time and again.
func (h *hints) report() {
	now := h.w.now
	h.measure(now)
	span := time.Duration(len(h.offered)) * h.w.scenario.Hints
	offered, came, part, active, flows := cc.Bytes(0), cc.Bytes(0), cc.Bytes(0), cc.Bytes(0), 0
	for _, n := range h.offered {
		offered += n
	}
	for _, host := range h.hosts {
		u := host.sum()
		came += u.came
		part += u.part
		if u.wanted > 0 {
			active++
		}
		flows += host.running()
	}
	claims := h.w.manager.Claims(everyone)
	for _, host := range h.hosts {
		if host.running() == 0 {
			continue
		}
		u, sharers := host.sum(), active
		if u.wanted == 0 {
			sharers++
		}
		hint := cc.Hint{
			At:          now,
			Capacity:    Known(cc.RateOf(Payload(u.part+(offered-part)/sharers), span)),
			FairShare:   Known(cc.RateOf(Payload(offered/sharers), span)),
			LinkRate:    Known(cc.RateOf(offered, span)),
			ArrivalRate: Known(cc.RateOf(came, span)),
			QueueRoom:   Known(h.room()),
			Flows:       flows,
			RadioLost:   host.radioLost,
			Share:       h.w.manager.Claims(host.prefix()).Of(claims),
		}
		h.w.at(now.Add(h.w.up.cfg.Delay), func() { h.w.manager.Hint(host.prefix(), hint) })
	}
	h.w.at(now.Add(h.w.scenario.Hints), h.report)
}

// measure closes a period that ends now.
func (h *hints) measure(now cc.Time) {
	period := h.w.scenario.Hints
	periods := max(1, int(HintWindow/period))
	n := h.w.down.Offered(now.Add(-period), now)
	h.offered = append(h.offered, n)
	h.offered = h.offered[max(0, len(h.offered)-periods):]
	for _, host := range h.hosts {
		host.usage = append(host.usage, usage{came: host.came, wanted: host.waiting})
		host.usage = host.usage[max(0, len(host.usage)-periods):]
		host.came = 0
	}
	h.serve(n)
}

// serve divides n bytes among the hosts for which something waits.
func (h *hints) serve(n cc.Bytes) {
	for {
		waiting := cc.Bytes(0)
		for _, host := range h.hosts {
			if host.waiting > 0 {
				waiting++
			}
		}
		if waiting == 0 || n < waiting {
			return
		}
		each := n / waiting
		for _, host := range h.hosts {
			served := min(each, host.waiting)
			host.waiting -= served
			host.usage[len(host.usage)-1].part += served
			n -= served
		}
	}
}

// Known keeps a value that is 0 apart from one that is not known, in a cc.Hint.
func Known[N cc.Bytes | cc.Rate](v N) N { return max(1, v) }

// Payload is what is left of n bytes on the wire without headers, in full segments.
func Payload(n cc.Bytes) cc.Bytes { return n * cc.DefaultMSS / (cc.DefaultMSS + HeaderBytes) }

// room is what is free in the queue.
func (h *hints) room() cc.Bytes {
	return h.w.down.cfg.Room(h.w.down.Backlog(h.w.now))
}

// Room is what is free in the link's queue while so much waits in it;
// cc.MaxCwnd where it has no limit.
func (c LinkConfig) Room(waiting cc.Bytes, packets int) cc.Bytes {
	room := cc.MaxCwnd
	if c.QueueBytes > 0 {
		room = c.QueueBytes - waiting
	}
	if c.QueuePackets > 0 {
		room = min(room, cc.Bytes(c.QueuePackets-packets)*OpportunityBytes)
	}
	return room
}

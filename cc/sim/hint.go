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

// host is where some flows lead, as the link sees it.
type host struct {
	number    int
	flows     []endpoint
	radioLost cc.Bytes // payload

	came    cc.Bytes // to the queue in this period, dropped there or not
	waiting cc.Bytes // in the queue of its own
	usage   []usage  // in each period of the window, the oldest first
}

// usage is what a host asked of the link in one period, and may have had.
type usage struct {
	came, wanted, part cc.Bytes
}

// add opens an account for a flow to a host, with the host's others.
func (h *hints) add(number int, e endpoint) {
	account := h.of(number)
	if account == nil {
		account = &host{number: number}
		h.hosts = append(h.hosts, account)
	}
	account.flows = append(account.flows, e)
}

// of returns the account of a host; nil: there is none.
func (h *hints) of(number int) *host {
	for _, account := range h.hosts {
		if account.number == number {
			return account
		}
	}
	return nil
}

// note takes in what became of a host's packet of size bytes.
func (h *hints) note(number int, size cc.Bytes, v Verdict) {
	account := h.of(number)
	if account == nil {
		return
	}
	switch v.Dropped {
	case DropLoss:
		account.radioLost += max(0, size-HeaderBytes)
	case DropQueue:
		account.came += size
	case DropNone:
		account.came += size
		account.waiting += size
	}
}

// gone takes in that a host's packet of size bytes which waited was dropped.
func (h *hints) gone(number int, size cc.Bytes) {
	if account := h.of(number); account != nil {
		account.waiting = max(0, account.waiting-size)
	}
}

// everyone is all hosts there are.
var everyone = netip.MustParsePrefix("0.0.0.0/0")

func (h *host) prefix() netip.Prefix {
	addr := hostAddr(h.number)
	return netip.PrefixFrom(addr, addr.BitLen())
}

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

// report lets the bottleneck tell the senders to all hosts of itself, time and again.
func (h *hints) report() {
	now, manager := h.w.now, &h.w.manager
	cell, _ := h.w.down.(*Cell)
	hintOf := func(host *host) cc.Hint { return cell.Hint(now, host.number) }
	if cell == nil {
		h.measure(now)
		hintOf = h.ofLink()
	}
	claims := manager.Claims(everyone)
	for _, host := range h.hosts {
		if host.running() == 0 {
			continue
		}
		hint := hintOf(host)
		hint.Share = manager.Claims(host.prefix()).Of(claims)
		if tell := h.w.scenario.Tell; tell != nil {
			hint = tell(hint)
		}
		h.w.at(now.Add(h.w.up.cfg.Delay), func() { manager.Hint(host.prefix(), hint) })
	}
	h.w.at(now.Add(h.w.scenario.Hints), h.report)
}

// ofLink works out what each host may have of a link.
func (h *hints) ofLink() func(*host) cc.Hint {
	now := h.w.now
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
	return func(host *host) cc.Hint {
		u, sharers := host.sum(), active
		if u.wanted == 0 {
			sharers++
		}
		return cc.Hint{
			At:          now,
			Capacity:    Known(cc.RateOf(Payload(u.part+(offered-part)/sharers), span)),
			FairShare:   Known(cc.RateOf(Payload(offered/sharers), span)),
			LinkRate:    Known(cc.RateOf(offered, span)),
			ArrivalRate: Known(cc.RateOf(came, span)),
			QueueRoom:   Known(h.w.scenario.Down.Room(h.w.down.Backlog(now, 0))),
			Flows:       flows,
			RadioLost:   host.radioLost,
		}
	}
}

// measure closes a period that ends now.
func (h *hints) measure(now cc.Time) {
	period := h.w.scenario.Hints
	periods := max(1, int(HintWindow/period))
	n := h.w.down.Offered(0, now.Add(-period), now)
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

// Room returns the bytes that are free in the link's queue while waiting bytes in a
// number of packets wait there; cc.MaxCwnd where the queue has no limit.
func (c LinkConfig) Room(waiting cc.Bytes, packets int) cc.Bytes {
	return roomOf(c.QueueBytes, c.QueuePackets, waiting, packets)
}

// roomOf is what is free in a queue with such limits.
func roomOf(bytes cc.Bytes, packets int, waiting cc.Bytes, waitingPackets int) cc.Bytes {
	room := cc.MaxCwnd
	if bytes > 0 {
		room = bytes - waiting
	}
	if packets > 0 {
		room = min(room, cc.Bytes(packets-waitingPackets)*OpportunityBytes)
	}
	return room
}

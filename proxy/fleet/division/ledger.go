package division

import (
	"cmp"
	"maps"
	"slices"

	"github.com/penstock-net/penstock/cc"
)

// ledger has the claims of all edges on a limit that this edge owns.
type ledger struct {
	key    Key
	owner  ownership
	claims map[string]*claim
}

// claim is one edge's part of a limit.
type claim struct {
	Report             // the newest
	at       cc.Time   // Message.At of Report, by the edge's clock
	heard    cc.Time   // when Report came
	promises []promise // grants that may be in force
}

// maxPromises bounds claim.promises. An edge that sends one report each Period causes at most three times
// Lease/Period.
const maxPromises = 32

// promise is a grant that may be in force at its edge.
type promise struct {
	at      cc.Time // Message.At
	rate    cc.Rate
	expires cc.Time // at the latest, by our clock
}

// addReport notes a report that an edge sent at a time of its own clock. It drops promises that are older than the
// grant in force there, since they will never be in force again.
func (d *ledger) addReport(now, at cc.Time, from string, r Report) {
	c := d.claims[from]
	if c == nil {
		c = &claim{}
		d.claims[from] = c
	}
	c.Report, c.at, c.heard = r, at, now
	if r.GrantAt > 0 && r.GrantAt <= now {
		c.promises = slices.DeleteFunc(c.promises, func(p promise) bool { return p.at < r.GrantAt })
	} else if r.Rate > 0 { // a grant of another owner, or of this one before a restart with a later clock; or the floor
		p := promise{0, min(r.Rate, d.key.Max), now.Add(Lease)}
		if last := len(c.promises) - 1; last+1 >= maxPromises { // merge it with the last one
			p.at, p.rate = c.promises[last].at, max(p.rate, c.promises[last].rate)
			c.promises = c.promises[:last]
		}
		c.promises = append(c.promises, p)
	}
}

// dropStale removes expired promises, and the claims of edges that have none and report no more.
func (d *ledger) dropStale(now cc.Time) {
	maps.DeleteFunc(d.claims, func(_ string, c *claim) bool {
		c.promises = slices.DeleteFunc(c.promises, func(p promise) bool { return p.expires <= now })
		return len(c.promises) == 0 && now.Sub(c.heard) >= Lease
	})
}

// promised returns the most that an edge may use now.
func (c *claim) promised() (most cc.Rate) {
	for _, p := range c.promises {
		most = max(most, p.rate)
	}
	return most
}

// minDemand is the part of a limit that all members together demand at least. So an edge that begins to send is not
// slowed down until its next report.
const minDemand = 0.05

// divideLimit returns the parts of the edges that report, and notes them as promises. A part grows only by rate that
// no promise to another edge covers, and not at all without mayGrow.
func (d *ledger) divideLimit(now cc.Time, members int, mayGrow bool) map[string]cc.Rate {
	names := slices.Sorted(maps.Keys(d.claims))
	names = slices.DeleteFunc(names, func(n string) bool { return now.Sub(d.claims[n].heard) >= Lease })
	least := cc.Rate(minDemand*float64(d.key.Max)) / cc.Rate(members)
	wants := make([]want, len(names))
	for i, name := range names {
		c := d.claims[name]
		wants[i] = want{float64(max(c.Demand, least)), float64(max(1, c.Weight))}
	}
	shares := shareByDemand(float64(d.key.Max), wants)
	free := d.key.Max // rate that no promise covers
	for _, c := range d.claims {
		free -= c.promised()
	}
	grow := 0.0 // sum by which parts should grow
	for i, name := range names {
		grow += max(0, shares[i]-float64(d.claims[name].promised()))
	}
	part := 0.0 // fraction of grow that free covers
	if free > 0 && grow > 0 && mayGrow {
		part = min(1, float64(free)/grow)
	}
	grants := make(map[string]cc.Rate, len(names))
	for i, name := range names {
		c := d.claims[name]
		share := shares[i]
		if before := float64(c.promised()); share > before {
			share = before + part*(share-before)
		}
		rate := max(1, cc.Rate(share))
		c.promises = append(c.promises, promise{now, rate, c.heard.Add(Lease)})
		grants[name] = rate
	}
	return grants
}

// describe returns the state of all claims, by member.
func (d *ledger) describe() (all []ClaimState) {
	for name, c := range d.claims {
		all = append(all, ClaimState{name, c.Demand, c.Sent, c.Rate})
	}
	slices.SortFunc(all, func(a, b ClaimState) int { return cmp.Compare(a.Member, b.Member) })
	return all
}

// want is the demand of one edge.
type want struct{ demand, weight float64 }

// shareByDemand divides a rate by weighted max-min: no edge gets more than its demand while another one lacks some.
// What remains then goes to all by weight, so that the shares add up to the rate.
func shareByDemand(rate float64, wants []want) []float64 {
	shares := make([]float64, len(wants))
	order := make([]int, len(wants))
	weights := 0.0
	for i, w := range wants {
		order[i] = i
		weights += w.weight
	}
	all := weights
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Compare(wants[a].demand/wants[a].weight, wants[b].demand/wants[b].weight)
	})
	for _, i := range order { // those with the least demand for their weight first
		w := wants[i]
		shares[i] = min(w.demand, rate*w.weight/weights)
		rate -= shares[i]
		weights -= w.weight
	}
	for i, w := range wants {
		shares[i] += max(0, rate) * w.weight / all
	}
	return shares
}

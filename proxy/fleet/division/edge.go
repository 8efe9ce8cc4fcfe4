// Package division divides maximum rates among several edges. Each shared limit has one live edge as its owner. The
// other edges report to it what they send and want, and it grants each a part for a short time. The package does no
// I/O and reads no clock: a caller passes messages and time.
//
//	edge                                      owner of the limit (by rendezvous hashing)
//	Exchange: what flows did ──▶ Report  ───▶ Receive: the claim of the edge
//	Rate: the part in force ◀──── Grant  ◀─── Exchange: max-min by demand and weight
//
// These rules bound the sum of what is in force:
//
//   - A grant holds for Lease from the report that it answers, by the clock of the edge that sent the report.
//   - The owner raises a part only by the rate that no unexpired grant of another edge may still use.
//   - It raises none while members hear different sets of members, because a former owner may have granted more.
//   - An edge without a grant has its floor: one Nth of the limit, where N is the number of known members.
//
// Edges that hear less than half of the known members own nothing and have their floors. So a limit never has owners
// on both sides of a partition, and the sum exceeds the limit by no more than the floors.
package division

import (
	"cmp"
	"encoding/binary"
	"hash/fnv"
	"maps"
	"slices"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Period is how often an edge calls Exchange.
const Period = 100 * time.Millisecond

// Lease is how long a grant holds from the report that it answers. A member that was silent for that long is missing.
const Lease = 5 * Period

const (
	forgetAfter = 30 * time.Second // how long a missing member counts while this side decides
	idleAfter   = time.Second      // a limit with no bytes for this long is no longer reported
	maxLimits   = 4096             // bound of reported limits, and of owned limits
)

// MaxMembers is how many members an edge knows at most, itself included.
const MaxMembers = 64

// Key identifies a shared limit.
type Key struct {
	Group string  // flow.Terms.Group
	Max   cc.Rate // flow.Terms.MaxRate
}

// Use is the use of a shared limit by the flows of an edge.
type Use struct {
	Key
	Passed cc.Bytes // total that has passed the limit
	Weight int      // sum of the weights of the flows that send; 0 counts as 1
	Held   bool     // the limit holds a flow back, or is used up
}

// Edge is one edge's view of a fleet: the members that it hears, the shared limits of its own flows, and the limits
// that it owns. One goroutine at a time may call its methods.
type Edge struct {
	name         string
	members      map[string]*member // without the edge itself
	gone         map[string]cc.Time // when members were removed; their last messages may still arrive
	live         []string           // names of the members heard within Lease, and of the edge, in order
	view         uint32             // a hash of live
	isQuorum     bool               // live is more than half of all members, or the half with the first name
	views        int                // number of changes of live; tells when an ownership must be found again
	decidesSince cc.Time            // when isQuorum became true
	growsFrom    cc.Time            // grants raise no part before this time
	limits       map[Key]*limit
	ledgers      map[Key]*ledger // of the limits that the edge owns
}

// member is another edge.
type member struct {
	at    cc.Time // Message.At of its newest message, by its clock; 0: none came
	heard cc.Time // when that came, or when the member was added; by our clock
	echo  cc.Time // Message.Heard: when it last heard us, by our clock; at first when the member was added
	view  uint32  // Message.View
}

// limit is a shared limit that flows of this edge use.
type limit struct {
	key      Key
	owner    ownership
	passed   cc.Bytes
	passedAt cc.Time // time of passed
	usedAt   cc.Time // when passed last grew, or flows were held back
	weight   int
	sent     float64 // smoothed rate of passed, in bits per second
	allowed  float64 // smoothed rate in force, by the same filter, to be comparable with sent
	heldPart float64 // smoothed part of the periods in which flows were held back
	grant    cc.Rate
	grantAt  cc.Time // Message.At of the grant, by the owner's clock
	granter  string
	expires  cc.Time // of the grant, by our clock
}

// ownership is the owner of a limit in one view of the fleet. It is kept because findOwner hashes every member's name.
type ownership struct {
	name string // empty: none
	view int    // Edge.views when it was found
}

// NewEdge returns the edge of a name that no other member has.
func NewEdge(name string) *Edge {
	e := &Edge{
		name: name, members: map[string]*member{}, gone: map[string]cc.Time{}, limits: map[Key]*limit{},
		ledgers: map[Key]*ledger{},
	}
	e.updateView(0)
	return e
}

// AddMember adds another edge, and reports whether there is room for it. It counts as heard.
func (e *Edge) AddMember(now cc.Time, name string) bool {
	if e.members[name] == nil {
		if name == e.name || len(e.members)+1 >= MaxMembers {
			return name == e.name
		}
		e.members[name] = &member{}
	}
	e.members[name].heard, e.members[name].echo = now, now
	delete(e.gone, name)
	e.updateView(now)
	return true
}

// RemoveMember removes an edge that has ended: it has left, or nothing listens at its address. A member that is only
// silent must not be removed, because it may send on the other side of a partition.
func (e *Edge) RemoveMember(now cc.Time, name string) {
	delete(e.members, name)
	e.gone[name] = now
	e.updateView(now)
}

// updateView finds the live members, and forgets members that have been missing for long. Only a side with a quorum
// may forget them. Otherwise the other side would know fewer members in time, and have a quorum as well.
func (e *Edge) updateView(now cc.Time) {
	live := []string{e.name}
	for name, m := range e.members {
		switch {
		case m.isLive(now):
			live = append(live, name)
		case now.Sub(max(m.heard, e.decidesSince)) > forgetAfter && e.isQuorum:
			delete(e.members, name)
		}
	}
	maps.DeleteFunc(e.gone, func(_ string, at cc.Time) bool { return now.Sub(at) > Lease })
	slices.Sort(live)
	first := live[0] == slices.Min(append(slices.Collect(maps.Keys(e.members)), e.name))
	all := len(e.members) + 1
	isQuorum := 2*len(live) > all || 2*len(live) == all && first
	if slices.Equal(live, e.live) && isQuorum == e.isQuorum {
		return
	}
	if isQuorum && !e.isQuorum {
		e.decidesSince = now
	}
	for _, name := range e.live {
		if e.members[name] != nil && !slices.Contains(live, name) { // it may still use a grant until it misses us, too
			e.growsFrom = now.Add(Lease)
		}
	}
	e.live, e.view, e.isQuorum = live, hashNames(live), isQuorum
	e.views++
}

// isLive reports whether m and this edge hear each other. An answer takes a message each way.
func (m *member) isLive(now cc.Time) bool {
	return now.Sub(m.heard) <= Lease && now.Sub(m.echo) <= 2*Lease
}

// hashNames returns a hash of a list of names.
func hashNames(names []string) uint32 {
	h := fnv.New32a()
	for _, name := range names {
		_, _ = h.Write([]byte(name + "\x00"))
	}
	return h.Sum32()
}

// othersAgree reports whether all live members hear the same members as this edge. Only then do all report to the same
// owners.
func (e *Edge) othersAgree() bool {
	for _, name := range e.live {
		if m := e.members[name]; m != nil && m.view != e.view {
			return false
		}
	}
	return true
}

// findOwner returns the live member that owns a limit; empty: too few members are heard. It is the one with the
// highest hash of its name and the limit (highest random weight, Thaler and Ravishankar 1998). So when a member goes,
// only its own limits move.
func (e *Edge) findOwner(k Key) string {
	if !e.isQuorum {
		return ""
	}
	return slices.MaxFunc(e.live, func(a, b string) int {
		return cmp.Or(cmp.Compare(memberWeight(a, k), memberWeight(b, k)), cmp.Compare(a, b))
	})
}

// memberWeight returns a hash of a member and a limit. It is the same in every build.
func memberWeight(name string, k Key) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(binary.AppendUvarint([]byte(name+"\x00"+k.Group+"\x00"), uint64(k.Max)))
	v := h.Sum64() // the last bytes barely reach the high bits: mix them (MurmurHash3's finalizer)
	v = (v ^ v>>33) * 0xff51afd7ed558ccd
	v = (v ^ v>>33) * 0xc4ceb9fe1a85ec53
	return v ^ v>>33
}

// ownerFor returns the owner of a limit in the current view, and keeps it in o until the view changes.
func (e *Edge) ownerFor(k Key, o *ownership) string {
	if o.view != e.views {
		*o = ownership{e.findOwner(k), e.views}
	}
	return o.name
}

// Rate returns the part of a limit that the flows of this edge may use now.
func (e *Edge) Rate(now cc.Time, k Key) cc.Rate {
	floor := e.floorOf(k)
	switch l := e.limits[k]; {
	case l == nil || l.expires <= now:
		return floor
	case !e.isQuorum: // the other side may divide the limit already
		return min(l.grant, floor)
	default:
		return l.grant
	}
}

// floorOf returns the part of a limit that an edge has without a grant.
func (e *Edge) floorOf(k Key) cc.Rate { return max(1, k.Max/cc.Rate(len(e.members)+1)) }

// Exchange notes the uses of limits until now, divides the limits that the edge owns, and returns a message for each
// other member. A message without entries shows that this edge lives.
func (e *Edge) Exchange(now cc.Time, uses []Use) map[string]*Message {
	e.updateView(now)
	e.noteUses(now, uses)
	out := make(map[string]*Message, len(e.members))
	for name, m := range e.members {
		out[name] = &Message{At: now, Heard: m.at, View: e.view}
	}
	for _, l := range e.limits {
		switch owner := e.ownerFor(l.key, &l.owner); owner {
		case "":
		case e.name:
			e.ledgerOf(l.key).addReport(now, now, e.name, l.makeReport(e, now, owner))
		default:
			out[owner].Reports = append(out[owner].Reports, l.makeReport(e, now, owner))
		}
	}
	mayGrow := e.othersAgree() && now >= e.growsFrom
	for k, d := range e.ledgers {
		if d.dropStale(now); len(d.claims) == 0 {
			delete(e.ledgers, k)
			continue
		}
		if e.ownerFor(k, &d.owner) != e.name {
			continue
		}
		for name, rate := range d.divideLimit(now, len(e.members)+1, mayGrow) {
			if l := e.limits[k]; name == e.name && l != nil {
				l.applyGrant(now, now, now, e.name, rate)
			} else if m := out[name]; m != nil {
				m.Grants = append(m.Grants, Grant{k, rate})
			}
		}
	}
	return out
}

// noteUses updates the limits of this edge. It forgets limits that are absent from uses, or idle.
func (e *Edge) noteUses(now cc.Time, uses []Use) {
	seen := make(map[Key]bool, len(uses))
	for _, u := range uses {
		l := e.limits[u.Key]
		if l == nil {
			if len(e.limits) >= maxLimits {
				continue // it has its floor
			}
			l = &limit{key: u.Key, passed: u.Passed, passedAt: now, usedAt: now}
			e.limits[u.Key] = l
		}
		l.noteUse(now, u, e.Rate(now, u.Key))
		seen[u.Key] = now.Sub(l.usedAt) < idleAfter
	}
	maps.DeleteFunc(e.limits, func(k Key, _ *limit) bool { return !seen[k] })
}

// smoothing is the weight of the newest period in smoothed rates.
const smoothing = 0.4

// noteUse updates l by a use until now. allowed is the rate in force.
func (l *limit) noteUse(now cc.Time, u Use, allowed cc.Rate) {
	if n := u.Passed - l.passed; n > 0 {
		l.usedAt = now
		rate := float64(cc.RateOf(n, now.Sub(l.passedAt)))
		l.sent += smoothing * (rate - l.sent)
	} else {
		l.sent -= smoothing * l.sent
	}
	if u.Held {
		l.usedAt = now
	}
	l.allowed += smoothing * (float64(allowed) - l.allowed)
	l.heldPart -= smoothing * l.heldPart
	if u.Held {
		l.heldPart += smoothing
	}
	l.passed, l.passedAt, l.weight = max(u.Passed, 0), now, max(1, u.Weight)
}

// Flows count as held back by the rate in force if they send limitedFromRate of it, more than a flow needs that has
// all it asks for. What passes in one period jitters: if flows are held back in limitedFromHeld of the periods, half
// of that rate is enough. At a low rate nothing passes for many periods after one write: flows that are held back in
// limitedFromRate of the periods count whatever they send.
//
// The demand of flows that are held back is heldDemand times the rate in force. What they could send is not known, and
// one that sends little must not take all from the others to find out. The demand of other flows exceeds what they
// send by demandHeadroom, so that they can grow.
const (
	limitedFromRate = 0.88
	limitedFromHeld = 0.4
	heldDemand      = 2
	demandHeadroom  = 1.15
)

// makeReport returns the report about l to its owner.
func (l *limit) makeReport(e *Edge, now cc.Time, owner string) Report {
	r := Report{Key: l.key, Demand: cc.Rate(demandHeadroom * l.sent), Sent: cc.Rate(l.sent), Weight: l.weight}
	if l.sent >= limitedFromRate*l.allowed || l.heldPart >= limitedFromRate ||
		l.heldPart >= limitedFromHeld && l.sent >= limitedFromRate*l.allowed/2 {
		r.Demand = cc.Rate(heldDemand * l.allowed)
	}
	r.Demand = min(r.Demand, l.key.Max)
	if r.Rate = e.Rate(now, l.key); l.expires > now && l.granter == owner {
		r.GrantAt = l.grantAt
	}
	return r
}

// applyGrant puts a grant into force, unless it is older than the one in force. at is when the owner sent it, and
// heard when this edge sent the report that it answers.
func (l *limit) applyGrant(now, at, heard cc.Time, granter string, rate cc.Rate) {
	if l.granter == granter && at < l.grantAt && now < l.expires {
		return
	}
	l.grant, l.grantAt, l.granter, l.expires = rate, at, granter, heard.Add(Lease)
}

// Receive handles a message from another edge, which becomes a member if it is none. It ignores a message that is
// older than the newest one. But if none came for Lease, the sender was restarted with a clock that is behind.
func (e *Edge) Receive(now cc.Time, from string, m *Message) {
	if _, gone := e.gone[from]; gone || from == e.name || e.members[from] == nil && !e.AddMember(now, from) {
		return
	}
	p := e.members[from]
	if m.At < p.at && now.Sub(p.heard) <= Lease {
		return
	}
	p.at, p.heard, p.view = m.At, now, m.View
	if m.Heard <= now {
		p.echo = max(p.echo, m.Heard)
	}
	e.updateView(now)
	for _, r := range m.Reports {
		// The sender may know before this edge that this edge owns the limit now.
		if e.ledgers[r.Key] != nil || len(e.ledgers) < maxLimits {
			e.ledgerOf(r.Key).addReport(now, m.At, from, r)
		}
	}
	for _, g := range m.Grants {
		if l := e.limits[g.Key]; l != nil && e.ownerFor(l.key, &l.owner) == from && m.Heard <= now {
			l.applyGrant(now, m.At, m.Heard, from, min(g.Rate, g.Max))
		}
	}
}

// ledgerOf returns the ledger of a limit.
func (e *Edge) ledgerOf(k Key) *ledger {
	d := e.ledgers[k]
	if d == nil {
		d = &ledger{key: k, claims: map[string]*claim{}}
		e.ledgers[k] = d
	}
	return d
}

// MemberState is the state of a member, as this edge knows it.
type MemberState struct {
	Name   string
	Own    bool          // it is this edge
	Live   bool          // it and this edge hear each other
	Silent time.Duration // since it was heard last
}

// Members returns the state of all members, by name, and whether enough of them are heard to divide limits.
func (e *Edge) Members(now cc.Time) (all []MemberState, decides bool) {
	all = []MemberState{{Name: e.name, Own: true, Live: true}}
	for name, m := range e.members {
		all = append(all, MemberState{Name: name, Live: m.isLive(now), Silent: max(0, now.Sub(m.heard))})
	}
	slices.SortFunc(all, func(a, b MemberState) int { return cmp.Compare(a.Name, b.Name) })
	return all, e.isQuorum
}

// LimitState is the state of a shared limit, as this edge knows it.
type LimitState struct {
	Key
	Owner  string  // empty: too few members are heard
	Sent   cc.Rate // by this edge
	Rate   cc.Rate // in force here
	Leased bool    // Rate is a grant; false: the floor
	Claims []ClaimState
}

// ClaimState is an edge's use of a limit, as the limit's owner knows it.
type ClaimState struct {
	Member             string
	Demand, Sent, Rate cc.Rate
}

// Limits returns the state of the limits that flows of this edge use, or that it owns, by group. Only limits that it
// owns have claims.
func (e *Edge) Limits(now cc.Time) []LimitState {
	all := map[Key]*LimitState{}
	for k, l := range e.limits {
		all[k] = &LimitState{
			Key: k, Owner: e.ownerFor(k, &l.owner), Sent: cc.Rate(l.sent), Rate: e.Rate(now, k), Leased: l.expires > now,
		}
	}
	for k, d := range e.ledgers {
		if e.ownerFor(k, &d.owner) != e.name {
			continue
		}
		if all[k] == nil {
			all[k] = &LimitState{Key: k, Owner: e.name, Rate: e.Rate(now, k)}
		}
		all[k].Claims = d.describe()
	}
	out := make([]LimitState, 0, len(all))
	for _, s := range all {
		out = append(out, *s)
	}
	slices.SortFunc(out, func(a, b LimitState) int {
		return cmp.Or(cmp.Compare(a.Group, b.Group), cmp.Compare(a.Max, b.Max))
	})
	return out
}

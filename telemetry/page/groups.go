package page

import (
	"fmt"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

// HintedWithin is the age up to which a hint counts as present.
const HintedWithin = time.Second

// hosts are the groups at one moment.
type hosts struct {
	at, before      cc.Time // before is the time of the reading before this one; 0: there was none
	groups          []flow.Group
	deliveredBefore map[string]cc.Bytes // delivered at before, by Group.Key
	held            map[string]HeldUDP  // by Group.Name
	heldBefore      map[string]HeldUDP  // held at before
	rows            []Host              // of groups; nil until a request wants to see them
}

// SumHeld returns held UDP by the names of groups.
func SumHeld(all []proxy.HeldInfo) map[string]HeldUDP {
	out := map[string]HeldUDP{}
	for _, l := range all {
		for _, c := range l.Clients {
			u := out[c.Group]
			if !strings.Contains(u.AcknowledgedBy, c.AcknowledgedBy) {
				u.AcknowledgedBy = strings.TrimPrefix(u.AcknowledgedBy+", "+c.AcknowledgedBy, ", ")
			}
			u.BusyFlows += c.BusyFlows
			u.Waiting += c.Waiting
			if c.Flow != nil {
				u.Delivered += c.Flow.Delivered
			}
			out[c.Group] = u
		}
	}
	return out
}

// readAfter returns the next reading after h. It also returns the queueing delays of the groups that had bytes
// delivered since h.
func (h hosts) readAfter(groups []flow.Group, held map[string]HeldUDP, now cc.Time) (
	out hosts, delays []time.Duration,
) {
	out = hosts{
		at: now, before: h.at, groups: groups, deliveredBefore: make(map[string]cc.Bytes, len(h.groups)),
		held: held, heldBefore: h.held,
	}
	for i := range h.groups {
		g := &h.groups[i]
		out.deliveredBefore[g.Key] = g.Delivered
	}
	for i := range groups {
		g := &groups[i]
		if g.SRTT > 0 && h.at != 0 && g.Delivered > out.deliveredBefore[g.Key] {
			delays = append(delays, g.QueueingDelay)
		}
	}
	return out, delays
}

// allHosts returns a row for each group. It makes them on the first call.
func (h *hosts) allHosts() []Host {
	if h.rows == nil {
		h.rows = make([]Host, len(h.groups))
		count := map[string]int{}
		for i := range h.groups {
			h.rows[i] = h.hostRow(&h.groups[i])
			count[h.rows[i].Label]++
		}
		for i := range h.rows { // groups of two listeners may have the same label
			if r := &h.rows[i]; count[r.Label] > 1 {
				_, r.Label = parseGroupName(r.Name).labels()
			}
		}
	}
	return h.rows
}

// hostRow returns the row of a group.
func (h *hosts) hostRow(g *flow.Group) Host {
	v := Host{
		Name: g.Name, Algorithm: g.Algorithm, Receives: g.Receives, Phase: g.Phase, Hosts: stringsOf(g.Hosts),
		Members: g.Members, Active: g.Active, Window: g.Cwnd, Inflight: g.Inflight, MinRTT: g.MinRTT.Seconds(),
		LimitedBy: g.LimitedBy.String(), Hinted: g.Hint.Age(h.at) <= HintedWithin, Capped: g.Capped,
		Delivered: g.Delivered,
	}
	name := parseGroupName(g.Name)
	v.Label, _ = name.labels()
	v.Host = name.host
	if v.Window >= cc.MaxCwnd {
		v.Window = 0
	}
	if g.SRTT > 0 {
		v.Queue = new(g.QueueingDelay.Seconds())
	}
	if was, ok := h.deliveredBefore[g.Key]; ok {
		v.Rate = new(rateOf(was, g.Delivered, h.at.Sub(h.before)))
	}
	if u, ok := h.held[g.Name]; ok {
		if was, ok := h.heldBefore[g.Name]; ok {
			u.Rate = new(rateOf(was.Delivered, u.Delivered, h.at.Sub(h.before)))
		}
		v.UDP = &u
	}
	v.Reason, v.Severity = explainGroup(g, v.UDP)
	return v
}

// groupName has the parts of a group's name: the direction and the parts that proxy/policy joins by "|".
type groupName struct {
	direction string // of the bytes: down or up; empty: the name has another form
	listener  string // empty: a rule gives the name
	host      string // the host, network or peer that the bytes go to or come from, or the name that a rule gives
	toServer  bool
	received  bool // the window is a receive window, which the hosts send in
}

// parseGroupName parses the name of a group. A name of another form becomes the host.
func parseGroupName(name string) (n groupName) {
	rest, received := strings.CutPrefix(name, "from ")
	parts := strings.SplitN(rest, "|", 3)
	if len(parts) < 2 {
		return groupName{host: name}
	}
	n = groupName{direction: parts[0], host: parts[len(parts)-1], received: received}
	if len(parts) == 3 {
		n.listener = parts[1]
	}
	n.host, n.toServer = strings.CutPrefix(strings.TrimPrefix(n.host, "through "), "to ")
	return n
}

// sends reports whether the bytes of the group come from its host.
func (n groupName) sends() bool { return (n.direction == "up") != n.toServer }

// labels returns what an operator calls the group. full ends with the listener, if the name has one.
func (n groupName) labels() (label, full string) {
	usual := "down" // the label leaves this direction out
	if n.toServer {
		usual = "up"
	}
	switch {
	case n.host == "":
		label = "all of " + n.listener
	case n.received:
		label, usual = "from "+n.host, n.direction
	case n.toServer:
		label = "to " + n.host
	default:
		label = n.host
	}
	switch {
	case n.direction == "":
		return n.host, n.host
	case n.direction != usual:
		label += ", " + n.direction
	}
	if n.listener == "" || n.host == "" {
		return label, label
	}
	return label, label + " (" + n.listener + ")"
}

// stringsOf returns the elements of a list as text; never nil.
func stringsOf[T fmt.Stringer](list []T) []string {
	all := make([]string, len(list))
	for i, v := range list {
		all[i] = v.String()
	}
	return all
}

// udpRate returns the rate of held UDP, nil if it is not known.
func (h *Host) udpRate() *cc.Rate {
	if h.UDP == nil {
		return nil
	}
	return h.UDP.Rate
}

// isOfHost reports whether the window is one of a host.
func (h *Host) isOfHost(host string) bool { return h.Host == host }

// searchWords appends the words that a search finds the host by.
func (h *Host) searchWords(to []byte) []byte {
	return appendWords(to, h.Label, h.Name, h.Algorithm, h.Phase, h.LimitedBy, h.Reason, strings.Join(h.Hosts, " "))
}

// peers are those of tunnels at one moment.
type peers struct {
	at    cc.Time
	all   []Peer
	moved map[string][2]uint64 // received and sent, by listener and name
}

// readAfter returns the next reading after p. wall is the date.
func (p peers) readAfter(tunnels []proxy.TunnelInfo, now cc.Time, wall time.Time) peers {
	out := peers{at: now, moved: map[string][2]uint64{}}
	add := func(v Peer, key string) {
		key = v.Listener + "\x00" + key
		out.moved[key] = [2]uint64{v.Received, v.Sent}
		if was, ok := p.moved[key]; ok && now.Sub(p.at) <= maxRateSpan {
			d := now.Sub(p.at)
			v.Up = new(rateOf(cc.Bytes(was[0]), cc.Bytes(v.Received), d))
			v.Down = new(rateOf(cc.Bytes(was[1]), cc.Bytes(v.Sent), d))
		}
		out.all = append(out.all, v)
	}
	for _, t := range tunnels {
		for _, s := range t.Peers {
			v := Peer{
				Listener: t.Listener, Mode: t.Mode, Name: s.Name, Addresses: stringsOf(s.Addresses),
				Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent,
			}
			if !s.Handshake.IsZero() {
				v.Handshake = new(max(0, wall.Sub(s.Handshake).Seconds()))
			}
			add(v, s.PublicKey.String())
		}
		for _, s := range t.Sessions {
			add(Peer{
				Listener: t.Listener, Mode: t.Mode, Name: s.Name, Addresses: stringsOf(s.Addresses),
				Endpoint: s.Endpoint, Received: s.Received, Sent: s.Sent,
			}, fmt.Sprint(s.Name, "\x00", s.Endpoint, s.Addresses))
		}
	}
	return out
}

// searchWords appends the words that a search finds the peer by.
func (p *Peer) searchWords(to []byte) []byte {
	return appendWords(to, p.Listener, p.Mode, p.Name, p.Endpoint, strings.Join(p.Addresses, " "))
}

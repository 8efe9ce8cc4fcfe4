package fleet

import "github.com/penstock-net/penstock/cc"

// Status is an edge's view of its fleet, as GET /v1/fleet shows it. Rates are in bits per second.
type Status struct {
	Name string `json:"name"`
	// Decides is false while less than half of the members are heard: then each has one Nth of every shared limit.
	Decides bool     `json:"decides"`
	Members []Member `json:"members"`
	Limits  []Limit  `json:"limits"`
	// Counts since the start.
	Sent       uint64 `json:"messages_sent"`
	Received   uint64 `json:"messages_received"`
	Refused    uint64 `json:"messages_refused"`
	Remembered uint64 `json:"hosts_remembered"` // memories of hosts from edges that drained
}

// Member is one edge.
type Member struct {
	Name    string  `json:"name"`
	Address string  `json:"address,omitempty"` // absent of this edge
	Own     bool    `json:"own,omitempty"`
	Live    bool    `json:"live"`
	Silent  float64 `json:"silent_seconds"`
}

// Limit is a shared maximum rate.
type Limit struct {
	Group   string  `json:"group"`
	MaxRate cc.Rate `json:"max_rate"`
	Owner   string  `json:"owner,omitempty"` // absent: too few members are heard
	Sent    cc.Rate `json:"sent"`            // by this edge
	Rate    cc.Rate `json:"rate"`            // this edge's part
	Granted bool    `json:"granted"`         // false: Rate is one Nth, which needs no grant
	Claims  []Claim `json:"claims,omitempty"`
}

// Claim is an edge's use of a limit, as the limit's owner knows it.
type Claim struct {
	Member string  `json:"member"`
	Demand cc.Rate `json:"demand"`
	Sent   cc.Rate `json:"sent"`
	Rate   cc.Rate `json:"rate"`
}

// Status returns the current state.
func (f *Fleet) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.readClock()
	members, decides := f.edge.Members(now)
	s := Status{
		Name: f.cfg.EdgeName(), Decides: decides, Members: []Member{}, Limits: []Limit{},
		Sent: f.sent.Load(), Received: f.received.Load(), Refused: f.refused.Load(), Remembered: f.remembered.Load(),
	}
	for _, m := range members {
		out := Member{Name: m.Name, Own: m.Own, Live: m.Live, Silent: m.Silent.Seconds()}
		if node, ok := f.nodes[m.Name]; ok {
			out.Address = node.Address()
		}
		s.Members = append(s.Members, out)
	}
	for _, l := range f.edge.Limits(now) {
		out := Limit{
			Group: l.Group, MaxRate: l.Max, Owner: l.Owner, Sent: l.Sent, Rate: l.Rate, Granted: l.Leased,
		}
		for _, c := range l.Claims {
			out.Claims = append(out.Claims, Claim(c))
		}
		s.Limits = append(s.Limits, out)
	}
	return s
}

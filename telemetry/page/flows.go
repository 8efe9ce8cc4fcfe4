package page

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

// row is what is kept of a flow from one look to the next.
type row struct {
	id                                 uint64
	state                              proxy.State
	listener, rule, peer, host, server string
	client, target                     netip.AddrPort
	age, idle                          time.Duration
	down, up                           side
	groups                             [2]string // hosts of the groups of down and up
}

// side is one direction of a row, as far as the page shows and sorts it.
type side struct {
	algorithm, phase             string
	bytes                        cc.Bytes
	rate                         cc.Rate
	rateKnown                    bool
	managed                      bool // a window of ours is in force; the fields below are set only then
	window, inflight, lost       cc.Bytes
	pacing                       cc.Rate
	queue, srtt, min, limitedFor time.Duration
	limitedBy                    flow.LimitedBy
}

// rowOf keeps of a connection what the page shows.
func rowOf(f *proxy.FlowInfo) row {
	r := row{
		id: f.ID, state: f.State, listener: f.Listener, rule: f.Rule, peer: f.Peer, host: f.Host, server: f.ServerName,
		client: f.Source, target: f.Target, age: f.Age, idle: f.Idle,
	}
	if f.Relayed() {
		r.down, r.up = sideOf(&f.Down), sideOf(&f.Up)
		r.groups = [2]string{parseGroupName(f.Down.Flow.Group).host, parseGroupName(f.Up.Flow.Group).host}
	}
	return r
}

// sideOf keeps of a direction what the page shows.
func sideOf(d *proxy.DirectionInfo) side {
	s := side{algorithm: d.Algorithm, bytes: d.Written}
	if d.Managed {
		f := &d.Flow
		s.managed, s.phase, s.window, s.inflight, s.lost = true, f.Phase, f.Share, f.Inflight, f.Lost
		s.pacing, s.queue, s.srtt, s.min = f.PacingRate, f.QueueingDelay, f.SRTT, f.MinRTT
		s.limitedBy, s.limitedFor = f.LimitedBy, f.Limited[f.LimitedBy]
	}
	return s
}

// updateRate sets the rate since before, over a time of d.
func (s *side) updateRate(before side, d time.Duration) {
	s.rateKnown, s.rate = true, rateOf(before.bytes, s.bytes, d)
}

// updateRates fills in the rates of rows, which are in the order of their numbers as
// those before are.
func updateRates(rows, before []row, d time.Duration) {
	i := 0
	for n := range rows {
		r := &rows[n]
		for i < len(before) && before[i].id < r.id {
			i++
		}
		var was row
		lived := d // a flow that was not there before has moved all it has since
		if i < len(before) && before[i].id == r.id {
			was = before[i]
		} else {
			lived = min(d, r.age)
		}
		if lived <= 0 {
			continue
		}
		r.down.updateRate(was.down, lived)
		r.up.updateRate(was.up, lived)
	}
}

// main returns the direction with the greater rate; with equal rates, the one with more bytes.
func (r *row) main() (name string, s *side) {
	if r.up.rate > r.down.rate || r.up.rate == r.down.rate && r.up.bytes > r.down.bytes {
		return "up", &r.up
	}
	return "down", &r.down
}

// flowView is the row as JSON.
func (r *row) flowView() Flow {
	out := Flow{
		ID: r.id, State: string(r.state), Listener: r.listener, Rule: r.rule, Peer: r.peer,
		Host: r.host, ServerName: r.server, Age: r.age.Seconds(), Idle: r.idle.Seconds(),
		Down: r.down.sideView(r.age), Up: r.up.sideView(r.age),
	}
	out.Main, _ = r.main()
	if r.client.IsValid() {
		out.Client = r.client.String()
	}
	if r.target.IsValid() {
		out.Target = r.target.String()
	}
	return out
}

// sideView is the direction as JSON, of a flow of that age. A rate that is not known yet is absent.
func (s *side) sideView(age time.Duration) Side {
	out := Side{Algorithm: s.algorithm, Phase: s.phase, Bytes: s.bytes}
	if s.rateKnown {
		out.Rate = &s.rate
	}
	if !s.managed {
		return out
	}
	out.Inflight, out.Lost, out.Pacing = s.inflight, s.lost, s.pacing
	if s.window < cc.MaxCwnd {
		out.Window = s.window
	}
	if s.srtt > 0 {
		out.Queue = new(s.queue.Seconds())
	}
	out.SRTT, out.MinRTT = s.srtt.Seconds(), s.min.Seconds()
	out.LimitedBy, out.Limited = s.limitedBy.String(), s.limitedFor.Seconds()
	part := min(1, s.limitedFor.Seconds()/max(age.Seconds(), 1e-3))
	out.Reason = fmt.Sprintf("%s, %.0f %%", limits[s.limitedBy], 100*part)
	return out
}

// isOf reports whether a host is the client, or shares one of the flow's windows.
func (r *row) isOf(host string) bool {
	return host == r.groups[0] || host == r.groups[1] || host == r.peer || host == r.client.Addr().String()
}

// searchWords appends what a search looks at.
func (r *row) searchWords(to []byte) []byte {
	if r.client.IsValid() {
		to = r.client.AppendTo(to)
	}
	if to = append(to, ' '); r.target.IsValid() {
		to = r.target.AppendTo(to)
	}
	words := []string{r.host, r.server, r.listener, r.rule, r.peer, string(r.state), r.down.algorithm, r.up.algorithm}
	if _, s := r.main(); s.managed {
		words = append(words, s.limitedBy.String(), limits[s.limitedBy])
	}
	return appendWords(to, words...)
}

package page

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
)

// row is what the page shows of a connection. It is kept until the next reading, for the rates.
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

// rowOf returns the row of a connection.
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

// sideOf returns one direction of a row.
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

// updateRates fills in the rates of rows over the time d since before. Both are in the order of flow numbers.
func updateRates(rows, before []row, d time.Duration) {
	i := 0
	for n := range rows {
		r := &rows[n]
		for i < len(before) && before[i].id < r.id {
			i++
		}
		var was row
		lived := d // for a new flow it is its age, because it has moved all its bytes since it began
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

// busierSide returns the direction with the greater rate; with equal rates, the one with more bytes.
func (r *row) busierSide() (name string, s *side) {
	if r.up.rate > r.down.rate || r.up.rate == r.down.rate && r.up.bytes > r.down.bytes {
		return "up", &r.up
	}
	return "down", &r.down
}

// flowView returns the row as JSON has it.
func (r *row) flowView() Flow {
	out := Flow{
		ID: r.id, State: string(r.state), Listener: r.listener, Rule: r.rule, Peer: r.peer,
		Host: r.host, ServerName: r.server, Age: r.age.Seconds(), Idle: r.idle.Seconds(),
		Down: r.down.sideView(r.age), Up: r.up.sideView(r.age),
	}
	out.Main, _ = r.busierSide()
	if r.client.IsValid() {
		out.Client = r.client.String()
	}
	if r.target.IsValid() {
		out.Target = r.target.String()
	}
	return out
}

// sideView returns the direction as JSON has it, for a flow of that age. A rate that is not known yet is absent.
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
	out.Reason = fmt.Sprintf("%s, %.0f %%", limitWords[s.limitedBy], 100*part)
	return out
}

// isOfHost reports whether a host is the client, or shares one of the flow's windows.
func (r *row) isOfHost(host string) bool {
	return host == r.groups[0] || host == r.groups[1] || host == r.peer || host == r.client.Addr().String()
}

// searchWords appends the words that a search finds the flow by.
func (r *row) searchWords(to []byte) []byte {
	if r.client.IsValid() {
		to = r.client.AppendTo(to)
	}
	if to = append(to, ' '); r.target.IsValid() {
		to = r.target.AppendTo(to)
	}
	words := []string{r.host, r.server, r.listener, r.rule, r.peer, string(r.state), r.down.algorithm, r.up.algorithm}
	if _, s := r.busierSide(); s.managed {
		words = append(words, s.limitedBy.String(), limitWords[s.limitedBy])
	}
	return appendWords(to, words...)
}

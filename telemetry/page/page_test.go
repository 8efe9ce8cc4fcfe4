package page

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// hand is a proxy that a test moves by hand.
type hand struct {
	at       cc.Time
	counters proxy.Counters
	flows    []proxy.FlowInfo
	groups   []flow.Group
	held     []proxy.HeldInfo
	tunnels  []proxy.TunnelInfo
	looks    int
}

func (h *hand) Counters() proxy.Counters { return h.counters }
func (h *hand) Flows() (int, iter.Seq[*proxy.FlowInfo]) {
	h.looks++
	return len(h.flows), func(yield func(*proxy.FlowInfo) bool) {
		for i := range h.flows {
			if !yield(&h.flows[i]) {
				return
			}
		}
	}
}

func (h *hand) Held() []proxy.HeldInfo          { return h.held }
func (h *hand) Groups() ([]flow.Group, cc.Time) { return slices.Clone(h.groups), h.at }
func (h *hand) Tunnels() []proxy.TunnelInfo     { return h.tunnels }

// begin is the date when a hand's clock shows nothing.
var begin = time.Unix(1_700_000_000, 0)

func (h *hand) page(more ...func(*Options)) *Page {
	o := Options{
		Source: h, Version: "v1", Start: 5, Clock: func() cc.Time { return h.at },
		Wall: func() time.Time { return begin.Add(time.Duration(h.at)) },
	}
	for _, m := range more {
		m(&o)
	}
	return New(o)
}

// later moves the clock, and bytes of flows and of listener lan on.
func (h *hand) later(d time.Duration, down, up cc.Bytes) {
	h.at = h.at.Add(d)
	h.flows = append([]proxy.FlowInfo{}, h.flows...)
	for i := range h.flows {
		h.flows[i].Age += d
		h.flows[i].Down.Written += down
		h.flows[i].Up.Written += up
	}
	n := cc.Bytes(len(h.flows))
	r := proxy.RouteCounters{Listener: "lan"}
	if len(h.counters.Routes) > 0 {
		r = h.counters.Routes[0]
	}
	r.Down.Written += n * down
	r.Up.Written += n * up
	h.counters.Routes = []proxy.RouteCounters{r}
}

func managed(id uint64, host string, queue time.Duration) proxy.FlowInfo {
	side := proxy.DirectionInfo{Algorithm: "copa", Managed: true, Flow: flow.Snapshot{
		Algorithm: "copa", Phase: "steady", Share: 3000, Inflight: 1000, SRTT: 20*time.Millisecond + queue, MinRTT: 20 * time.Millisecond,
		QueueingDelay: queue, LimitedBy: flow.LimitedByCwnd, Limited: flow.LimitedTime{flow.LimitedByCwnd: 3 * time.Second},
	}}
	return proxy.FlowInfo{
		ID: id, Listener: "lan", Rule: "all", State: proxy.StateOpen, Host: host, Age: time.Second,
		Source: netip.AddrPortFrom(netip.MustParseAddr("192.0.2.7"), uint16(1000+id)), Down: side,
		Up: proxy.DirectionInfo{Algorithm: "none"},
	}
}

// ask asks for a view.
func ask(t *testing.T, p *Page, parameters string) (v View) {
	t.Helper()
	mux := http.NewServeMux()
	p.Register(mux)
	rec := httptest.NewRecorder()
	mux.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/v1/view?"+parameters, http.NoBody))
	require.Equal(t, http.StatusOK, rec.Code, rec.Body.String())
	require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &v))
	return v
}

func TestRatesAreThoseBetweenTwoLooks(t *testing.T) {
	h := &hand{at: cc.Time(time.Second), flows: []proxy.FlowInfo{
		managed(1, "a", 10*time.Millisecond),
		managed(2, "b", 30*time.Millisecond),
	}}
	h.counters.Listeners = []proxy.ListenerCounters{{
		Listener: "lan", Mode: "mixed", Active: 2, Accepted: 7,
		Rejected: map[proxy.Reason]uint64{"limit": 3},
	}}
	h.counters.Active, h.counters.Limit = 2, 100
	h.later(0, 500, 0)
	p := h.page()
	v := ask(t, p, "")
	assert.Nil(t, v.Flows[0].Down.Rate, "not known yet")
	assert.Zero(t, v.Totals.Down)

	h.later(2*time.Second, 250_000, 1000)
	v = ask(t, p, "")
	require.Len(t, v.Flows, 2)
	assert.Equal(t, cc.Rate(1_000_000), *v.Flows[0].Down.Rate)
	assert.Equal(t, cc.Rate(4000), *v.Flows[0].Up.Rate)
	assert.Equal(t, cc.Rate(2_000_000), v.Totals.Down)
	assert.Equal(t, Listener{
		Name: "lan", Mode: "mixed", Active: 2, Accepted: 7, Refused: 3, Down: 2_000_000,
		Up: 8000,
	}, v.Listeners[0])
	f := v.Flows[0]
	assert.Equal(t, "down", f.Main)
	assert.Equal(t, "cwnd", f.Down.LimitedBy)
	assert.InDelta(t, 3, f.Down.Limited, 1e-9)
	assert.InDelta(t, .01, *f.Down.Queue, 1e-9)
	assert.Nil(t, f.Up.Queue, "the kernel's alone")

	// A flow that has come since has moved all it has since it came.
	late := managed(3, "c", 0)
	late.Age, late.Down.Written = 500*time.Millisecond, 1000
	h.later(time.Second, 0, 0)
	h.flows = append(h.flows, late)
	v = ask(t, p, "detail=3")
	assert.Equal(t, cc.Rate(16_000), *v.Detail.Down.Rate)
	assert.Nil(t, ask(t, p, "detail=4").Detail)
}

func TestTheHistoryHasTheQueuesOfHostsThatReceive(t *testing.T) {
	group := func(name string, delivered cc.Bytes, queue time.Duration) flow.Group {
		return flow.Group{Key: name, Name: name, Delivered: delivered, SRTT: time.Second, QueueingDelay: queue}
	}
	h := &hand{at: 1, groups: []flow.Group{
		group("a", 100, 10*time.Millisecond), group("b", 100, 30*time.Millisecond), group("c", 100, time.Second),
	}}
	p := h.page()
	p.AddPoint()
	h.later(step, 0, 0)
	h.groups[0].Delivered, h.groups[1].Delivered = 200, 101
	p.AddPoint()
	assert.Zero(t, h.looks, "a point needs no look at every flow")
	v := ask(t, p, "")
	assert.InDelta(t, .03, *v.Totals.Queue95, 1e-9)
	assert.InDelta(t, .03, *v.History.Points[0].Queue95, 1e-9)
	h.later(step, 0, 0)
	p.AddPoint()
	assert.Nil(t, ask(t, p, "").Totals.Queue50, "nobody has received anything since")
}

func TestOneLookServesAllWhoAsk(t *testing.T) {
	h := &hand{at: 1, flows: []proxy.FlowInfo{managed(1, "a", 0)}}
	p := h.page()
	for range 10 {
		ask(t, p, "")
		h.later(50*time.Millisecond, 1, 1)
	}
	assert.Equal(t, 1, h.looks)
	h.later(time.Second, 1, 1)
	ask(t, p, "")
	assert.Equal(t, 2, h.looks)
}

// slow is a proxy that takes its time to look at.
type slow struct {
	*hand
	takes time.Duration
}

func (s slow) Flows() (int, iter.Seq[*proxy.FlowInfo]) {
	s.at = s.at.Add(s.takes)
	return s.hand.Flows()
}

func TestLookingTakesAFortiethOfTheTimeAtMost(t *testing.T) {
	h := &hand{at: 1}
	p := h.page(func(o *Options) { o.Source = slow{h, 100 * time.Millisecond} })
	assert.InDelta(t, 4, ask(t, p, "").Fresh, 1e-9)
	h.at = h.at.Add(3 * time.Second)
	ask(t, p, "")
	assert.Equal(t, 1, h.looks)
	h.at = h.at.Add(time.Second)
	ask(t, p, "")
	assert.Equal(t, 2, h.looks)
}

func TestRowsAreFoundSortedAndCut(t *testing.T) {
	h := &hand{at: 1}
	for i := range 200 {
		h.flows = append(h.flows, managed(uint64(i+1), fmt.Sprintf("Server%d.example", i%20),
			time.Duration(i%50)*time.Millisecond))
	}
	p := h.page()
	v := ask(t, p, "sort=-queue&rows=3")
	assert.Equal(t, []int{200, 200, 3}, []int{v.Total, v.Matches, len(v.Flows)})
	assert.Equal(t, []uint64{50, 100, 150}, []uint64{v.Flows[0].ID, v.Flows[1].ID, v.Flows[2].ID},
		"equal rows stay in order")
	v = ask(t, p, "sort=-queue&rows=3&offset=3")
	assert.EqualValues(t, 200, v.Flows[0].ID)
	v = ask(t, p, "q=SERVER7.&rows=2")
	assert.Equal(t, []int{200, 10, 2}, []int{v.Total, v.Matches, len(v.Flows)})
	assert.Equal(t, 1, ask(t, p, "q=192.0.2.7:1200").Matches)
	assert.Equal(t, 200, ask(t, p, "q=cwnd").Matches)
	assert.Equal(t, 200, ask(t, p, "q=window").Matches, "as the page shows it")
	assert.Zero(t, ask(t, p, "q=nowhere").Matches)
	assert.Empty(t, ask(t, p, "offset=1000").Flows)
	for table, keys := range columns {
		for _, key := range keys {
			ask(t, p, "table="+table+"&sort="+key)
			ask(t, p, "table="+table+"&sort=-"+key)
		}
	}
}

func TestHostsAndPeers(t *testing.T) {
	h := &hand{at: cc.Time(time.Second), groups: []flow.Group{
		{
			Name: "down|lan|192.0.2.7", Algorithm: "copa", Hosts: []netip.Addr{netip.MustParseAddr("192.0.2.7")},
			Cwnd: cc.MaxCwnd, Delivered: 1000,
		},
	}, tunnels: []proxy.TunnelInfo{{Listener: "vpn", Mode: "wireguard", Status: tunnel.Status{
		Peers: []tunnel.PeerState{{
			Name: "phone", PublicKey: access.Key{1}, Handshake: begin.Add(-time.Minute),
			Received: 10, Sent: 100,
		}, {Name: "tablet", PublicKey: access.Key{2}}},
		Sessions: []tunnel.SessionState{{Name: "laptop", Addresses: []netip.Addr{netip.MustParseAddr("10.9.0.9")}}},
	}}}}
	held := []hold.ClientState{
		{Group: "down|lan|192.0.2.7", AcknowledgedBy: "echo", BusyFlows: 2, Waiting: 3, Flow: &flow.Snapshot{Delivered: 500}},
		{Group: "down|lan|192.0.2.7", AcknowledgedBy: "share", BusyFlows: 1},
	}
	h.held = []proxy.HeldInfo{{Listener: "lan", Clients: held}}
	p := h.page()
	assert.Nil(t, ask(t, p, "table=hosts").Hosts[0].Rate)
	assert.Nil(t, ask(t, p, "table=hosts").Hosts[0].UDP.Rate)
	assert.Nil(t, ask(t, p, "table=peers").Peers[0].Down)
	h.later(time.Second, 0, 0)
	other := h.groups[0] // by other parameters, as after a change
	other.Key, other.Delivered = "other", 1e9
	h.groups = []flow.Group{h.groups[0], other}
	h.groups[0].Delivered += 125
	held[0].Flow.Delivered += 250
	h.tunnels[0].Peers[0].Sent += 250
	v := ask(t, p, "table=hosts")
	assert.Equal(t, cc.Rate(1000), *v.Hosts[0].Rate)
	assert.Zero(t, v.Hosts[0].Window, "without a bound")
	assert.Equal(t, &HeldUDP{
		AcknowledgedBy: "echo, share", BusyFlows: 3, Waiting: 3, Delivered: 750, Rate: new(cc.Rate(2000)),
	}, v.Hosts[0].UDP)
	v = ask(t, p, "table=peers&sort=-handshake")
	assert.Equal(t, "phone", v.Peers[0].Name)
	assert.InDelta(t, 62, *v.Peers[0].Handshake, .01)
	assert.Equal(t, cc.Rate(2000), *v.Peers[0].Down)
	v = ask(t, p, "table=peers&q=10.9.0.9")
	assert.Equal(t, []string{"10.9.0.9"}, v.Peers[0].Addresses)
}

// A client may have several sessions over one connection; each has a rate of its own.
func TestSessionsOfOneConnectionAreToldApart(t *testing.T) {
	session := func(address string, sent uint64) tunnel.SessionState {
		return tunnel.SessionState{
			Name: "laptop", Endpoint: "198.51.100.7:4000", Sent: sent,
			Addresses: []netip.Addr{netip.MustParseAddr(address)},
		}
	}
	h := &hand{at: cc.Time(time.Second), tunnels: []proxy.TunnelInfo{{Listener: "masque", Status: tunnel.Status{
		Sessions: []tunnel.SessionState{session("10.9.0.2", 1_000_000), session("10.9.0.3", 500)},
	}}}}
	p := h.page()
	ask(t, p, "table=peers")
	h.later(time.Second, 0, 0)
	h.tunnels[0].Sessions[1].Sent += 125
	v := ask(t, p, "table=peers")
	require.Len(t, v.Peers, 2)
	assert.Equal(t, []cc.Rate{0, 1000}, []cc.Rate{*v.Peers[0].Down, *v.Peers[1].Down})
}

// TestAHostHasAViewOfItsOwn has a host with two connections, two windows and a proof, beside another host.
func TestAHostHasAViewOfItsOwn(t *testing.T) {
	h := &hand{at: 1, groups: []flow.Group{
		{
			Key: "d", Name: "down|lan|192.0.2.7", Members: 2, Active: 1, SRTT: time.Second,
			QueueingDelay: 300 * time.Millisecond,
		},
		{Key: "u", Name: "up|lan|192.0.2.7", Members: 2},
		{Key: "other", Name: "down|lan|192.0.2.9", Members: 1, Active: 1, SRTT: time.Second},
	}}
	for id := range uint64(3) {
		h.flows = append(h.flows, managed(id+1, "a.example", 0))
	}
	h.flows[1].Rule = ""
	h.flows[2].Source = netip.MustParseAddrPort("192.0.2.9:1000")
	p := h.page(func(o *Options) {
		o.Gains = func() []Gain {
			return []Gain{
				{Host: "192.0.2.7", Text: "half"},
				{Host: "192.0.2.9", Text: "none"},
				{Rules: []string{"canary", ""}, Text: "a third"},
			}
		}
	})
	p.AddPoint()
	for range 2 * int(hostStep/step) {
		h.later(step, 125_000, 1000)
		h.groups[0].Delivered += 250_000
		h.groups[1].Delivered += 2500
		ask(t, p, "host=192.0.2.7")
		p.AddPoint()
	}
	v := ask(t, p, "host=192.0.2.7&table=hosts")
	assert.Equal(t, &Focus{
		Host: "192.0.2.7", Connections: 2, Down: 400_000, Up: 3200, Rules: []string{"", "all"}, Queue: new(0.3),
		Reason: "long queue: others fill it, since it asks for less", Severity: Bad,
		Gains: []string{"half", "a third"},
	}, v.Focus)
	assert.Len(t, v.Gains, 3)
	assert.Equal(t, []string{"192.0.2.7", "192.0.2.7, up"}, []string{v.Hosts[0].Label, v.Hosts[1].Label})
	require.Len(t, v.History.Points, 2)
	assert.Equal(t, []cc.Rate{400_000, 4000}, []cc.Rate{v.History.Points[1].Down, v.History.Points[1].Up})
	assert.InDelta(t, 0.3, *v.History.Points[1].Queue95, 1e-9)
	assert.Len(t, ask(t, p, "host=192.0.2.7").Flows, 2)

	unknown := ask(t, p, "host=192.0.2.8")
	assert.Equal(t, &Focus{Host: "192.0.2.8", Rules: []string{}}, unknown.Focus)
	assert.Empty(t, unknown.Flows)
	assert.Empty(t, unknown.History.Points)
}

// TestHistoriesOfHostsAreBounded has more hosts than histories. Those that move nothing give way.
func TestHistoriesOfHostsAreBounded(t *testing.T) {
	var all hostHistories
	groups := make([]flow.Group, maxHostHistories+10)
	moved := func(from, to int, at time.Duration) {
		for i := from; i < to; i++ {
			groups[i].Delivered += 1000
		}
		all.addPoints(groups, cc.Time(at), at.Seconds())
	}
	for i := range groups {
		groups[i].Key = fmt.Sprint(i)
		groups[i].Name = "down|lan|host" + groups[i].Key
	}
	moved(0, 0, time.Second)
	moved(0, maxHostHistories, 2*time.Second)
	moved(0, len(groups), 3*time.Second)
	require.Len(t, all.byHost, maxHostHistories)
	assert.NotContains(t, all.byHost, groups[maxHostHistories].Name)
	moved(10, len(groups), 3*time.Second+quietHistory)
	require.Len(t, all.byHost, maxHostHistories)
	assert.Contains(t, all.byHost, fmt.Sprint("host", maxHostHistories+9))
	assert.NotContains(t, all.byHost, "host3")
}

// TestGroupsSayHowTheyDo has a group for each thing that may be said, in the order of the list: the worst first.
func TestGroupsSayHowTheyDo(t *testing.T) {
	late := func(by flow.LimitedBy, queue time.Duration, more ...func(*flow.Group)) flow.Group {
		g := flow.Group{Active: 1, Members: 1, SRTT: time.Second, QueueingDelay: queue, LimitedBy: by}
		for _, m := range more {
			m(&g)
		}
		return g
	}
	holds := func(inflight cc.Bytes) func(*flow.Group) {
		return func(g *flow.Group) { g.Inflight, g.DeliveryRate = inflight, 800_000 }
	}
	held := []hold.ClientState{{Group: "4", AcknowledgedBy: "none", BusyFlows: 1}}
	h := &hand{at: 1, held: []proxy.HeldInfo{{Clients: held}}}
	want := []string{
		"long queue: it fills the link itself", "long queue: 3.0 Mbit/s go there past its window",
		"long queue: its receive window is the limit", "hints state more than arrives",
		"UDP passes: nothing acknowledges it",
		"fills its link", "held below its window by a limit", "has all that it asks for", "idle", "no connection",
	}
	h.groups = []flow.Group{
		late(flow.LimitedByApplication, time.Second, holds(60_000)),
		late(flow.LimitedByCwnd, 300*time.Millisecond, func(g *flow.Group) { g.RivalRate, g.DeliveryRate = 3e6, 9e6 }),
		late(flow.LimitedByReceiver, 100*time.Millisecond, holds(10_000)),
		late(flow.LimitedByCwnd, 50*time.Millisecond, func(g *flow.Group) { g.HintDoubt = flow.HintTooHigh }),
		late(flow.LimitedByCwnd, 40*time.Millisecond),
		late(flow.LimitedByCwnd, 30*time.Millisecond),
		late(flow.LimitedByCwnd, 20*time.Millisecond, func(g *flow.Group) { g.Capped = true }),
		late(flow.LimitedByApplication, 10*time.Millisecond),
		{Members: 1, SRTT: time.Second, QueueingDelay: time.Second},
		{},
	}
	for i := range h.groups {
		h.groups[i].Name = fmt.Sprint(i)
		h.groups[i].Key = fmt.Sprint(i)
	}
	slices.Reverse(h.groups)
	var said []string
	for _, g := range ask(t, h.page(), "table=hosts").Hosts {
		said = append(said, g.Reason)
	}
	assert.Equal(t, want, said)
}

// csvOf asks for a table as CSV and returns its rows by the names of columns.
func csvOf(t *testing.T, p *Page, parameters string, header http.Header) []map[string]string {
	t.Helper()
	mux := http.NewServeMux()
	p.Register(mux)
	rec, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/v1/view?"+parameters, http.NoBody)
	r.Header = header
	mux.ServeHTTP(rec, r)
	require.Equal(t, "text/csv; charset=utf-8", rec.Header().Get("Content-Type"), rec.Body.String())
	all, err := csv.NewReader(rec.Body).ReadAll()
	require.NoError(t, err)
	var rows []map[string]string
	for _, row := range all[1:] {
		named := map[string]string{}
		for i, name := range all[0] {
			named[name] = row[i]
		}
		require.Len(t, named, len(row), "two columns have one name")
		rows = append(rows, named)
	}
	return rows
}

func TestTablesAsCSV(t *testing.T) {
	h := &hand{at: 1, groups: []flow.Group{{Key: "a", Name: "down|lan|192.0.2.7", Delivered: 1e9, Algorithm: "copa"}}}
	h.tunnels = []proxy.TunnelInfo{{Listener: "vpn", Status: tunnel.Status{Peers: []tunnel.PeerState{{
		Name: "phone", Addresses: []netip.Prefix{
			netip.MustParsePrefix("10.9.0.2/32"), netip.MustParsePrefix("fd00::2/128"),
		},
	}}}}}
	h.counters.Listeners = []proxy.ListenerCounters{{Listener: "lan", Mode: "mixed", Accepted: 12}}
	for id := range uint64(3 * maxRows) {
		h.flows = append(h.flows, managed(id+1, "=HYPERLINK(\"x\")", 0))
	}
	p := h.page()
	rows := csvOf(t, p, "format=csv&rows=2&offset=7&sort=age", nil)
	require.Len(t, rows, 3*maxRows, "all of them")
	assert.Equal(t, "'=HYPERLINK(\"x\")", rows[0]["host"], "no formula")
	assert.Equal(t, []string{"192.0.2.7:1001", "3000", "window, 100 %", "", "none"}, []string{
		rows[0]["client"], rows[0]["down_window_bytes"], rows[0]["down_reason"],
		rows[0]["up_window_bytes"], rows[0]["up_algorithm"],
	})
	assert.Len(t, csvOf(t, p, "q=1007", http.Header{"Accept": {"text/csv"}}), 1)
	host := csvOf(t, p, "table=hosts&format=csv", nil)[0]
	assert.Equal(t, []string{"192.0.2.7", "1000000000", "no connection", ""}, []string{
		host["label"], host["delivered_bytes"], host["reason"], host["held_udp_acknowledged_by"],
	})
	assert.Equal(t, "10.9.0.2/32 fd00::2/128", csvOf(t, p, "table=peers&format=csv", nil)[0]["addresses"])
	assert.Equal(t, "12", csvOf(t, p, "table=listeners&format=csv", nil)[0]["accepted"])
	p.o.Events.addEvent(1.5, slog.LevelWarn, "a, \"b\"", 2)
	assert.Equal(t, []map[string]string{{"t": "1.5", "level": "WARN", "text": `a, "b"`, "count": "2"}},
		csvOf(t, p, "table=events&format=csv&events=1", nil))
}

func TestTheHistoryIsAnHourAtMost(t *testing.T) {
	const points = int(time.Hour / step)
	h := &hand{at: 1, flows: []proxy.FlowInfo{managed(1, "a", 5*time.Millisecond)}}
	h.later(0, 0, 0)
	p := h.page()
	p.AddPoint()
	for range points + 100 {
		h.later(step, 625, 0)
		p.AddPoint()
	}
	v := ask(t, p, "")
	require.Len(t, v.History.Points, points)
	for i, x := range v.History.Points {
		require.Equal(t, cc.Rate(1000), x.Down)
		if i > 0 {
			require.InDelta(t, step.Seconds(), x.At-v.History.Points[i-1].At, .01, "in order")
		}
	}
	last := v.History.Points[points-1].At
	assert.Empty(t, ask(t, p, fmt.Sprintf("since=%f", last)).History.Points)
	assert.Len(t, ask(t, p, fmt.Sprintf("since=%f", last-12)).History.Points, 3)

	day := ask(t, p, "history=day").History
	assert.InDelta(t, 120, day.Step, 0)
	require.Len(t, day.Points, (points+100)/24)
	assert.Equal(t, cc.Rate(1000), day.Points[3].Down, "the mean of its points")
	require.InDelta(t, 120, day.Points[4].At-day.Points[3].At, .01)
}

func TestTheHistoryBeginsAnewWhereTheClockIsSetBack(t *testing.T) {
	h := newPointRing(time.Hour, step)
	for at := range h.most + 3 { // past its end
		h.addPoint(Point{At: 1000 + float64(at)})
	}
	h.addPoint(Point{At: 500})
	h.addPoint(Point{At: 505})
	assert.Equal(t, []Point{{At: 500}, {At: 505}}, h.pointsSince(0))
	assert.Equal(t, []Point{{At: 505}}, h.pointsSince(500))
}

func TestRunNotesAPointEachStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hand{at: 1}
		p := h.page(func(o *Options) {
			from := time.Now()
			o.Clock = func() cc.Time { return cc.Time(time.Since(from) + 1) }
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute+time.Second)
		defer cancel()
		p.Run(ctx)
		assert.Len(t, p.history.hour.ring, 12)
	})
}

func TestRefusalsAndFallbacksAreEvents(t *testing.T) {
	fallbacks := uint64(40)
	h := &hand{at: 1}
	refused := uint64(500)
	count := func() {
		h.counters.Listeners = []proxy.ListenerCounters{{
			Listener: "lan",
			Rejected: map[proxy.Reason]uint64{proxy.RejectedDialTimeout: refused},
		}}
	}
	count()
	p := h.page(func(o *Options) { o.Fallbacks = func() uint64 { return fallbacks } })
	p.AddPoint()
	assert.Empty(t, ask(t, p, "").Events, "what was before is no news")
	for range 3 {
		h.later(step, 0, 0)
		refused += 4
		count()
		fallbacks++
		p.AddPoint()
	}
	v := ask(t, p, "")
	require.Len(t, v.Events, 2, "the same again is counted")
	counts := map[string]int{}
	for _, e := range v.Events {
		counts[e.Text] = e.Count
		assert.Equal(t, "WARN", e.Level)
	}
	assert.Equal(t, 12, counts["connections refused at lan: dial_timeout"])
	assert.Equal(t, 3, counts["connections fell back to Reno in the kernel: the process did not answer in time"])
	assert.EqualValues(t, 4, v.History.Points[0].Refused)
	assert.Empty(t, ask(t, p, fmt.Sprintf("events=%d", v.EventsSeq)).Events, "known already")
}

func TestTheLogIsEvents(t *testing.T) {
	var out strings.Builder
	e := &Events{}
	log := slog.New(e.Handler(slog.NewTextHandler(&out,
		&slog.HandlerOptions{Level: slog.LevelError}))).With("listener", "lan")
	log.Info("configuration reloaded", "hash", "abc")
	log.Info("flow closed", "id", 1)
	log.Debug("nobody asks")
	log.WithGroup("g").Error(strings.Repeat("é", maxEventText))
	assert.Equal(t, 1, strings.Count(out.String(), "\n"), "the level of the log is kept")
	all, _ := e.eventsSince(0)
	require.Len(t, all, 2)
	assert.Equal(t, "configuration reloaded listener=lan hash=abc", all[1].Text)
	assert.Equal(t, maxEventText/2+1, len([]rune(all[0].Text)), "cut between characters")

	for i := range 10 * maxEvents {
		e.addEvent(float64(i), slog.LevelInfo, fmt.Sprint("event ", i), 1)
	}
	all, _ = e.eventsSince(0)
	assert.Len(t, all, maxEvents)
	assert.Equal(t, fmt.Sprint("event ", 10*maxEvents-1), all[0].Text)
}

func TestStateSaysWhyNotAllIsServed(t *testing.T) {
	h := &hand{at: 1}
	v := ask(t, h.page(func(o *Options) { o.Ready = func() error { return errors.New("draining") } }), "")
	assert.Equal(t, "draining", v.State)
	assert.False(t, v.Serving)
	assert.True(t, ask(t, h.page(), "").Serving)
}

func TestWrongParametersAreNamed(t *testing.T) {
	mux := http.NewServeMux()
	(&hand{at: 1}).page().Register(mux)
	for parameters, says := range map[string]string{
		"table=people": `table is "people"`, "sort=size": `sort is "size"`, "table=peers&sort=rate": "must be one " +
			"of name, listener",
		"format=xml": `format is "xml"`, "host=" + strings.Repeat("x", 301): "host has 301 bytes",
		"rows=501": "from 0 to 500", "offset=-1": `offset is "-1"`, "since=now": `since is "now"`,
		"events=x": `events is "x"`, "detail=-2": `detail is "-2"`, "q=" + strings.Repeat("x", 101): "q has 101 bytes",
	} {
		rec := httptest.NewRecorder()
		mux.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/v1/view?"+parameters, http.NoBody))
		assert.Equal(t, http.StatusBadRequest, rec.Code, parameters)
		assert.Contains(t, rec.Body.String(), says)
	}
}

func TestThePageLoadsNothingButItself(t *testing.T) {
	mux := http.NewServeMux()
	(&hand{at: 1}).page().Register(mux)
	for path, kind := range map[string]string{
		"/": "text/html", "/page.js": "text/javascript",
		"/page.css": "text/css", "/favicon.svg": "image/svg+xml",
	} {
		rec := httptest.NewRecorder()
		mux.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, path, http.NoBody))
		assert.Equal(t, http.StatusOK, rec.Code, path)
		assert.Contains(t, rec.Header().Get("Content-Type"), kind, path)
		assert.Contains(t, rec.Header().Get("Content-Security-Policy"), "default-src 'none'; script-src 'self';", path)
		assert.NotContains(t, rec.Header().Get("Content-Security-Policy"), "unsafe")
		if path != "/favicon.svg" && path != "/page.js" { // which name SVG's XML namespace
			assert.False(t, strings.Contains(rec.Body.String(), "://"), "%s names another place", path)
		}
		assert.False(t, strings.Contains(rec.Body.String(), "innerHTML"), path)
	}
}

func TestAnyFlowsAnyQuery(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		h := &hand{at: 1}
		p := h.page()
		id := uint64(0)
		for range rapid.IntRange(1, 5).Draw(r, "looks") {
			for range rapid.IntRange(0, 5).Draw(r, "new") {
				id++
				h.flows = append(h.flows, managed(id, rapid.String().Draw(r, "host"), 0))
			}
			if len(h.flows) > 0 && rapid.Bool().Draw(r, "one ends") {
				i := rapid.IntRange(0, len(h.flows)-1).Draw(r, "which")
				h.flows = append(append([]proxy.FlowInfo{}, h.flows[:i]...), h.flows[i+1:]...)
			}
			h.later(time.Duration(rapid.Int64Range(0, 3e9).Draw(r, "ns")),
				cc.Bytes(rapid.Int64Range(-50, 1e6).Draw(r, "bytes")), 0)
			q, err := readQuery(map[string][]string{
				"offset": {fmt.Sprint(rapid.IntRange(0, 9).Draw(r, "offset"))}, "rows": {fmt.Sprint(rapid.IntRange(0,
					9).Draw(r, "rows"))},
				"sort": {rapid.SampledFrom(columns["flows"]).Draw(r, "sort")}, "q": {rapid.StringN(0, 3, 20).Draw(r,
					"q")},
			})
			if err != nil {
				r.Fatal(err)
			}
			v := p.answerQuery(q)
			if len(v.Flows) > q.rows || v.Matches > v.Total || len(v.Flows) > max(0, v.Matches-q.offset) {
				r.Fatalf("%d rows of %d found of %d from %d", len(v.Flows), v.Matches, v.Total, q.offset)
			}
			for _, f := range v.Flows {
				if f.Down.Rate != nil && *f.Down.Rate < 0 {
					r.Fatalf("a rate below 0: %d", *f.Down.Rate)
				}
			}
		}
	})
}

func FuzzReadQuery(f *testing.F) {
	f.Add("table=flows&sort=-queue&q=x&offset=1&rows=2&since=1.5&events=3&detail=4")
	f.Add("table=peers&rows=999999999999999999999")
	f.Fuzz(func(t *testing.T, parameters string) {
		r := httptest.NewRequest(http.MethodGet, "/", http.NoBody)
		r.URL.RawQuery = parameters
		q, err := readQuery(r.URL.Query())
		if err == nil {
			assert.LessOrEqual(t, q.rows, maxRows)
			assert.Contains(t, columns[q.table], q.sort)
			assert.GreaterOrEqual(t, q.offset, 0)
		}
	})
}

// BenchmarkView is a reader of 10,000 flows: what a poll costs beside the snapshot.
func BenchmarkView(b *testing.B) {
	h := &hand{at: 1}
	for i := range 10_000 {
		h.flows = append(h.flows, managed(uint64(i+1), fmt.Sprintf("server%d.example:443", i%300),
			time.Duration(i%50)*time.Millisecond))
	}
	p := h.page()
	q := query{table: "flows", sort: "queue", descending: true, search: "server1", rows: 60}
	for b.Loop() {
		h.at = h.at.Add(2 * time.Second)
		p.answerQuery(q)
	}
}

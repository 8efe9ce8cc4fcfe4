//go:build linux

package browser

import (
	"fmt"
	"iter"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/tunnel"
	"github.com/penstock-net/penstock/telemetry"
	"github.com/penstock-net/penstock/telemetry/page"
)

// busy is a proxy with as many flows as a test wants, each of which goes on between
// two counts.
type busy struct {
	n     int
	flow  func(i, looks int) proxy.FlowInfo // nil: flowInfo
	group func(i, looks int) flow.Group     // nil: groupInfo
	gains []page.Gain
	fleet []string

	mu    sync.Mutex
	looks int
}

// hostile is a name that is markup where it is not taken as text.
const hostile = `<img src=x onerror="window.pwned=1">.example`

func (b *busy) Flows() (int, iter.Seq[*proxy.FlowInfo]) {
	b.mu.Lock()
	defer b.mu.Unlock()
	looks := b.looks
	return b.n, func(yield func(*proxy.FlowInfo) bool) {
		for i := range b.n {
			if f := b.flowAt(i, looks); !yield(&f) {
				return
			}
		}
	}
}

func (b *busy) Snapshot(visit func(*proxy.FlowInfo)) proxy.Counters {
	_, flows := b.Flows()
	flows(func(f *proxy.FlowInfo) bool { visit(f); return true })
	return b.Counters()
}

func (b *busy) Counters() proxy.Counters {
	b.mu.Lock()
	b.looks++
	looks := b.looks
	b.mu.Unlock()
	var down, up cc.Bytes
	for i := range b.n {
		f := b.flowAt(i, looks)
		down += f.Down.Written
		up += f.Up.Written
	}
	return proxy.Counters{
		Listeners: []proxy.ListenerCounters{
			{
				Listener: "lan", Mode: "tproxy", Accepted: uint64(b.n), Active: b.n,
				Rejected: map[proxy.Reason]uint64{proxy.RejectedDialTimeout: uint64(looks)},
			},
			{Listener: "vpn", Mode: "wireguard"},
		},
		Routes: []proxy.RouteCounters{{
			Listener: "lan", Rule: "all", Opened: uint64(b.n), Active: b.n,
			Down: proxy.DirectionCounters{Written: down}, Up: proxy.DirectionCounters{Written: up},
		}},
		Active: b.n, Sources: 250, Limit: 65536,
	}
}

func (b *busy) flowAt(i, looks int) proxy.FlowInfo {
	if b.flow != nil {
		return b.flow(i, looks)
	}
	return flowInfo(i, looks)
}

// flowInfo is the i-th flow at the time of a look.
func flowInfo(i, looks int) proxy.FlowInfo {
	by := []flow.LimitedBy{
		flow.LimitedByCwnd, flow.LimitedByApplication, flow.LimitedByPacing,
		flow.LimitedByReceiver,
	}[i%4]
	rate := cc.Bytes(1000 * (1 + i%977))
	leg := datapath.Info{Tier: "kernel", Envelope: "ebpf"}
	side := func(moved cc.Bytes, queue time.Duration) proxy.DirectionInfo {
		s := flow.Snapshot{
			Algorithm: "penstock", Phase: "steady", Members: 3, Cwnd: 90000, Share: 30000 + moved%70000, Inflight: 20000,
			SRTT: 40*time.Millisecond + queue, MinRTT: 40 * time.Millisecond, LatestRTT: 40*time.Millisecond + queue,
			QueueingDelay: queue, DeliveryRate: 12e6, Delivered: moved, LimitedBy: by,
		}
		s.Limited[by] = time.Duration(1+i%90) * time.Second
		return proxy.DirectionInfo{Algorithm: "penstock", Read: moved, Written: moved, Managed: true, Flow: s}
	}
	f := proxy.FlowInfo{
		ID: uint64(i + 1), Listener: "lan", Rule: "all", State: proxy.StateOpen,
		Source: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 7, byte(i / 250 % 250), byte(1 + i%250)}),
			uint16(20000+i%40000)),
		Target: netip.AddrPortFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i % 256)}), 443),
		Host:   fmt.Sprintf("server%d.example:443", i%300),
		Age:    time.Duration(10+i%5000) * time.Second, Idle: time.Millisecond,
		Down: side(rate*cc.Bytes(looks)+cc.Bytes(float64(10*rate)*math.Sin(float64(looks)/25)),
			time.Duration(5+i%60)*time.Millisecond),
		Up:     side(cc.Bytes(10*looks), time.Duration(i%9)*time.Millisecond),
		Client: leg, Server: leg,
	}
	if i == 17 {
		f.Host = hostile
	}
	return f
}

func (b *busy) Groups() ([]flow.Group, cc.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	groups := make([]flow.Group, min(b.n, 250))
	for i := range groups {
		if groups[i] = groupInfo(i, b.looks); b.group != nil {
			groups[i] = b.group(i, b.looks)
		}
	}
	return groups, now()
}

// groupInfo is the i-th group at the time of a look.
func groupInfo(i, looks int) flow.Group {
	return flow.Group{
		Key: fmt.Sprint(i), Name: fmt.Sprintf("down|lan|10.7.0.%d", 1+i), Algorithm: "penstock", Phase: "steady",
		Hosts: []netip.Addr{netip.AddrFrom4([4]byte{10, 7, 0, byte(1 + i)})}, Members: 40, Active: 12,
		Cwnd: 90000, Inflight: 70000, SRTT: 60 * time.Millisecond, MinRTT: 40 * time.Millisecond,
		QueueingDelay: time.Duration(5+i%40) * time.Millisecond, Delivered: cc.Bytes(looks) * 1e6, LimitedBy: flow.LimitedByCwnd,
	}
}

func (b *busy) Held() []proxy.HeldInfo { return nil }

func (b *busy) Tunnels() []proxy.TunnelInfo {
	peers := []tunnel.PeerState{
		{
			Name: "phone", PublicKey: access.Key{1}, Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.2/32")},
			Endpoint: "198.51.100.9:4000", Handshake: time.Now().Add(-75 * time.Second), Received: 12e6, Sent: 310e6,
		},
		{Name: "tablet", PublicKey: access.Key{2}, Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")}},
	}
	return []proxy.TunnelInfo{{Listener: "vpn", Mode: "wireguard", Status: tunnel.Status{Peers: peers}}}
}

var began = time.Now()

func now() cc.Time { return cc.Time(time.Since(began) + time.Second) }

// serve serves the page of src.
func serve(t *testing.T, src *busy, events *page.Events) (at string, p *page.Page) {
	return serveAt(t, src, events, func() time.Duration { return 0 })
}

// serveAt is serve where it is later by so much.
func serveAt(t *testing.T, src *busy, events *page.Events, later func() time.Duration) (at string, p *page.Page) {
	t.Helper()
	handler, p := handlerOf(src, events, later)
	srv := httptest.NewServer(handler)
	t.Cleanup(srv.Close)
	return srv.URL, p
}

// handlerOf returns what serves the page of src.
func handlerOf(src *busy, events *page.Events, later func() time.Duration) (http.Handler, *page.Page) {
	p := page.New(page.Options{
		Source: src, Version: "v1.2.3", Start: float64(began.Unix()), Events: events,
		Gains: func() []page.Gain { return src.gains }, Fleet: func() []string { return src.fleet },
		Clock: func() cc.Time { return now().Add(later()) }, Wall: func() time.Time { return time.Now().Add(later()) },
	})
	pages := telemetry.Pages{Source: src, Page: p}
	return pages.Handler(true), p
}

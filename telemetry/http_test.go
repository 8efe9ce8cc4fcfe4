package telemetry

import (
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath/hold"
	vpn "github.com/penstock-net/penstock/proxy/tunnel"
	"github.com/penstock-net/penstock/telemetry/page"
)

func pages(src Source) Pages {
	clock := &handClock{t: 1}
	return Pages{
		Source: src, Metrics: NewRegistry(src, busyOptions(clock)),
		Page: page.New(page.Options{Source: src, Clock: clock.now, Wall: time.Now}),
	}
}

func TestPages(t *testing.T) {
	draining := errors.New("draining")
	for name, c := range map[string]struct {
		pages  func(*Pages)
		method string
		path   string
		host   string
		code   int
		says   string // part of the body
	}{
		"metrics are there":                              {path: "/metrics", code: 200, says: "penstock_flows_total"},
		"metrics are only read":                          {method: "POST", path: "/metrics", code: 405},
		"flows are only read":                            {method: "DELETE", path: "/flows", code: 405},
		"a living process is healthy":                    {path: "/healthz", code: 200, says: "ok"},
		"a serving proxy is ready":                       {path: "/readyz", code: 200, says: "ready"},
		"a draining proxy is not ready":                  {pages: func(p *Pages) { p.Ready = func() error { return draining } }, path: "/readyz", code: 503, says: "draining"},
		"a draining proxy is healthy":                    {pages: func(p *Pages) { p.Ready = func() error { return draining } }, path: "/healthz", code: 200},
		"the root is the page, which says what there is": {path: "/", code: 200, says: "/flows"},
		"the page is only read":                          {method: "POST", path: "/", code: 405},
		"its view is there":                              {path: "/v1/view", code: 200, says: "server.example:443"},
		"its view is not for another host":               {path: "/v1/view", host: "rebind.example", code: 421},
		"anything else is not found":                     {path: "/nope", code: 404},
		"profiles are off":                               {path: "/debug/pprof/", code: 404},
		"profiles are on when asked for":                 {pages: func(p *Pages) { p.Profile = true }, path: "/debug/pprof/", code: 200, says: "goroutine"},
		"a limit that is no number is refused": {
			path: "/flows?limit=many", code: 400,
			says: `limit is "many"`,
		},
		"a negative limit is refused":               {path: "/flows?limit=-1", code: 400},
		"of hosts as well":                          {path: "/hosts?limit=-1", code: 400, says: `limit is "-1"`},
		"peers are listed":                          {path: "/v1/peers", code: 200, says: `"name":"phone"`},
		"peers are only read":                       {method: "POST", path: "/v1/peers", code: 405},
		"held UDP is listed":                        {path: "/held", code: 200, says: `"acknowledged_by":"echo"`},
		"held UDP is only read":                     {method: "POST", path: "/held", code: 405},
		"hosts are only read":                       {method: "POST", path: "/hosts", code: 405},
		"localhost with a port is this host":        {path: "/healthz", host: "localhost:9464", code: 200},
		"an address is this host":                   {path: "/healthz", host: "127.0.0.1:9464", code: 200},
		"an IPv6 address is this host":              {path: "/healthz", host: "[::1]:9464", code: 200},
		"somebody's domain is not this host":        {path: "/flows", host: "rebind.example:9464", code: 421},
		"a domain that begins like one is not":      {path: "/flows", host: "localhost.example", code: 421},
		"a bracket alone does not upset the server": {path: "/flows", host: "[", code: 421},
	} {
		t.Run(name, func(t *testing.T) {
			p := pages(busyProxy())
			if c.pages != nil {
				c.pages(&p)
			}
			if c.method == "" {
				c.method = http.MethodGet
			}
			req := httptest.NewRequest(c.method, c.path, http.NoBody)
			if req.Host = "127.0.0.1"; c.host != "" {
				req.Host = c.host
			}
			rec := httptest.NewRecorder()
			p.Handler(true).ServeHTTP(rec, req)
			assert.Equal(t, c.code, rec.Code)
			assert.Contains(t, rec.Body.String(), c.says)
		})
	}
}

func TestAServerInsideANetworkAnswersToItsName(t *testing.T) {
	req := httptest.NewRequest(http.MethodGet, "/healthz", http.NoBody)
	req.Host = "router.lan:9464"
	rec := httptest.NewRecorder()
	pages(busyProxy()).Handler(false).ServeHTTP(rec, req)
	assert.Equal(t, http.StatusOK, rec.Code)
}

// listItems asks a page for a list, and returns its items and how many there are in all.
func listItems[Item any](t *testing.T, p Pages, path string) (items []Item, total string) {
	t.Helper()
	rec := httptest.NewRecorder()
	p.Handler(false).ServeHTTP(rec, httptest.NewRequest(http.MethodGet, path, http.NoBody))
	require.Equal(t, http.StatusOK, rec.Code)
	assert.Equal(t, "application/json", rec.Header().Get("Content-Type"))
	body := rec.Body.String()
	require.NoError(t, json.Unmarshal([]byte(body), &items), body)
	if len(items) > 0 {
		assert.Len(t, strings.Split(strings.TrimSpace(body), "\n"), len(items)+2, "a line for each, between the brackets")
	}
	return items, rec.Header().Get("X-Total-Count")
}

func TestFlowsShowEveryField(t *testing.T) {
	flows, total := listItems[Flow](t, pages(busyProxy()), "/flows")
	assert.Equal(t, "2", total)
	leg := &Leg{
		Tier: "kernel", Envelope: "bbr", Missing: []string{"a thing"}, Cwnd: 14480, SRTT: .041, MinRTT: .019,
		DeliveryRate: 11e6, Unsent: 52, Retransmitted: 1448, SignalErrors: 1,
	}
	forward, reverse := .015, .01
	assert.Equal(t, []Flow{
		{
			ID: 1, State: "open", Listener: "lan", Rule: "all", Client: "192.0.2.7:1234", Target: "198.51.100.1:443",
			Host: "server.example:443", Age: 90, Setup: .03, Idle: .001,
			Down: &Direction{
				Algorithm: "copa", Read: 700, Written: 500, Spliced: 100,
				Control: &Control{
					Group: "down|lan|192.0.2.7", Members: 2, Class: "guarantee", Target: 5e6, Phase: "steady", Cwnd: 40000, Share: 20000, Unused: 3000, PacingRate: 8e6,
					Inflight: 1448, Unsent: 52, SRTT: .04, MinRTT: .02, LatestRTT: .045, QueueingDelay: .025, DeliveryRate: 12e6,
					Forward: &forward, Reverse: &reverse, Delivered: 450, Lost: 48, Marked: 1, LossEvents: 3, Timeouts: 2,
					LimitedBy: "cwnd", Limited: map[string]float64{"cwnd": 1.5},
					Internals: Internals{
						{"target_packets", 20.5},
						{"velocity", 2},
						{"delta", .02},
						{"standing_rtt_ms", 41.25},
						{"min_rtt_ms", 0},
					},
				},
			},
			Up:        &Direction{Algorithm: "none", Read: 10, Written: 10},
			ClientLeg: leg, ServerLeg: leg,
		},
		{ID: 2, State: "greeting", Listener: "lan", Client: "192.0.2.8:99", Peer: "phone"},
	}, flows)
}

func TestListsAreLimited(t *testing.T) {
	const all = defaultLimit + 500
	many := &still{groups: make([]flow.Group, all), tunnels: []proxy.TunnelInfo{{
		Status: vpn.Status{Peers: make([]vpn.PeerState, all)},
	}}, held: []proxy.HeldInfo{{Clients: make([]hold.ClientState, all)}}}
	for i := range all {
		many.flows = append(many.flows, proxy.FlowInfo{ID: uint64(i), State: proxy.StateGreeting})
	}
	for _, list := range []string{"/flows", "/hosts", "/held", "/v1/peers"} {
		for limit, want := range map[string]int{
			"": defaultLimit, "?limit=2": 2, "?limit=0": all, "?limit=99999": all,
		} {
			items, total := listItems[json.RawMessage](t, pages(many), list+limit)
			assert.Len(t, items, want, list+limit)
			assert.Equal(t, "1500", total, list+limit)
		}
		none, total := listItems[json.RawMessage](t, pages(&still{}), list)
		assert.Empty(t, none, list)
		assert.NotNil(t, none, "%s: an empty array, not null", list)
		assert.Equal(t, "0", total, list)
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	ln, err := net.Listen("tcp", need.Host()+":7409") // where nobody else listens afterwards
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- pages(busyProxy()).Serve(ctx, ln) }()

	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	url := "http://" + ln.Addr().String()
	resp, err := client.Get(url + "/healthz")
	require.NoError(t, err)
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, resp.Body.Close())
	require.NoError(t, err)
	assert.Equal(t, "ok", strings.TrimSpace(string(body)))

	// On loopback, the page of another site in a browser gets nothing.
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/flows", http.NoBody)
	require.NoError(t, err)
	req.Host = "rebind.example"
	resp, err = client.Do(req)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	assert.Equal(t, http.StatusMisdirectedRequest, resp.StatusCode)

	cancel()
	assert.NoError(t, <-served)
	_, err = net.Dial("tcp", ln.Addr().String())
	assert.Error(t, err, "still listening")
}

// deaf is a client that reads nothing.
type deaf struct {
	httptest.ResponseRecorder
	wrote, over chan struct{}
}

func (d *deaf) Write(text []byte) (int, error) {
	d.wrote <- struct{}{}
	<-d.over
	return len(text), nil
}

func TestWhoReadsNoMetricsKeepsNobodyFromThem(t *testing.T) {
	h := pages(busyProxy()).Handler(true)
	scrape := func(w http.ResponseWriter) {
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "http://localhost/metrics", http.NoBody))
	}
	wrote, over := make(chan struct{}), make(chan struct{})
	var all sync.WaitGroup
	for range maxScrapes {
		all.Go(func() { scrape(&deaf{wrote: wrote, over: over}) })
		<-wrote
	}
	rec := httptest.NewRecorder()
	scrape(rec)
	assert.Equal(t, http.StatusOK, rec.Code, rec.Body)
	close(over)
	all.Wait()
}

func TestServeReportsABrokenListener(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	assert.ErrorContains(t, pages(busyProxy()).Serve(t.Context(), ln), "telemetry: serve")
}

func TestHostsShowEveryField(t *testing.T) {
	groups, total := listItems[Group](t, pages(busyProxy()), "/hosts")
	assert.Equal(t, "2", total)
	assert.Equal(t, []Group{
		{
			Name: "down|lan|192.0.2.7", Algorithm: "copa", Phase: "steady", Hosts: []netip.Addr{netip.MustParseAddr("192.0.2.7")},
			Members: 3, Active: 2, Cwnd: 40000, Inflight: 30000, Borrowed: 6000, Unused: 4000, PacingRate: 8e6,
			SRTT: .04, MinRTT: .02, LatestRTT: .045, QueueingDelay: .025, DeliveryRate: 12e6, Delivered: 1e6, LimitedBy: "cwnd",
			UDP: &page.HeldUDP{AcknowledgedBy: "echo", BusyFlows: 2, Waiting: 9, Delivered: 450},
			Hint: &GroupHint{
				Age: .5, Capacity: 20e6, FairShare: 10e6, LinkRate: 40e6, ArrivalRate: 30e6, QueueRoom: 15000, Flows: 4, RadioLost: 1448, Share: .5,
				Believed: .75, Doubt: flow.HintTooHigh,
			},
			Capped: true,
			Internals: Internals{
				{"target_packets", 20.5},
				{"velocity", 2},
				{"delta", .02},
				{"standing_rtt_ms", 41.25},
				{"min_rtt_ms", 0},
			},
		},
		{
			Name: "up|lan|satellite", Algorithm: "cubic", Phase: "avoidance", Hosts: []netip.Addr{}, Idle: 7,
			Cwnd: 14480, Unused: 14480, LimitedBy: "application", Internals: InternalsOf("cubic", cc.Internals{}),
		},
	}, groups)
}

func TestHeldClientsShowEveryField(t *testing.T) {
	src := busyProxy()
	got, total := listItems[HeldClient](t, pages(src), "/held")
	assert.Equal(t, "2", total)
	assert.Equal(t, []HeldClient{
		{
			Listener: "lan", Direction: "down", Address: netip.MustParseAddr("192.0.2.7"), Group: "down|lan|192.0.2.7",
			WaitingPackets: 9, WaitingBytes: 10_800, BusyFlows: 2, AcknowledgedBy: "echo",
			Control: describeControl(&src.flows[0].Down.Flow),
		},
		{
			Listener: "lan", Direction: "down", Address: netip.MustParseAddr("192.0.2.8"), Group: "down|lan|192.0.2.8",
			AcknowledgedBy: "share",
		},
	}, got)
}

func TestPeersShowEveryField(t *testing.T) {
	src := busyProxy()
	src.flows[0].Listener, src.flows[0].Peer = "vpn", "phone"
	got, _ := listItems[Peer](t, pages(src), "/v1/peers")
	phone := access.Key{1}
	tablet := access.Key{2}
	assert.Equal(t, []Peer{
		{
			Listener: "vpn", Name: "phone", PublicKey: phone.String(), Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.2/32")},
			Endpoint: "198.51.100.9:4000", Handshake: 1.7e9 + .5, Received: 1100, Sent: 9900,
			Connections: 2, QueueingDelay: .025, DeliveryRate: 12e6, Retransmitted: 4344,
		},
		{
			Listener: "vpn", Name: "tablet", PublicKey: tablet.String(),
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.9.0.3/32")},
		},
		{
			Listener: "vpn2", Name: "laptop", Endpoint: "198.51.100.7:5000", Received: 700, Sent: 800,
			Addresses: []netip.Prefix{netip.MustParsePrefix("10.10.0.1/32"), netip.MustParsePrefix("fd00:10::1/128")},
		},
	}, got)
}

func TestScrapersGetTheFormatTheyAskFor(t *testing.T) {
	for name, c := range map[string]struct{ accept, encoding, contentType, ends string }{
		"text":        {"", "", "text/plain; version=0.0.4", "\n"},
		"compressed":  {"", "gzip", "text/plain; version=0.0.4", "\n"},
		"OpenMetrics": {"application/openmetrics-text;version=1.0.0", "", "application/openmetrics-text; version=1.0.0", "\n# EOF\n"},
	} {
		t.Run(name, func(t *testing.T) {
			req := httptest.NewRequest(http.MethodGet, "http://localhost/metrics", http.NoBody)
			req.Header.Set("Accept", c.accept)
			req.Header.Set("Accept-Encoding", c.encoding)
			rec := httptest.NewRecorder()
			pages(busyProxy()).Handler(true).ServeHTTP(rec, req)
			require.Equal(t, http.StatusOK, rec.Code)
			assert.Equal(t, c.encoding, rec.Header().Get("Content-Encoding"))
			assert.Contains(t, rec.Header().Get("Content-Type"), c.contentType)
			body := io.Reader(rec.Body)
			if c.encoding == "gzip" {
				unpacked, err := gzip.NewReader(body)
				require.NoError(t, err)
				body = unpacked
			}
			text, err := io.ReadAll(body)
			require.NoError(t, err)
			assert.Contains(t, string(text), "\npenstock_flows_total{")
			assert.True(t, strings.HasSuffix(string(text), c.ends), "%q", text[len(text)-40:])
		})
	}
}

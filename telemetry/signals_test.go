package telemetry

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

// madeUpLinks are interfaces of a test: clients are behind lan, all others behind wan.
type madeUpLinks struct {
	traffic []linkstat.Traffic
	closed  atomic.Bool
	asked   int // for routes
}

func (l *madeUpLinks) ReadTraffic(bool) ([]linkstat.Traffic, error) { return l.traffic, nil }

func (l *madeUpLinks) FindInterface(host netip.Addr) string {
	l.asked++
	if host.IsPrivate() {
		return "lan"
	}
	return "wan"
}

func (l *madeUpLinks) Close() { l.closed.Store(true) }

func TestSignalsSayWhatConnectionsSeeOfEachInterface(t *testing.T) {
	managed := func(delay time.Duration) proxy.DirectionInfo {
		return proxy.DirectionInfo{Managed: true, Flow: flow.Snapshot{LatestRTT: 1, QueueingDelay: delay}}
	}
	leg := datapath.Info{Tier: "kernel", SRTT: 90 * time.Millisecond, MinRTT: 40 * time.Millisecond}
	src := &still{}
	addFlow := func(id uint64, client string, delay time.Duration) *proxy.FlowInfo {
		src.flows = append(src.flows, proxy.FlowInfo{
			ID: id, State: proxy.StateOpen, Source: netip.MustParseAddrPort(client + ":1"), Client: leg, Server: leg,
			Target: netip.MustParseAddrPort("198.51.100.1:443"), Down: managed(delay),
		})
		return &src.flows[len(src.flows)-1]
	}
	for id, delay := range []time.Duration{10 * time.Millisecond, 20 * time.Millisecond, 500 * time.Millisecond} {
		addFlow(uint64(id), "192.168.1.7", delay)
	}
	addFlow(9, "192.168.1.9", time.Second).Client.Tier = "netstack" // its address is of the inside of a tunnel
	links := &madeUpLinks{traffic: []linkstat.Traffic{{Name: "wan", Rate: 8e6, Sent: 1e6}, {Name: "lan"}}}
	reader := &signalReader{source: src, links: links}
	now := time.Unix(1_800_000_000, 0)
	first, err := reader.readSignals(now)
	require.NoError(t, err)
	assert.Zero(t, first[1].Sent, "there is nothing to compare with")

	for i, bytes := range []cc.Bytes{40e3, 50e3, 10e3, 1e6} {
		f := &src.flows[i]
		f.Down.Written, f.Down.Read = bytes, bytes
	}
	src.flows[0].Up.Written = 25e3 // unmanaged: TCP's own round trips tell
	src.flows[1].Down.Receive = proxy.HoldingInfo{Held: true, Flow: flow.Snapshot{
		LatestRTT: 1, QueueingDelay: 30 * time.Millisecond,
	}}
	links.traffic[0].Sent += 250e3
	signals, err := reader.readSignals(now.Add(500 * time.Millisecond))
	require.NoError(t, err)
	assert.Equal(t, []Signal{
		{
			Time: 1_800_000_000.5, Interface: "lan", Connections: 3, ProxySent: 1.6e6,
			QueueingDelay: new(.02), QueueingDelay95: new(.5),
		},
		{
			Time: 1_800_000_000.5, Interface: "wan", Connections: 4, Sent: 4e6, ProxySent: 400e3, ProxyReceived: 17.6e6,
			QueueingDelay: new(.05), QueueingDelay95: new(.05), ReceiveQueueingDelay: new(.03),
			Capacity: 8e6, Load: new(.5),
		},
	}, signals)
	assert.Equal(t, 2, links.asked, "routes are remembered")

	signals, err = reader.readSignals(now.Add(time.Second))
	require.NoError(t, err)
	assert.Nil(t, signals[0].QueueingDelay, "nothing was sent")

	// One connection sends more and ends, another begins and ends, and a third ends after it was seen.
	ends := src.flows[0]
	ends.Down.Written += 10e3
	short := proxy.FlowInfo{ID: 99, Source: ends.Source, Client: leg}
	short.Down.Written = 5e3
	reader.addClosed(&ends)
	reader.addClosed(&short)
	src.flows = src.flows[1:]
	late := src.flows[0]
	src.flows = src.flows[1:]
	signals, err = reader.readSignals(now.Add(2 * time.Second))
	require.NoError(t, err)
	assert.EqualValues(t, 15e3*8, signals[0].ProxySent)
	late.Down.Written += 1e3
	reader.addClosed(&late)
	signals, err = reader.readSignals(now.Add(3 * time.Second))
	require.NoError(t, err)
	assert.EqualValues(t, 1e3*8, signals[0].ProxySent, "what it had sent before was counted then")
}

func TestSignalsAreFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		links := &madeUpLinks{traffic: []linkstat.Traffic{{Name: "lan"}, {Name: "wan"}}}
		ending := make(chan struct{})
		p := Pages{
			Source: &still{}, Links: func() (LinkReader, error) { return links, nil }, Wall: time.Now, ending: ending,
		}
		handler := p.Handler(false)
		get := func(query string) *httptest.ResponseRecorder {
			out := httptest.NewRecorder()
			handler.ServeHTTP(out, httptest.NewRequest(http.MethodGet, "/v1/signals"+query, http.NoBody))
			return out
		}
		begin := time.Now()
		var list []Signal
		require.NoError(t, json.Unmarshal(get("").Body.Bytes(), &list))
		assert.Len(t, list, 2)
		assert.Equal(t, signalPeriod, time.Since(begin))
		assert.Equal(t, http.StatusBadRequest, get("?follow=1ms").Code)
		assert.Equal(t, http.StatusBadRequest, get("?follow=often").Code)

		followed := make(chan *httptest.ResponseRecorder)
		for range maxSignalReaders {
			go func() { followed <- get("?follow=200ms&interface=wan") }()
		}
		synctest.Wait()
		assert.Equal(t, http.StatusServiceUnavailable, get("").Code)
		time.Sleep(1100 * time.Millisecond)
		close(ending) // the server ends
		for range maxSignalReaders {
			lines := 0
			for text := bufio.NewScanner((<-followed).Body); text.Scan(); lines++ {
				assert.Contains(t, text.Text(), `"interface":"wan"`)
			}
			assert.Equal(t, 5, lines)
		}
		assert.True(t, links.closed.Load())
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/v1/signals?follow=1m",
			http.NoBody).WithContext(gone))
	})
}

// TestThePingerOfTheDocsWritesWhatCakeAutorateReads runs the script of docs/http-api.md against a proxy. Its reader
// adds a digit to a time of five, to have microseconds.
func TestThePingerOfTheDocsWritesWhatCakeAutorateReads(t *testing.T) {
	need.Programs(t, "curl", "jq")
	page, err := os.ReadFile("../docs/http-api.md")
	require.NoError(t, err)
	_, script, found := strings.Cut(string(page), "```sh\n#!/bin/sh\n")
	require.True(t, found)
	script, _, _ = strings.Cut(script, "```")

	src := busyProxy()
	ended := make(chan struct{})
	links := &countingLinks{madeUpLinks: madeUpLinks{traffic: []linkstat.Traffic{{Name: "wan"}}}, src: src}
	p := Pages{Source: src, Wall: time.Now, ending: ended, Links: func() (LinkReader, error) { return links, nil }}
	server := httptest.NewServer(p.Handler(true))
	defer server.Close()
	script = strings.ReplaceAll(script, "127.0.0.1:9464", server.Listener.Addr().String())
	cmd := exec.CommandContext(t.Context(), "sh", "-c", script, "pinger", "fping", "--loop", "9.9.9.9")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	lines := bufio.NewScanner(out)
	for range 2 {
		require.True(t, lines.Scan())
		assert.Regexp(t, `^\[\d{10}\.\d{5}\] 9\.9\.9\.9 : \[\d+\], 64 bytes, 35\.000 ms \(35\.000 avg, 0% loss\)$`,
			lines.Text())
	}
	close(ended)
	assert.NoError(t, cmd.Wait())
}

// countingLinks lets the flows of a proxy send before each look.
type countingLinks struct {
	madeUpLinks
	src *still
}

func (l *countingLinks) ReadTraffic(rates bool) ([]linkstat.Traffic, error) {
	l.src.flows[0].Down.Written += 1000
	return l.madeUpLinks.ReadTraffic(rates)
}

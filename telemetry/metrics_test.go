package telemetry

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

func busyOptions(clock *handClock) Options {
	downloads := NewDownloads()
	closed := closedDownload("192.0.2.7", "all", 1e6, 2*time.Millisecond, time.Millisecond)
	closed.Server.Retransmits = 7
	downloads.ObserveClosed(time.Unix(1.7e9, 0), closed)
	return Options{
		Downloads: downloads,
		Facts: Facts{
			Version: "v1.2.3", Revision: "abc", GoVersion: "go1.26", Start: 1.7e9,
			Tier: "kernel", Envelope: "cubic", Missing: []string{"bbr: not loaded", "bbr: not loaded"},
		},
		Clock: clock.now,
		Wall:  func() time.Time { return time.Unix(1.7e9+60, 0) },
		Load: func() Load {
			return Load{Busy: 6, Interval: 0.002, Enforced: &Enforced{
				Legs: 5, Limit: 9, Full: 2, Failed: 1, Fallbacks: 3,
				Answers: datapath.Histogram{Bounds: []float64{.001}, Counts: []uint64{4, 1}, Sum: .004},
			}}
		},
		Config:  func() Config { return Config{Hash: "d00f", Succeeded: 3, Failed: 2, Since: 1.75e9} },
		Hints:   func() map[HintOutcome]uint64 { return map[HintOutcome]uint64{HintHeard: 6, HintRefused: 1} },
		Changes: func() map[ChangeOutcome]uint64 { return map[ChangeOutcome]uint64{ChangeMade: 2, ChangeRefused: 5} },
		Dropped: func() uint64 { return 8 },
		Exports: func() (sent, refused, dropped uint64) { return 3, 2, 1 },

		Predecessor:     func() int { return 12 },
		PredecessorLeft: func() time.Duration { return 25 * time.Second },
		TakenOver:       func() int { return 34 },
		Fleet:           func() FleetCounts { return FleetCounts{Live: 2, Silent: 1, Granted: 5, Decides: true} },
		Ports:           map[string]*BoundedListener{"health": Bound(nil, 64, nil, nil)},
		HintSources: func() []HintSource {
			return []HintSource{{Interface: "wlan0", Readings: 50, Errors: 2, Up: true}}
		},
	}
}

// gather returns the families by name.
func gather(t *testing.T, g prometheus.Gatherer) map[string]*dto.MetricFamily {
	t.Helper()
	families, err := g.Gather()
	require.NoError(t, err)
	byName := map[string]*dto.MetricFamily{}
	for _, f := range families {
		byName[f.GetName()] = f
	}
	return byName
}

func TestMetricsFollowTheConventions(t *testing.T) {
	problems, err := testutil.GatherAndLint(NewRegistry(busyProxy(), busyOptions(&handClock{t: 1})))
	require.NoError(t, err)
	for _, p := range problems {
		assert.Fail(t, p.Metric+": "+p.Text)
	}
}

func TestEveryMetricIsShownWhenThereIsSomethingToShow(t *testing.T) {
	shown := gather(t, NewRegistry(busyProxy(), busyOptions(&handClock{t: 1})))
	for _, m := range families {
		assert.True(t, shown[m.name] != nil || strings.HasPrefix(m.name, "penstock_agent_"), m.name)
	}
}

func TestLabelsAreEscaped(t *testing.T) {
	words := "a \"quoted\" back\\slash,\n{and} more"
	options := busyOptions(&handClock{t: 1})
	options.Facts.Missing = []string{words + "\xff"}
	shown := gather(t, NewRegistry(busyProxy(), options))["penstock_datapath_missing"].GetMetric()
	require.Len(t, shown, 1)
	assert.Equal(t, words+"\uFFFD", shown[0].GetLabel()[0].GetValue())
}

func TestTheProcessIsShown(t *testing.T) {
	shown := gather(t, NewRegistry(busyProxy(), busyOptions(&handClock{t: 1})))
	for _, name := range []string{"process_cpu_seconds_total", "go_memstats_alloc_bytes_total"} {
		assert.Positive(t, shown[name].GetMetric()[0].GetCounter().GetValue(), name)
	}
	for _, name := range []string{
		"process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds", "process_max_fds",
		"go_goroutines", "go_threads", "go_memstats_sys_bytes",
	} {
		assert.Positive(t, shown[name].GetMetric()[0].GetGauge().GetValue(), name)
	}
}

func TestLabelsAreBounded(t *testing.T) {
	// An address, a port or a flow's number as a label would grow without end.
	allowed := []string{
		"listener", "rule", "leg", "algorithm", "direction", "reason", "by", "result", "state", "interface", "peer", "outcome",
		"size",
		// told of by the configuration and the code
		"doubt",
		"version", "revision", "goversion", "hash", "tier", "envelope", "le", // constant in a process
	}
	for name, family := range gather(t, NewRegistry(busyProxy(), busyOptions(&handClock{t: 1}))) {
		if !strings.HasPrefix(name, "penstock_") {
			continue
		}
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				assert.True(t, slices.Contains(allowed, l.GetName()), "%s has label %s", name, l.GetName())
				assert.NotContains(t, l.GetValue(), "192.0.2.", "%s shows an address", name)
			}
		}
	}
}

func TestMetricsShowWhatTheSnapshotsSay(t *testing.T) {
	want := `
# HELP penstock_algorithm_changes_total Changes of a rule's algorithm that were asked for while running, by what became of them.
# TYPE penstock_algorithm_changes_total counter
penstock_algorithm_changes_total{result="changed"} 2
penstock_algorithm_changes_total{result="unauthorized"} 5
# HELP penstock_buffered_bytes Bytes read from one leg and not yet written to the other.
# TYPE penstock_buffered_bytes gauge
penstock_buffered_bytes{direction="down"} 200
penstock_buffered_bytes{direction="up"} 0
# HELP penstock_bytes_total Bytes read from the leg they come from and written to the leg they go to.
# TYPE penstock_bytes_total counter
penstock_bytes_total{direction="down",leg="client",listener="lan",rule="all"} 2000
penstock_bytes_total{direction="down",leg="server",listener="lan",rule="all"} 3000
penstock_bytes_total{direction="up",leg="client",listener="lan",rule="all"} 3000
penstock_bytes_total{direction="up",leg="server",listener="lan",rule="all"} 2000
# HELP penstock_cc_limited_seconds_total Time that directions under our congestion control were held back, by what.
# TYPE penstock_cc_limited_seconds_total counter
penstock_cc_limited_seconds_total{algorithm="copa",by="cwnd",direction="down",listener="lan",rule="all"} 1.5
penstock_cc_limited_seconds_total{algorithm="copa",by="cwnd",direction="up",listener="lan",rule="all"} 1.5
penstock_cc_limited_seconds_total{algorithm="copa",by="receiver",direction="down",listener="lan",rule="all"} 1
penstock_cc_limited_seconds_total{algorithm="copa",by="receiver",direction="up",listener="lan",rule="all"} 1
# HELP penstock_cc_pacing_rate_bytes_per_second Pacing rates of our congestion control, summed over groups; those without one are left out.
# TYPE penstock_cc_pacing_rate_bytes_per_second gauge
penstock_cc_pacing_rate_bytes_per_second{algorithm="copa",direction="down"} 500000
# HELP penstock_cc_window_bytes Windows of our congestion control, summed over groups; those without a bound are left out.
# TYPE penstock_cc_window_bytes gauge
penstock_cc_window_bytes{algorithm="copa",direction="down"} 20000
# HELP penstock_datapath_missing What was asked for or is useful and cannot be had, in words; always 1.
# TYPE penstock_datapath_missing gauge
penstock_datapath_missing{reason="bbr: not loaded"} 1
# HELP penstock_flow_closes_total Relayed connections that ended, by why and by whom.
# TYPE penstock_flow_closes_total counter
penstock_flow_closes_total{by="client",listener="lan",reason="eof",rule="all"} 5
penstock_flow_closes_total{by="server",listener="lan",reason="reset",rule="all"} 4
# HELP penstock_flow_duration_seconds How long relayed connections lived.
# TYPE penstock_flow_duration_seconds histogram
penstock_flow_duration_seconds_bucket{listener="lan",rule="all",le="0.1"} 3
penstock_flow_duration_seconds_bucket{listener="lan",rule="all",le="1"} 5
penstock_flow_duration_seconds_bucket{listener="lan",rule="all",le="+Inf"} 6
penstock_flow_duration_seconds_sum{listener="lan",rule="all"} 12.5
penstock_flow_duration_seconds_count{listener="lan",rule="all"} 6
# HELP penstock_flow_rejections_total Connections that were accepted and never relayed, by why.
# TYPE penstock_flow_rejections_total counter
penstock_flow_rejections_total{listener="lan",reason="dial_refused"} 5
penstock_flow_rejections_total{listener="vpn",reason="auth"} 3
# HELP penstock_group_borrowed_bytes Bytes in flight beyond members' shares by weight, of what others leave, summed over groups.
# TYPE penstock_group_borrowed_bytes gauge
penstock_group_borrowed_bytes{algorithm="copa"} 6000
penstock_group_borrowed_bytes{algorithm="cubic"} 0
# HELP penstock_group_members Flows in groups: active ones have something in flight or to send.
# TYPE penstock_group_members gauge
penstock_group_members{algorithm="copa",state="active"} 2
penstock_group_members{algorithm="copa",state="idle"} 1
penstock_group_members{algorithm="cubic",state="active"} 0
penstock_group_members{algorithm="cubic",state="idle"} 0
# HELP penstock_group_unused_bytes Parts of windows that no member wants, summed over groups; those of windows without a bound are left out.
# TYPE penstock_group_unused_bytes gauge
penstock_group_unused_bytes{algorithm="copa"} 4000
penstock_group_unused_bytes{algorithm="cubic"} 14480
# HELP penstock_groups Groups of flows that share a window: with members (used), or kept for the next one (lingering).
# TYPE penstock_groups gauge
penstock_groups{algorithm="copa",state="lingering"} 0
penstock_groups{algorithm="copa",state="used"} 1
penstock_groups{algorithm="cubic",state="lingering"} 1
penstock_groups{algorithm="cubic",state="used"} 0
# HELP penstock_groups_capped Groups whose window or rate hint_cap keeps below what the algorithm asks for.
# TYPE penstock_groups_capped gauge
penstock_groups_capped{algorithm="copa"} 1
penstock_groups_capped{algorithm="cubic"} 0
# HELP penstock_groups_doubting_hints Groups whose hints say more (high) or less (low) than is delivered.
# TYPE penstock_groups_doubting_hints gauge
penstock_groups_doubting_hints{algorithm="copa",doubt="high"} 1
penstock_groups_doubting_hints{algorithm="copa",doubt="low"} 0
penstock_groups_doubting_hints{algorithm="cubic",doubt="high"} 0
penstock_groups_doubting_hints{algorithm="cubic",doubt="low"} 0
# HELP penstock_groups_hinted Groups that have a hint not older than a second.
# TYPE penstock_groups_hinted gauge
penstock_groups_hinted{algorithm="copa"} 1
penstock_groups_hinted{algorithm="cubic"} 0
# HELP penstock_hints_total Hints posted, by what became of them; a request that is refused before it is read counts as one.
# TYPE penstock_hints_total counter
penstock_hints_total{result="heard"} 6
penstock_hints_total{result="unauthorized"} 1
# HELP penstock_held_bytes_total Bytes of the UDP packets that windows let go.
# TYPE penstock_held_bytes_total counter
penstock_held_bytes_total{direction="down",listener="lan"} 120000
# HELP penstock_held_clients Clients that UDP is held for; servers in direction up.
# TYPE penstock_held_clients gauge
penstock_held_clients{direction="down",listener="lan"} 2
# HELP penstock_held_echo_answers_total Echo replies about UDP that is held.
# TYPE penstock_held_echo_answers_total counter
penstock_held_echo_answers_total{direction="down",listener="lan"} 11
# HELP penstock_held_echoes_total Echo requests about UDP that is held.
# TYPE penstock_held_echoes_total counter
penstock_held_echoes_total{direction="down",listener="lan"} 12
# HELP penstock_held_flows UDP flows that rules have decided about.
# TYPE penstock_held_flows gauge
penstock_held_flows{direction="down",listener="lan"} 4
# HELP penstock_held_packets_total UDP packets by what became of them: accepted (let go as their window says), late and overflow (dropped in their queue), refused (dropped by a rule), unmanaged (let go, as rules say), passed (let go: unreadable, or above a bound). Counted twice are held (had to wait) and marked (accepted, with CE).
# TYPE penstock_held_packets_total counter
penstock_held_packets_total{direction="down",listener="lan",outcome="accepted"} 100
penstock_held_packets_total{direction="down",listener="lan",outcome="held"} 40
penstock_held_packets_total{direction="down",listener="lan",outcome="late"} 3
penstock_held_packets_total{direction="down",listener="lan",outcome="marked"} 5
penstock_held_packets_total{direction="down",listener="lan",outcome="overflow"} 2
penstock_held_packets_total{direction="down",listener="lan",outcome="passed"} 7
penstock_held_packets_total{direction="down",listener="lan",outcome="refused"} 6
penstock_held_packets_total{direction="down",listener="lan",outcome="unmanaged"} 8
# HELP penstock_held_waiting_bytes Bytes of the UDP packets that wait for room in their client's window.
# TYPE penstock_held_waiting_bytes gauge
penstock_held_waiting_bytes{direction="down",listener="lan"} 10800
# HELP penstock_held_waiting_packets UDP packets that wait for room in their client's window.
# TYPE penstock_held_waiting_packets gauge
penstock_held_waiting_packets{direction="down",listener="lan"} 9
# HELP penstock_tcp_retransmitted_bytes_total Bytes that TCP sent again.
# TYPE penstock_tcp_retransmitted_bytes_total counter
penstock_tcp_retransmitted_bytes_total{leg="client",listener="lan",rule="all"} 1448
penstock_tcp_retransmitted_bytes_total{leg="server",listener="lan",rule="all"} 1448
# HELP penstock_tunnel_bytes_total Bytes of the packets inside the tunnel, their headers included, received from peers and sent to them.
# TYPE penstock_tunnel_bytes_total counter
penstock_tunnel_bytes_total{direction="received",listener="vpn"} 1000
penstock_tunnel_bytes_total{direction="received",listener="vpn2"} 1
penstock_tunnel_bytes_total{direction="sent",listener="vpn"} 9000
penstock_tunnel_bytes_total{direction="sent",listener="vpn2"} 0
# HELP penstock_tunnel_datagram_sessions Addresses and ports of peers that have sent datagrams and may be answered.
# TYPE penstock_tunnel_datagram_sessions gauge
penstock_tunnel_datagram_sessions{listener="vpn"} 4
penstock_tunnel_datagram_sessions{listener="vpn2"} 0
# HELP penstock_tunnel_datagram_sessions_evicted_total Sessions that ended early to make room for others.
# TYPE penstock_tunnel_datagram_sessions_evicted_total counter
penstock_tunnel_datagram_sessions_evicted_total{listener="vpn"} 7
penstock_tunnel_datagram_sessions_evicted_total{listener="vpn2"} 0
# HELP penstock_tunnel_datagrams_dropped_total UDP datagrams and echo messages that were dropped: refused by policy, crowded (no room for another session), late (stood too long in its queue) and overflow (the queue was full) on the way to a peer, or at a maximum rate on the way from it, unsolicited (from whom the peer had not written to), failed (not taken by the network or the tunnel).
# TYPE penstock_tunnel_datagrams_dropped_total counter
penstock_tunnel_datagrams_dropped_total{listener="vpn",reason="crowded"} 2
penstock_tunnel_datagrams_dropped_total{listener="vpn",reason="failed"} 6
penstock_tunnel_datagrams_dropped_total{listener="vpn",reason="late"} 3
penstock_tunnel_datagrams_dropped_total{listener="vpn",reason="overflow"} 4
penstock_tunnel_datagrams_dropped_total{listener="vpn",reason="refused"} 1
penstock_tunnel_datagrams_dropped_total{listener="vpn",reason="unsolicited"} 5
penstock_tunnel_datagrams_dropped_total{listener="vpn2",reason="crowded"} 0
penstock_tunnel_datagrams_dropped_total{listener="vpn2",reason="failed"} 0
penstock_tunnel_datagrams_dropped_total{listener="vpn2",reason="late"} 0
penstock_tunnel_datagrams_dropped_total{listener="vpn2",reason="overflow"} 0
penstock_tunnel_datagrams_dropped_total{listener="vpn2",reason="refused"} 0
penstock_tunnel_datagrams_dropped_total{listener="vpn2",reason="unsolicited"} 0
# HELP penstock_tunnel_datagrams_total UDP datagrams and echo messages that came from peers and that went to them.
# TYPE penstock_tunnel_datagrams_total counter
penstock_tunnel_datagrams_total{direction="received",listener="vpn"} 50
penstock_tunnel_datagrams_total{direction="received",listener="vpn2"} 0
penstock_tunnel_datagrams_total{direction="sent",listener="vpn"} 60
penstock_tunnel_datagrams_total{direction="sent",listener="vpn2"} 0
# HELP penstock_tunnel_icmp_errors_total ICMP errors about datagrams that peers were told.
# TYPE penstock_tunnel_icmp_errors_total counter
penstock_tunnel_icmp_errors_total{listener="vpn"} 8
penstock_tunnel_icmp_errors_total{listener="vpn2"} 0
# HELP penstock_tunnel_expired_packets_total Packets out of the tunnel whose hop limit had run out.
# TYPE penstock_tunnel_expired_packets_total counter
penstock_tunnel_expired_packets_total{listener="vpn"} 8
penstock_tunnel_expired_packets_total{listener="vpn2"} 0
# HELP penstock_tunnel_invalid_packets_total Packets out of the tunnel that were dropped: malformed (shorter than they say), checksum (one is wrong) and flags (no TCP sends them together).
# TYPE penstock_tunnel_invalid_packets_total counter
penstock_tunnel_invalid_packets_total{listener="vpn",reason="checksum"} 6
penstock_tunnel_invalid_packets_total{listener="vpn",reason="flags"} 7
penstock_tunnel_invalid_packets_total{listener="vpn",reason="malformed"} 5
penstock_tunnel_invalid_packets_total{listener="vpn2",reason="checksum"} 0
penstock_tunnel_invalid_packets_total{listener="vpn2",reason="flags"} 0
penstock_tunnel_invalid_packets_total{listener="vpn2",reason="malformed"} 0
# HELP penstock_tunnel_peers Peers that may use the tunnel.
# TYPE penstock_tunnel_peers gauge
penstock_tunnel_peers{listener="vpn"} 2
penstock_tunnel_peers{listener="vpn2"} 0
# HELP penstock_tunnel_peers_active Peers whose session has not run out: WireGuard's that made a handshake in the last three minutes, and CONNECT-IP's.
# TYPE penstock_tunnel_peers_active gauge
penstock_tunnel_peers_active{listener="vpn"} 1
penstock_tunnel_peers_active{listener="vpn2"} 1
# HELP penstock_tunnel_refused_packets_total Packets that were no peer's, or not from its addresses.
# TYPE penstock_tunnel_refused_packets_total counter
penstock_tunnel_refused_packets_total{listener="vpn"} 3
penstock_tunnel_refused_packets_total{listener="vpn2"} 0
# HELP penstock_tunnel_send_errors_total WireGuard's packets outside that the kernel did not take: too_large, unreachable (no route, or the device is down), forbidden (a firewall of this machine), no_buffer (it had no memory), other.
# TYPE penstock_tunnel_send_errors_total counter
penstock_tunnel_send_errors_total{listener="vpn",reason="forbidden"} 3
penstock_tunnel_send_errors_total{listener="vpn",reason="no_buffer"} 4
penstock_tunnel_send_errors_total{listener="vpn",reason="other"} 5
penstock_tunnel_send_errors_total{listener="vpn",reason="too_large"} 1
penstock_tunnel_send_errors_total{listener="vpn",reason="unreachable"} 2
penstock_tunnel_send_errors_total{listener="vpn2",reason="forbidden"} 0
penstock_tunnel_send_errors_total{listener="vpn2",reason="no_buffer"} 0
penstock_tunnel_send_errors_total{listener="vpn2",reason="other"} 0
penstock_tunnel_send_errors_total{listener="vpn2",reason="too_large"} 0
penstock_tunnel_send_errors_total{listener="vpn2",reason="unreachable"} 0
# HELP penstock_tunnel_stalls_total How often a connection in user space had stopped retransmitting, and was made to go on.
# TYPE penstock_tunnel_stalls_total counter
penstock_tunnel_stalls_total{listener="vpn"} 4
penstock_tunnel_stalls_total{listener="vpn2"} 0
# HELP penstock_tunnel_up Whether packets get through, as far as it is the proxy's; 0: a port or a device has gone and is being opened again.
# TYPE penstock_tunnel_up gauge
penstock_tunnel_up{listener="vpn"} 1
penstock_tunnel_up{listener="vpn2"} 0
`
	var names []string
	for line := range strings.Lines(want) {
		if name, ok := strings.CutPrefix(line, "# TYPE "); ok {
			names = append(names, strings.Fields(name)[0])
		}
	}
	registry := NewRegistry(busyProxy(), busyOptions(&handClock{t: 1}))
	assert.NoError(t, testutil.GatherAndCompare(registry, strings.NewReader(want), names...))
}

func TestBusyLegsAreSampledOnceASecond(t *testing.T) {
	clock := &handClock{t: cc.Time(time.Second)}
	src := busyProxy()
	registry := NewRegistry(src, busyOptions(clock))
	// rtt counts the observations of the client's leg.
	rtt := func() uint64 {
		for _, m := range gather(t, registry)["penstock_tcp_rtt_seconds"].GetMetric() {
			if m.GetLabel()[0].GetValue() == "client" {
				return m.GetHistogram().GetSampleCount()
			}
		}
		return 0
	}

	assert.EqualValues(t, 1, rtt(), "bytes have moved since the start")
	clock.t = clock.t.Add(sampleEvery - 1)
	src.flows[0].Down.Written += 1000
	assert.EqualValues(t, 1, rtt(), "a second scraper right after the first")
	clock.t = clock.t.Add(1)
	assert.EqualValues(t, 2, rtt(), "a second later, with bytes moved")
	clock.t = clock.t.Add(sampleEvery)
	assert.EqualValues(t, 2, rtt(), "an idle leg says nothing new")
	src.flows = nil
	clock.t = clock.t.Add(sampleEvery)
	assert.EqualValues(t, 2, rtt(), "what was seen stays when the flow has gone")
}

func TestWindowsOfAGroupCountOnce(t *testing.T) {
	src := busyProxy()
	second := src.flows[0]
	second.ID = 3
	src.flows = append(src.flows, second) // the other member of the same group
	got := sumLive(src).control[controlKey{"copa", "down"}]
	require.NotNil(t, got)
	assert.Equal(t, 2, got.flows)
	assert.InDelta(t, 40000, got.window, 1e-6)
	assert.InDelta(t, 1e6, got.pacing, 1e-6) // 8 Mbit/s
	assert.InDelta(t, 2*1448, got.inflight, 1e-6)
}

func TestAWindowWithoutBoundIsLeftOut(t *testing.T) {
	src := busyProxy()
	src.flows[0].Down.Flow.Cwnd = cc.MaxCwnd
	assert.Zero(t, sumLive(src).control[controlKey{"copa", "down"}].window)
}

func TestTheRestOfAWindowWithoutBoundIsLeftOut(t *testing.T) {
	sums := sumGroups([]flow.Group{{Algorithm: "static", Members: 1, Cwnd: cc.MaxCwnd, Unused: cc.MaxCwnd - 5}}, 1)
	assert.Zero(t, sums["static"].unused)
	assert.Equal(t, 1, sums["static"].used)
	assert.Zero(t, sums["static"].hinted, "it has no hint")
}

// TestDashboardAndAlertsAskForMetricsThatThereAre catches what a renamed metric
// leaves behind.
func TestDashboardAndAlertsAskForMetricsThatThereAre(t *testing.T) {
	names := map[string]bool{}
	for _, m := range families {
		names[m.name] = true
	}
	for _, path := range []string{"../deploy/grafana.json", "../deploy/alerts.yaml"} {
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		asked := regexp.MustCompile(`\bpenstock_\w+`).FindAllString(string(text), -1)
		require.NotEmpty(t, asked, path)
		for _, name := range asked {
			assert.True(t, names[name] || names[strings.TrimSuffix(name, "_bucket")], "%s asks for %s", path, name)
		}
	}
}

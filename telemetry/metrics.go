package telemetry

// The families of the proxy, but for tunnels, agents and the sampled ones. A name is penstock_<noun>_<unit>[_total],
// in base units (seconds, bytes). A label has values from the configuration or the code alone: never an address, a
// port or the number of a flow, because each value is a series that a database keeps.
//
// A new metric is a line here, a line in collector.go, and a panel of deploy/grafana.json or a word in its
// description; a test compares them.
var (
	// The process and its configuration.
	buildInfo  = newGauge("build_info", "The running program; always 1.", "version", "revision", "goversion")
	startTime  = newGauge("start_time_seconds", "When the process started, in Unix time.")
	configInfo = newGauge("config_info",
		"SHA-256 of the configuration in use, empty for the built-in one; always 1.", "hash")
	reloads = newCounter("config_reloads_total",
		"Times the configuration was reread, by whether it was put into force.", "result")
	reloadOK = newGauge("config_last_reload_successful",
		"1 unless the last attempt to reread the configuration failed; the one before is in force then.")
	reloadTime = newGauge("config_last_reload_success_timestamp_seconds",
		"When the configuration in force was put there, in Unix time.")
	configChanged = newGauge("config_changed_rules",
		"Rules, and the defaults, whose algorithms have been changed since the configuration was reread.")
	changesTotal = newCounter("algorithm_changes_total",
		"Changes of a rule's algorithm that were asked for while running, by what became of them.", "result")
	// The datapath.
	datapathInfo = newGauge("datapath_info",
		"The datapath's tier and the kernel's congestion control under our window; always 1.", "tier", "envelope")
	missing = newGauge("datapath_missing",
		"What was asked for or is useful and cannot be had, in words; always 1.", "reason")
	busyLegs     = newGauge("datapath_busy_legs", "Legs with bytes unsent or unacknowledged.")
	pollInterval = newGauge("datapath_poll_interval_seconds",
		"Time between two polls of a busy leg whose window the relay keeps, at most.")
	answers = newHistogram("datapath_answer_seconds",
		"From an acknowledgement until the kernel had the window computed from it.")
	enforced      = newGauge("datapath_enforced_legs", "Legs whose window the kernel enforces.")
	enforcedLimit = newGauge("datapath_enforced_legs_limit", "Legs whose window the kernel can enforce at once.")
	unenforced    = newCounter("datapath_unenforced_legs_total",
		"Legs whose window the kernel was to enforce and does not, by why.", "reason")
	fallbacks = newCounter("datapath_fallbacks_total",
		"Times a leg fell back to Reno in the kernel, since the process did not answer it.")
	traceDropped = newCounter("trace_dropped_total", "Trace events lost because the disk was slow or full.")

	// Connections, before and while they are relayed.
	draining    = newGauge("draining", "1 while no new connections are accepted and open ones may end.")
	predecessor = newGauge("predecessor_connections",
		"Connections that the process which this one took over from still has; 0 once it has ended.")
	predecessorLeft = newGauge("predecessor_drain_seconds",
		"Time until the process which this one took over from resets them; 0 if they may last, or once it has ended.")
	takenOver = newCounter("connections_taken_over_total",
		"Connections that came from the process which this one took over from.")
	hostsActive = newGauge("hosts_active", "Client hosts with connections.")
	limit       = newGauge("connections_limit", "Connections accepted at most, by configuration and by descriptors.")
	conns       = newGauge("connections_active",
		"Connections in whatever state, those not yet relayed included.", "listener")
	accepted   = newCounter("connections_accepted_total", "Connections accepted.", "listener")
	rejections = newCounter("flow_rejections_total",
		"Connections that were accepted and never relayed, by why.", "listener", "reason")
	setup = newHistogram("flow_setup_seconds", "From accepting a connection to relaying it.", "listener")
	dial  = newHistogram("flow_dial_seconds", "Resolving and reaching the server, where it worked.", "listener")

	// Relayed connections, by the rule that they came under.
	flowsActive = newGauge("flows_active", "Connections being relayed.", "listener", "rule")
	flowsTotal  = newCounter("flows_total", "Connections relayed since the start.", "listener", "rule")
	closes      = newCounter("flow_closes_total",
		"Relayed connections that ended, by why and by whom.", "listener", "rule", "reason", "by")
	duration     = newHistogram("flow_duration_seconds", "How long relayed connections lived.", "listener", "rule")
	downloadTook = newHistogram("download_seconds",
		"From accepting a connection to the last byte that its client got, of connections that are over.", "rule", "size")
	downloadRate = newHistogram("download_rate_bytes_per_second",
		"Bytes that the client got over that time, pauses included, of connections that are over.", "rule", "size")
	downloadQueueing = newHistogram("download_queueing_delay_seconds",
		"Smoothed round-trip time at the end of a connection above the least that its host has had; unmanaged "+
			"connections too.", "rule", "size")
	bytesTotal = newCounter("bytes_total",
		"Bytes read from the leg they come from and written to the leg they go "+
			"to.", "listener", "rule", "direction", "leg")
	spliced = newCounter("splice_bytes_total",
		"Of the bytes written, those moved inside the kernel.", "listener", "rule", "direction")
	buffered = newGauge("buffered_bytes", "Bytes read from one leg and not yet written to the other.", "direction")

	// What TCP itself does, under our windows.
	retransmitted = newCounter("tcp_retransmitted_bytes_total", "Bytes that TCP sent again.", "listener", "rule", "leg")
	retransmits   = newCounter("tcp_retransmitted_segments_total",
		"Segments that the kernel's TCP sent again, of connections that are over.", "leg")
	lastRTT      = newHistogram("tcp_last_rtt_seconds", "Smoothed round-trip time of a leg at its end.", "leg")
	signalErrors = newCounter("tcp_signal_errors_total", "Failed reads of a leg's state.", "listener", "rule", "leg")
	tcpCwnd      = newGauge("tcp_cwnd_bytes", "TCP's own congestion windows, summed over legs.", "leg")
	tcpUnsent    = newGauge("tcp_unsent_bytes",
		"Bytes in TCP's send queues and not on the wire, summed over legs.", "leg")

	// What our congestion control holds, by algorithm.
	ccFlows  = newGauge("cc_flows", "Directions whose congestion control is ours.", "algorithm", "direction")
	ccWindow = newGauge("cc_window_bytes",
		"Windows of our congestion control, summed over groups; those without a bound "+
			"are left out.", "algorithm", "direction")
	ccInflight = newGauge("cc_inflight_bytes",
		"Bytes in flight under our congestion control.", "algorithm", "direction")
	ccPacing = newGauge("cc_pacing_rate_bytes_per_second",
		"Pacing rates of our congestion control, summed over groups; those without one "+
			"are left out.", "algorithm", "direction")
	groupsOpen = newGauge("groups",
		"Groups of flows that share a window: with members (used), or kept for the next "+
			"one (lingering).", "algorithm", "state")
	groupMembers = newGauge("group_members",
		"Flows in groups: active ones have something in flight or to send.", "algorithm", "state")
	groupBorrowed = newGauge("group_borrowed_bytes",
		"Bytes in flight beyond members' shares by weight, of what others leave, summed "+
			"over groups.", "algorithm")
	groupsHinted = newGauge("groups_hinted", "Groups that have a hint not older than a second.", "algorithm")
	groupUnused  = newGauge("group_unused_bytes",
		"Parts of windows that no member wants, summed over groups; those of windows "+
			"without a bound are left out.", "algorithm")
	groupsCapped = newGauge("groups_capped",
		"Groups whose window or rate hint_cap keeps below what the algorithm asks for.", "algorithm")
	groupsDoubting = newGauge("groups_doubting_hints",
		"Groups whose hints say more (high) or less (low) than is delivered.", "algorithm", "doubt")
	// Exports, hints, and the ports of telemetry.
	exports = newCounter("otlp_exports_total",
		"Exports of all metrics by OTLP that the collector took (sent), refused (refused), or did not answer while there "+
			"was room for them to wait (dropped).", "result")
	hintsTotal = newCounter("hints_total",
		"Hints posted, by what became of them; a request that is refused before it is read counts as one.", "result")
	portRefusals = newCounter("telemetry_rejections_total",
		"Connections to a port of telemetry that were closed at once, by the bound that they met.",
		"listener", "reason")
	hintReadings = newCounter("hint_source_readings_total", "Times an interface was read for hints.", "interface")
	hintErrors   = newCounter("hint_source_errors_total",
		"Times an interface could not be read for hints; it is tried again each second.", "interface")
	hintSourceUp = newGauge("hint_source_up", "1 while the last reading of an interface for hints worked.", "interface")

	// Our congestion control over time.
	ccLosses = newCounter("cc_loss_events_total",
		"Times our congestion control was told of loss.", "listener", "rule", "algorithm", "direction")
	ccLimited = newCounter("cc_limited_seconds_total",
		"Time that directions under our congestion control were held back, by "+
			"what.", "listener", "rule", "algorithm", "direction", "by")
)

// Families that the sampler fills: of legs, and of directions under our congestion control.
var (
	rtt    = newHistogram("tcp_rtt_seconds", "Smoothed round-trip time of busy legs, sampled at scrapes.", "leg")
	minRTT = newHistogram("tcp_min_rtt_seconds", "Smallest round-trip time of busy legs, sampled at scrapes.", "leg")

	queueing = newHistogram("tcp_queueing_delay_seconds",
		"Smoothed round-trip time above the smallest of busy legs, sampled at scrapes.", "leg")
	delivery = newHistogram("tcp_delivery_rate_bytes_per_second",
		"Delivery rate of busy legs, sampled at scrapes.", "leg")
	ccDelay = newHistogram("cc_queueing_delay_seconds",
		"Newest round-trip time above the smallest of busy directions, as our congestion control sees it, sampled at "+
			"scrapes.", "algorithm", "direction")
)

// Families of tunnels.
var (
	tunnelUp = newGauge("tunnel_up",
		"Whether packets get through, as far as it is the proxy's; 0: a port or a device has gone and is being opened "+
			"again.", "listener")
	tunnelPeers  = newGauge("tunnel_peers", "Peers that may use the tunnel.", "listener")
	tunnelActive = newGauge("tunnel_peers_active",
		"Peers whose session has not run out: WireGuard's that made a handshake in the last three minutes, and "+
			"CONNECT-IP's.", "listener")
	tunnelBytes = newCounter("tunnel_bytes_total",
		"Bytes of the packets inside the tunnel, their headers included, received from peers and sent to "+
			"them.", "listener", "direction")
	tunnelRefused = newCounter("tunnel_refused_packets_total",
		"Packets that were no peer's, or not from its addresses.", "listener")
	tunnelLost = newCounter("tunnel_lost_packets_total",
		"Packets to peers that were lost here, since more waited than may.", "listener")
	tunnelSendErrors = newCounter("tunnel_send_errors_total",
		"WireGuard's packets outside that the kernel did not take: too_large, unreachable (no route, or the device "+
			"is down), forbidden (a firewall of this machine), no_buffer (it had no memory), other.",
		"listener", "reason")
	tunnelHandshakes = newCounter("tunnel_dropped_handshakes_total",
		"Connections asked for that were not heard, since as many waited as may; clients ask again.", "listener")
	tunnelStalls = newCounter("tunnel_stalls_total",
		"How often a connection in user space had stopped retransmitting, and was made to go on.", "listener")
	tunnelInvalid = newCounter("tunnel_invalid_packets_total",
		"Packets out of the tunnel that were dropped: malformed (shorter than they say), checksum (one is wrong) "+
			"and flags (no TCP sends them together).", "listener", "reason")
	tunnelExpired = newCounter("tunnel_expired_packets_total",
		"Packets out of the tunnel whose hop limit had run out.", "listener")

	tunnelDatagrams = newCounter("tunnel_datagrams_total",
		"UDP datagrams and echo messages that came from peers and that went to them.", "listener", "direction")
	tunnelDropped = newCounter("tunnel_datagrams_dropped_total",
		"UDP datagrams and echo messages that were dropped: refused by policy, "+
			"crowded (no room for another session), late (stood too long in its queue) and overflow (the queue was "+
			"full) on the way to a peer, or at a maximum rate on the way from it, "+
			"unsolicited (from whom the peer had not written to), failed (not taken by the network or the "+
			"tunnel).", "listener", "reason")
	tunnelSessions = newGauge("tunnel_datagram_sessions",
		"Addresses and ports of peers that have sent datagrams and may be answered.", "listener")
	tunnelEvicted = newCounter("tunnel_datagram_sessions_evicted_total",
		"Sessions that ended early to make room for others.", "listener")
	tunnelNotices = newCounter("tunnel_icmp_errors_total",
		"ICMP errors about datagrams that peers were told.", "listener")
)

// Metrics of single peers, by the names that configuration, tokens or certificates
// give them.
var (
	peerBytes = newCounter("peer_bytes_total",
		"Bytes received from a peer and sent to it: WireGuard's with the tunnel's own, of a MASQUE client "+
			"those of the packets in its CONNECT-IP sessions.", "listener", "peer", "direction")
	peerHandshake = newGauge("peer_last_handshake_timestamp_seconds",
		"When WireGuard's last handshake with a peer was, in Unix time; absent: there was none.", "listener", "peer")
	peerConnections = newGauge("peer_connections_active", "Connections of a peer that are relayed.", "listener", "peer")
	peerQueueing    = newGauge("peer_queueing_delay_seconds",
		"Newest round-trip time towards a peer above the least, the greatest of the connections that have "+
			"something in flight under our congestion control; 0: none has.", "listener", "peer")
	peerRate = newGauge("peer_delivery_rate_bytes_per_second",
		"Newest delivery rates towards a peer, summed over the connections that have something in flight "+
			"under our congestion control.", "listener", "peer")
	peerRetransmitted = newCounter("peer_retransmitted_bytes_total", "Bytes that TCP sent to a peer again.", "listener",
		"peer")
)

// Metrics of congestion control agents.
var (
	agentUp = newGauge("agent_up",
		"1 while the agent is there; otherwise its flows are under their fallback.", "agent")
	agentFlows = newGauge("agent_flows",
		"Windows that the agent is to decide, by who does: the agent, or the fallback.", "agent", "decides")
	agentConnects = newCounter("agent_connects_total", "Times the agent was reached.", "agent")
	agentReports  = newCounter("agent_reports_total", "Reports sent to the agent.", "agent")
	agentDropped  = newCounter("agent_reports_dropped_total",
		"Reports for which the agent's queue had no room; the next ones have what they would have told.", "agent")
	agentDecisions = newCounter("agent_decisions_total", "Messages of the agent about flows that there are.", "agent")
	agentRefused   = newCounter("agent_messages_refused_total",
		"Messages of the agent that were not heeded, by reason: malformed; about a flow that there is none of "+
			"(no_such_flow), as one that has just ended; about a program that was not installed (no_such_program); "+
			"or of a kind that agents do not send (unexpected_kind).", "agent", "reason")
	agentAborts = newCounter("agent_program_aborts_total",
		"Runs of the agent's programs that ended in arithmetic without a result.", "agent")
	agentFallbacks = newCounter("agent_fallbacks_total",
		"Times the fallback took over from the agent: it is gone, stalled (does not read), silent (does not "+
			"answer), or its program fails.", "agent", "reason")
	agentTook = newHistogram("agent_decision_seconds",
		"From a report to the agent until the decision that followed it was in force; without reports that the agent "+
			"passed over for a later one.", "agent")
)

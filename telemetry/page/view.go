// Package page serves a page for the browser, and the view that it shows as JSON, which penstock top shows in a
// terminal. The proxy searches, sorts and cuts lists, so that it sends only the rows in sight. The package reads
// snapshots and changes nothing: changes are made by package telemetry.
package page

import "github.com/penstock-net/penstock/cc"

// View is the answer to GET /v1/view. Times are in Unix seconds, durations in
// seconds, rates in bits per second. What is not known yet is absent.
type View struct {
	Now     float64 `json:"now"`
	Fresh   float64 `json:"fresh_seconds"` // asking more often than this shows nothing new
	Version string  `json:"version"`
	Start   float64 `json:"start"` // of the process
	State   string  `json:"state"` // "serving", or why not all new connections are served
	Serving bool    `json:"serving"`
	Drain   string  `json:"drain,omitempty"` // in words, what the process before this one still has
	Totals  Totals  `json:"totals"`
	// Changeable: whoever has the token may change algorithms. Changed are the rules in force
	// that differ from the file.
	Changeable bool     `json:"changeable,omitempty"`
	Changed    []string `json:"changed,omitempty"`

	// Gains say what sampled rules and proofs have shown, one sentence each.
	Gains []string `json:"gains,omitempty"`
	// Fleet says what the edges and the shared rates of a fleet do, a line each; absent where there is none.
	Fleet []string `json:"fleet,omitempty"`

	Listeners []Listener `json:"listeners"`
	History   History    `json:"history"`
	// Events are the newest ones, newest first; absent where the request has seen them.
	Events    []Event `json:"events,omitempty"`
	EventsSeq uint64  `json:"events_seq"`

	// Focus is the host that was asked for. Rows and history are then those of the host.
	Focus *Focus `json:"host,omitempty"`

	Table   string `json:"table"`   // what the rows are: flows, hosts, peers, listeners or events
	Total   int    `json:"total"`   // rows there are
	Matches int    `json:"matches"` // rows that the search finds
	Offset  int    `json:"offset"`  // of the first row here among those
	Flows   []Flow `json:"flows,omitempty"`
	Hosts   []Host `json:"hosts,omitempty"`
	Peers   []Peer `json:"peers,omitempty"`
	Detail  *Flow  `json:"detail,omitempty"` // the flow that was asked for; absent: it is closed
}

// Totals are those of all listeners.
type Totals struct {
	Down        cc.Rate `json:"down_bits_per_second"` // written to clients
	Up          cc.Rate `json:"up_bits_per_second"`   // written to servers
	Connections int     `json:"connections"`
	Limit       int     `json:"limit"` // connections at most
	Sources     int     `json:"sources"`
	// Queue50 and Queue95 are quantiles of the queueing delay, over hosts that had bytes
	// delivered of late; absent where there are none.
	Queue50 *float64 `json:"queue_p50_seconds,omitempty"`
	Queue95 *float64 `json:"queue_p95_seconds,omitempty"`
}

// Focus is what one host does, by all its connections and windows.
type Focus struct {
	Host        string   `json:"host"` // its address or name, as Host.Host
	Connections int      `json:"connections"`
	Down        cc.Rate  `json:"down_bits_per_second"` // written to it
	Up          cc.Rate  `json:"up_bits_per_second"`   // written for it to servers
	Rules       []string `json:"rules"`                // of its connections, by name; the defaults are empty
	// Queue is the longest queueing delay of its busy windows; absent where none is busy.
	Queue    *float64 `json:"queueing_delay_seconds,omitempty"`
	Reason   string   `json:"reason"` // of its worst window; empty: it has none
	Severity Severity `json:"severity,omitempty"`
	UDP      *HeldUDP `json:"held_udp,omitempty"` // of all its windows; absent where none is held
	Gains    []string `json:"gains,omitempty"`    // what proofs of it and samples of its rules have shown
}

// Gain is what a proof or a sampled rule has shown.
type Gain struct {
	Host  string   // of a proof; empty: of a sample
	Rules []string // of a sample and of the hosts that it is compared with; the defaults are empty
	Text  string
}

// Listener is one listener, with its tunnel if it ends one.
type Listener struct {
	Name     string  `json:"name"`
	Mode     string  `json:"mode"`
	Active   int     `json:"active"`
	Accepted uint64  `json:"accepted"`
	Refused  uint64  `json:"refused"`
	Down     cc.Rate `json:"down_bits_per_second"`
	Up       cc.Rate `json:"up_bits_per_second"`
}

// Flow is one connection as a row shows it.
type Flow struct {
	ID         uint64  `json:"id"`
	State      string  `json:"state"`
	Listener   string  `json:"listener"`
	Rule       string  `json:"rule"`
	Client     string  `json:"client"`
	Peer       string  `json:"peer,omitempty"`
	Target     string  `json:"target,omitempty"`
	Host       string  `json:"host,omitempty"`
	ServerName string  `json:"server_name,omitempty"`
	Age        float64 `json:"age_seconds"`
	Idle       float64 `json:"idle_seconds"`
	Main       string  `json:"main"` // the direction that moves more: down or up
	Down       Side    `json:"down"`
	Up         Side    `json:"up"`
}

// Side is one direction of a flow.
type Side struct {
	Algorithm string   `json:"algorithm,omitempty"`
	Phase     string   `json:"phase,omitempty"`
	Bytes     cc.Bytes `json:"bytes"`
	Rate      *cc.Rate `json:"bits_per_second,omitempty"`
	// The rest is absent where the kernel alone decides.
	Window   cc.Bytes `json:"window_bytes,omitempty"` // this flow's share
	Inflight cc.Bytes `json:"inflight_bytes,omitempty"`
	Pacing   cc.Rate  `json:"pacing_bits_per_second,omitempty"`
	Queue    *float64 `json:"queueing_delay_seconds,omitempty"`
	SRTT     float64  `json:"srtt_seconds,omitempty"`
	MinRTT   float64  `json:"min_rtt_seconds,omitempty"`
	Lost     cc.Bytes `json:"lost_bytes,omitempty"`
	// LimitedBy is what holds it back now, and Limited for how long that cause has
	// done so in the flow's life.
	LimitedBy string  `json:"limited_by,omitempty"`
	Limited   float64 `json:"limited_seconds,omitempty"`
	Reason    string  `json:"reason,omitempty"` // LimitedBy in words, with its part of the flow's life: window, 90 %
}

// Host is one group of flows that share a window.
type Host struct {
	Name      string   `json:"name"`  // of the group, as in /hosts: down|lan|192.0.2.7
	Label     string   `json:"label"` // what an operator calls it: 192.0.2.7
	Host      string   `json:"host"`  // whom it is about: 192.0.2.7; empty: all of a listener
	Algorithm string   `json:"algorithm"`
	Receives  bool     `json:"receives,omitempty"` // hosts send, and this is the window they are let send in
	Phase     string   `json:"phase"`
	Hosts     []string `json:"hosts"`
	Members   int      `json:"members"`
	Active    int      `json:"active"`
	Rate      *cc.Rate `json:"bits_per_second,omitempty"`
	Window    cc.Bytes `json:"window_bytes"`
	Inflight  cc.Bytes `json:"inflight_bytes"`
	Queue     *float64 `json:"queueing_delay_seconds,omitempty"`
	MinRTT    float64  `json:"min_rtt_seconds,omitempty"`
	LimitedBy string   `json:"limited_by"`
	Reason    string   `json:"reason"` // what is wrong with it, or else what holds it back
	Severity  Severity `json:"severity,omitempty"`
	Hinted    bool     `json:"hinted,omitempty"`
	Capped    bool     `json:"capped,omitempty"`
	Delivered cc.Bytes `json:"delivered_bytes"`
	UDP       *HeldUDP `json:"held_udp,omitempty"` // absent where none is held
}

// HeldUDP is the UDP of a group that waits for room in its window.
type HeldUDP struct {
	AcknowledgedBy string   `json:"acknowledged_by"` // as in /held, with commas where clients of the group differ
	BusyFlows      int      `json:"busy_flows"`
	Waiting        int      `json:"waiting_packets"`
	Delivered      cc.Bytes `json:"delivered_bytes"`
	Rate           *cc.Rate `json:"bits_per_second,omitempty"` // in views only; absent until it is known
}

// Peer is one peer of a tunnel.
type Peer struct {
	Listener  string   `json:"listener"`
	Mode      string   `json:"mode"`
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	Endpoint  string   `json:"endpoint,omitempty"` // absent: never heard from
	// Handshake is how long ago WireGuard's last was; absent: never, or not WireGuard.
	Handshake *float64 `json:"handshake_age_seconds,omitempty"`
	Received  uint64   `json:"received_bytes"`
	Sent      uint64   `json:"sent_bytes"`
	Down      *cc.Rate `json:"down_bits_per_second,omitempty"`
	Up        *cc.Rate `json:"up_bits_per_second,omitempty"`
}

// History is the last hour, or the last day.
type History struct {
	Step   float64 `json:"step_seconds"`
	Points []Point `json:"points"` // oldest first
}

// Point is what one step of the history came to.
type Point struct {
	At          float64  `json:"t"`
	Down        cc.Rate  `json:"down"`
	Up          cc.Rate  `json:"up"`
	Connections int      `json:"n"`
	Queue50     *float64 `json:"q50,omitempty"`
	Queue95     *float64 `json:"q95,omitempty"`
	Refused     uint64   `json:"refused,omitempty"`
}

// Event is something that happened, once or several times.
type Event struct {
	At    float64 `json:"t"` // the last time
	Level string  `json:"level"`
	Text  string  `json:"text"`
	Count int     `json:"count"`
}

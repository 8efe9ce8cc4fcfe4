package config

import (
	"reflect"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/fleet"
	"github.com/penstock-net/penstock/proxy/linkstat"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Config is the configuration file.
type Config struct {
	// Where connections come from; at least one.
	Listeners []access.Listener `yaml:"listeners" required:"yes" reload:"yes"`
	// Tried in order; the first that matches decides.
	Rules []policy.RuleSettings `yaml:"rules" reload:"yes"`
	// What rules leave open, or all where none matches.
	Defaults policy.TermsSettings `yaml:"defaults" reload:"yes"`
	// Bounds on connections, times and memory.
	Limits Limits `yaml:"limits"`
	// Who keeps our window. ebpf: the kernel, by a congestion control of ours (Linux 6.10, CAP_BPF and CAP_PERFMON at
	// the start). bbr, cubic, reno: the relay, above that control's own window. auto: the first of these that can be
	// had.
	Envelope Envelope `yaml:"envelope"`
	// Firewall mark of the proxy's own connections, so that capture rules let them pass; 0: none. Setting it needs
	// CAP_NET_ADMIN.
	Mark Mark `yaml:"mark"`
	// Interfaces of this machine: their rate and queue, as netlink tells them, are hints for those who send through
	// them.
	Hints []linkstat.Settings `yaml:"hints"`
	// Congestion control agents; rules name them ccp:NAME.
	Agents []agent.Settings `yaml:"agents"`
	// Other edges, which share maximum rates (shared) and tell this one about hosts when they drain.
	Fleet fleet.Settings `yaml:"fleet"`
	// Metrics, health and the list of flows over HTTP.
	Telemetry Telemetry `yaml:"telemetry"`
	// What is logged to standard error.
	Log Log `yaml:"log"`
	// How the proxy ends.
	Shutdown Shutdown `yaml:"shutdown" reload:"yes"`
}

// defaultConfig returns the values of keys that a file leaves out.
func defaultConfig() Config {
	return Config{
		Defaults: policy.TermsSettings{DirectionSettings: policy.DirectionSettings{Algorithm: cc.Default}},
		Limits: Limits{
			IdleTimeout:       defaultIdle,
			HalfClosedTimeout: 5 * time.Minute,
			HandshakeTimeout:  10 * time.Second,
			DialTimeout:       10 * time.Second,
			ServerNameWait:    time.Second,
			Buffer:            1 << 20,
			HeldLegs:          defaultHeldLegs,
			ReceiveBuffer:     defaultReceiveBuffer,
			Memory:            256 << 20,
		},
		Envelope:  "auto",
		Telemetry: Telemetry{Address: DefaultTelemetry, Health: "off", OTLP: OTLP{Interval: time.Minute}},
		Log:       Log{Level: "info", Format: "auto", Flows: true},
		Shutdown:  Shutdown{Drain: 30 * time.Second},
	}
}

// Default returns the configuration without a file: SOCKS5 and HTTP CONNECT on one loopback port,
// our own algorithm in both directions. It needs no privilege.
func Default() Config {
	c := defaultConfig()
	c.Listeners = []access.Listener{{Name: "local", Mode: access.Mixed, Address: "127.0.0.1:1080"}}
	return c
}

// configType is the type of the whole file.
var configType = reflect.TypeFor[Config]()

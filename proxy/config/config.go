// Package config is the configuration file: its types, schema, reading, checks, and what may
// change while the proxy runs. It opens nothing but the files that it names.
package config

import (
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Config is the configuration file.
type Config struct {
	Listeners []Listener `yaml:"listeners" required:"yes" reload:"yes"`
	Rules     []Rule     `yaml:"rules" reload:"yes"`
	Defaults  Terms      `yaml:"defaults" reload:"yes"`
	Limits    Limits     `yaml:"limits"`
	Envelope  Envelope   `yaml:"envelope"`
	Mark      Mark       `yaml:"mark"`
	Hints     []Source   `yaml:"hints"`
	Agents    []Agent    `yaml:"agents"`
	Telemetry Telemetry  `yaml:"telemetry"`
	Log       Log        `yaml:"log"`
	Shutdown  Shutdown   `yaml:"shutdown" reload:"yes"`
}

// Listener is one way in.
type Listener struct {
	Name          string         `yaml:"name" required:"yes" reload:"yes"`
	Mode          access.Mode    `yaml:"mode" required:"yes" reload:"sockets"`
	Address       string         `yaml:"address" reload:"sockets"`
	Target        string         `yaml:"target" reload:"yes"`
	Users         []User         `yaml:"users" reload:"yes"`
	ProxyProtocol Header         `yaml:"proxy_protocol" reload:"yes"`
	KeepClient    bool           `yaml:"keep_client"`
	Device        string         `yaml:"device" reload:"sockets"`
	Tunnel        Tunnel         `yaml:"tunnel"`
	WireGuard     WireGuard      `yaml:"wireguard"`
	MASQUE        MASQUE         `yaml:"masque"`
	TLS           TLS            `yaml:"tls" reload:"yes"`
	Connections   int            `yaml:"connections" min:"0" reload:"yes"`
	Allow         []netip.Prefix `yaml:"allow" reload:"yes"`
}

// User is one account.
type User struct {
	Name         string `yaml:"name" required:"yes"`
	Password     string `yaml:"password" secret:"true"`
	PasswordFile string `yaml:"password_file"`
}

// Header says who may tell us a client's address.
type Header struct {
	From []netip.Prefix `yaml:"from"`
}

// Rule gives terms to the connections it matches.
type Rule struct {
	Name      string    `yaml:"name" required:"yes"`
	Match     Match     `yaml:"match"`
	Refuse    Refuse    `yaml:"refuse"`
	Undecided Undecided `yaml:"undecided"`
	Terms     `yaml:",inline"`
}

// Match selects connections.
type Match struct {
	Protocol    policy.Protocol      `yaml:"protocol"`
	Listener    []string             `yaml:"listener"`
	Source      []netip.Prefix       `yaml:"source"`
	Destination []netip.Prefix       `yaml:"destination"`
	Ports       []policy.PortRange   `yaml:"ports"`
	Host        []string             `yaml:"host"`
	ServerName  []policy.NamePattern `yaml:"server_name"`
}

// Terms is how a connection sends: for both directions, and what differs in one.
type Terms struct {
	Direction `yaml:",inline"`
	Down      Direction `yaml:"down"`
	Up        Direction `yaml:"up"`
	SendProxy SendProxy `yaml:"send_proxy"`
	DSCP      DSCP      `yaml:"dscp"`
}

// Direction is how one direction sends. What it leaves out comes from
// the next wider scope; parameters belong to the algorithm they stand beside.
type Direction struct {
	Algorithm      Algorithm        `yaml:"algorithm"`
	Params         map[string]Param `yaml:"params"`
	Receive        Algorithm        `yaml:"receive"`
	MaxRate        cc.Rate          `yaml:"max_rate"`
	ConnectionRate cc.Rate          `yaml:"connection_rate"`
	Weight         int              `yaml:"weight" min:"0" max:"1000"`
	Priority       *int             `yaml:"priority"`
	Class          Class            `yaml:"class"`
	Target         cc.Rate          `yaml:"target"`
	MinRate        cc.Rate          `yaml:"min_rate"`
	HintCap        *Fraction        `yaml:"hint_cap"`
	Group          string           `yaml:"group"`
}

// Limits bounds what connections may use.
type Limits struct {
	Connections       int           `yaml:"connections" min:"0" reload:"yes"`
	PerSource         *int          `yaml:"per_source" min:"0" reload:"yes"`
	IdleTimeout       time.Duration `yaml:"idle_timeout" reload:"yes"`
	HalfClosedTimeout time.Duration `yaml:"half_closed_timeout" reload:"yes"`
	HandshakeTimeout  time.Duration `yaml:"handshake_timeout" reload:"yes"`
	DialTimeout       time.Duration `yaml:"dial_timeout" reload:"yes"`
	ServerNameWait    time.Duration `yaml:"server_name_wait" reload:"yes"`
	Buffer            cc.Bytes      `yaml:"buffer" reload:"yes"`
	HeldLegs          int           `yaml:"held_legs" min:"1" max:"1048576"`
	ReceiveBuffer     cc.Bytes      `yaml:"receive_buffer"`
	Memory            cc.Bytes      `yaml:"memory"`
}

// Telemetry is where the proxy can be watched.
type Telemetry struct {
	Address string `yaml:"address"`
	Health  string `yaml:"health"`
	Hints   Hints  `yaml:"hints"`

	ChangeToken     string `yaml:"change_token" reload:"yes" secret:"true"`
	ChangeTokenFile string `yaml:"change_token_file" reload:"yes"`
}

// Hints is how hints come in.
type Hints struct {
	Socket    string `yaml:"socket"`
	Token     string `yaml:"token" reload:"yes" secret:"true"`
	TokenFile string `yaml:"token_file" reload:"yes"`
}

// Log is what is logged.
type Log struct {
	Level  LogLevel  `yaml:"level" reload:"yes"`
	Format LogFormat `yaml:"format"`
	Flows  bool      `yaml:"flows" reload:"yes"`
}

// Shutdown is how the proxy ends.
type Shutdown struct {
	Delay time.Duration `yaml:"delay"`
	Drain time.Duration `yaml:"drain"`
}

// DefaultTelemetry is where telemetry listens unless told otherwise.
const DefaultTelemetry = "127.0.0.1:9464"

// defaultIdle is how long Linux's connection tracking remembers a silent
// connection, so that the proxy ends none which would have lived without it; RFC
// 5382 REQ-5 asks for 2 h 4 min at least. Keep-alives find peers that are gone
// long before.
const defaultIdle = 5 * 24 * time.Hour

const (
	// defaultHeldLegs is how many windows the kernel enforces at a time, in 3 MiB.
	defaultHeldLegs = 16 << 10
	// defaultReceiveBuffer is what a socket may take in before its bytes have proved to
	// be wanted, the kernel's overhead included: more than the 64 KiB that Linux lets a
	// peer send first.
	defaultReceiveBuffer = 256 << 10
)

// defaultConfig is what a file leaves out.
func defaultConfig() Config {
	return Config{
		Defaults: Terms{Direction: Direction{Algorithm: cc.Default}},
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
		Telemetry: Telemetry{Address: DefaultTelemetry, Health: "off"},
		Log:       Log{Level: "info", Format: "auto", Flows: true},
		Shutdown:  Shutdown{Drain: 30 * time.Second},
	}
}

// Default is what runs without a file: SOCKS5 and HTTP CONNECT on one
// loopback port, our own algorithm in both directions. It needs no privilege.
func Default() Config {
	c := defaultConfig()
	c.Listeners = []Listener{{Name: "local", Mode: access.Mixed, Address: "127.0.0.1:1080"}}
	return c
}

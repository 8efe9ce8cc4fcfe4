// Package config is the configuration file: its types, schema, reading, checks, and what may
// change while the proxy runs. It opens nothing but the files that it names.
package config

import (
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/access"
)

// Config is the configuration file. The about tags become the descriptions of
// its JSON Schema.
type Config struct {
	Listeners []Listener `yaml:"listeners" required:"yes" reload:"yes" about:"Where connections come from; at least one."`
	Rules     []Rule     `yaml:"rules" reload:"yes" about:"Tried in order; the first that matches decides."`
	Defaults  Terms      `yaml:"defaults" reload:"yes" about:"What rules leave open, or all where none matches."`
	Limits    Limits     `yaml:"limits" about:"Bounds on connections, times and memory."`
	Envelope  Envelope   `yaml:"envelope" about:"Who keeps our window. ebpf: the kernel, by a congestion control of ours (Linux 6.10, CAP_BPF and CAP_PERFMON at the start). bbr, cubic, reno: the relay, above that control's own window. auto: the first of these that can be had."`
	Mark      Mark       `yaml:"mark" about:"Firewall mark of the proxy's own connections, so that capture rules let them pass; 0: none. Setting it needs CAP_NET_ADMIN."`
	Hints     []Source   `yaml:"hints" about:"Interfaces of this machine whose rate and queue, as netlink tells them, are hints for those who send through them."`
	Agents    []Agent    `yaml:"agents" about:"Congestion control agents; rules name them ccp:NAME."`
	Telemetry Telemetry  `yaml:"telemetry" about:"Metrics, health and the list of flows over HTTP."`
	Log       Log        `yaml:"log" about:"What is logged to standard error."`
	Shutdown  Shutdown   `yaml:"shutdown" reload:"yes" about:"How the proxy ends."`
}

// Listener is one way in.
type Listener struct {
	Name          string    `yaml:"name" required:"yes" reload:"yes" about:"For rules, logs and metrics; unique."`
	Mode          Mode      `yaml:"mode" required:"yes" reload:"yes" about:"How clients come: captured (tproxy, redirect), asking (socks5, connect, mixed is both on one port), all to one target (forward), or inside a tunnel (wireguard, tun, masque)."`
	Address       string    `yaml:"address" reload:"yes" about:"host:port to listen on; [::]:port is every address of both families. Modes wireguard and masque have a UDP port, such as :51820, and mode tun none."`
	Target        string    `yaml:"target" reload:"yes" about:"host:port that mode forward connects to."`
	Users         []User    `yaml:"users" reload:"yes" about:"Who may use a listener that asks; none: everybody."`
	ProxyProtocol Header    `yaml:"proxy_protocol" reload:"yes" about:"PROXY protocol v1 or v2 in front of incoming connections."`
	KeepClient    bool      `yaml:"keep_client" about:"Connect to the server from the client's own address; mode tproxy only, and replies must come back through this machine."`
	Device        string    `yaml:"device" reload:"yes" about:"The TUN device of mode tun; made unless it exists. Its addresses and routes are yours."`
	Tunnel        Tunnel    `yaml:"tunnel" about:"What holds for the packets of a tunnel; modes wireguard, tun and masque only."`
	WireGuard     WireGuard `yaml:"wireguard" about:"The endpoint of mode wireguard."`
	MASQUE        MASQUE    `yaml:"masque" about:"The endpoint of mode masque."`
	TLS           TLS       `yaml:"tls" reload:"yes" about:"Of mode masque: its certificate, and whose let in."`
	Connections   int       `yaml:"connections" min:"0" reload:"yes" about:"Most at once; 0: the global limit."`
	Allow         []Prefix  `yaml:"allow" reload:"yes" about:"Destinations that clients may reach although they are this machine's own, link-local or a cloud's metadata service, or, for clients that ask or are inside a tunnel, multicast or carrier-grade NAT addresses. Not for mode forward."`
}

// User is one account.
type User struct {
	Name         string `yaml:"name" required:"yes" about:"1 to 255 bytes."`
	Password     string `yaml:"password" secret:"true" about:"1 to 255 bytes."`
	PasswordFile string `yaml:"password_file" about:"A file whose first line is the password, closed to others; relative to the configuration file, and reread with it."`
}

// Header says who may tell us a client's address.
type Header struct {
	From []Prefix `yaml:"from" about:"Peers that must open with a PROXY protocol header; from all others it is plain data."`
}

// Rule gives terms to the connections it matches.
type Rule struct {
	Name      string    `yaml:"name" required:"yes" about:"For logs and metrics; unique."`
	Match     Match     `yaml:"match" about:"All that is set must match; nothing set matches every connection."`
	Refuse    Refuse    `yaml:"refuse" about:"Refuse the connection: true, or the reason for the log."`
	Undecided Undecided `yaml:"undecided" about:"What becomes of a connection that the rule would match if it had a name of match.server_name, and that shows none: next (the next rule decides, as where not set) or refuse."`
	Terms     `yaml:",inline"`
}

// Match selects connections.
type Match struct {
	Protocol    Protocol     `yaml:"protocol" about:"The transport: tcp, or udp and icmp out of tunnels. Not set: any. QUIC is udp at port 443; refused, browsers go on over TCP."`
	Listener    []string     `yaml:"listener" about:"Names of listeners."`
	Source      []Prefix     `yaml:"source" about:"Addresses or prefixes of clients."`
	Destination []Prefix     `yaml:"destination" about:"Addresses or prefixes of servers."`
	Ports       []Ports      `yaml:"ports" about:"Server ports and ranges, such as 443 or 8000-8100."`
	Host        []string     `yaml:"host" about:"Names the client asked for: example.com, or .example.com for all names below it. Only listeners that ask know names."`
	ServerName  []ServerName `yaml:"server_name" about:"Names in the client's first bytes (TLS server name, HTTP/1 host): example.com, or *.example.com for all names below it. Only where a rule needs them are those bytes looked at; limits.server_name_wait bounds for how long."`
}

// Terms is how a connection sends: for both directions, and what differs in one.
type Terms struct {
	Direction `yaml:",inline"`
	Down      Direction `yaml:"down" about:"Towards the client, where it differs."`
	Up        Direction `yaml:"up" about:"Towards the server, where it differs."`
	SendProxy SendProxy `yaml:"send_proxy" about:"Open the connection to the server with a PROXY protocol header."`
}

// Direction is how one direction sends. What it leaves out comes from
// the next wider scope; parameters belong to the algorithm they stand beside.
type Direction struct {
	Algorithm      Algorithm        `yaml:"algorithm" about:"Congestion control, optionally with settings or a profile: penstock, copa:delta=0.1. none leaves it to the kernel."`
	Params         map[string]Param `yaml:"params" about:"Settings of the algorithm by name."`
	Receive        Algorithm        `yaml:"receive" about:"Congestion control of the window that the proxy lets the sender of this direction's bytes send in: under up the client, under down the server. penstock keeps uploads from queueing in clients' uplinks; none leaves it to the kernel."`
	MaxRate        Rate             `yaml:"max_rate" about:"All connections of one group together are never faster than this, such as 20mbit: with the usual group, what one host gets."`
	ConnectionRate Rate             `yaml:"connection_rate" about:"One connection is never faster than this, such as 5mbit."`
	Weight         int              `yaml:"weight" min:"0" max:"1000" about:"Share within the group; 1 where not set."`
	Priority       *int             `yaml:"priority" about:"Lower goes first within the group; 0 where not set."`
	Class          Class            `yaml:"class" about:"What the flow is for: bulk takes what is left, delay_sensitive has its share at once, guarantee has its target before others share the rest. bulk where not set."`
	Target         Rate             `yaml:"target" about:"With class guarantee, the payload that the application needs: its due, and a little above it its most. Not set: not known, so it shares with the rest."`
	MinRate        Rate             `yaml:"min_rate" about:"What the flow has of its group's window whatever the others want; at most target."`
	HintCap        *Fraction        `yaml:"hint_cap" about:"While the network tells a path's capacity (POST /v1/hints), send no faster than this part of it, above 0 up to 1, such as 0.95; 0: as fast as the algorithm will."`
	Group          string           `yaml:"group" about:"Which flows share one window: peer (the host the bytes go to), source, source/24, destination, tunnel (who hands on what many clients send), listener, flow, or a name of your own."`
}

// Limits bounds what connections may use.
type Limits struct {
	Connections       int      `yaml:"connections" min:"0" reload:"yes" about:"At most this many at once; 0: as many as the descriptor limit has room for."`
	PerSource         *int     `yaml:"per_source" min:"0" reload:"yes" about:"At most this many at once from one client host (IPv6: /64), as the PROXY header says where one is taken; 0: no limit. Not set: a quarter of all that there is room for, but for clients on loopback."`
	IdleTimeout       Duration `yaml:"idle_timeout" reload:"yes" about:"Reset a connection on which nothing moved for this long; 0s: never. Keep-alives do not count: the proxy answers them, and sends its own."`
	HalfClosedTimeout Duration `yaml:"half_closed_timeout" reload:"yes" about:"The same once one side ended; 0s: never."`
	HandshakeTimeout  Duration `yaml:"handshake_timeout" reload:"yes" about:"For a client to say where it wants to go."`
	DialTimeout       Duration `yaml:"dial_timeout" reload:"yes" about:"For resolving and reaching the server."`
	ServerNameWait    Duration `yaml:"server_name_wait" reload:"yes" about:"For the client's first bytes where a rule by server_name may apply; over as soon as the server speaks first. Without a name by then such rules do not match."`
	Buffer            Size     `yaml:"buffer" reload:"yes" about:"Largest piece read from one side before it is written to the other; less is read from a side whose bytes have to wait."`
	HeldLegs          int      `yaml:"held_legs" min:"1" max:"1048576" about:"Windows that the kernel enforces at once with envelope ebpf, one for each managed direction; the relay keeps the rest. 192 bytes each."`
	ReceiveBuffer     Size     `yaml:"receive_buffer" about:"Kernel memory for what comes from one side of a connection while the other takes nothing. It grows with what that side takes, to at most four times as much, up to net.ipv4.tcp_rmem; 0B: that from the start."`
	Memory            Size     `yaml:"memory" about:"Memory for pieces that have to be copied, over all connections; beyond it they are 16 KiB."`
}

// Telemetry is where the proxy can be watched.
type Telemetry struct {
	Address string `yaml:"address" about:"host:port for /metrics, /healthz, /readyz, /flows and /hosts; off: none. /flows and /hosts show addresses: keep them on loopback or behind a firewall."`
	Health  string `yaml:"health" about:"host:port for /healthz and /readyz alone, such as 0.0.0.0:9465 for the probes of a cluster; off: none."`
	Hints   Hints  `yaml:"hints" about:"Who may tell what the network knows of a path (POST /v1/hints)."`
}

// Hints is how hints come in.
type Hints struct {
	Socket    string `yaml:"socket" about:"A Unix socket that takes hints as well, such as /run/penstock/hints.sock; who may is who can write to it (mode 0660). Not set: none."`
	Token     string `yaml:"token" reload:"yes" secret:"true" about:"What hints over TCP must carry as bearer token, 16 to 255 visible characters. Not set: hints are taken on a loopback address only, from everybody there."`
	TokenFile string `yaml:"token_file" reload:"yes" about:"A file whose first line is the token, closed to others; relative to the configuration file, and reread with it."`
}

// Log is what is logged.
type Log struct {
	Level  LogLevel  `yaml:"level" reload:"yes" about:"The least severe level that is logged."`
	Format LogFormat `yaml:"format" about:"auto is text on a terminal and JSON elsewhere."`
	Flows  bool      `yaml:"flows" reload:"yes" about:"One line for every closed or refused connection."`
}

// Shutdown is how the proxy ends.
type Shutdown struct {
	Delay Duration `yaml:"delay" about:"How long listeners go on accepting after a signal, while /readyz says 503: what sends connections here learns of it first."`
	Drain Duration `yaml:"drain" about:"How long open connections may go on once no new ones are accepted; then they are reset."`
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
	defaultReceiveBuffer = Size(256 << 10)
)

// defaults is what a file leaves out.
func defaults() Config {
	return Config{
		Defaults: Terms{Direction: Direction{Algorithm: cc.Default}},
		Limits: Limits{
			IdleTimeout:       Duration(defaultIdle),
			HalfClosedTimeout: Duration(5 * time.Minute),
			HandshakeTimeout:  Duration(10 * time.Second),
			DialTimeout:       Duration(10 * time.Second),
			ServerNameWait:    Duration(time.Second),
			Buffer:            Size(1 << 20),
			HeldLegs:          defaultHeldLegs,
			ReceiveBuffer:     defaultReceiveBuffer,
			Memory:            Size(256 << 20),
		},
		Envelope:  "auto",
		Telemetry: Telemetry{Address: DefaultTelemetry, Health: "off"},
		Log:       Log{Level: "info", Format: "auto", Flows: true},
		Shutdown:  Shutdown{Drain: Duration(30 * time.Second)},
	}
}

// Default is what runs without a file: SOCKS5 and HTTP CONNECT on one
// loopback port, our own algorithm in both directions. It needs no privilege.
func Default() Config {
	c := defaults()
	c.Listeners = []Listener{{Name: "local", Mode: Mode(access.Mixed), Address: "127.0.0.1:1080"}}
	return c
}

// Guarded reports whether the listener's clients are kept from what is the
// proxy's own: all but those whose one destination is the operator's choice.
func (l Listener) Guarded() bool { return !l.Is(access.Forward) }

package config

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config/check"
)

// The sections of this file are those of the process: of no room alone, or of one that imports this package.

// Limits bounds what connections may use.
type Limits struct {
	// At most this many at once; 0: as many as the descriptor limit has room for.
	Connections int `yaml:"connections" min:"0" reload:"yes"`
	// At most this many at once from one client host (IPv6: /64), as the PROXY header says where one is taken, or from
	// one peer of a tunnel; 0: no limit. Not set: a quarter of all that there is room for, but for clients on
	// loopback.
	PerSource *int `yaml:"per_source" min:"0" reload:"yes"`
	// Reset a connection on which nothing moved for this long; 0s: never. Keep-alives do not count: the proxy answers
	// them, and sends its own.
	IdleTimeout time.Duration `yaml:"idle_timeout" reload:"yes"`
	// The same once one side ended; 0s: never.
	HalfClosedTimeout time.Duration `yaml:"half_closed_timeout" reload:"yes"`
	// For a client to say where it wants to go.
	HandshakeTimeout time.Duration `yaml:"handshake_timeout" reload:"yes"`
	// For resolving and reaching the server.
	DialTimeout time.Duration `yaml:"dial_timeout" reload:"yes"`
	// For the client's first bytes where a rule by server_name may apply; over as soon as the server speaks first.
	// Without a name by then such rules do not match.
	ServerNameWait time.Duration `yaml:"server_name_wait" reload:"yes"`
	// Largest piece read from one side before it is written to the other; less is read from a side with bytes that
	// have to wait.
	Buffer cc.Bytes `yaml:"buffer" reload:"yes"`
	// Windows that the kernel enforces at once with envelope ebpf, one for each managed direction; the relay keeps the
	// rest. 192 bytes each.
	HeldLegs int `yaml:"held_legs" min:"1" max:"1048576"`
	// Kernel memory for what comes from one side of a connection while the other takes nothing. It grows with what
	// that side takes, to at most four times as much, up to 1 MiB, and beyond, up to net.ipv4.tcp_rmem, where the path
	// carries more in a round trip; less of it is used while the kernel's TCP is short of memory (net.ipv4.tcp_mem);
	// 0B: as much as tcp_rmem allows, always.
	ReceiveBuffer cc.Bytes `yaml:"receive_buffer"`
	// Memory for pieces that have to be copied, over all connections; beyond it they are 16 KiB.
	Memory cc.Bytes `yaml:"memory"`
}

// Telemetry is where the proxy can be watched.
type Telemetry struct {
	// host:port for /metrics, /healthz, /readyz, /flows and /hosts; off: none. /flows and /hosts show addresses: keep
	// them on loopback or behind a firewall.
	Address string `yaml:"address"`
	// host:port for /healthz and /readyz alone, such as 0.0.0.0:9465 for the probes of a cluster; off: none.
	Health string `yaml:"health"`
	// Who may tell what the network knows of a path (POST /v1/hints).
	Hints Hints `yaml:"hints"`

	// Where metrics are sent to by OpenTelemetry's protocol, OTLP over HTTP.
	OTLP OTLP `yaml:"otlp"`

	// What a change of an algorithm by the page must carry as bearer token, 16 to 255 visible characters. Not set: the
	// page changes nothing.
	ChangeToken Token `yaml:"change_token" reload:"yes" secret:"true"`
	// A file that holds that token in its first line, closed to others; relative to the configuration file, and reread
	// with it.
	ChangeTokenFile string `yaml:"change_token_file" reload:"yes"`
}

// Hints is how hints come in.
type Hints struct {
	// A Unix socket that takes hints as well, such as /run/penstock/hints.sock; who may is who can write to it (mode
	// 0660). Not set: none.
	Socket string `yaml:"socket"`
	// What hints over TCP must carry as bearer token, 16 to 255 visible characters. Not set: hints are taken on a
	// loopback address only, from everybody on this machine but clients.
	Token Token `yaml:"token" reload:"yes" secret:"true"`
	// A file that holds the token in its first line, closed to others; relative to the configuration file, and reread
	// with it.
	TokenFile string `yaml:"token_file" reload:"yes"`
}

// OTLP is where metrics are sent to.
type OTLP struct {
	// URL of a collector, such as http://127.0.0.1:4318 or https://otlp.example.com; /v1/metrics is appended where it is
	// not there. Not set: metrics are not sent.
	Endpoint string `yaml:"endpoint"`
	// What requests carry, as OTEL_EXPORTER_OTLP_HEADERS has it: name=value,name=value with values in percent-encoding,
	// such as Authorization=Bearer%20TOKEN.
	Headers OTLPHeaders `yaml:"headers" reload:"yes" secret:"true"`
	// A file that holds the headers in its first line, closed to others; relative to the configuration file, and reread
	// with it.
	HeadersFile string `yaml:"headers_file" reload:"yes"`
	// Time between two exports, at least 1s.
	Interval time.Duration `yaml:"interval"`
}

// metricsPath is where collectors take metrics.
const metricsPath = "/v1/metrics"

// Validate checks the interval, and that the URL has no secrets, because logs show it.
func (o *OTLP) Validate() error {
	var errs []error
	if o.Interval < time.Second {
		errs = append(errs, check.Errorf("interval", "%v is less than 1s; write a time such as 1m", o.Interval))
	}
	u, err := url.Parse(o.Endpoint)
	switch {
	case o.Endpoint == "" && o.Headers == "" && o.HeadersFile == "":
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		errs = append(errs, check.Errorf("endpoint", "this is no URL of a collector, such as http://127.0.0.1:4318"))
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		errs = append(errs, check.Errorf("endpoint",
			"a URL without user, query and fragment, because logs show it; secrets "+
				"belong into headers_file"))
	}
	return errors.Join(errs...)
}

// URL returns the complete URL to which metrics are sent.
func (o *OTLP) URL() string {
	return strings.TrimSuffix(strings.TrimSuffix(o.Endpoint, "/"), metricsPath) + metricsPath
}

// OTLPHeaders are headers in the form of OTEL_EXPORTER_OTLP_HEADERS.
type OTLPHeaders string

// Fields returns the headers by name, as far as they are valid.
func (o OTLPHeaders) Fields() map[string]string {
	h, _ := o.parse()
	return h
}

// parse returns the headers by name. The error shows no value.
func (o OTLPHeaders) parse() (h map[string]string, err error) {
	h = map[string]string{}
	for part := range strings.SplitSeq(string(o), ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		name, value, found := strings.Cut(part, "=")
		name = strings.TrimSpace(name)
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if !found || err != nil || !httpguts.ValidHeaderFieldName(name) || !httpguts.ValidHeaderFieldValue(value) {
			return h, errors.New("headers are name=value,name=value with values in percent-encoding, such as " +
				"Authorization=Bearer%20TOKEN; these are not")
		}
		h[name] = value
	}
	return h, nil
}

// Validate implements the check of secrets.
func (o OTLPHeaders) Validate() error {
	_, err := o.parse()
	return err
}

// Log is what is logged.
type Log struct {
	// The least severe level that is logged.
	Level LogLevel `yaml:"level" reload:"yes"`
	// auto is text on a terminal and JSON elsewhere.
	Format LogFormat `yaml:"format"`
	// A line for each closed or refused connection; above 100 in a second some are left out, but not at level debug.
	Flows bool `yaml:"flows" reload:"yes"`
}

// Shutdown is how the proxy ends.
type Shutdown struct {
	// How long listeners go on accepting after a signal, while /readyz says 503: what sends connections here learns of
	// it first.
	Delay time.Duration `yaml:"delay"`
	// How long open connections may go on once no new ones are accepted; then they are reset. 0: as long as they last.
	Drain time.Duration `yaml:"drain"`
}

// The types of single values.
type (
	// Mark is a firewall mark, decimal or 0x….
	Mark uint32
	// Envelope names the kernel's congestion control.
	Envelope string
	// LogLevel is a slog level's name in lower case.
	LogLevel string
	// LogFormat is text, json or auto.
	LogFormat string
)

// DefaultTelemetry is where telemetry listens unless told otherwise.
const DefaultTelemetry = "127.0.0.1:9464"

// defaultIdle is how long Linux's connection tracking keeps a silent connection. So the proxy ends none that would
// have survived without it; RFC 5382 REQ-5 asks for 2 h 4 min at least. Keep-alives find peers that are gone long
// before.
const defaultIdle = 5 * 24 * time.Hour

const (
	// defaultHeldLegs is how many windows the kernel enforces at a time, in 3 MiB.
	defaultHeldLegs = 16 << 10
	// defaultReceiveBuffer is how much a socket may receive before the other side has taken some of it, with the
	// kernel's overhead. It is more than the 64 KiB that Linux lets a peer send first.
	defaultReceiveBuffer = 256 << 10
)

// minBuffer is the smallest buffer of a copy, which package datapath uses when memory is short.
const minBuffer = 16 << 10

// Bounds of ReceiveBuffer: the bytes that Linux lets a peer send first take 128 KiB with their overhead.
const (
	minReceiveBuffer = 128 << 10
	maxReceiveBuffer = 1 << 30
)

// maxServerNameWait is longer than any client that speaks first waits before it does.
const maxServerNameWait = time.Minute

// Validate refuses bounds with which no connection could work. Errors are *check.Errors.
func (l *Limits) Validate() error {
	var errs []error
	wrong := func(key, format string, args ...any) { errs = append(errs, check.Errorf(key, format, args...)) }
	if l.HandshakeTimeout == 0 {
		wrong("handshake_timeout", "0s would leave silent clients connected for ever; write a time such as 10s")
	}
	if l.DialTimeout == 0 {
		wrong("dial_timeout", "0s would let no connection be made; write a time such as 10s")
	}
	if l.ServerNameWait == 0 || l.ServerNameWait > maxServerNameWait {
		wrong("server_name_wait", "%v is not above 0s and at most 1m; write a time such as 1s. "+
			"Nothing waits where no rule has a server_name", l.ServerNameWait)
	}
	if l.Buffer < minBuffer || l.Buffer > 16<<20 {
		wrong("buffer", "%v is outside 16KiB to 16MiB", l.Buffer)
	}
	if l.ReceiveBuffer != 0 && (l.ReceiveBuffer < minReceiveBuffer || l.ReceiveBuffer > maxReceiveBuffer) {
		wrong("receive_buffer", "%v is outside 128KiB to 1GiB; 0B is as much as the kernel likes",
			l.ReceiveBuffer)
	}
	if l.Memory < minBuffer {
		wrong("memory", "%v is not enough; at least 16KiB", l.Memory)
	}
	return errors.Join(errs...)
}

// maxSocketPath is the length of a Unix socket's address (sun_path, with its final zero) without the suffix of the
// socket while it is being made.
const maxSocketPath = 107 - len(".new")

// Validate checks addresses and sockets. Errors are *check.Errors.
func (t *Telemetry) Validate() error {
	var errs []error
	if t.Address != "off" {
		errs = append(errs, check.Address("address", t.Address))
	}
	if t.Health != "off" {
		errs = append(errs, check.Address("health", t.Health))
	}
	switch socket := t.Hints.Socket; {
	case socket != "" && !filepath.IsAbs(socket):
		errs = append(errs, check.Errorf("hints.socket", "%q is not a whole path, such as /run/penstock/hints.sock", socket))
	case len(socket) > maxSocketPath:
		errs = append(errs, check.Errorf("hints.socket", "a path of %d bytes; a socket's has at most %d", len(socket),
			maxSocketPath))
	}
	return errors.Join(append(errs, check.Within("otlp", t.OTLP.Validate()))...)
}

// Warnings describes settings that are allowed and probably not intended.
func (t *Telemetry) Warnings() (out []string) {
	if u, err := url.Parse(t.OTLP.Endpoint); err == nil && u.Scheme == "http" && t.OTLP.Headers != "" &&
		!check.IsLoopback(net.JoinHostPort(u.Hostname(), "0")) {
		out = append(out, "telemetry.otlp: headers go to "+u.Host+" unencrypted; write https")
	}
	if t.Address == "off" || check.IsLoopback(t.Address) {
		return out
	}
	out = append(out, fmt.Sprintf("telemetry.address: /flows and /hosts show who talks to whom to everybody who can "+
		"reach %s", t.Address))
	if t.Hints.Token != "" {
		out = append(out, fmt.Sprintf("telemetry.hints: hints to %s carry their token unencrypted; whoever listens on "+
			"the way may use it", t.Address))
	}
	if t.ChangeToken != "" {
		out = append(out, fmt.Sprintf("telemetry.change_token: changes of algorithms to %s carry their token "+
			"unencrypted; whoever listens on the way may use it", t.Address))
	}
	return out
}

// Token is a bearer token, which a header can carry and which cannot be guessed: 16 to 255 visible characters.
type Token string

// Validate checks that a header can carry the token.
func (t Token) Validate() error {
	odd := func(r rune) bool { return r <= ' ' || r > '~' }
	if len(t) < 16 || len(t) > 255 || strings.ContainsFunc(string(t), odd) {
		return fmt.Errorf("a token is 16 to 255 visible characters without spaces, such as openssl rand -hex 16 prints; "+
			"this has %d bytes", len(t))
	}
	return nil
}

// Level returns the level for slog.
func (l LogLevel) Level() slog.Level {
	var v slog.Level
	_ = v.UnmarshalText([]byte(l)) // info, slog's zero, where it is not set
	return v
}

// Kernel returns the name of the kernel's congestion control; empty: the datapath chooses.
func (e Envelope) Kernel() string {
	if e == "auto" {
		return ""
	}
	return string(e)
}

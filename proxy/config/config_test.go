package config_test

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// lan is a listener that is fine; what a test adds comes behind it.
const lan = "listeners:\n- {name: lan, mode: mixed, address: '127.0.0.1:1080'}\n"

const whole = `
listeners:
- name: lan
  mode: tproxy
  address: "[::]:7000"
  keep_client: true
  connections: 1000
- name: socks
  mode: mixed
  address: 127.0.0.1:1080
  users:
  - {name: alice, password: secret}
  proxy_protocol: {from: [10.0.0.1]}
  allow: [127.0.0.0/8]
- name: fwd
  mode: forward
  address: 127.0.0.1:8443
  target: server.example:443
rules:
- name: no-mail
  match: {ports: [25, "465-587"]}
  refuse: no mail from here
- name: phones
  match:
    listener: [lan]
    source: [10.0.0.0/8, "2001:db8::/32"]
    destination: [192.0.2.1]
    host: [.example.com]
    server_name: [example.com, "*.video.example"]
  algorithm: copa:delta=0.1
  weight: 2
  down:
    {max_rate: 20mbit, connection_rate: 8mbit, group: source/24, priority: -1, class: guarantee, target: 5mbit,
     min_rate: 500kbit, hint_cap: 0.95}
  up: {algorithm: none}
  send_proxy: v2
- name: tuned
  params: {delta: 0.25}
defaults: {algorithm: copa, group: peer}
limits:
  connections: 5000
  per_source: 100
  idle_timeout: 30m
  half_closed_timeout: 0s
  handshake_timeout: 5s
  dial_timeout: 3s
  server_name_wait: 300ms
  buffer: 128KiB
  memory: 1GiB
envelope: cubic
mark: 0x70656e
telemetry: {address: "off"}
log: {level: debug, format: json, flows: false}
shutdown: {drain: 1m}
`

func TestAWholeConfigurationIsRead(t *testing.T) {
	cfg, err := config.Parse([]byte(whole))
	require.NoError(t, err)
	assert.Len(t, cfg.Listeners, 3)
	assert.Equal(t, config.Mark(0x70656e), cfg.Mark)
	assert.Equal(t, 30*time.Minute, cfg.Limits.IdleTimeout)
	assert.Zero(t, cfg.Limits.HalfClosedTimeout)
	assert.Equal(t, cc.Bytes(1<<30), cfg.Limits.Memory)
	assert.Equal(t, 300*time.Millisecond, cfg.Limits.ServerNameWait)
	assert.Equal(t, "*.video.example", cfg.Rules[1].Match.ServerNames[1].String())
	assert.Equal(t, "cubic", cfg.Envelope.Kernel())
	assert.False(t, cfg.Log.Flows)

	routes, err := cfg.Routes()
	require.NoError(t, err)
	require.Len(t, routes, 4)
	assert.Equal(t, "no mail from here", routes[0].Refuse)
	phones := routes[1]
	assert.Equal(t, "phones", phones.Rule)
	assert.Equal(t, cc.Params{"delta": 0.1}, phones.Down.Params)
	assert.Equal(t, 20_000_000, int(phones.Down.MaxRate))
	assert.Equal(t, 8_000_000, int(phones.Down.ConnectionRate))
	assert.Equal(t, -1, phones.Down.Priority)
	assert.Equal(t, 2, phones.Down.Weight)
	assert.Equal(t, flow.Guarantee, phones.Down.Class)
	assert.Equal(t, 5_000_000, int(phones.Down.Target))
	assert.Equal(t, 500_000, int(phones.Down.MinRate))
	assert.InDelta(t, .95, phones.Down.HintCap, 0)
	assert.Equal(t, flow.Bulk, phones.Up.Class)
	assert.Equal(t, policy.Unmanaged, phones.Up.Algorithm)
	assert.Empty(t, phones.Up.Params, "parameters belong to the algorithm they stand beside")
	assert.Equal(t, 2, phones.Up.Weight, "what the rule says for both directions holds for each")
	assert.Equal(t, 2, phones.SendProxy)
	assert.Equal(t, "copa", routes[2].Up.Algorithm, "the defaults fill in what a rule leaves out")
	assert.Equal(t, cc.Params{"delta": 0.25}, routes[2].Up.Params)
	assert.Equal(t, "copa", routes[3].Down.Algorithm)
}

func TestARuleTakesBackWhatTheDefaultsPromise(t *testing.T) {
	cfg, err := config.Parse([]byte(lan + `
rules:
- {name: rest, class: bulk, hint_cap: 0}
- {name: more, target: 8mbit}
defaults: {class: guarantee, target: 5mbit, hint_cap: 0.9}
`))
	require.NoError(t, err)
	routes, err := cfg.Routes()
	require.NoError(t, err)
	rest, more := routes[0].Down, routes[1].Down
	assert.Equal(t, flow.Bulk, rest.Class)
	assert.Zero(t, rest.Target, "a class without a target drops it")
	assert.Zero(t, rest.HintCap)
	assert.Equal(t, flow.Guarantee, more.Class)
	assert.Equal(t, 8_000_000, int(more.Target))
	assert.InDelta(t, .9, more.HintCap, 0)
}

func TestLeftOutIsDefault(t *testing.T) {
	cfg, err := config.Parse([]byte(lan))
	require.NoError(t, err)
	want := config.Default()
	want.Listeners[0].Name = "lan"
	assert.Equal(t, want, cfg)
}

func TestTheDefaultRunsWithoutPrivilege(t *testing.T) {
	cfg := config.Default()
	assert.Empty(t, cfg.Warnings())
	assert.Zero(t, cfg.Mark, "setting a mark needs a capability")
	routes, err := cfg.Routes()
	require.NoError(t, err)
	require.Len(t, routes, 1)
	assert.Equal(t, cc.Default, routes[0].Down.Algorithm)
	assert.Equal(t, cc.Default, routes[0].Up.Algorithm)
}

// Every mistake is one line that names the place, the key and the way out.
func TestMistakes(t *testing.T) {
	for _, row := range []struct {
		name, config string
		place, says  string
	}{
		{"nothing at all", "", "", "listeners: at least one listener is needed"},
		{"only a comment", "# hello\n", "", "at least one listener"},
		{"no YAML", "listeners: [", "1:12", ""},
		{"a list where keys belong", "- a\n", "1:1", "expected keys with values, not a list"},
		{"two documents", lan + "---\nmark: 1\n", "", "a second document"},
		{"a misspelt key", lan + "limts: {}\n", "3:1", "limts: unknown key; did you mean limits?"},
		{
			"a misspelt key further in", "listeners:\n- {name: a, mod: mixed}\n", "2:13",
			"listeners[0].mod: unknown key; did you mean mode?",
		},
		{
			"a key from nowhere", lan + "log: {colour: red}\n", "3:7",
			"log.colour: unknown key; there are flows, format, level",
		},
		{"the same key twice", lan + "mark: 1\nmark: 2\n", "4:1", "mark"},
		{"a key without value", lan + "mark:\n", "3:7", "no value"},
		{"an anchor", lan + "defaults: &a {algorithm: copa}\n", "", "anchors"},
		{"an alias", lan + "defaults: *a\n", "", ""},
		{"a merge key", lan + "defaults: {<<: {algorithm: copa}}\n", "3:12", "anchors"},
		{"a word where a list belongs", "listeners: all\n", "1:12", "listeners: expected a list, not \"all\""},
		{
			"a word where a number belongs", lan + "limits: {connections: many}\n", "3:23",
			"limits.connections: expected a whole number, not \"many\"",
		},
		{
			"a fraction where a whole number belongs", lan + "limits: {connections: 1.5}\n", "3:23",
			"expected a whole number",
		},
		{"a word where yes or no belongs", lan + "log: {flows: 'on'}\n", "3:14", "log.flows: expected true or false"},
		{"a list where a text belongs", lan + "telemetry: {address: [a]}\n", "", "telemetry.address: expected"},

		{
			"a listener without name", "listeners: [{mode: mixed, address: '127.0.0.1:1'}]\n", "",
			"listeners[0].name: missing",
		},
		{
			"a name that no label takes", "listeners: [{name: 'my lan', mode: mixed, address: " +
				"'127.0.0.1:1'}]\n", "1:20",
			"listeners[0].name",
		},
		{
			"two listeners by one name", lan + "- {name: lan, mode: mixed, address: '127.0.0.1:2'}\n", "3:10",
			"\"lan\" is already listeners[0].name",
		},
		{
			"two listeners on one address", lan + "- {name: b, mode: mixed, address: '127.0.0.1:1080'}\n", "3:35",
			"already listeners[0].address",
		},
		{
			"no mode", "listeners: [{name: a, address: '127.0.0.1:1'}]\n", "",
			"listeners[0].mode: missing; it is one of tproxy",
		},
		{
			"an unknown mode", "listeners: [{name: a, mode: http}]\n", "1:29",
			"listeners[0].mode: \"http\" is not one of",
		},
		{"no address", "listeners: [{name: a, mode: mixed}]\n", "", "listeners[0].address: missing"},
		{
			"an address without port", "listeners: [{name: a, mode: mixed, address: 127.0.0.1}]\n", "1:45",
			"is not host:port",
		},
		{
			"a port too high", "listeners: [{name: a, mode: mixed, address: '127.0.0.1:99999'}]\n", "1:45",
			"port \"99999\"",
		},
		{
			"a host name to listen on", "listeners: [{name: a, mode: mixed, address: 'example.com:1'}]\n", "1:45",
			"is not an address of this machine",
		},
		{
			"forward to nowhere", "listeners: [{name: a, mode: forward, address: '127.0.0.1:1'}]\n", "",
			"listeners[0].target: missing",
		},
		{
			"forward to no port", "listeners: [{name: a, mode: forward, address: '127.0.0.1:1', target: " +
				"host}]\n", "1:70",
			"listeners[0].target",
		},
		{
			"a target without forward", "listeners: [{name: a, mode: mixed, address: '127.0.0.1:1', target: 'h:1'}]\n",
			"1:68", "only mode forward has a target",
		},
		{
			"keeping the address of a client that asked",
			"listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', keep_client: true}]\n", "1:74", "only " +
				"mode tproxy",
		},
		{
			"passwords for those who cannot be asked",
			"listeners: [{name: a, mode: tproxy, address: '127.0.0.1:1', users: [{name: x, password: " +
				"y}]}]\n", "1:68", "cannot ask for a password",
		},
		{"allow where nothing is denied", "listeners: [{name: a, mode: forward, address: '127.0.0.1:1', target: " +
			"'x:1', " +
			"allow: ['::1']}]\n", "1:84", "has the one destination that you gave it"},
		{
			"a user without password", "listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', users: [{name: " +
				"x}]}]\n",
			"", "listeners[0].users[0]: needs a password",
		},
		{"a user with two", "listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', users: [{name: x, " +
			"password: y, " +
			"password_file: z}]}]\n", "1:107", "not both"},
		{"hints from no interface", lan + "hints: [{capacity: 1mbit}]\n", "", "hints[0].interface: missing"},
		{"hints from what is no interface", lan + "hints: [{interface: wlan0/x}]\n", "3:21", "is no interface's name"},
		{
			"hints from an interface twice", lan + "hints: [{interface: w}, {interface: w}]\n", "3:37",
			"already hints[0].interface",
		},
		{
			"hints more often than they can be read", lan + "hints: [{interface: w, interval: 1ms}]\n", "3:34",
			"hints[0].interval: 1ms is outside 5ms to 1s",
		},
		{
			"a negative limit", "listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', connections: -1}]\n",
			"", "-1 is less than 0",
		},
		{
			"a prefix that is none", "listeners: [{name: a, mode: mixed, address: '127.0.0.1:1', allow: " +
				"[10.0.0.0/33]}]\n",
			"1:68", "listeners[0].allow[0]",
		},
		{"a prefix with bits behind it", "listeners: [{name: a, mode: mixed, address: '127.0.0.1:1', allow: " +
			"[10.0.0.1/8]}]\n", "1:68", "write 10.0.0.0/8"},

		{
			"a refusal that may mean its opposite", lan + "rules: [{name: a, refuse: no}]\n", "3:27",
			"rules[0].refuse: expected true, false or the reason in words",
		},
		{"a rule without name", lan + "rules: [{refuse: true}]\n", "", "rules[0].name: missing"},
		{"two rules by one name", lan + "rules: [{name: a}, {name: a}]\n", "3:27", "already rules[0].name"},
		{
			"an agent that is not there", lan + "defaults: {algorithm: \"ccp:reno\"}\n", "3:23",
			"defaults.algorithm: there is no agent \"reno\"; name it in agents, as in {name: reno}",
		},
		{
			"an agent that is another", lan + "agents: [{name: a}]\nrules: [{name: r, up: {algorithm: " +
				"ccp:b}}]\n", "4:35",
			"rules[0].up.algorithm: there is no agent \"b\"; agents has a",
		},
		{
			"an agent without a proper name", lan + "agents: [{name: A}]\n", "3:17",
			"agents[0].name: \"A\" is no agent's name; it has lower-case letters, digits, - and _",
		},
		{
			"two agents at one socket", lan + "agents: [{name: a}, {name: b}]\n", "3:21",
			"agents[1].socket: \"/tmp/ccp/portus\" is already agents[0].socket",
		},
		{
			"an agent's socket in no place", lan + "agents: [{name: a, socket: portus}]\n", "3:28",
			"is no whole path of at most 101 bytes, such as /tmp/ccp/portus",
		},
		{
			"a rule for a listener that is not there", lan + "rules: [{name: a, match: {listener: [lna]}}]\n", "3:38",
			"rules[0].match.listener[0]: there is no listener \"lna\"",
		},
		{"ports back to front", lan + "rules: [{name: a, match: {ports: [9-8]}}]\n", "3:35", "rules[0].match.ports[0]"},
		{
			"a wildcard host", lan + "rules: [{name: a, match: {host: ['*.example.com']}}]\n", "3:34",
			"write example.com, or .example.com",
		},
		{
			"an address for a host", lan + "rules: [{name: a, match: {host: [192.0.2.1]}}]\n", "3:34",
			"rules[0].match.host[0]: \"192.0.2.1\" is no host name; write 192.0.2.1 under destination",
		},
		{
			"letters that no host name has", lan + "rules: [{name: a, match: {host: [bücher.example]}}]\n", "3:34",
			"write its ASCII form",
		},
		{
			"a target that cannot be dialled", "listeners: [{name: a, mode: forward, address: '127.0.0.1:1', target: " +
				"'a b:1'}]\n",
			"1:70", "listeners[0].target: \"a b\" is neither an address nor a host name",
		},
		{
			"a target on a link", "listeners: [{name: a, mode: forward, address: '127.0.0.1:1', target: " +
				"'[fe80::1%eth0]:1'}]\n",
			"1:70", "listeners[0].target: \"[fe80::1%eth0]:1\" has a zone",
		},
		{
			"any server name", lan + "rules: [{name: a, match: {server_name: ['*']}}]\n", "3:41",
			"rules[0].match.server_name[0]: \"*\" is no server name; leave server_name out",
		},
		{
			"a URL for a server name", lan + "rules: [{name: a, match: {server_name: " +
				"['https://example.com/a']}}]\n", "3:41",
			"write the name alone: example.com",
		},
		{
			"a server name with a port", lan + "rules: [{name: a, match: {server_name: [b.example, " +
				"'example.com:8443']}}]\n",
			"3:52", "rules[0].match.server_name[1]: \"example.com:8443\" is no server name; write example.com " +
				"here, and 8443 " +
				"under ports",
		},
		{
			"a server name that is an alias", lan + "rules: [{name: a, match: {server_name: " +
				"[*.example.com]}}]\n", "3:41",
			"rules[0].match.server_name[0]: a value that begins with * is written in quotes",
		},
		{
			"undecided without names", lan + "rules: [{name: a, undecided: refuse}]\n",
			"3:30", "rules[0].undecided: there is nothing to decide by; it goes with match.server_name",
		},
		{
			"a name in a ping", lan + "rules: [{name: a, match: {protocol: icmp, server_name: [a.example]}}]\n",
			"3:37", "rules[0].match.protocol: nothing that comes over icmp shows a name",
		},
		{
			"a host of a datagram", lan + "rules: [{name: a, match: {protocol: udp, host: [a.example]}}]\n",
			"3:37", "rules[0].match.protocol: nothing that comes over udp asks for a host",
		},
		{
			"one queue for both directions", "listeners: [{name: lan, mode: tproxy, address: ':1', udp: {queue: 9, up_queue: 9}}]\n",
			"1:80", "listeners[0].udp.up_queue: \"9\" is already listeners[0].udp.queue",
		},
		{
			"one queue for two listeners", "listeners: [{name: a, mode: tproxy, address: ':1', udp: {queue: 9}},\n" +
				"  {name: b, mode: tproxy, address: ':2', udp: {up_queue: 9}}]\n",
			"2:58", "listeners[1].udp.up_queue: \"9\" is already listeners[0].udp.queue",
		},
		{
			"a host that is never asked", "listeners: [{name: lan, mode: tproxy, address: ':1', udp: {up_echo: 192.0.2.1}}]\n",
			"1:69", "listeners[0].udp.up_echo: nothing that clients send is held without udp.up_queue",
		},
		{
			"undecided either way", lan + "rules: [{name: a, match: {server_name: [a.example]}, undecided: maybe}]\n",
			"3:65", "rules[0].undecided: \"maybe\" is not one of next, refuse",
		},
		{
			"no time for a server name", lan + "limits: {server_name_wait: 0s}\n", "3:28",
			"limits.server_name_wait: 0s is not above 0s",
		},
		{
			"a long time for a server name", lan + "limits: {server_name_wait: 2m}\n", "3:28",
			"limits.server_name_wait: 2m0s is not",
		},
		{
			"an unknown algorithm", lan + "defaults: {algorithm: warp}\n", "3:23",
			"defaults.algorithm: no algorithm \"warp\"; there are",
		},
		{"an unknown parameter", lan + "defaults: {algorithm: 'copa:speed=9'}\n", "3:23", "no parameter \"speed\""},
		{
			"a parameter out of range", lan + "rules: [{name: a, up: {params: {delta: -1}}}]\n", "3:40",
			"rules[0].up.params.delta",
		},
		{
			"parameters where there is no algorithm for them",
			lan + "rules: [{name: a, algorithm: none, params: {delta: 1}}]\n", "3:52", "rules[0].params.delta: " +
				"none has no " +
				"parameter",
		},
		{
			"a rate without unit", lan + "defaults: {max_rate: 20}\n", "3:22",
			"defaults.max_rate: \"20\" needs a unit, such as 20mbit",
		},
		{
			"a rate with a unit of others", lan + "defaults: {max_rate: 20Mbps}\n", "3:22",
			"defaults.max_rate: \"20Mbps\" needs a unit, such as 20mbit; \"Mbps\" is none",
		},
		{"a rate of zero", lan + "defaults: {max_rate: 0mbit}\n", "3:22", "leave the key out"},
		{"a number too large", lan + "defaults: {weight: 99999999999999999999}\n", "3:20", "defaults.weight: "},
		{
			"a negative weight", lan + "defaults: {down: {weight: -2}}\n", "",
			"defaults.down.weight: -2 is outside 0 to 1000",
		},
		{
			"a weight that is too large", lan + "defaults: {weight: 1001}\n", "",
			"defaults.weight: 1001 is outside 0 to 1000",
		},
		{
			"a class that does not exist", lan + "defaults: {class: video}\n", "3:19",
			"defaults.class: \"video\" is not one of bulk, delay_sensitive, guarantee",
		},
		{
			"a target for nothing that has one", lan + "rules: [{name: a, down: {target: 5mbit}}]\n", "3:34",
			"rules[0].down.target: a flow of class bulk has no target; add class: guarantee",
		},
		{
			"a target in the way of one direction", lan + "rules: [{name: a, target: 5mbit, up: {class: guarantee}}]\n",
			"3:27", "rules[0].target: a flow of class bulk",
		},
		{"more at least than at all", lan + "defaults: {min_rate: 2mbit}\nrules: [{name: a, class: guarantee, " +
			"target: " +
			"1mbit}]\n", "3:22", "defaults.min_rate: 2mbit is above the target, which is 1mbit"},
		{"a target that max_rate keeps from", lan + "defaults: {class: guarantee, target: 2mbit, up: {max_rate: " +
			"1mbit}}\n", "3:38", "defaults.target: 2mbit is more than max_rate lets pass, which is 1mbit"},
		{
			"a target that connection_rate keeps from",
			lan + "defaults: {class: guarantee, target: 2mbit, up: {connection_rate: " +
				"1mbit}}\n", "3:38", "defaults.target: " +
				"2mbit is more than connection_rate lets pass, which is 1mbit",
		},
		{
			"a cap above the capacity", lan + "defaults: {hint_cap: 1.2}\n", "3:22",
			"defaults.hint_cap: \"1.2\" is no part of a whole; write a number above 0, up to 1",
		},
		{
			"a cap in percent", lan + "defaults: {hint_cap: 95%}\n", "3:22",
			"defaults.hint_cap: \"95%\" is no part of a whole",
		},
		{"Janus told twice", lan + "defaults: {algorithm: 'janus:class=guarantee', group: flow, down: {class: " +
			"guarantee}}\n", "3:75", "defaults.down.class: guarantee, and janus is given class as well"},
		{"a group with spaces", lan + "defaults: {group: my group}\n", "3:19", "defaults.group"},
		{
			"a PROXY protocol that does not exist", lan + "defaults: {send_proxy: v3}\n", "3:24",
			"defaults.send_proxy: \"v3\" is not one of off, v1, v2",
		},

		{
			"a size without unit", lan + "limits: {buffer: 65536}\n", "3:18",
			"limits.buffer: \"65536\" needs a unit, such as 64KiB",
		},
		{"a buffer too small", lan + "limits: {buffer: 1KiB}\n", "3:18", "limits.buffer: 1KiB is outside"},
		{
			"a time without unit", lan + "limits: {idle_timeout: 3600}\n", "3:24",
			"limits.idle_timeout: \"3600\" is not a time with a unit",
		},
		{"a negative time", lan + "limits: {idle_timeout: -1s}\n", "3:24", "limits.idle_timeout"},
		{"no time for a handshake", lan + "limits: {handshake_timeout: 0s}\n", "3:29", "limits.handshake_timeout"},
		{"no time to dial", lan + "limits: {dial_timeout: 0s}\n", "3:24", "limits.dial_timeout"},
		{"too little memory", lan + "limits: {memory: 1KiB}\n", "3:18", "limits.memory"},
		{
			"an envelope nobody has", lan + "envelope: vegas\n", "3:11",
			"envelope: \"vegas\" is not one of auto, ebpf, bbr, cubic, reno",
		},
		{"a mark too wide", lan + "mark: 0x1ffffffff\n", "3:7", "mark: \"0x1ffffffff\" is no firewall mark"},
		{
			"telemetry on a listener's port", lan + "telemetry: {address: '127.0.0.1:1080'}\n", "3:22",
			"telemetry.address: \"127.0.0.1:1080\" is already listeners[0].address",
		},
		{
			"a socket somewhere", lan + "telemetry: {hints: {socket: hints.sock}}\n", "3:29",
			"telemetry.hints.socket: \"hints.sock\" is not a whole path, such as /run/penstock/hints.sock",
		},
		{
			"a socket far away", lan + "telemetry: {hints: {socket: /" + strings.Repeat("x", 103) + "}}\n", "3:29",
			"telemetry.hints.socket: a path of 104 bytes; a socket's has at most 103",
		},
		{
			"a token that is guessed", lan + "telemetry: {hints: {token: secret}}\n", "3:28",
			"telemetry.hints.token: a token is 16 to 255 visible characters without spaces, such as openssl rand " +
				"-hex 16 " +
				"prints",
		},
		{
			"a token of two words", lan + "telemetry: {hints: {token: 0123456789 0123456789}}\n", "3:28",
			"telemetry.hints.token: a token is",
		},
		{
			"two tokens", lan + "telemetry: {hints: {token: 0123456789abcdef, token_file: t}}\n", "3:58",
			"telemetry.hints.token_file: give token or token_file, not both",
		},
		{
			"a token of changes that is guessed", lan + "telemetry: {change_token: secret}\n", "3:27",
			"telemetry.change_token: a token is 16 to 255 visible characters",
		},
		{
			"two tokens of changes", lan + "telemetry: {change_token: 0123456789abcdef, change_token_file: t}\n", "3:64",
			"telemetry.change_token_file: give change_token or change_token_file, not both",
		},
		{
			"a collector at a path", lan + "telemetry: {otlp: {endpoint: /v1/metrics}}\n", "3:30",
			"telemetry.otlp.endpoint: this is no URL of a collector, such as http://127.0.0.1:4318",
		},
		{
			"a collector with a password", lan + "telemetry: {otlp: {endpoint: 'https://a:b@c'}}\n", "3:30",
			"telemetry.otlp.endpoint: a URL without user, query and fragment",
		},
		{
			"headers without a collector", lan + "telemetry: {otlp: {headers: a=b}}\n", "3:19",
			"telemetry.otlp.endpoint: this is no URL of a collector",
		},
		{
			"headers that are none", lan + "telemetry: {otlp: {endpoint: 'http://c', headers: 'a: b'}}\n", "3:51",
			"telemetry.otlp.headers: headers are name=value,name=value with values in percent-encoding",
		},
		{
			"exports without a pause", lan + "telemetry: {otlp: {endpoint: 'http://c', interval: 1ms}}\n", "3:52",
			"telemetry.otlp.interval: 1ms is less than 1s",
		},
		{
			"a level that does not exist", lan + "log: {level: trace}\n", "3:14",
			"log.level: \"trace\" is not one of debug, info, warn, error",
		},
	} {
		t.Run(row.name, func(t *testing.T) {
			_, err := config.Parse([]byte(row.config))
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.Contains(t, err.Error(), row.says)
			assert.NotContains(t, err.Error(), "\n")
			assert.NotContains(t, err.Error(), "unmarshal")
			if row.place != "" {
				assert.True(t, strings.HasPrefix(err.Error(), row.place+":"), "%q is at %s", err, row.place)
				assert.Contains(t, ce.Excerpt, "^", "the place is shown")
			}
		})
	}
}

func TestLoadReadsPasswordFilesBesideTheConfiguration(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "penstock.yaml")
	write := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	write("penstock.yaml", "listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', users: [{name: x, "+
		"password_file: secret}]}]\n")

	_, err := config.Load(file)
	require.ErrorContains(t, err, file+":1:", "the file that is missing is named where it is asked for")
	require.ErrorContains(t, err, "listeners[0].users[0].password_file: "+filepath.Join(filepath.Dir(file),
		"secret")+": no such file")

	write("secret", "hunter2\nsecond line\n")
	cfg, err := config.Load(file)
	require.NoError(t, err)
	assert.EqualValues(t, "hunter2", cfg.Listeners[0].Users[0].Password)
	assert.NoError(t, cfg.Validate(), "as it is once more with the flags")

	write("secret", "\n")
	_, err = config.Load(file)
	require.ErrorContains(t, err, "a password has 1 to 255")

	_, err = config.Load(filepath.Join(dir, "absent.yaml"))
	var ce *config.Error
	require.True(t, errors.As(err, &ce))
	assert.Contains(t, err.Error(), "absent.yaml")
}

func TestLoadReadsTokens(t *testing.T) {
	dir := t.TempDir()
	file, secret := filepath.Join(dir, "penstock.yaml"), filepath.Join(dir, "token")
	require.NoError(t, os.WriteFile(file, []byte(lan+
		"telemetry: {hints: {token_file: token}, change_token_file: token}\n"), 0o600))

	_, err := config.Load(file)
	require.ErrorContains(t, err, file+":3:33: telemetry.hints.token_file: "+secret+": no such file")

	require.NoError(t, os.WriteFile(secret, []byte("0123456789abcdef\nnext\n"), 0o600))
	cfg, err := config.Load(file)
	require.NoError(t, err)
	assert.EqualValues(t, "0123456789abcdef", cfg.Telemetry.Hints.Token)
	assert.EqualValues(t, "0123456789abcdef", cfg.Telemetry.ChangeToken)
	assert.NoError(t, cfg.Validate(), "as it is once more with the flags")

	require.NoError(t, os.WriteFile(secret, []byte("hunter2\n"), 0o600))
	_, err = config.Load(file)
	require.ErrorContains(t, err, "telemetry.hints.token_file: a token is 16 to 255 visible characters")
	require.ErrorContains(t, err, "this has 7 bytes")
	assert.NotContains(t, err.Error(), "hunter2", "it is a secret")
}

func TestWarnings(t *testing.T) {
	cfg, err := config.Parse([]byte("listeners: [{name: a, mode: mixed, address: '0.0.0.0:1080', proxy_protocol: " +
		"{from: " +
		"[0.0.0.0/0]}}]\ntelemetry: {address: ':9464'}\n"))
	require.NoError(t, err)
	assert.Len(t, cfg.Warnings(), 3, "an open proxy, addresses anybody may claim, telemetry for all")
	cfg.Telemetry.Hints.Token, cfg.Telemetry.ChangeToken = "0123456789abcdef", "0123456789abcdef"
	assert.Contains(t, strings.Join(cfg.Warnings(), "\n"),
		"telemetry.hints: hints to :9464 carry their token unencrypted")
	assert.Contains(t, strings.Join(cfg.Warnings(), "\n"),
		"telemetry.change_token: changes of algorithms to :9464 carry their token unencrypted")
	cfg.Telemetry.OTLP = config.OTLP{Endpoint: "http://collector.example:4318/v1/metrics/", Headers: "api-key=a%20b%3D"}
	assert.Contains(t, strings.Join(cfg.Warnings(), "\n"),
		"telemetry.otlp: headers go to collector.example:4318 unencrypted")
	assert.Equal(t, "http://collector.example:4318/v1/metrics", cfg.Telemetry.OTLP.URL())
	assert.Equal(t, map[string]string{"api-key": "a b="}, cfg.Telemetry.OTLP.Headers.Fields())
	assert.NotContains(t, strings.Join(cfg.Warnings(), "\n"), "0123456789abcdef")
}

func TestRulesThatDoNothingAreWarnedOf(t *testing.T) {
	const (
		pages = "{name: pages, match: {ports: [80, 443]}}"
		calls = "{name: calls, match: {server_name: ['*.meet.example'], ports: [443]}}"
		inner = "{name: inner, match: {destination: [10.1.0.0/16]}}"
		outer = "{name: outer, match: {destination: [10.0.0.0/8]}}"
	)
	for name, c := range map[string]struct {
		rules string
		says  []string
	}{
		"in a good order": {calls + ", " + pages + ", " + inner + ", " + outer + ", {name: rest}", nil},
		"behind one without a match": {"{name: all}, " + pages + ", " + calls, []string{
			"rules[0]: all matches every connection, so that these rules below it are never reached: pages, calls; " +
				"put it below them, or narrow its match",
		}},
		"behind all addresses": {"{name: all, match: {destination: ['::/0', 0.0.0.0/0]}}, " + inner, []string{
			"rules[0]: all matches every connection, so that these rules below it are never reached: inner; ",
		}},
		"behind the only listener": {
			"{name: all, match: {listener: [a], protocol: tcp, ports: [1-65535]}}, " + pages,
			[]string{"rules[0]: all matches every connection, so that these rules below it are never reached: pages; "},
		},
		"behind a wider one": {outer + ", " + inner + ", " + pages + ", " + calls, []string{
			"rules[0]: outer matches all that these rules below it match, so that they are never reached: inner; ",
			"rules[2]: pages matches all that these rules below it match, so that they are never reached: calls; ",
		}},
		"for datagrams, with keys of TCP": {
			"{name: q, match: {protocol: udp}, send_proxy: v1, dscp: keep, up: {receive: none}, max_rate: 1mbit}",
			[]string{
				"rules[0]: send_proxy, dscp, up.receive: only TCP has a use for it, and the rule is for udp; remove it",
				"rules[0]: UDP goes past these listeners, so the rule matches nothing; set udp.queue of a listener",
			},
		},
		"for datagrams, with a name that none shows": {
			"{name: q, match: {protocol: udp, server_name: [a.example]}, refuse: true}",
			[]string{"rules[0]: UDP shows a server name only where it is held, so the rule matches nothing; set udp.queue"},
		},
		"for pings without a tunnel": {
			"{name: p, match: {protocol: icmp}, refuse: true}", []string{"rules[0]: only tunnels have icmp"},
		},
		"for a host that no client tells": {
			"{name: h, match: {host: [a.example]}, refuse: true}",
			[]string{"rules[0]: match.host: clients tell these listeners no host, so the rule matches nothing"},
		},
		"of many": {"{name: all}, {name: b}, {name: c}, {name: d}, {name: e}, {name: f}, {name: g}, {name: h}", []string{
			"are never reached: b, c, d, e, f and 2 more; ",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := config.Parse([]byte("listeners: [{name: a, mode: tproxy, address: ':1'}]\nrules: [" +
				c.rules + "]\n"))
			require.NoError(t, err)
			warnings := cfg.Warnings()
			require.Len(t, warnings, len(c.says))
			for i, says := range c.says {
				assert.Contains(t, warnings[i], says)
			}
		})
	}
}

// Two listeners share a port where the kernel lets them.
func TestListenersShareAPort(t *testing.T) {
	masque := func(name, address string) string {
		return "- {name: " + name + ", mode: masque, address: '" + address + "', tls: {certificate: c, key: k}, " +
			"masque: " +
			"{open: true}}\n"
	}
	mixed := func(name, address string) string {
		return "- {name: " + name + ", mode: mixed, address: '" + address + "'}\n"
	}
	wireguard := func(name, address string) string {
		return "- {name: " + name + ", mode: wireguard, address: '" + address + "', wireguard: {private_key_file: k}}\n"
	}
	for name, c := range map[string]struct{ listeners, says string }{
		"MASQUE on two addresses": {masque("a", "192.0.2.1:443") + masque("b", "192.0.2.2:443"), ""},
		"MASQUE on two families":  {masque("a", "0.0.0.0:443") + masque("b", "[2001:db8::1]:443"), ""},
		"MASQUE on one address": {
			masque("a", "192.0.2.1:443") + masque("b", "192.0.2.1:443"),
			"listeners[1].address: \"192.0.2.1:443\" is already listeners[0].address",
		},
		"MASQUE on all and one": {
			masque("a", ":443") + masque("b", "192.0.2.1:443"),
			"listeners[1].address: \"192.0.2.1:443\" is already listeners[0].address, which is \":443\"",
		},
		"MASQUE on one and all": {
			masque("a", "192.0.2.1:443") + masque("b", "0.0.0.0:443"),
			"already listeners[0].address",
		},
		"MASQUE beside WireGuard": {
			wireguard("a", ":443") + masque("b", "192.0.2.1:443"),
			"already listeners[0].address",
		},
		"MASQUE beside TCP":                    {masque("a", ":443") + mixed("b", "127.0.0.1:443"), ""},
		"TCP on two addresses":                 {mixed("a", "127.0.0.1:1080") + mixed("b", "192.0.2.1:1080"), ""},
		"TCP on all of a family and the other": {mixed("a", "0.0.0.0:1080") + mixed("b", "[::1]:1080"), ""},
		"TCP on all and one": {
			mixed("a", "[::]:1080") + mixed("b", "127.0.0.1:1080"),
			"listeners[1].address: \"127.0.0.1:1080\" is already listeners[0].address",
		},
		"TCP by name and number": {
			mixed("a", "localhost:1080") + mixed("b", "127.0.0.1:1080"),
			"already listeners[0].address",
		},
		"ports of the kernel's choice": {mixed("a", "[::]:0") + mixed("b", "127.0.0.1:0"), ""},
		"telemetry below a listener": {
			mixed("a", ":9464"),
			"telemetry.address: \"127.0.0.1:9464\" is already listeners[0].address",
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte("listeners:\n" + c.listeners))
			if c.says == "" {
				assert.NoError(t, err)
			} else {
				assert.ErrorContains(t, err, c.says)
			}
		})
	}
}

// What check takes, run takes: the files of secrets hold to the same rules as the configuration.
func TestFilesAreCheckedLikeTheConfiguration(t *testing.T) {
	for _, token := range []string{"phone-0123456789abcdef", strings.Repeat("jwt.", 75), strings.Repeat("x", 4096)} {
		for _, name := range []string{"phone", "alice@example.com"} {
			path := masqueFolder(t, func(f map[string]string) { f["tokens"] = name + " " + token + "\n" })
			cfg, err := config.Load(path)
			require.NoError(t, err)
			require.NoError(t, cfg.Validate(), "as run and reload check it again")
			inline := masqueFolder(t, func(f map[string]string) {
				f["c.yaml"] = strings.Replace(f["c.yaml"], "tokens_file: tokens",
					"tokens: [{name: '"+name+"', token: '"+token+"'}]", 1)
			})
			_, err = config.Load(inline)
			require.NoError(t, err)
		}
	}
	_, err := config.Load(masqueFolder(t, func(f map[string]string) {
		f["tokens"] = "a " + strings.Repeat("x",
			4097) + "\n"
	}))
	require.ErrorContains(t, err, "masque.tokens_file: tokens: line 1")

	dir := folder(t, map[string]string{
		"c.yaml": "listeners:\n- {name: v, mode: wireguard, address: ':51820', wireguard: {private_key_file: k}}\n- " +
			"{name: w, mode: wireguard, wireguard: {config_file: wg0.conf}}\n",
		"k":        keyA,
		"wg0.conf": "[Interface]\nPrivateKey = " + keyC + "\nListenPort = 51820\n",
	})
	_, err = config.Load(filepath.Join(dir, "c.yaml"))
	require.ErrorContains(t, err, "c.yaml:3:3: listeners[1].address: \":51820\" is already listeners[0].address")
}

// Whatever says that a window is the kernel's wins over what holds where nothing is said.
func TestClientsAreLetSendInAWindow(t *testing.T) {
	const rule = "rules: [{name: r, match: {ports: [80]}, "
	for text, want := range map[string][2]string{ // of the rule, and of the rest
		"":                                    {"", "penstock"},
		"defaults: {algorithm: cubic}\n":      {"", "penstock"},
		"defaults: {receive: none}\n":         {"", "none"},
		"defaults: {algorithm: none}\n":       {"", "none"},
		"defaults: {up: {algorithm: none}}\n": {"", "none"},
		"defaults: {algorithm: none, up: {receive: vegas}}\n":               {"", "vegas"},
		"defaults: {receive: none, up: {receive: vegas}}\n":                 {"", "vegas"},
		rule + "algorithm: none}]\n":                                        {"none", "penstock"},
		rule + "receive: none}]\n":                                          {"none", "penstock"},
		rule + "up: {receive: cubic}}]\n":                                   {"cubic", "penstock"},
		rule + "algorithm: copa}]\ndefaults: {algorithm: none}\n":           {"penstock", "none"},
		rule + "algorithm: copa}]\ndefaults: {receive: none}\n":             {"none", "none"},
		rule + "receive: penstock}]\ndefaults: {up: {algorithm: none}}\n":   {"penstock", "none"},
		rule + "weight: 2}]\ndefaults: {algorithm: none, receive: cubic}\n": {"cubic", "cubic"},
	} {
		t.Run(text, func(t *testing.T) {
			cfg, err := config.Parse([]byte(lan + text))
			require.NoError(t, err)
			require.NoError(t, cfg.Validate())
			routes, err := cfg.Routes()
			require.NoError(t, err)
			assert.Equal(t, want[1], routes[len(routes)-1].FromClient.Algorithm)
			if len(routes) > 1 {
				assert.Equal(t, want[0], routes[0].FromClient.Algorithm)
			}
			if text == "" {
				assert.Equal(t, policy.Unmanaged, routes[0].FromServer.Algorithm, "servers are left alone")
			}
		})
	}
}

func TestWhoSendsIsLetSendInAWindow(t *testing.T) {
	cfg, err := config.Parse([]byte(lan +
		"defaults: {weight: 2, max_rate: 9mbit, up: {receive: 'penstock:target_ms=20'}}\n"))
	require.NoError(t, err)
	p, err := cfg.Policy()
	require.NoError(t, err)
	v := p.Decide(policy.Facts{
		Listener: "lan", Source: netip.MustParseAddrPort("192.0.2.1:5"), Target: netip.MustParseAddrPort("198.51.100.7:443"),
	})
	assert.Equal(t, policy.Unmanaged, v.FromServer.Algorithm)
	assert.Equal(t, flow.Terms{
		Group: "from down|lan|192.0.2.1", Host: netip.MustParseAddr("192.0.2.1"), Algorithm: "penstock",
		Params: cc.Params{"target_ms": 20}, Weight: 2,
	}, v.FromClient)
	assert.Equal(t, "penstock", v.Up.Algorithm)
	assert.EqualValues(t, 9e6, v.Up.MaxRate)

	cfg, err = config.Parse([]byte(lan + "defaults: {up: {receive: copa}}\n"))
	require.Error(t, errors.Join(err, cfg.Validate()))
	err = errors.Join(err, cfg.Validate())
	assert.ErrorContains(t, err, "copa does not go as the algorithm of a receive window")
}

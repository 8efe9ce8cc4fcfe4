package doctor

import (
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// edge needs most of what there is.
const edge = `
listeners:
  - {name: lan, mode: tproxy, address: "0.0.0.0:7000", keep_client: true, udp: {queue: 2510}}
  - {name: local, mode: mixed, address: "127.0.0.1:1080"}
hints: [{interface: wlan0}]
envelope: ebpf
`

// judgedFor returns the report for a configuration on a machine that is healthy but for a change.
func judgedFor(t *testing.T, file string, change func(*facts)) Report {
	t.Helper()
	cfg, err := config.Parse([]byte(file))
	require.NoError(t, err)
	f := healthy()
	f.config, f.rulesInstalled, f.listenErrs, f.owners = &cfg, true, map[string]error{}, map[string]string{}
	f.sysctls["net.ipv4.ip_forward"] = "1"
	f.ebpfErr, f.envelope = nil, "ebpf"
	f.sources[0].Name = "wlan0"
	change(&f)
	return judgeFacts(f)
}

func TestAConfigurationIsJudgedByWhatItNeeds(t *testing.T) {
	r := judgedFor(t, edge, func(*facts) {})
	require.NoError(t, r.Fatal, "%v", r.Checks)
	assert.Equal(t, "This machine has all that the configuration needs.", r.Verdict)
	assert.Contains(t, r.check(t, "net_admin").Found, "(needed by listeners[0].mode, listeners[0].keep_client)")
	for _, c := range r.Checks {
		assert.NotContains(t, []string{"redirect_rules_ipv4", "tproxy_ipv6", "tun", "kernel_wireguard", "sources"}, c.Name,
			"the configuration needs none of it")
	}

	refused := attemptOf(fmt.Errorf("capture: refused: %w", syscall.ENOENT))
	for name, c := range map[string]struct {
		change func(*facts)
		check  string
		state  State
		fix    string
	}{
		"no privilege": {func(f *facts) { f.capabilities = 0 }, "net_admin", Missing, "run as root"},
		"no modules": {
			func(f *facts) { f.trials["tproxy_rules_ipv4"] = refused }, "tproxy_rules_ipv4", Missing,
			"modprobe",
		},
		"UDP that cannot be held is missing, for it was asked for": {
			func(f *facts) { f.trials[queueTrial] = refused }, queueTrial, Missing, "modprobe -a nfnetlink_queue",
		},
		"so is the envelope": {
			func(f *facts) { f.ebpfErr, f.release = errors.New("too old"), "5.10.0" }, "ebpf", Missing, "boot Linux 6.10",
		},
		"nothing is captured": {func(f *facts) { f.rulesInstalled = false }, rulesInForce, Warn, "penstock rules apply"},
		"no router": {
			func(f *facts) { f.sysctls["net.ipv4.ip_forward"] = "0" }, "net.ipv4.ip_forward", Warn,
			"sysctl -w net.ipv4.ip_forward=1",
		},
		"a port of another": {func(f *facts) {
			f.listenErrs["listeners[1].address"], f.owners["listeners[1].address"] = syscall.EADDRINUSE, "nginx (process 7)"
		}, "listeners[1].address", Missing, "end that process"},
		"a port of the running proxy": {func(f *facts) {
			f.listenErrs["telemetry.address"], f.owners["telemetry.address"] = syscall.EADDRINUSE, "penstock (process 7)"
		}, "telemetry.address", OK, ""},
		"an address of another": {func(f *facts) {
			f.listenErrs["listeners[0].address"] = syscall.EADDRNOTAVAIL
		}, "listeners[0].address", Missing, "ip addr add"},
		"a port of root's": {func(f *facts) {
			f.listenErrs["listeners[1].address"] = syscall.EACCES
		}, "listeners[1].address", Missing, "cap_net_bind_service"},
		"an interface that is gone": {
			func(f *facts) { f.sources = nil }, "hints[0].interface", Warn,
			"ip link set wlan0 up",
		},
		"an interface without a rate": {func(f *facts) {
			f.sources[0].Rate, f.sources[0].Radio = 0, false
		}, "hints[0].interface", Warn, "set hints[0].capacity"},
	} {
		t.Run(name, func(t *testing.T) {
			r := judgedFor(t, edge, c.change)
			got := r.check(t, c.check)
			assert.Equal(t, c.state, got.State, got.Found)
			assert.Contains(t, got.Fix, c.fix)
			assert.Equal(t, c.state == Missing, r.Fatal != nil && strings.Contains(r.Fatal.Error(), c.check), "%v", r.Fatal)
		})
	}
}

func TestListenersNeedWhatTheirModesDo(t *testing.T) {
	for listener, checks := range map[string]string{
		`mode: redirect, address: "[2001:db8::1]:7000"`: "redirect_rules_ipv6 capture_rules input_chain output_chain " +
			"forward_chain captured_networks captured_routes net.ipv4.tcp_syncookies net.ipv6.conf.all.forwarding",
		`mode: tun, device: tun7`:                 "tun net_admin ping",
		`mode: socks5, address: "127.0.0.1:1080"`: "",
	} {
		cfg, err := config.Parse([]byte("listeners: [{name: l, " + listener + "}]"))
		require.NoError(t, err)
		var names []string
		for _, n := range needsOf(&cfg) {
			names = append(names, n.check)
		}
		assert.Equal(t, checks, strings.Join(names, " "))
	}
}

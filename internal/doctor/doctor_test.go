package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

// healthy is a machine on which everything works, for root.
func healthy() facts {
	return facts{
		version: "v1.2.3", release: "6.12.4-generic", machine: "x86_64",
		envelope: kernel.EBPF, relayEnvelope: "bbr", infoSize: 280, btf: true,
		available: []string{"reno", "cubic", "bbr"}, allowed: []string{"reno", "cubic", "bbr"},
		sources: []linkstat.Interface{
			{Name: "wlan0", Queue: "noqueue", Radio: true},
			{Name: "lan0", Queue: "tbf", Rate: 40_000_000},
			{Name: "wan0", Queue: "fq_codel"},
		},
		root:         true,
		capabilities: caps.NetAdmin | caps.NetRaw | caps.NetBindService | caps.SysAdmin | caps.BPF | caps.Perfmon,
		trials: map[string]attempt{
			"tproxy_rules_ipv4": {}, "tproxy_rules_ipv6": {}, "redirect_rules_ipv4": {}, "redirect_rules_ipv6": {},
			"udp_queue": {}, "tun": {}, "kernel_wireguard": {},
		},
		descriptors: proxy.Descriptors{Total: 1048576, Connections: 458696, Pipes: 65528},
		sysctls: map[string]string{
			"user.max_user_namespaces": "127000", "kernel.unprivileged_userns_clone": "1",
			"kernel.apparmor_restrict_unprivileged_userns": "0",
			"net.ipv4.tcp_wmem":                            "4096 16384 4194304", "net.ipv4.tcp_rmem": "4096 " +
				"131072 6291456",
			"net.ipv4.tcp_sack": "1", "net.ipv4.tcp_timestamps": "1", "net.ipv4.tcp_window_scaling": "1",
			"net.ipv4.tcp_mtu_probing": "1",
			"net.ipv4.tcp_syncookies":  "1", "net.ipv4.ip_local_port_range": "32768 60999",
			"net.ipv4.tcp_tw_reuse": "2", "net.ipv6.conf.all.disable_ipv6": "0", "net.ipv6.conf.lo.disable_ipv6": "0",
			"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "0",
		},
	}
}

// limited is an old and locked one, for a user.
func limited() facts {
	f := healthy()
	f.release, f.infoSize = "5.4.0", 232
	f.sources, f.sourcesErr = nil, unix.EAFNOSUPPORT
	f.captureErr = unix.EPERM
	f.datapathMissing = []string{
		"TCP_INFO has no total_rto before Linux 6.7: timeouts are inferred from the recovery state",
		`envelope "bbr": not loaded`,
	}
	f.envelope, f.relayEnvelope = "cubic", "cubic"
	f.ebpfErr = fmt.Errorf("bpf: needs Linux 6.10 or later, this is 5.4.0: %w", unix.EPERM)
	f.btf, f.root, f.capabilities = false, false, 0
	f.available, f.allowed = []string{"reno", "cubic"}, []string{"reno", "cubic"}
	f.transparentErrs = [2]error{unix.EPERM, unix.EPERM}
	f.pingErr = unix.EACCES
	f.namespaceErr, f.userNamespaceErr, f.trials, f.inUserTrials = unix.EPERM, unix.EPERM, nil, true
	f.descriptors = proxy.Descriptors{Total: 1024, Connections: 392, Pipes: 56}
	maps.Copy(f.sysctls, map[string]string{
		"net.ipv4.ping_group_range":        "1 0",
		"kernel.unprivileged_userns_clone": "0", "net.ipv4.tcp_wmem": "4096 16384 262144", "net.ipv4.tcp_sack": "0",
	})
	return f
}

// golden compares with a file, which UPDATE_GOLDEN=1 rewrites.
func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if os.Getenv("UPDATE_GOLDEN") != "" {
		require.NoError(t, os.WriteFile(path, got, 0o644)) //nolint:gosec // a file of the source
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, string(want), string(got), "UPDATE_GOLDEN=1 rewrites it")
}

func TestTheReportIsRenderedAsBefore(t *testing.T) {
	for name, f := range map[string]facts{"healthy": healthy(), "limited": limited()} {
		t.Run(name, func(t *testing.T) {
			var text, object bytes.Buffer
			r := judgeFacts(f)
			require.NoError(t, r.Text(&text))
			require.NoError(t, r.JSON(&object))
			golden(t, name+".txt", text.Bytes())
			golden(t, name+".json", object.Bytes())
		})
	}
}

func (r Report) check(t *testing.T, name string) Check {
	t.Helper()
	i := slices.IndexFunc(r.Checks, func(c Check) bool { return c.Name == name })
	require.GreaterOrEqual(t, i, 0, "no check %s", name)
	return r.Checks[i]
}

func TestEveryFindingThatIsNotFineNamesItsFix(t *testing.T) {
	refused := func(name string, errno syscall.Errno) func(*facts) {
		return func(f *facts) { f.trials[name] = attemptOf(fmt.Errorf("capture: refused: %w", errno)) }
	}
	sysctl := func(name, value string) func(*facts) { return func(f *facts) { f.sysctls[name] = value } }
	without := func(c caps.Set) func(*facts) {
		return func(f *facts) { f.capabilities, f.ebpfErr = c, unix.EPERM }
	}
	for name, c := range map[string]struct {
		change func(*facts)
		check  string
		state  State
		fix    string // a part of it; empty: there is none
	}{
		"a kernel without the datapath": {
			func(f *facts) { f.datapathErr = errors.New("kernel: too old") }, "release",
			Missing, "boot Linux 5.4",
		},
		"no tier without a datapath": {
			func(f *facts) { f.datapathErr = errors.New("kernel: too old") }, "tier", Missing,
			"see release",
		},
		"no look at TCP_INFO without a datapath": {
			func(f *facts) { f.datapathErr, f.infoSize = errors.New("kernel: too old"), 0 }, "tcp_info", Warn,
			"see release",
		},
		"a short TCP_INFO": {
			func(f *facts) { f.datapathMissing = []string{"TCP_INFO has no total_rto"} },
			"tcp_info", Warn, "boot Linux 6.7",
		},

		"eBPF on an old kernel": {
			func(f *facts) { f.release, f.ebpfErr = "6.9.12", unix.ENOTSUP }, "ebpf", Warn,
			"boot Linux 6.10",
		},
		"eBPF without type information": {
			func(f *facts) { f.btf, f.ebpfErr = false, unix.ENOENT }, "ebpf", Warn,
			"CONFIG_DEBUG_INFO_BTF=y",
		},
		"eBPF without both capabilities": {
			without(caps.NetAdmin), "ebpf", Warn,
			"setcap cap_net_admin,cap_perfmon,cap_bpf+ep",
		},
		"eBPF without one of the two": {without(caps.BPF), "ebpf", Warn, "AmbientCapabilities=CAP_PERFMON CAP_BPF in"},
		"eBPF behind a filter":        {func(f *facts) { f.ebpfErr = unix.EPERM }, "ebpf", Warn, "SystemCallFilter=bpf"},
		"eBPF in a rootless container": {
			func(f *facts) { f.ebpfErr, f.inUserNamespace = unix.EPERM, true }, "ebpf", Warn,
			"which cannot grant CAP_PERFMON CAP_BPF",
		},
		"eBPF in a kernel built without": {func(f *facts) { f.ebpfErr = unix.EINVAL }, "ebpf", Warn, "CONFIG_BPF_JIT=y"},
		"congestion controls are unknown": {
			func(f *facts) { f.controlsErr = unix.EACCES }, "congestion_controls", Warn,
			"ProcSubset",
		},

		"bbr is not loaded, for an administrator": {
			func(f *facts) { f.available = []string{"reno"} }, "bbr", Warn,
			"modprobe tcp_bbr",
		},
		"bbr is not loaded, for a user": {
			func(f *facts) { f.available, f.allowed, f.capabilities = []string{"reno"}, []string{"reno"}, 0 }, "bbr", Warn,
			`modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control="reno bbr"`,
		},
		"bbr is not for everybody": {
			func(f *facts) { f.allowed = []string{"reno", "cubic"} }, "bbr", Warn,
			`sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"`,
		},

		"no CAP_NET_ADMIN": {
			without(0), "net_admin", Missing,
			"setcap cap_net_admin+ep on the binary, or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit",
		},
		"IP_TRANSPARENT is refused": {
			func(f *facts) { f.transparentErrs[0], f.capabilities = unix.EPERM, 0 },
			"tproxy_ipv4", Missing, "setcap cap_net_admin+ep",
		},
		"IP_TRANSPARENT in a rootless container": {
			func(f *facts) { f.transparentErrs[0], f.inUserNamespace = unix.EPERM, true },
			"tproxy_ipv4", Missing, "which cannot grant CAP_NET_ADMIN",
		},
		"IPv6 is switched off": {
			func(f *facts) { f.transparentErrs[1] = unix.EAFNOSUPPORT }, "tproxy_ipv6",
			Missing, "ipv6.disable=1",
		},
		"a kernel without transparency": {
			func(f *facts) { f.transparentErrs[1] = unix.ENOPROTOOPT }, "tproxy_ipv6",
			Missing, "CONFIG_IPV6",
		},
		"no tproxy in nftables": {
			refused("tproxy_rules_ipv4", unix.ENOENT), "tproxy_rules_ipv4",
			Missing, "modprobe -a nft_fib_inet nft_tproxy nft_socket",
		},
		"no redirect in nftables": {
			refused("redirect_rules_ipv4", unix.EOPNOTSUPP), "redirect_rules_ipv4",
			Missing, "modprobe -a nft_fib_inet nft_redir nft_chain_nat",
		},
		"no rules for IPv6": {
			refused("tproxy_rules_ipv6", unix.EAFNOSUPPORT), "tproxy_rules_ipv6",
			Missing, "--ipv6=false",
		},
		"rules are refused": {
			refused("redirect_rules_ipv6", unix.EPERM), "redirect_rules_ipv6",
			Missing, "setcap cap_net_bind_service,cap_net_admin,",
		},
		"rules that could not be tried": {
			func(f *facts) { f.trials, f.namespaceErr = nil, unix.EPERM },
			"tproxy_rules_ipv4", Warn, "run penstock doctor as root",
		},
		"a TUN device not tried": {
			func(f *facts) { f.trials, f.namespaceErr = nil, unix.EPERM }, "tun", Warn,
			"user_namespaces",
		},
		"no netfilter queue": {
			refused("udp_queue", unix.EINVAL), "udp_queue", Warn,
			"modprobe -a nfnetlink_queue nft_queue nfnetlink_log nft_log",
		},
		"a netfilter queue without echoes": {without(caps.NetAdmin), "udp_queue", Warn, "cap_net_admin,cap_net_raw"},
		"a netfilter queue without rights": {
			func(f *facts) { f.trials["udp_queue"], f.capabilities = attemptOf(unix.EPERM), 0 }, "udp_queue", Warn,
			"CAP_NET_ADMIN",
		},
		"no TUN device":               {refused("tun", unix.ENOENT), "tun", Missing, "modprobe tun"},
		"a TUN device for root only":  {refused("tun", unix.EACCES), "tun", Missing, "chmod 0666 /dev/net/tun"},
		"a TUN device behind a fence": {refused("tun", unix.EPERM), "tun", Missing, "DeviceAllow=/dev/net/tun"},
		"no WireGuard in the kernel": {
			refused("kernel_wireguard", unix.EOPNOTSUPP), "kernel_wireguard", Warn,
			"modprobe wireguard",
		},
		"WireGuard in the kernel for root only": {
			refused("kernel_wireguard", unix.EPERM), "kernel_wireguard", Warn,
			"CAP_NET_ADMIN",
		},
		"pings are for nobody": {
			func(f *facts) {
				f.pingErr, f.sysctls["net.ipv4.ping_group_range"] = unix.EACCES, "1 0"
				f.capabilities &^= caps.NetRaw
			}, "ping", Missing,
			`sysctl -w net.ipv4.ping_group_range="0 2147483647"; or run as root, or setcap cap_net_bind_service,cap_net_admin,cap_net_raw`,
		},
		"pings by raw sockets": {
			func(f *facts) { f.pingErr, f.capabilities = unix.EACCES, caps.NetRaw }, "ping",
			OK, "",
		},
		"low ports are for information":  {without(caps.NetBindService), "ports", OK, ""},
		"a TUN device without its ioctl": {refused("tun", unix.EINVAL), "tun", Missing, "CONFIG_TUN"},

		"user namespaces are switched off": {
			func(f *facts) { f.userNamespaceErr, f.sysctls["user.max_user_namespaces"] = unix.ENOSPC, "0" },
			"user_namespaces", Missing,
			"sysctl -w user.max_user_namespaces=10000",
		},
		"user namespaces are for root only, says Debian": {
			sysctl("kernel.unprivileged_userns_clone", "0"),
			"user_namespaces", Warn, "sysctl -w kernel.unprivileged_userns_clone=1",
		},
		"user namespaces are for root only, says AppArmor": {
			sysctl("kernel.apparmor_restrict_unprivileged_userns", "1"),
			"user_namespaces", Warn, "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
		},
		"user namespaces are refused to a user": {
			func(f *facts) {
				f.root, f.userNamespaceErr = false, unix.EPERM
				f.sysctls["kernel.unprivileged_userns_clone"] = "0"
			}, "user_namespaces", Missing,
			"sysctl -w kernel.unprivileged_userns_clone=1",
		},
		"user namespaces in a container": {
			func(f *facts) { f.userNamespaceErr = unix.EPERM }, "user_namespaces", Missing,
			"seccomp=unconfined",
		},
		"a kernel without user namespaces": {
			func(f *facts) { f.userNamespaceErr = unix.EINVAL }, "user_namespaces", Missing,
			"CONFIG_USER_NS=y",
		},

		"a forward chain that drops": {
			func(f *facts) { f.forwardFilters = []string{"inet fw forward (policy drop)"} }, "forward_chain", Warn, "The " +
				"forward chain",
		},
		"a network that came after the rules": {
			func(f *facts) {
				f.lateNetworks = []capture.Network{{Prefix: netip.MustParsePrefix("2001:db8::/64"), Interface: "lan0"}}
			},
			"captured_networks", Warn, "penstock rules apply once more",
		},
		"a route that has gone": {
			func(f *facts) { f.lostParts = []string{"the local IPv6 route of table 11200"} }, "captured_routes", Warn,
			"penstock rules apply once more",
		},
		"an input chain that drops": {
			func(f *facts) {
				f.rulesInstalled = true
				f.obstacles = []capture.Obstacle{{Hook: "input", Chain: "inet fw input", Drops: "all", Cure: "nft insert"}}
			}, "input_chain", Warn, "nft insert",
		},
		"which is no output chain": {
			func(f *facts) { f.obstacles = []capture.Obstacle{{Hook: "input", Cure: "nft"}} }, "output_chain", OK, "",
		},
		"an output chain that drops": {
			func(f *facts) {
				f.obstacles = []capture.Obstacle{{Hook: "output", Chain: "ip a b", Drops: "all", Cure: "nft insert"}}
			}, "output_chain", Warn, "nft insert",
		},
		"which is in nobody's way": {
			func(f *facts) {
				f.obstacles = []capture.Obstacle{{Hook: "output", Chain: "ip a b", Drops: "all", Cure: "nft insert"}}
				f.sysctls["net.ipv4.ip_forward"] = "0"
			}, "output_chain", OK, "",
		},
		"nobody may look at the input chain": {
			func(f *facts) { f.captureErr = unix.EPERM }, "input_chain", Warn, "run penstock doctor as root",
		},
		"SYN cookies for all": {
			sysctl("net.ipv4.tcp_syncookies", "2"), "net.ipv4.tcp_syncookies", Warn,
			"sysctl -w net.ipv4.tcp_syncookies=1",
		},
		"SYN cookies in a flood are for information": {
			sysctl("net.ipv4.tcp_syncookies", "1"), "net.ipv4.tcp_syncookies", OK, "",
		},
		"few ports that rest": {
			sysctl("net.ipv4.ip_local_port_range", "50000 59999"), "net.ipv4.ip_local_port_range", Warn,
			`sysctl -w net.ipv4.ip_local_port_range="32768 60999" net.ipv4.tcp_tw_reuse=1`,
		},
		"few ports that do not rest": {
			func(f *facts) {
				f.sysctls["net.ipv4.ip_local_port_range"], f.sysctls["net.ipv4.tcp_tw_reuse"] = "50000 59999", "1"
			}, "net.ipv4.ip_local_port_range", OK, "",
		},
		"hardly any ports": {
			func(f *facts) {
				f.sysctls["net.ipv4.ip_local_port_range"], f.sysctls["net.ipv4.tcp_tw_reuse"] = "50000 50050", "1"
			}, "net.ipv4.ip_local_port_range", Warn, "32768 60999",
		},
		"IPv6 is off where it is delivered": {
			sysctl("net.ipv6.conf.lo.disable_ipv6", "1"), "ipv6", Warn, "sysctl -w net.ipv6.conf.lo.disable_ipv6=0",
		},
		"IPv6 is off": {
			func(f *facts) {
				f.sysctls["net.ipv6.conf.lo.disable_ipv6"], f.sysctls["net.ipv6.conf.all.disable_ipv6"] = "1", "1"
			}, "ipv6", OK, "",
		},
		"nobody may look at the forward chain": {
			func(f *facts) { f.captureErr = unix.EPERM }, "forward_chain", Warn, "run penstock doctor as root",
		},
		"nor at the rules": {
			func(f *facts) { f.captureErr = unix.EPERM }, "captured_networks", Warn, "run penstock doctor as root",
		},

		"few descriptors": {func(f *facts) {
			f.descriptors = proxy.Descriptors{Total: 1024, Connections: 392, Pipes: 56}
		}, "descriptors", Warn, "LimitNOFILE=1048576"},
		"small send buffers": {
			sysctl("net.ipv4.tcp_wmem", "4096 16384 262144"), "net.ipv4.tcp_wmem", Warn,
			`sysctl -w net.ipv4.tcp_wmem="4096 16384 4194304"`,
		},
		"small receive buffers": {
			sysctl("net.ipv4.tcp_rmem", "4096 87380 1048576"), "net.ipv4.tcp_rmem", Warn,
			`sysctl -w net.ipv4.tcp_rmem="4096 87380 4194304"`,
		},
		"no selective acknowledgements": {
			sysctl("net.ipv4.tcp_sack", "0"), "net.ipv4.tcp_sack", Warn,
			"sysctl -w net.ipv4.tcp_sack=1",
		},
		"no timestamps": {
			sysctl("net.ipv4.tcp_timestamps", "0"), "net.ipv4.tcp_timestamps", Warn,
			"sysctl -w net.ipv4.tcp_timestamps=1",
		},
		"no window scaling": {
			sysctl("net.ipv4.tcp_window_scaling", "0"), "net.ipv4.tcp_window_scaling", Warn,
			"sysctl -w net.ipv4.tcp_window_scaling=1",
		},
		"black holes are not found out": {
			sysctl("net.ipv4.tcp_mtu_probing", "0"), "net.ipv4.tcp_mtu_probing", Warn,
			"sysctl -w net.ipv4.tcp_mtu_probing=1",
		},
		"capabilities are unknown": {
			func(f *facts) { f.capabilitiesErr = unix.EPERM }, "capabilities", Warn,
			"SystemCallFilter",
		},

		"not routing is for information": {
			sysctl("net.ipv4.ip_forward", "0"), "net.ipv4.ip_forward", OK,
			"",
		},
		"no capabilities at all are for information": {without(0), "capabilities", OK, ""},
		"AppArmor's permission to all is fine": {
			sysctl("kernel.apparmor_restrict_unprivileged_userns", "0"),
			"user_namespaces", OK, "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			c.change(&f)
			r := judgeFacts(f)
			got := r.check(t, c.check)
			assert.Equal(t, c.state, got.State, got.Found)
			assert.Contains(t, got.Fix, c.fix)
			wellFormed(t, r)
		})
	}
}

// wellFormed checks what holds for every report.
func wellFormed(t *testing.T, r Report) {
	t.Helper()
	names := map[string]bool{}
	for _, c := range r.Checks {
		assert.False(t, names[c.Name], "%s appears twice", c.Name)
		names[c.Name] = true
		assert.Contains(t, []State{OK, Warn, Missing}, c.State)
		assert.NotEmpty(t, c.Found, c.Name)
		assert.NotContains(t, c.Found+c.Fix, "\n", c.Name)
		assert.Equal(t, c.State == OK, c.Fix == "", "%s is %s, with fix %q", c.Name, c.State, c.Fix)
	}
	assert.True(t, strings.HasSuffix(r.Verdict, "."), r.Verdict)
}

func TestTheVerdictIsWhatRunWillDo(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*facts)
		says   string
	}{
		"everything works": {func(*facts) {}, "penstock run will use the ebpf tier of the kernel datapath with " +
			"envelope " +
			"ebpf, and can capture connections by tproxy and by redirect."},
		"without eBPF": {
			func(f *facts) { f.envelope = "bbr" },
			"the unprivileged tier of the kernel datapath with envelope bbr",
		},
		"without tproxy": {
			func(f *facts) { f.trials["tproxy_rules_ipv4"] = attemptOf(unix.ENOENT) },
			"can capture connections by redirect.",
		},
		"without redirect": {
			func(f *facts) { f.trials["redirect_rules_ipv4"] = attemptOf(unix.ENOENT) },
			"can capture connections by tproxy.",
		},
		"without rights": {func(f *facts) { f.capabilities = 0 }, "cannot capture connections as it is"},
		"without a datapath": {
			func(f *facts) { f.datapathErr = errors.New("kernel: no TCP_INFO") },
			"penstock run cannot work here: kernel: no TCP_INFO.",
		},
		"without IPv6, still": {func(f *facts) { f.transparentErrs[1] = unix.EAFNOSUPPORT }, "by tproxy and by redirect."},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			c.change(&f)
			assert.Contains(t, judgeFacts(f).Verdict, c.says)
		})
	}
}

func TestCapabilitiesAreSaidInTheShorterWay(t *testing.T) {
	for says, c := range map[string]caps.Set{
		"none: what needs no privilege works": 0,
		"CAP_NET_ADMIN CAP_BPF":               caps.NetAdmin | caps.BPF,
		"all but CAP_SYS_ADMIN":               caps.All &^ caps.SysAdmin,
		"all":                                 caps.All,
	} {
		f := healthy()
		f.capabilities = c
		assert.Equal(t, says, f.judgeCapabilities().Found)
	}
}

func TestOnlyAProxyThatCannotRunIsAFailure(t *testing.T) {
	assert.NoError(t, judgeFacts(healthy()).Fatal)
	assert.NoError(t, judgeFacts(limited()).Fatal)
	f := healthy()
	f.datapathErr = errors.New("kernel: no TCP_INFO")
	r := judgeFacts(f)
	assert.ErrorIs(t, r.Fatal, f.datapathErr)
	assert.Empty(t, r.Tier)
}

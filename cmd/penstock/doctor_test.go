package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

// healthy is a machine on which everything works, for root.
func healthy() facts {
	return facts{
		version: "v1.2.3", release: "6.12.4-generic", machine: "x86_64",
		envelope: kernel.EBPF, beneath: "bbr", infoSize: 280, btf: true,
		available: []string{"reno", "cubic", "bbr"}, allowed: []string{"reno", "cubic", "bbr"},
		sources: []linkstat.Interface{
			{Name: "wlan0", Queue: "noqueue", Radio: true}, {Name: "lan0", Queue: "tbf", Rate: 40_000_000}, {Name: "wan0", Queue: "fq_codel"},
		},
		root: true, traceable: true,
		capabilities: capNetAdmin | capNetBindService | capSysAdmin | capBPF | capPerfmon,
		trials: map[string]attempt{
			"tproxy_rules_ipv4": {}, "tproxy_rules_ipv6": {}, "redirect_rules_ipv4": {}, "redirect_rules_ipv6": {}, "tun": {}, "kernel_wireguard": {},
		},
		descriptors: proxy.Descriptors{Total: 1048576, Connections: 458696, Pipes: 65528},
		sysctls: map[string]string{
			"user.max_user_namespaces": "127000", "kernel.unprivileged_userns_clone": "1",
			"kernel.apparmor_restrict_unprivileged_userns": "0",
			"net.ipv4.tcp_wmem":                            "4096 16384 4194304", "net.ipv4.tcp_rmem": "4096 131072 6291456",
			"net.ipv4.tcp_sack": "1", "net.ipv4.tcp_timestamps": "1", "net.ipv4.tcp_window_scaling": "1",
			"net.ipv4.tcp_slow_start_after_idle": "0", "net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "0",
		},
	}
}

// limited is an old and locked one, for a user.
func limited() facts {
	f := healthy()
	f.release, f.infoSize = "5.3.0", 240
	f.sources, f.sourceless = nil, unix.EAFNOSUPPORT
	f.filterless = unix.EPERM
	f.lacking = []string{"TCP_INFO has no snd_wnd before Linux 5.4: the receive window is not seen", `envelope "bbr": not loaded`}
	f.envelope, f.beneath = "cubic", "cubic"
	f.ebpf = fmt.Errorf("bpf: needs Linux 6.10 or later, this is 5.3.0: %w", unix.EPERM)
	f.btf, f.root, f.capabilities = false, false, 0
	f.available, f.allowed = []string{"reno", "cubic"}, []string{"reno", "cubic"}
	f.transparent = [2]error{unix.EPERM, unix.EPERM}
	f.ping = unix.EACCES
	f.own, f.user, f.trials, f.inUserTrials = unix.EPERM, unix.EPERM, nil, true
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
			r := judge(f)
			require.NoError(t, r.text(&text))
			require.NoError(t, r.json(&object))
			golden(t, "doctor_"+name+".txt", text.Bytes())
			golden(t, "doctor_"+name+".json", object.Bytes())
		})
	}
}

func (r report) check(t *testing.T, name string) check {
	t.Helper()
	i := slices.IndexFunc(r.Checks, func(c check) bool { return c.Name == name })
	require.GreaterOrEqual(t, i, 0, "no check %s", name)
	return r.Checks[i]
}

func TestEveryFindingThatIsNotFineNamesItsFix(t *testing.T) {
	refused := func(name string, errno syscall.Errno) func(*facts) {
		return func(f *facts) { f.trials[name] = tried(fmt.Errorf("capture: refused: %w", errno)) }
	}
	sysctl := func(name, value string) func(*facts) { return func(f *facts) { f.sysctls[name] = value } }
	without := func(c capabilities) func(*facts) {
		return func(f *facts) { f.capabilities, f.ebpf = c, unix.EPERM }
	}
	for name, c := range map[string]struct {
		change func(*facts)
		check  string
		state  state
		fix    string // a part of it; empty: there is none
	}{
		"a kernel without the datapath": {func(f *facts) { f.datapath = errors.New("kernel: too old") }, "release", stateMissing, "boot Linux 4.6"},
		"no tier without a datapath":    {func(f *facts) { f.datapath = errors.New("kernel: too old") }, "tier", stateMissing, "see release"},
		"a short TCP_INFO":              {func(f *facts) { f.lacking = []string{"TCP_INFO has no total_rto"} }, "tcp_info", stateWarn, "boot Linux 6.7"},

		"eBPF on an old kernel":           {func(f *facts) { f.release, f.ebpf = "6.9.12", unix.ENOTSUP }, "ebpf", stateWarn, "boot Linux 6.10"},
		"eBPF without type information":   {func(f *facts) { f.btf, f.ebpf = false, unix.ENOENT }, "ebpf", stateWarn, "CONFIG_DEBUG_INFO_BTF=y"},
		"eBPF without both capabilities":  {without(capNetAdmin), "ebpf", stateWarn, "setcap cap_net_admin,cap_perfmon,cap_bpf+ep"},
		"eBPF without one of the two":     {without(capBPF), "ebpf", stateWarn, "AmbientCapabilities=CAP_PERFMON CAP_BPF in"},
		"eBPF behind a filter":            {func(f *facts) { f.ebpf = unix.EPERM }, "ebpf", stateWarn, "SystemCallFilter=bpf"},
		"eBPF in a rootless container":    {func(f *facts) { f.ebpf, f.guest = unix.EPERM, true }, "ebpf", stateWarn, "which cannot grant CAP_PERFMON CAP_BPF"},
		"eBPF in a kernel built without":  {func(f *facts) { f.ebpf = unix.EINVAL }, "ebpf", stateWarn, "CONFIG_BPF_JIT=y"},
		"congestion controls are unknown": {func(f *facts) { f.controls = unix.EACCES }, "congestion_controls", stateWarn, "ProcSubset"},

		"bbr is not loaded, for an administrator": {func(f *facts) { f.available = []string{"reno"} }, "bbr", stateWarn, "modprobe tcp_bbr"},
		"bbr is not loaded, for a user": {
			func(f *facts) { f.available, f.allowed, f.capabilities = []string{"reno"}, []string{"reno"}, 0 }, "bbr", stateWarn,
			`modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control="reno bbr"`,
		},
		"bbr is not for everybody": {
			func(f *facts) { f.allowed = []string{"reno", "cubic"} }, "bbr", stateWarn,
			`sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"`,
		},

		"no CAP_NET_ADMIN":                       {without(0), "net_admin", stateMissing, "setcap cap_net_admin+ep on the binary, or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit"},
		"IP_TRANSPARENT is refused":              {func(f *facts) { f.transparent[0], f.capabilities = unix.EPERM, 0 }, "tproxy_ipv4", stateMissing, "setcap cap_net_admin+ep"},
		"IP_TRANSPARENT in a rootless container": {func(f *facts) { f.transparent[0], f.guest = unix.EPERM, true }, "tproxy_ipv4", stateMissing, "which cannot grant CAP_NET_ADMIN"},
		"IPv6 is switched off":                   {func(f *facts) { f.transparent[1] = unix.EAFNOSUPPORT }, "tproxy_ipv6", stateMissing, "ipv6.disable=1"},
		"a kernel without transparency":          {func(f *facts) { f.transparent[1] = unix.ENOPROTOOPT }, "tproxy_ipv6", stateMissing, "CONFIG_IPV6"},
		"no tproxy in nftables":                  {refused("tproxy_rules_ipv4", unix.ENOENT), "tproxy_rules_ipv4", stateMissing, "modprobe -a nft_fib_inet nft_tproxy nft_socket"},
		"no redirect in nftables":                {refused("redirect_rules_ipv4", unix.EOPNOTSUPP), "redirect_rules_ipv4", stateMissing, "modprobe -a nft_fib_inet nft_redir nft_chain_nat"},
		"no rules for IPv6":                      {refused("tproxy_rules_ipv6", unix.EAFNOSUPPORT), "tproxy_rules_ipv6", stateMissing, "--ipv6=false"},
		"rules are refused":                      {refused("redirect_rules_ipv6", unix.EPERM), "redirect_rules_ipv6", stateMissing, "setcap cap_net_bind_service,cap_net_admin,"},
		"rules that could not be tried":          {func(f *facts) { f.trials, f.own = nil, unix.EPERM }, "tproxy_rules_ipv4", stateWarn, "run penstock doctor as root"},
		"a TUN device not tried":                 {func(f *facts) { f.trials, f.own = nil, unix.EPERM }, "tun", stateWarn, "user_namespaces"},
		"no TUN device":                          {refused("tun", unix.ENOENT), "tun", stateMissing, "modprobe tun"},
		"a TUN device for root only":             {refused("tun", unix.EACCES), "tun", stateMissing, "chmod 0666 /dev/net/tun"},
		"a TUN device behind a fence":            {refused("tun", unix.EPERM), "tun", stateMissing, "DeviceAllow=/dev/net/tun"},
		"no WireGuard in the kernel":             {refused("kernel_wireguard", unix.EOPNOTSUPP), "kernel_wireguard", stateWarn, "modprobe wireguard"},
		"WireGuard in the kernel for root only":  {refused("kernel_wireguard", unix.EPERM), "kernel_wireguard", stateWarn, "CAP_NET_ADMIN"},
		"pings are for nobody": {
			func(f *facts) { f.ping, f.sysctls["net.ipv4.ping_group_range"] = unix.EACCES, "1 0" }, "ping", stateMissing,
			`sysctl -w net.ipv4.ping_group_range="0 2147483647"; or run as root, or setcap cap_net_bind_service,cap_net_admin,cap_net_raw`,
		},
		"pings by raw sockets":           {func(f *facts) { f.ping, f.capabilities = unix.EACCES, capNetRaw }, "ping", stateOK, ""},
		"low ports are for information":  {without(capNetBindService), "ports", stateOK, ""},
		"a TUN device without its ioctl": {refused("tun", unix.EINVAL), "tun", stateMissing, "CONFIG_TUN"},

		"user namespaces are switched off": {
			func(f *facts) { f.user, f.sysctls["user.max_user_namespaces"] = unix.ENOSPC, "0" }, "user_namespaces", stateMissing,
			"sysctl -w user.max_user_namespaces=10000",
		},
		"user namespaces are for root only, says Debian":   {sysctl("kernel.unprivileged_userns_clone", "0"), "user_namespaces", stateWarn, "sysctl -w kernel.unprivileged_userns_clone=1"},
		"user namespaces are for root only, says AppArmor": {sysctl("kernel.apparmor_restrict_unprivileged_userns", "1"), "user_namespaces", stateWarn, "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"},
		"user namespaces are refused to a user": {
			func(f *facts) { f.root, f.user, f.sysctls["kernel.unprivileged_userns_clone"] = false, unix.EPERM, "0" }, "user_namespaces", stateMissing,
			"sysctl -w kernel.unprivileged_userns_clone=1",
		},
		"too many user namespaces":           {func(f *facts) { f.user = unix.ENOSPC }, "user_namespaces", stateMissing, "sysctl -w user.max_user_namespaces=254000"},
		"user namespaces in a container":     {func(f *facts) { f.user = unix.EPERM }, "user_namespaces", stateMissing, "seccomp=unconfined"},
		"user namespaces by a setcap binary": {func(f *facts) { f.user, f.traceable = unix.EACCES, false }, "user_namespaces", stateMissing, "run a copy"},
		"a kernel without user namespaces":   {func(f *facts) { f.user = unix.EINVAL }, "user_namespaces", stateMissing, "CONFIG_USER_NS=y"},

		"a forward chain that drops": {
			func(f *facts) { f.filters = []string{"inet fw forward (policy drop)"} }, "forward_chain", stateWarn, "The forward chain",
		},
		"a network that came after the rules": {
			func(f *facts) {
				f.newcomers = []capture.Network{{Prefix: netip.MustParsePrefix("2001:db8::/64"), Interface: "lan0"}}
			},
			"captured_networks", stateWarn, "penstock rules apply once more",
		},
		"nobody may look at the forward chain": {func(f *facts) { f.filterless = unix.EPERM }, "forward_chain", stateOK, ""},

		"few descriptors":               {func(f *facts) { f.descriptors = proxy.Descriptors{Total: 1024, Connections: 392, Pipes: 56} }, "descriptors", stateWarn, "LimitNOFILE=1048576"},
		"small send buffers":            {sysctl("net.ipv4.tcp_wmem", "4096 16384 262144"), "net.ipv4.tcp_wmem", stateWarn, `sysctl -w net.ipv4.tcp_wmem="4096 16384 4194304"`},
		"small receive buffers":         {sysctl("net.ipv4.tcp_rmem", "4096 87380 1048576"), "net.ipv4.tcp_rmem", stateWarn, `sysctl -w net.ipv4.tcp_rmem="4096 87380 4194304"`},
		"no selective acknowledgements": {sysctl("net.ipv4.tcp_sack", "0"), "net.ipv4.tcp_sack", stateWarn, "sysctl -w net.ipv4.tcp_sack=1"},
		"no timestamps":                 {sysctl("net.ipv4.tcp_timestamps", "0"), "net.ipv4.tcp_timestamps", stateWarn, "sysctl -w net.ipv4.tcp_timestamps=1"},
		"no window scaling":             {sysctl("net.ipv4.tcp_window_scaling", "0"), "net.ipv4.tcp_window_scaling", stateWarn, "sysctl -w net.ipv4.tcp_window_scaling=1"},
		"capabilities are unknown":      {func(f *facts) { f.capabilityLoss = unix.EPERM }, "capabilities", stateWarn, "SystemCallFilter"},

		"starting over after a pause is for information": {sysctl("net.ipv4.tcp_slow_start_after_idle", "1"), "net.ipv4.tcp_slow_start_after_idle", stateOK, ""},
		"not routing is for information":                 {sysctl("net.ipv4.ip_forward", "0"), "net.ipv4.ip_forward", stateOK, ""},
		"no capabilities at all are for information":     {without(0), "capabilities", stateOK, ""},
		"AppArmor's permission to all is fine":           {sysctl("kernel.apparmor_restrict_unprivileged_userns", "0"), "user_namespaces", stateOK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			c.change(&f)
			r := judge(f)
			got := r.check(t, c.check)
			assert.Equal(t, c.state, got.State, got.Found)
			assert.Contains(t, got.Fix, c.fix)
			wellFormed(t, r)
		})
	}
}

// wellFormed checks what holds for every report.
func wellFormed(t *testing.T, r report) {
	t.Helper()
	names := map[string]bool{}
	for _, c := range r.Checks {
		assert.False(t, names[c.Name], "%s appears twice", c.Name)
		names[c.Name] = true
		assert.Contains(t, []state{stateOK, stateWarn, stateMissing}, c.State)
		assert.NotEmpty(t, c.Found, c.Name)
		assert.NotContains(t, c.Found+c.Fix, "\n", c.Name)
		assert.Equal(t, c.State == stateOK, c.Fix == "", "%s is %s, with fix %q", c.Name, c.State, c.Fix)
	}
	assert.True(t, strings.HasSuffix(r.verdict, "."), r.verdict)
}

func TestTheVerdictIsWhatRunWillDo(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*facts)
		says   string
	}{
		"everything works":    {func(*facts) {}, "penstock run will use the ebpf tier of the kernel datapath with envelope ebpf, and can capture connections by tproxy and by redirect."},
		"without eBPF":        {func(f *facts) { f.envelope = "bbr" }, "the unprivileged tier of the kernel datapath with envelope bbr"},
		"without tproxy":      {func(f *facts) { f.trials["tproxy_rules_ipv4"] = tried(unix.ENOENT) }, "can capture connections by redirect."},
		"without redirect":    {func(f *facts) { f.trials["redirect_rules_ipv4"] = tried(unix.ENOENT) }, "can capture connections by tproxy."},
		"without rights":      {func(f *facts) { f.capabilities = 0 }, "cannot capture connections as it is"},
		"without a datapath":  {func(f *facts) { f.datapath = errors.New("kernel: no TCP_INFO") }, "penstock run cannot work here: kernel: no TCP_INFO."},
		"without IPv6, still": {func(f *facts) { f.transparent[1] = unix.EAFNOSUPPORT }, "by tproxy and by redirect."},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy()
			c.change(&f)
			assert.Contains(t, judge(f).verdict, c.says)
		})
	}
}

func TestCapabilitiesAreSaidInTheShorterWay(t *testing.T) {
	for says, c := range map[string]capabilities{
		"none: what needs no privilege works": 0,
		"CAP_NET_ADMIN CAP_BPF":               capNetAdmin | capBPF,
		"all but CAP_SYS_ADMIN":               allCapabilities &^ capSysAdmin,
		"all":                                 allCapabilities,
	} {
		f := healthy()
		f.capabilities = c
		assert.Equal(t, says, f.judgeCapabilities().Found)
	}
}

func TestOnlyAProxyThatCannotRunIsAFailure(t *testing.T) {
	assert.NoError(t, judge(healthy()).fatal)
	assert.NoError(t, judge(limited()).fatal)
	f := healthy()
	f.datapath = errors.New("kernel: no TCP_INFO")
	r := judge(f)
	assert.ErrorIs(t, r.fatal, f.datapath)
	assert.Empty(t, r.Tier)
}

// doctor runs this test binary as the program, as the given user, and returns
// its report and the number it had.
func doctor(t *testing.T, credential *syscall.Credential) (r report, pid int) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "doctor", "--json")
	cmd.Env = append(os.Environ(), programEnv+"=1")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	assert.Empty(t, stderr.String())
	require.NoError(t, json.Unmarshal(out, &r), string(out))
	r.verdict = "."
	wellFormed(t, r)
	return r, cmd.Process.Pid
}

// traces is what a trial could leave behind where this process is.
func traces(t *testing.T) (lines []string) {
	t.Helper()
	links, err := netlink.LinkList()
	require.NoError(t, err)
	for _, l := range links {
		lines = append(lines, "link "+l.Attrs().Name)
	}
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	require.NoError(t, err)
	for _, r := range rules {
		lines = append(lines, "rule "+r.String())
	}
	return lines
}

func TestDoctorTellsRootAboutThisMachine(t *testing.T) {
	needRoot(t)
	before := traces(t)
	r, pid := doctor(t, nil)
	assert.Equal(t, before, traces(t), "something was left behind")
	available, _, err := kernel.Envelopes()
	require.NoError(t, err)
	assert.NotContains(t, available, fmt.Sprintf("penstock%d", pid), "a control was left behind")

	d, err := kernel.New(kernel.Config{Clock: now})
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	assert.Equal(t, d.Envelope(), r.Envelope)
	assert.Equal(t, stateOK, r.check(t, "net_admin").State)
	assert.Equal(t, stateOK, r.check(t, "tproxy_ipv4").State)
	effective, _, err := held()
	require.NoError(t, err)
	f := healthy()
	f.capabilities = effective
	assert.Equal(t, f.judgeCapabilities().Found, r.check(t, "capabilities").Found)
	if effective.has(capSysAdmin) {
		assert.NotContains(t, r.check(t, "tproxy_rules_ipv4").Found, "could not be tried")
	}
}

func TestDoctorTellsAUserWhatIsMissing(t *testing.T) {
	needRoot(t) // to become nobody
	r, _ := doctor(t, &syscall.Credential{Uid: 65534, Gid: 65534})
	assert.Equal(t, "unprivileged", r.Tier)
	for _, name := range []string{"net_admin", "tproxy_ipv4", "tproxy_ipv6"} {
		c := r.check(t, name)
		assert.Equal(t, stateMissing, c.State, name)
		assert.Contains(t, c.Fix, "setcap cap_net_admin+ep on the binary", name)
	}
	assert.Equal(t, stateWarn, r.check(t, "ebpf").State)
	assert.Equal(t, "none: what needs no privilege works", r.check(t, "capabilities").Found)
	switch namespaces := r.check(t, "user_namespaces"); namespaces.State {
	case stateOK:
		assert.NotContains(t, r.check(t, "redirect_rules_ipv4").Found, "could not be tried")
	default:
		assert.Contains(t, r.check(t, "redirect_rules_ipv4").Fix, "run penstock doctor as root")
	}
}

func TestDoctorHelpHasExamples(t *testing.T) {
	code, stdout, _ := run(t, "doctor", "--help")
	require.Equal(t, exitOK, code)
	assert.Contains(t, stdout, "penstock doctor --json")
	assert.NotContains(t, stdout, trialsFlag)
}

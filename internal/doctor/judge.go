package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// judgeFacts turns facts into checks, group by group, and the verdict. It does not read the machine, so that tests can
// make up the facts.
func judgeFacts(f facts) Report {
	r := Report{Version: f.version, Kernel: f.release, Envelope: f.envelope, Fatal: f.datapathErr}
	if f.datapathErr == nil {
		r.Tier = f.kernelTier()
	}
	for _, group := range []struct {
		name   string
		checks []Check
	}{
		{"kernel", f.judgeKernel()},
		{"datapath", f.judgeDatapath()},
		{"capture", f.judgeCapture()},
		{"hints", []Check{f.judgeSources()}},
		{"tunnels", f.judgeTunnels()},
		{"lab", []Check{f.judgeUserNamespaces(), f.judgeTUN()}},
		{"limits", append([]Check{f.judgeDescriptors()}, f.judgeSettings()...)},
		{"process", []Check{f.judgeCapabilities()}},
	} {
		for _, c := range group.checks {
			c.Group = group.name
			r.Checks = append(r.Checks, c)
		}
	}
	r.Verdict = f.overallVerdict(r)
	if f.config != nil {
		return f.judgeNeeds(r)
	}
	return r
}

// kernelTier returns the tier of the kernel datapath that run would use.
func (f facts) kernelTier() string {
	if f.envelope == kernel.EBPF {
		return "ebpf"
	}
	return "unprivileged"
}

// overallVerdict returns the report's sentence for people.
func (f facts) overallVerdict(r Report) string {
	if f.datapathErr != nil {
		return fmt.Sprintf("penstock run cannot work here: %v.", f.datapathErr)
	}
	able := func(names ...string) bool {
		return !slices.ContainsFunc(r.Checks, func(c Check) bool {
			return c.State == Missing && slices.Contains(names, c.Name)
		})
	}
	// Anybody may open a redirect listener, but its rules need CAP_NET_ADMIN.
	capturing := "can capture connections by tproxy and by redirect"
	tproxy, redirect := able("net_admin", "tproxy_ipv4", "tproxy_rules_ipv4"), able("net_admin", "redirect_rules_ipv4")
	switch {
	case tproxy && !redirect:
		capturing = "can capture connections by tproxy"
	case redirect && !tproxy:
		capturing = "can capture connections by redirect"
	case !tproxy:
		capturing = "cannot capture connections as it is; SOCKS5, CONNECT and forward listeners work"
	}
	return fmt.Sprintf("penstock run will use the %s tier of the kernel datapath with envelope %s, and %s.", r.Tier,
		r.Envelope, capturing)
}

// okCheck returns a check that needs no action.
func okCheck(name, format string, args ...any) Check {
	return Check{Name: name, State: OK, Found: fmt.Sprintf(format, args...)}
}

// judgeKernel judges the kernel's release and its TCP_INFO.
func (f facts) judgeKernel() []Check {
	release := okCheck("release", "Linux %s on %s", f.release, f.machine)
	if f.datapathErr != nil {
		release.State, release.Fix = Missing, "boot Linux 5.4 or later; in a sandbox that emulates Linux, leave it"
		release.Found += ": " + f.datapathErr.Error()
	}
	info := okCheck("tcp_info", "%d bytes, with all that is used", f.infoSize)
	if f.datapathErr != nil {
		info = Check{Name: "tcp_info", State: Warn, Found: "not looked at: there is no datapath", Fix: "see release"}
	} else if less := f.joinMissing("TCP_INFO"); less != "" {
		info = Check{
			Name: "tcp_info", State: Warn, Found: fmt.Sprintf("%d bytes: %s", f.infoSize, less),
			Fix: "boot Linux 6.7 or later, which has all of it",
		}
	}
	return []Check{release, info}
}

// judgeDatapath judges the tier, and what it rests on.
func (f facts) judgeDatapath() []Check {
	tier := okCheck("tier", "%s: the relay keeps the windows, with %s below them", f.kernelTier(), f.relayEnvelope)
	if f.kernelTier() == "ebpf" {
		tier.Found = fmt.Sprintf("ebpf: the kernel enforces the windows; %s where it has no room for more", f.relayEnvelope)
	}
	if f.datapathErr != nil {
		tier = Check{Name: "tier", State: Missing, Found: "none: " + f.datapathErr.Error(), Fix: "see release"}
	}
	return append([]Check{tier, f.judgeEBPF()}, f.judgeControls()...)
}

// judgeEBPF says why the congestion control cannot be loaded: the release, type information,
// capabilities, or a filter of system calls.
func (f facts) judgeEBPF() Check {
	c := okCheck("ebpf", "a congestion control of ours loads and registers")
	if f.ebpfErr == nil {
		return c
	}
	c.State, c.Found = Warn, f.ebpfErr.Error()
	lacks := ebpfNeeds &^ f.capabilities
	switch {
	case isBefore(f.release, 6, 10):
		c.Found = "a congestion control of ours needs Linux 6.10"
		c.Fix = "boot Linux 6.10 or later"
	case !f.btf:
		c.Found = "the kernel has no type information of its own"
		c.Fix = "boot a kernel with CONFIG_DEBUG_INFO_BTF=y, so that there is /sys/kernel/btf/vmlinux"
	case lacks != 0 && !f.capabilities.Has(caps.SysAdmin):
		c.Found = fmt.Sprintf("a congestion control of ours may not be loaded: missing %s",
			strings.ReplaceAll(lacks.String(), " ", " and "))
		c.Fix = f.grantHint(lacks)
	case errors.Is(f.ebpfErr, unix.EPERM) && f.inUserNamespace:
		c.Found = "a congestion control of ours may not be loaded from a user namespace"
		c.Fix = f.grantHint(ebpfNeeds)
	case errors.Is(f.ebpfErr, unix.EPERM):
		c.Found = "a congestion control of ours may not be loaded, although the capabilities are held"
		c.Fix = "allow bpf() where a container or a system call filter forbids it (under systemd: " +
			"SystemCallFilter=bpf, after the other filters)"
	default:
		c.Fix = "boot a kernel with CONFIG_BPF_SYSCALL=y, CONFIG_BPF_JIT=y and CONFIG_DEBUG_INFO_BTF=y; until then " +
			"the unprivileged tier serves"
	}
	return c
}

// ebpfNeeds are the capabilities that load the congestion control (kernel/bpf).
const ebpfNeeds = caps.BPF | caps.Perfmon

// isBefore compares a release such as "6.10.3-amd64" with a version.
func isBefore(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a < major || a == major && b < minor
}

// judgeControls judges the kernel's congestion controls. bbr is the best below our window, because the others shrink
// below it at the first losses.
func (f facts) judgeControls() []Check {
	if f.controlsErr != nil {
		return []Check{{
			Name: "congestion_controls", State: Warn, Found: f.controlsErr.Error(),
			Fix: "let /proc/sys be read (under systemd: without ProcSubset=pid)",
		}}
	}
	list := okCheck("congestion_controls", "loaded: %s; for everybody: %s", joinWords(f.available), joinWords(f.allowed))
	permit := fmt.Sprintf("sysctl -w net.ipv4.tcp_allowed_congestion_control=%q",
		strings.Join(addName(f.allowed, "bbr"), " "))
	bbr := Check{Name: "bbr", State: Warn}
	admin := f.capabilities.Has(caps.NetAdmin)
	switch {
	case !slices.Contains(f.available, "bbr"):
		bbr.Found, bbr.Fix = "not loaded", "modprobe tcp_bbr"
		if !admin {
			bbr.Fix += " && " + permit
		}
	case slices.Contains(f.allowed, "bbr"):
		bbr.State, bbr.Found = OK, "loaded, for everybody"
	case admin:
		bbr.Found, bbr.Fix = "loaded, but only for CAP_NET_ADMIN, which penstock run then has to keep", permit
	default:
		bbr.Found, bbr.Fix = "loaded, but only for CAP_NET_ADMIN", permit
	}
	return []Check{list, bbr}
}

// judgeCapture judges everything that capturing connections needs.
func (f facts) judgeCapture() []Check {
	admin := okCheck("net_admin", "CAP_NET_ADMIN is held: tproxy listeners, keep_client, mark and penstock rules may "+
		"be used")
	if !f.capabilities.Has(caps.NetAdmin) {
		admin = Check{
			Name: "net_admin", State: Missing,
			Found: "CAP_NET_ADMIN is not held: no tproxy listeners, no keep_client, no mark, no penstock rules",
			Fix:   f.grantHint(caps.NetAdmin),
		}
	}
	checks := []Check{
		admin,
		f.judgeTransparent("tproxy_ipv4", "IP_TRANSPARENT", f.transparentErrs[0]),
		f.judgeTransparent("tproxy_ipv6", "IPV6_TRANSPARENT", f.transparentErrs[1]),
	}
	for _, mode := range []capture.Mode{capture.TPROXY, capture.Redirect} {
		for _, v6 := range []bool{false, true} {
			checks = append(checks, f.judgeRules(mode, v6))
		}
	}
	checks = append(checks, f.judgeQueue(), f.judgeIPv6())
	checks = append(checks, f.judgeForward()...)
	return append(checks, f.judgeObstacles("input", "lets captured connections in"),
		f.judgeObstacles("output", "lets answers to clients and the proxy's own connections out"))
}

// judgeTransparent judges transparent sockets of one family.
func (f facts) judgeTransparent(name, option string, err error) Check {
	c := okCheck(name, "%s can be set: listeners of mode tproxy and keep_client work", option)
	if err == nil {
		return c
	}
	c.State, c.Found = Missing, fmt.Sprintf("%s: %v", option, err)
	switch {
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		c.Fix = f.grantHint(caps.NetAdmin)
	case errors.Is(err, unix.EAFNOSUPPORT):
		c.Fix = "this kernel has the address family switched off (ipv6.disable=1 on its command line): switch it " +
			"on, or listen on 0.0.0.0"
	default:
		c.Fix = "boot a kernel with CONFIG_INET and CONFIG_IPV6"
	}
	return c
}

// judgeRules judges one kind of capture rules by the result of its trial.
func (f facts) judgeRules(mode capture.Mode, v6 bool) Check {
	c := Check{Name: rulesCheck(mode, v6)}
	t, made := f.trials[c.Name]
	err := t.asError()
	switch {
	case !made:
		return f.untriedCheck(c)
	case err == nil:
		where := "in a network namespace of their own"
		if f.inUserTrials {
			where += " (and a user namespace, which has the rights that this process has not)"
		}
		return okCheck(c.Name, "rules applied and removed %s", where)
	}
	c.State, c.Found = Missing, err.Error()
	modules := "nft_fib_inet nft_tproxy nft_socket"
	if mode == capture.Redirect {
		modules = "nft_fib_inet nft_redir nft_chain_nat"
	}
	switch {
	case errors.Is(err, unix.EPERM):
		c.Fix = f.grantHint(caps.NetAdmin)
	case v6 && (errors.Is(err, unix.EACCES) || errors.Is(err, unix.EAFNOSUPPORT)):
		c.Fix = "leave IPv6 out: penstock rules apply --ipv6=false; or switch it on (no ipv6.disable=1 on the " +
			"kernel's command line)"
	default:
		c.Fix = "modprobe -a " + modules + "; where there are no such modules, boot a kernel that has them"
	}
	return c
}

// queueTrial names the trial of the queue that UDP is held in.
const queueTrial = "udp_queue"

// judgeQueue judges what udp.queue of a listener needs: modules for the rule and for the queue, CAP_NET_ADMIN for each
// verdict, and CAP_NET_RAW for echo requests. It is never Missing, because UDP passes without.
func (f facts) judgeQueue() Check {
	c := Check{Name: queueTrial, State: Warn}
	t, made := f.trials[queueTrial]
	const needs = caps.NetAdmin | caps.NetRaw
	lacks := needs &^ f.capabilities
	err := t.asError()
	switch {
	case !made:
		return f.untriedCheck(c)
	case err == nil && lacks == 0:
		return okCheck(c.Name, "UDP can be held: a rule and a netfilter queue were made and removed")
	// The trial may have had the rights of a user namespace, which a proxy would not have.
	case lacks != 0 && (err == nil || errors.Is(err, unix.EPERM)):
		c.Found = fmt.Sprintf("UDP passes: udp.queue of a listener, which holds it, needs %s",
			strings.ReplaceAll(lacks.String(), " ", " and "))
		c.Fix = f.grantHint(needs) // all of them: setcap replaces those that the binary has
	default:
		c.Found = err.Error() + "; without udp.queue of a listener UDP passes"
		c.Fix = "modprobe -a nfnetlink_queue nft_queue nfnetlink_log nft_log; where there are no such modules, boot " +
			"a kernel that has them"
	}
	return c
}

// judgeIPv6 judges whether IPv6 is on. If it is not, penstock rules apply leaves it out.
func (f facts) judgeIPv6() Check {
	const name = "ipv6"
	everywhere, loopback := f.sysctls[ipv6OffAll], f.sysctls[ipv6OffLoopback]
	switch {
	case loopback == "":
		return okCheck(name, "switched off in this kernel: penstock rules apply leaves it out")
	case loopback == "0":
		return okCheck(name, "on: its connections may be captured")
	case everywhere == "1":
		return okCheck(name, "switched off: penstock rules apply leaves it out (sysctl -w %s=0 switches it on)", ipv6OffAll)
	}
	return Check{
		Name: name, State: Warn, Found: "switched off on lo alone: penstock rules apply leaves it out, so its " +
			"connections go past the proxy", Fix: "sysctl -w " + ipv6OffLoopback + "=0, and penstock rules apply once more",
	}
}

// judgeForward judges whether capturing connects networks that the machine's firewall separates, and whether parts of
// the rules have gone.
func (f facts) judgeForward() []Check {
	const filters, networks, routes = "forward_chain", "captured_networks", "captured_routes"
	if f.captureErr != nil {
		unknown := Check{State: Warn, Found: "could not be looked at: " + f.captureErr.Error(), Fix: lookAsRoot}
		forward, own, parts := unknown, unknown, unknown
		forward.Name, own.Name, parts.Name = filters, networks, routes
		return []Check{forward, own, parts}
	}
	forward := okCheck(filters, "nothing is dropped there that captured connections would go round")
	if len(f.forwardFilters) > 0 {
		forward.State = Warn
		forward.Found = "captured connections do not pass it, and it drops some: " + strings.Join(f.forwardFilters, ", ")
		forward.Fix = "what it forbids between other networks than this machine's own, forbid for captured " +
			"connections by a rule with refuse, too (docs/capture.md, The forward chain)"
	}
	own := okCheck(networks, "connections to networks of this machine go past the rules, or are captured as asked")
	if len(f.lateNetworks) > 0 {
		var words []string
		for _, n := range f.lateNetworks {
			words = append(words, fmt.Sprintf("%v (%s)", n.Prefix, n.Interface))
		}
		own.State, own.Found = Warn, "captured, since they came after the rules: "+strings.Join(words, ", ")
		own.Fix = "penstock rules apply once more, as before (under systemd: systemctl restart penstock)"
	}
	parts := okCheck(routes, "nothing that the rules need has gone")
	if len(f.lostParts) > 0 {
		parts.State = Warn
		parts.Found = "gone, so captured connections fail or go past the proxy: " + strings.Join(f.lostParts, ", ")
		parts.Fix = "penstock rules apply once more, as before (under systemd: systemctl restart penstock)"
	}
	return []Check{forward, own, parts}
}

// judgeObstacles judges the chains of one hook of the machine's firewall. On a machine that neither captures nor
// routes they may drop anything.
func (f facts) judgeObstacles(hook, passes string) Check {
	name := hook + "_chain"
	if f.captureErr != nil {
		return Check{
			Name: name, State: Warn, Found: "could not be looked at: " + f.captureErr.Error(), Fix: lookAsRoot,
		}
	}
	var found, cures []string
	for _, o := range f.obstacles {
		if o.Hook == hook {
			found, cures = append(found, o.Chain+" drops "+o.Drops), append(cures, o.Cure)
		}
	}
	routes := f.sysctls["net.ipv4.ip_forward"] == "1" || f.sysctls["net.ipv6.conf.all.forwarding"] == "1"
	switch {
	case len(found) == 0:
		return okCheck(name, "%s, as far as can be told", passes)
	case !f.rulesInstalled && !routes:
		return okCheck(name, "nothing is captured here; otherwise in the way: %s", strings.Join(found, "; "))
	}
	return Check{Name: name, State: Warn, Found: strings.Join(found, "; "), Fix: strings.Join(cures, "; ")}
}

// judgeSources lists the interfaces that the key hints could name, with what they report of
// themselves.
func (f facts) judgeSources() Check {
	if f.sourcesErr != nil {
		return Check{
			Name: "sources", State: Warn, Found: f.sourcesErr.Error(),
			Fix: "let the process open netlink sockets (systemd: RestrictAddressFamilies=AF_NETLINK); without them " +
				"the key hints has no effect",
		}
	}
	words := make([]string, len(f.sources))
	for i, s := range f.sources {
		what := []string{s.Queue}
		if s.Radio {
			what = append(what, "radio")
		}
		switch {
		case s.Rate > 0:
			what = append(what, s.Rate.String())
		case !s.Radio:
			what = append(what, "does not tell its rate: set capacity")
		}
		words[i] = fmt.Sprintf("%s (%s)", s.Name, strings.Join(what, ", "))
	}
	if len(words) == 0 {
		words = []string{"no interface is up but loopback"}
	}
	return okCheck("sources", "%s", strings.Join(words, "; "))
}

// judgeTunnels judges what listeners of tunnels need.
func (f facts) judgeTunnels() []Check {
	return []Check{f.judgePorts(), f.judgePing(), f.judgeWireGuard()}
}

// judgePorts judges the ports at which listeners may be.
func (f facts) judgePorts() Check {
	first, err := strconv.Atoi(f.sysctls[unprivilegedPorts])
	if err != nil {
		first = 1024
	}
	if f.capabilities.Has(caps.NetBindService) || first <= 1 {
		return okCheck("ports", "listeners may be on every port")
	}
	return okCheck("ports", "listeners may be on ports from %d on, WireGuard's 51820 among them; below, "+
		"CAP_NET_BIND_SERVICE is needed", first)
}

// judgePing judges echo requests out of a tunnel.
func (f facts) judgePing() Check {
	switch {
	case f.pingErr == nil:
		return okCheck("ping", "pings through a tunnel are sent by ping sockets, which this process may open")
	case f.capabilities.Has(caps.NetRaw):
		return okCheck("ping", "pings through a tunnel are sent by raw sockets, opened at the start with CAP_NET_RAW")
	}
	return Check{
		Name: "ping", State: Missing,
		Found: fmt.Sprintf("pings through a tunnel stay unanswered: %s is %q and leaves out this process's groups, "+
			"and CAP_NET_RAW is not held", pingGroups, f.sysctls[pingGroups]),
		Fix: fmt.Sprintf("sysctl -w %s=\"0 2147483647\"; or %s", pingGroups, f.grantHint(caps.NetRaw)),
	}
}

// judgeWireGuard judges the kernel's WireGuard. Listeners of mode wireguard work without it.
func (f facts) judgeWireGuard() Check {
	c := Check{Name: wireGuardTrial}
	t, made := f.trials[wireGuardTrial]
	err := t.asError()
	switch {
	case !made:
		return f.untriedCheck(c)
	case err == nil:
		return okCheck(c.Name, "makes devices: tunnels may end in the kernel, by wireguard.datapath: kernel")
	}
	c.State, c.Found = Warn, err.Error()+"; listeners of mode wireguard do without, and take more CPU"
	switch {
	case errors.Is(err, unix.EPERM):
		c.Fix = f.grantHint(caps.NetAdmin)
	default:
		c.Fix = "modprobe wireguard; where there is no such module, boot a kernel with CONFIG_WIREGUARD (5.6 or later)"
	}
	return c
}

// judgeUserNamespaces says whether penstock-lab may run without root, and which setting or
// container keeps it from that.
func (f facts) judgeUserNamespaces() Check {
	c := Check{Name: "user_namespaces", State: Warn}
	// The setting that forbids user namespaces to all but root, with the value that permits them; empty: there is none.
	limits := func() string {
		switch {
		case f.sysctls["user.max_user_namespaces"] == "0":
			return "user.max_user_namespaces=10000"
		case f.sysctls["kernel.unprivileged_userns_clone"] == "0":
			return "kernel.unprivileged_userns_clone=1"
		case f.sysctls["kernel.apparmor_restrict_unprivileged_userns"] == "1":
			return "kernel.apparmor_restrict_unprivileged_userns=0"
		}
		return ""
	}()
	switch err := f.userNamespaceErr; {
	case err == nil && (!f.root || limits == ""):
		return okCheck(c.Name, "may be made: penstock-lab needs no root")
	case err == nil:
		c.Found, c.Fix = "for root only: other users may not run penstock-lab", "sysctl -w "+limits
	default:
		c.State, c.Found = Missing, fmt.Sprintf("may not be made: %v; penstock-lab needs root then", err)
		switch {
		case limits != "":
			c.Fix = "sysctl -w " + limits
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
			c.Fix = "refused, most likely by a container's seccomp profile, by RestrictNamespaces= of a systemd unit, or " +
				"since this file has capabilities: run outside of it, with --security-opt seccomp=unconfined, or a copy of " +
				"the file"
		default:
			c.Fix = "boot a kernel with CONFIG_USER_NS=y and CONFIG_NET_NS=y, or run as root"
		}
	}
	return c
}

// judgeTUN judges TUN devices by the result of their trial.
func (f facts) judgeTUN() Check {
	c := Check{Name: "tun"}
	t, made := f.trials["tun"]
	err := t.asError()
	switch {
	case !made:
		return f.untriedCheck(c)
	case err == nil:
		return okCheck(c.Name, "%s makes devices: emulated links and listeners of mode tun work", tunDevice)
	}
	c.State, c.Found = Missing, fmt.Sprintf("%v; listeners of mode tun, penstock-lab needs it", err)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		c.Fix = "modprobe tun; into a container the device comes by --device " + tunDevice
	case errors.Is(err, unix.EACCES):
		c.Fix = "run as root, or chmod 0666 " + tunDevice
	case errors.Is(err, unix.EPERM):
		c.Fix = "let the container or the systemd unit use the device: --device " + tunDevice +
			", or DeviceAllow=" + tunDevice
	default:
		c.Fix = "boot a kernel with CONFIG_TUN"
	}
	return c
}

// judgeCapabilities lists the capabilities of the process.
func (f facts) judgeCapabilities() Check {
	switch {
	case f.capabilitiesErr != nil:
		return Check{
			Name: "capabilities", State: Warn, Found: f.capabilitiesErr.Error(),
			Fix: "let capget be called (under systemd: SystemCallFilter=@system-service)",
		}
	case f.capabilities == 0:
		return okCheck("capabilities", "none: what needs no privilege works")
	}
	return okCheck("capabilities", "%s", f.capabilities.Words())
}

// judgeDescriptors judges the limit of file descriptors.
func (f facts) judgeDescriptors() Check {
	c := okCheck("descriptors", "%d: room for %d connections and %d pipes", f.descriptors.Total,
		f.descriptors.Connections, f.descriptors.Pipes)
	if f.descriptors.Connections < fewConnections {
		c.State = Warn
		c.Fix = "ulimit -Hn 1048576 (as root), or LimitNOFILE=1048576 in the systemd unit"
	}
	return c
}

// leastBuffer is the least good size for the largest buffer of a connection: Linux's own default.
const leastBuffer cc.Bytes = 4 << 20

// fewConnections is the room below which the limit of descriptors is worth a warning.
const fewConnections = 1000

// judgedSetting is a setting of the kernel with the function that judges its value.
type judgedSetting struct {
	name string
	// judge returns the check for a value; the value has single spaces.
	judge func(name, value string) Check
}

// These settings may keep captured connections from working at all.
const (
	SYNCookies = "net.ipv4.tcp_syncookies"
	localPorts = "net.ipv4.ip_local_port_range"
	reusePorts = "net.ipv4.tcp_tw_reuse"
)

// Settings judges only the settings that matter for captured connections, in the namespace of the
// calling thread.
func Settings() []Check {
	f := facts{sysctls: map[string]string{}}
	f.readSettings(SYNCookies, localPorts, reusePorts)
	return f.judgeSettings()
}

// judgeSettings judges the settings of the kernel's TCP that this kernel has.
func (f facts) judgeSettings() []Check {
	var checks []Check
	for _, s := range []judgedSetting{
		{"net.ipv4.tcp_wmem", judgeBuffer("in flight towards a client or server")},
		{"net.ipv4.tcp_rmem", judgeBuffer("in flight towards this machine")},
		{"net.ipv4.tcp_sack", judgeSwitch("losses are found one in a round trip, and the datapath sees less of them")},
		{"net.ipv4.tcp_timestamps", judgeSwitch("round trips are measured more rarely, and retransmissions blur them")},
		{"net.ipv4.tcp_window_scaling", judgeSwitch("at most 64 KiB are in flight, 5 Mbit/s at 100 ms")},
		{"net.ipv4.tcp_mtu_probing", judgeMTUProbing},
		{SYNCookies, judgeSYNCookies},
		{localPorts, f.judgeLocalPorts},
		{"net.ipv4.ip_forward", informOnly("IPv4 is routed, as capturing other machines' connections needs",
			"IPv4 is not routed; a router that captures needs 1")},
		{"net.ipv6.conf.all.forwarding", informOnly("IPv6 is routed, as capturing other machines' connections needs",
			"IPv6 is not routed; a router that captures needs 1")},
	} {
		if value, ok := f.sysctls[s.name]; ok {
			checks = append(checks, s.judge(s.name, value))
		}
	}
	return checks
}

// judgeBuffer judges the three sizes of a buffer that tunes itself.
func judgeBuffer(what string) func(name, value string) Check {
	return func(name, value string) Check {
		sizes := strings.Fields(value)
		if len(sizes) != 3 {
			return okCheck(name, "%s", value)
		}
		n, err := strconv.ParseInt(sizes[2], 10, 64)
		most := cc.Bytes(n)
		if err != nil || most >= leastBuffer {
			return okCheck(name, "at most %s bytes of a connection", sizes[2])
		}
		return Check{
			Name: name, State: Warn,
			Found: fmt.Sprintf("at most %s bytes of a connection %s: %.3g Mbit/s at a round trip of 100 ms",
				sizes[2], what, float64(cc.RateOf(most, 100*time.Millisecond))/1e6),
			Fix: fmt.Sprintf("sysctl -w %s=\"%s %s %d\"", name, sizes[0], sizes[1], leastBuffer),
		}
	}
}

// judgeSwitch judges a setting that should be on.
func judgeSwitch(off string) func(name, value string) Check {
	return func(name, value string) Check {
		if value != "0" {
			return okCheck(name, "on")
		}
		return Check{Name: name, State: Warn, Found: "off: " + off, Fix: "sysctl -w " + name + "=1"}
	}
}

// judgeMTUProbing judges packetization layer path MTU discovery (RFC 4821). With 1 the kernel probes once a connection
// has had several retransmission timeouts in a row, with 2 from the start. A socket cannot set it for itself.
func judgeMTUProbing(name, value string) Check {
	if value != "0" {
		return okCheck(name, "%s: a path that swallows full packets without a word of ICMP is found out", value)
	}
	return Check{
		Name: name, State: Warn,
		Found: "0: a path that swallows full packets without a word of ICMP (a black hole) stops connections for good",
		Fix:   "sysctl -w " + name + "=1",
	}
}

// judgeSYNCookies judges SYN cookies. A handshake with a cookie leaves no socket, by which TPROXY recognises later
// packets of the connection.
func judgeSYNCookies(name, value string) Check {
	switch value {
	case "0":
		return okCheck(name, "0: in a flood of SYNs clients try again")
	case "2":
		return Check{
			Name: name, State: Warn, Found: "2, always: every connection captured by tproxy is reset",
			Fix: "sysctl -w " + name + "=1",
		}
	}
	return okCheck(name, "%s: in a flood of SYNs, connections captured by tproxy are reset "+
		"(with 0 clients try again)", value)
}

// A port is in TIME_WAIT for portRest after a connection. Fewer ports than fewPorts are worth a warning, or fewer than
// fewOpenPorts where ports in TIME_WAIT are reused.
const (
	portRest     = time.Minute
	fewPorts     = 16384
	fewOpenPorts = 1024
)

// judgeLocalPorts judges the number of connections to one server: each takes a local port.
func (f facts) judgeLocalPorts(name, value string) Check {
	var first, last int
	if n, _ := fmt.Sscan(value, &first, &last); n != 2 {
		return okCheck(name, "%s", value)
	}
	ports, reuse := last-first+1, f.sysctls[reusePorts]
	c := okCheck(name, "%d ports: so many connections to one server", ports)
	if reuse != "1" {
		c.Found = fmt.Sprintf("%d ports: %d new connections in a second to one server, as %s is %q", ports,
			ports/int(portRest.Seconds()), reusePorts, reuse)
	}
	if ports < fewOpenPorts || ports < fewPorts && reuse != "1" {
		c.State = Warn
		c.Fix = fmt.Sprintf("sysctl -w %s=\"32768 60999\" %s=1", name, reusePorts)
	}
	return c
}

// informOnly describes a setting that is right for some and wrong for others.
func informOnly(on, off string) func(name, value string) Check {
	return func(name, value string) Check {
		if value == "0" {
			return okCheck(name, "0: %s", off)
		}
		return okCheck(name, "%s: %s", value, on)
	}
}

// wireGuardTrial names the trial of the kernel's WireGuard.
const wireGuardTrial = "kernel_wireguard"

// unprivilegedPorts is the setting with the first port that needs no capability.
const unprivilegedPorts = "net.ipv4.ip_unprivileged_port_start"

// pingGroups is the setting of the groups that may open ping sockets.
const pingGroups = "net.ipv4.ping_group_range"

const (
	// ipv6OffAll is the setting that switches IPv6 off on all interfaces, ipv6OffLoopback the one for lo, where captured
	// packets are delivered.
	ipv6OffAll      = "net.ipv6.conf.all.disable_ipv6"
	ipv6OffLoopback = "net.ipv6.conf.lo.disable_ipv6"
)

// grantHint returns how the process gets capabilities. It also names the useful ones that it has, because setcap
// replaces all capabilities of a file.
func (f facts) grantHint(c caps.Set) string {
	if f.inUserNamespace && f.capabilities.Has(c) {
		return "run outside of the user namespace (a rootless container is one), which cannot grant " + c.String()
	}
	names := strings.Fields((c | f.capabilities&(caps.NetAdmin|caps.NetBindService|ebpfNeeds)).String())
	return fmt.Sprintf("run as root, or setcap %s+ep on the binary, or AmbientCapabilities=%s in the systemd unit",
		strings.ToLower(strings.Join(names, ",")), strings.Join(names, " "))
}

// joinMissing joins what the datapath misses of one kind.
func (f facts) joinMissing(kind string) string {
	var words []string
	for _, w := range f.datapathMissing {
		if strings.HasPrefix(w, kind) {
			words = append(words, w)
		}
	}
	return strings.Join(words, "; ")
}

// joinWords joins names; "none" where there are none.
func joinWords(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, " ")
}

// addName returns names with another one, once.
func addName(names []string, name string) []string {
	if slices.Contains(names, name) {
		return names
	}
	return append(slices.Clone(names), name)
}

// lookAsRoot is the cure for what this process may not read.
const lookAsRoot = "run penstock doctor as root, outside of any container"

// untriedCheck returns the check of a trial that was not made, because no namespace can be made here.
func (f facts) untriedCheck(c Check) Check {
	c.State = Warn
	c.Found = fmt.Sprintf("could not be tried, as no network namespace can be made here: %v", f.namespaceErr)
	c.Fix = lookAsRoot + "; or make user_namespaces (below) work"
	return c
}

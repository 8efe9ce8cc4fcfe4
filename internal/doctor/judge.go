package doctor

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// judgeFacts turns facts into checks, group by group, and the verdict.
func judgeFacts(f facts) Report {
	r := Report{Version: f.version, Kernel: f.release, Envelope: f.envelope, Fatal: f.datapath}
	if f.datapath == nil {
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
	return r
}

// kernelTier is the kernel datapath's that run would use.
func (f facts) kernelTier() string {
	if f.envelope == kernel.EBPF {
		return "ebpf"
	}
	return "unprivileged"
}

func okCheck(name, format string, args ...any) Check {
	return Check{Name: name, State: OK, Found: fmt.Sprintf(format, args...)}
}

// grantHint is how the process comes to have capabilities. setcap replaces what a
// file had, so those of use that are there already are named again.
func (f facts) grantHint(c caps.Set) string {
	if f.guest && f.capabilities.Has(c) {
		return "run outside of the user namespace (a rootless container is one), which cannot grant " + c.String()
	}
	names := strings.Fields((c | f.capabilities&(caps.NetAdmin|caps.NetBindService|ebpfNeeds)).String())
	return fmt.Sprintf("run as root, or setcap %s+ep on the binary, or AmbientCapabilities=%s in the systemd unit",
		strings.ToLower(strings.Join(names, ",")), strings.Join(names, " "))
}

func (f facts) judgeKernel() []Check {
	release := okCheck("release", "Linux %s on %s", f.release, f.machine)
	if f.datapath != nil {
		release.State, release.Fix = Missing, "boot Linux 5.4 or later; in a sandbox that emulates Linux, leave it"
		release.Found += ": " + f.datapath.Error()
	}
	info := okCheck("tcp_info", "%d bytes, with all that is used", f.infoSize)
	if f.datapath != nil {
		info = Check{Name: "tcp_info", State: Warn, Found: "not looked at: there is no datapath", Fix: "see release"}
	} else if less := f.joinMissing("TCP_INFO"); less != "" {
		info = Check{
			Name: "tcp_info", State: Warn, Found: fmt.Sprintf("%d bytes: %s", f.infoSize, less),
			Fix: "boot Linux 6.7 or later, which has all of it",
		}
	}
	return []Check{release, info}
}

// joinMissing joins what the datapath misses of one kind.
func (f facts) joinMissing(kind string) string {
	var words []string
	for _, w := range f.lacking {
		if strings.HasPrefix(w, kind) {
			words = append(words, w)
		}
	}
	return strings.Join(words, "; ")
}

func (f facts) judgeDatapath() []Check {
	tier := okCheck("tier", "%s: the relay keeps the windows, with %s below them", f.kernelTier(), f.beneath)
	if f.kernelTier() == "ebpf" {
		tier.Found = fmt.Sprintf("ebpf: the kernel enforces the windows; %s where it has no room for more", f.beneath)
	}
	if f.datapath != nil {
		tier = Check{Name: "tier", State: Missing, Found: "none: " + f.datapath.Error(), Fix: "see release"}
	}
	return append([]Check{tier, f.judgeEBPF()}, f.judgeControls()...)
}

// ebpfNeeds is what loading the congestion control takes (kernel/bpf).
const ebpfNeeds = caps.BPF | caps.Perfmon

func (f facts) judgeEBPF() Check {
	c := okCheck("ebpf", "a congestion control of ours loads and registers")
	if f.ebpf == nil {
		return c
	}
	c.State, c.Found = Warn, f.ebpf.Error()
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
	case errors.Is(f.ebpf, unix.EPERM) && f.guest:
		c.Found = "a congestion control of ours may not be loaded from a user namespace"
		c.Fix = f.grantHint(ebpfNeeds)
	case errors.Is(f.ebpf, unix.EPERM):
		c.Found = "a congestion control of ours may not be loaded, although the capabilities are held"
		c.Fix = "allow bpf() where a container or a system call filter forbids it (under systemd: " +
			"SystemCallFilter=bpf, " +
			"after the other filters)"
	default:
		c.Fix = "boot a kernel with CONFIG_BPF_SYSCALL=y, CONFIG_BPF_JIT=y and CONFIG_DEBUG_INFO_BTF=y; until then " +
			"the " +
			"unprivileged tier serves"
	}
	return c
}

// isBefore compares a release such as "6.10.3-amd64" with a version.
func isBefore(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a < major || a == major && b < minor
}

// judgeControls is about the kernel's congestion controls, bbr before all:
// the others shrink below our window at the first losses.
func (f facts) judgeControls() []Check {
	if f.controls != nil {
		return []Check{{
			Name: "congestion_controls", State: Warn, Found: f.controls.Error(),
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

func joinWords(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, " ")
}

func addName(names []string, name string) []string {
	if slices.Contains(names, name) {
		return names
	}
	return append(slices.Clone(names), name)
}

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
		f.judgeTransparent("tproxy_ipv4", "IP_TRANSPARENT", f.transparent[0]),
		f.judgeTransparent("tproxy_ipv6", "IPV6_TRANSPARENT", f.transparent[1]),
	}
	for _, mode := range []capture.Mode{capture.TPROXY, capture.Redirect} {
		for _, v6 := range []bool{false, true} {
			checks = append(checks, f.judgeRules(mode, v6))
		}
	}
	checks = append(checks, f.judgeIPv6())
	checks = append(checks, f.judgeForward()...)
	return append(checks, f.judgeObstacles("input", "lets captured connections in"),
		f.judgeObstacles("output", "lets answers to clients and the proxy's own connections out"))
}

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
			"on, or " +
			"listen on 0.0.0.0"
	default:
		c.Fix = "boot a kernel with CONFIG_INET and CONFIG_IPV6"
	}
	return c
}

// judgeRules is about one kind of capture rules, as applied for a trial.
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
			"kernel's " +
			"command line)"
	default:
		c.Fix = "modprobe -a " + modules + "; where there are no such modules, boot a kernel that has them"
	}
	return c
}

// lookAsRoot is the cure for what this process may not look at.
const lookAsRoot = "run penstock doctor as root, outside of any container"

// untriedCheck is a check that needs a namespace where none can be made.
func (f facts) untriedCheck(c Check) Check {
	c.State = Warn
	c.Found = fmt.Sprintf("could not be tried, as no network namespace can be made here: %v", f.own)
	c.Fix = lookAsRoot + "; or make user_namespaces (below) work"
	return c
}

func (f facts) judgeUserNamespaces() Check {
	c := Check{Name: "user_namespaces", State: Warn}
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
	switch err := f.user; {
	case err == nil && (!f.root || limits == ""):
		return okCheck(c.Name, "may be made: penstock-lab needs no root")
	case err == nil:
		c.Found, c.Fix = "for root only: other users may not run penstock-lab", "sysctl -w "+limits
	default:
		c.State, c.Found = Missing, fmt.Sprintf("may not be made: %v; penstock-lab needs root then", err)
		switch {
		case limits != "":
			c.Fix = "sysctl -w " + limits
		case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EUSERS):
			c.Fix = "too many are in use or nested: sysctl -w " +
				"user.max_user_namespaces=" + f.doubleSetting("user.max_user_namespaces")
		case !f.traceable:
			c.Fix = "a program with file capabilities cannot make them: run a copy without, such as cp \"$(command " +
				"-v " +
				"penstock)\" ~/penstock"
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
			c.Fix = "refused, most likely by a container's seccomp profile or by RestrictNamespaces= of a systemd " +
				"unit: run " +
				"outside of it, or start the container with --security-opt seccomp=unconfined"
		default:
			c.Fix = "boot a kernel with CONFIG_USER_NS=y and CONFIG_NET_NS=y, or run as root"
		}
	}
	return c
}

// doubleSetting is twice a setting, and enough where it is unknown.
func (f facts) doubleSetting(name string) string {
	var n int
	if _, err := fmt.Sscan(f.sysctls[name], &n); err != nil || n < 5000 {
		n = 5000
	}
	return fmt.Sprint(2 * n)
}

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

func (f facts) judgeCapabilities() Check {
	switch {
	case f.capabilityLoss != nil:
		return Check{
			Name: "capabilities", State: Warn, Found: f.capabilityLoss.Error(),
			Fix: "let capget be called (under systemd: SystemCallFilter=@system-service)",
		}
	case f.capabilities == 0:
		return okCheck("capabilities", "none: what needs no privilege works")
	}
	return okCheck("capabilities", "%s", f.capabilities.Words())
}

// overallVerdict is what all of it comes to, in a sentence.
func (f facts) overallVerdict(r Report) string {
	if f.datapath != nil {
		return fmt.Sprintf("penstock run cannot work here: %v.", f.datapath)
	}
	able := func(names ...string) bool {
		return !slices.ContainsFunc(r.Checks, func(c Check) bool {
			return c.State == Missing && slices.Contains(names, c.Name)
		})
	}
	// A redirect listener is open to everybody; its rules are not.
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

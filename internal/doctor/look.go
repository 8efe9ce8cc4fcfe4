package doctor

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

// facts is all that doctor looked at, to be judged.
type facts struct {
	version          string
	release, machine string

	datapath error    // why there is none; nil: there is one
	envelope string   // that auto comes to
	beneath  string   // what sockets have whose windows the kernel does not enforce for us
	lacking  []string // what the datapath misses, in words
	infoSize int      // bytes of TCP_INFO
	ebpf     error    // why the eBPF tier cannot be had; nil: it can
	btf      bool     // the kernel has its type information

	available, allowed []string // congestion controls
	controls           error    // why they are unknown

	obstacles  []capture.Obstacle // what drops captured connections, and the proxy's own
	lost       []string           // parts of the rules that have gone
	inForce    bool               // there are rules that they are obstacles to
	filters    []string           // forward chains that captured connections do not pass
	newcomers  []capture.Network  // of this machine, that its rules capture by now
	filterless error              // why these are unknown

	sources    []linkstat.Interface // that could tell hints
	sourceless error                // why they are unknown

	root           bool // the process's user
	guest          bool // the process is in a user namespace, where capabilities count for little
	traceable      bool // others of the same user may look into the process, as user namespaces need
	capabilities   caps.Set
	ping           error    // opening a ping socket
	transparent    [2]error // setting IP_TRANSPARENT, IPV6_TRANSPARENT
	own, user      error    // why a network namespace, and one in a user namespace, cannot be made
	trials         map[string]attempt
	descriptors    proxy.Descriptors
	sysctls        map[string]string // absent: this kernel does not have it
	inUserTrials   bool              // trials are those of the user namespace
	capabilityLoss error             // why capabilities is unknown
}

// sysctlNames are the kernel settings that are judged.
var sysctlNames = []string{
	"kernel.unprivileged_userns_clone", "user.max_user_namespaces", "kernel.apparmor_restrict_unprivileged_userns",
	"net.ipv4.tcp_wmem", "net.ipv4.tcp_rmem", "net.ipv4.tcp_sack", "net.ipv4.tcp_timestamps",
	"net.ipv4.tcp_window_scaling", "net.ipv4.tcp_slow_start_after_idle", "net.ipv4.tcp_mtu_probing",
	"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", unprivilegedPorts, pingGroups,
	SYNCookies, localPorts, reusePorts, ipv6OffAll, ipv6OffLoopback,
}

// gatherFacts tries everything once.
func gatherFacts(ctx context.Context, p Program) facts {
	f := facts{
		version: p.Version, machine: runtime.GOARCH,
		root: os.Geteuid() == 0, descriptors: proxy.DescriptorBudget(&config.Config{}), sysctls: map[string]string{},
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.release, f.machine = unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])
	}
	if dp, err := kernel.New(kernel.Config{Clock: p.Clock}); err != nil {
		f.datapath = err
	} else {
		f.envelope, f.beneath, f.lacking = dp.Envelope(), dp.Beneath(), dp.Missing()
		_ = dp.Close() // it had no legs
	}
	f.sources, f.sourceless = linkstat.Interfaces()
	if f.filters, f.filterless = capture.ForwardFilters(); f.filterless == nil {
		f.newcomers, f.filterless = capture.CapturedNetworks()
	}
	if f.filterless == nil {
		f.obstacles, f.inForce, f.filterless = capture.Obstacles()
	}
	if f.filterless == nil {
		f.lost, f.filterless = capture.LostParts()
	}
	f.infoSize = infoSize()
	f.ebpf = bpf.Check()
	_, err := os.Stat("/sys/kernel/btf/vmlinux")
	f.btf = err == nil
	f.available, f.allowed, f.controls = kernel.Envelopes() // trying bbr may have loaded it
	f.capabilities, _, f.capabilityLoss = caps.Held()
	dumpable, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0)
	f.traceable = err == nil && dumpable == 1
	users, err := os.ReadFile("/proc/self/uid_map")
	f.guest = err == nil && strings.Join(strings.Fields(string(users)), " ") != "0 0 4294967295"
	f.ping = mayPing()
	f.transparent = [2]error{
		maySet(unix.AF_INET, unix.SOL_IP, unix.IP_TRANSPARENT),
		maySet(unix.AF_INET6, unix.SOL_IPV6, unix.IPV6_TRANSPARENT),
	}
	f.readSettings(sysctlNames...)
	var inUser map[string]attempt
	inUser, f.user = tryInUserNamespace(ctx, p.Trials)
	if f.trials, f.own = tryInNamespace(ctx); f.own != nil {
		f.trials, f.inUserTrials = inUser, true
	}
	return f
}

// readSettings reads kernel settings where the calling thread is.
func (f facts) readSettings(names ...string) {
	for _, name := range names {
		text, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		if err == nil {
			f.sysctls[name] = strings.Join(strings.Fields(string(text)), " ")
		}
	}
}

// mayPing tries to open a ping socket.
func mayPing() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// maySet tries an option that is on or off on a socket that goes nowhere.
func maySet(family, level, option int) error {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.SetsockoptInt(fd, level, option, 1), unix.Close(fd))
}

// infoSize returns how many bytes of TCP_INFO this kernel has; 0: unknown.
func infoSize() int {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if errors.Is(err, unix.EAFNOSUPPORT) {
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	}
	if err != nil {
		return 0
	}
	defer unix.Close(fd) //nolint:errcheck // nothing is in it
	var buf [4096]byte   // unix.TCPInfo may be shorter than the kernel's
	size := uint32(len(buf))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.IPPROTO_TCP, unix.TCP_INFO,
		uintptr(unsafe.Pointer(&buf)), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return 0
	}
	return int(size)
}

// errnoOf returns the system's error in err; 0: there is none.
func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	errors.As(err, &errno)
	return errno
}

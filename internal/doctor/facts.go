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

// facts has what gatherFacts has found. An error is nil if the thing works, or if what it is about is known.
type facts struct {
	version          string
	release, machine string

	// datapathErr is why there is no datapath.
	datapathErr error
	// envelope is what auto comes to: ebpf, or a congestion control of the kernel.
	envelope string
	// relayEnvelope is the congestion control of sockets with windows that the relay keeps.
	relayEnvelope string
	// datapathMissing is what the datapath misses, in words.
	datapathMissing []string
	// infoSize is the size of TCP_INFO, in bytes.
	infoSize int
	// ebpfErr is why the eBPF tier cannot be had.
	ebpfErr error
	// btf reports whether the kernel has its type information.
	btf bool

	// available and allowed are congestion controls.
	available, allowed []string
	// controlsErr is why they are unknown.
	controlsErr error

	// obstacles are chains that drop captured connections, and the proxy's own.
	obstacles []capture.Obstacle
	// lostParts are parts of the rules that have gone.
	lostParts []string
	// rulesInstalled reports whether obstacles are those of installed rules.
	rulesInstalled bool
	// forwardFilters are forward chains that captured connections do not pass.
	forwardFilters []string
	// lateNetworks are networks of this machine that came after the rules, which capture them.
	lateNetworks []capture.Network
	// captureErr is why the fields above, from obstacles on, are unknown.
	captureErr error

	// sources are interfaces that could give hints.
	sources []linkstat.Interface
	// sourcesErr is why they are unknown.
	sourcesErr error

	// root reports whether the process runs as root.
	root bool
	// inUserNamespace reports whether the process is in a user namespace other than the first, where capabilities permit
	// little.
	inUserNamespace bool
	capabilities    caps.Set
	// pingErr is the result of opening a ping socket.
	pingErr error
	// transparentErrs are the results of setting IP_TRANSPARENT and IPV6_TRANSPARENT.
	transparentErrs [2]error
	// namespaceErr is why no network namespace can be made, userNamespaceErr why none can in a new user namespace.
	namespaceErr, userNamespaceErr error
	// trials are by the name of their check.
	trials map[string]attempt
	// descriptors is the budget of file descriptors, for connections and pipes.
	descriptors proxy.Descriptors
	// sysctls are by name; absent: this kernel does not have it.
	sysctls map[string]string
	// config is what the machine is judged for; nil: for everything.
	config *config.Config
	// listenErrs are the errors of listening at its addresses, and owners the processes that have them, by key.
	listenErrs map[string]error
	owners     map[string]string
	// inUserTrials reports whether trials were made in a new user namespace.
	inUserTrials bool
	// capabilitiesErr is why capabilities is unknown.
	capabilitiesErr error
}

// sysctlNames are the kernel settings that are judged.
var sysctlNames = []string{
	"kernel.unprivileged_userns_clone", "user.max_user_namespaces", "kernel.apparmor_restrict_unprivileged_userns",
	"net.ipv4.tcp_wmem", "net.ipv4.tcp_rmem", "net.ipv4.tcp_sack", "net.ipv4.tcp_timestamps",
	"net.ipv4.tcp_window_scaling", "net.ipv4.tcp_mtu_probing",
	"net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding", unprivilegedPorts, pingGroups,
	SYNCookies, localPorts, reusePorts, ipv6OffAll, ipv6OffLoopback,
}

// gatherFacts looks at everything once.
func gatherFacts(ctx context.Context, p Program) facts {
	f := facts{
		config: p.Config, listenErrs: map[string]error{}, owners: map[string]string{},
		version: p.Version, machine: runtime.GOARCH,
		root: os.Geteuid() == 0, descriptors: proxy.DescriptorBudget(&config.Config{}), sysctls: map[string]string{},
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		f.release, f.machine = unix.ByteSliceToString(u.Release[:]), unix.ByteSliceToString(u.Machine[:])
	}
	if dp, err := kernel.New(kernel.Config{Clock: p.Clock}); err != nil {
		f.datapathErr = err
	} else {
		f.envelope, f.relayEnvelope, f.datapathMissing = dp.Envelope(), dp.RelayEnvelope(), dp.Missing()
		_ = dp.Close() // it had no legs
	}
	f.sources, f.sourcesErr = linkstat.Interfaces()
	if f.forwardFilters, f.captureErr = capture.ForwardFilters(); f.captureErr == nil {
		f.lateNetworks, f.captureErr = capture.CapturedNetworks()
	}
	if f.captureErr == nil {
		f.obstacles, f.rulesInstalled, f.captureErr = capture.Obstacles()
	}
	if f.captureErr == nil {
		f.lostParts, f.captureErr = capture.LostParts()
	}
	if p.Config != nil {
		f.descriptors = proxy.DescriptorBudget(p.Config)
		for _, s := range socketsOf(p.Config) {
			if err := tryListen(s.network, s.address); err != nil {
				f.listenErrs[s.key], f.owners[s.key] = err, SocketOwner(s.network, s.address)
			}
		}
	}
	f.infoSize = infoSize()
	f.ebpfErr = bpf.Check()
	_, err := os.Stat("/sys/kernel/btf/vmlinux")
	f.btf = err == nil
	f.available, f.allowed, f.controlsErr = kernel.Envelopes() // trying bbr may have loaded it
	f.capabilities, _, f.capabilitiesErr = caps.Held()
	users, err := os.ReadFile("/proc/self/uid_map")
	f.inUserNamespace = err == nil && strings.Join(strings.Fields(string(users)), " ") != "0 0 4294967295"
	f.pingErr = tryPingSocket()
	f.transparentErrs = [2]error{
		tryOption(unix.AF_INET, unix.SOL_IP, unix.IP_TRANSPARENT),
		tryOption(unix.AF_INET6, unix.SOL_IPV6, unix.IPV6_TRANSPARENT),
	}
	f.readSettings(sysctlNames...)
	var inUser map[string]attempt
	inUser, f.userNamespaceErr = tryInUserNamespace(ctx, p.Trials)
	if f.trials, f.namespaceErr = tryInNamespace(ctx); f.namespaceErr != nil {
		f.trials, f.inUserTrials = inUser, true
	}
	return f
}

// readSettings reads kernel settings in the namespace of the calling thread. Numbers get single spaces between them.
// A setting that cannot be read is left out.
func (f facts) readSettings(names ...string) {
	for _, name := range names {
		text, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		if err == nil {
			f.sysctls[name] = strings.Join(strings.Fields(string(text)), " ")
		}
	}
}

// tryPingSocket tries to open a ping socket.
func tryPingSocket() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// tryOption sets an option to 1 on a socket that is not connected.
func tryOption(family, level, option int) error {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.SetsockoptInt(fd, level, option, 1), unix.Close(fd))
}

// infoSize returns the size of this kernel's TCP_INFO in bytes; 0: unknown.
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

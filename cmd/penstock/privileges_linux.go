package main

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/tunnel"
)

// capabilities is a set of them: bit n is the capability of number n
// (linux/capability.h).
type capabilities uint64

const (
	capDACOverride    capabilities = 1 << unix.CAP_DAC_OVERRIDE
	capDACReadSearch  capabilities = 1 << unix.CAP_DAC_READ_SEARCH
	capNetAdmin       capabilities = 1 << unix.CAP_NET_ADMIN
	capNetRaw         capabilities = 1 << unix.CAP_NET_RAW
	capNetBindService capabilities = 1 << unix.CAP_NET_BIND_SERVICE
	capBPF            capabilities = 1 << unix.CAP_BPF
	capPerfmon        capabilities = 1 << unix.CAP_PERFMON
	capSysAdmin       capabilities = 1 << unix.CAP_SYS_ADMIN

	allCapabilities capabilities = 1<<(unix.CAP_LAST_CAP+1) - 1
)

// capabilityNames are the names without CAP_, by number.
var capabilityNames = [...]string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
	"LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
	"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
	"SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
	"MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
	"CHECKPOINT_RESTORE",
}

// has reports whether all of some are in the set.
func (c capabilities) has(some capabilities) bool { return c&some == some }

// String names them; empty: none.
func (c capabilities) String() string {
	names := make([]string, 0, bits.OnesCount64(uint64(c)))
	for n := range 64 {
		switch {
		case c&(1<<n) == 0:
		case n < len(capabilityNames):
			names = append(names, "CAP_"+capabilityNames[n])
		default: // of a kernel that is younger than this list
			names = append(names, fmt.Sprintf("capability %d", n))
		}
	}
	return strings.Join(names, " ")
}

// words is String in short: of nearly all, those that are not there are of interest.
func (c capabilities) words() string {
	rest := allCapabilities &^ c
	switch {
	case rest == 0:
		return "all"
	case bits.OnesCount64(uint64(rest)) < 10:
		return "all but " + rest.String()
	}
	return c.String()
}

// header is for every call about the calling thread's capabilities.
func header() unix.CapUserHeader {
	return unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
}

// held returns what the calling thread may use now, and what it could have:
// permitted to it, or handed on to a program that it starts.
func held() (effective, all capabilities, err error) {
	var data [2]unix.CapUserData
	h := header()
	if err := unix.Capget(&h, &data[0]); err != nil {
		return 0, 0, fmt.Errorf("privileges: read capabilities: %w", err)
	}
	join := func(low, high uint32) capabilities { return capabilities(high)<<32 | capabilities(low) }
	effective = join(data[0].Effective, data[1].Effective)
	all = join(data[0].Permitted, data[1].Permitted) | join(data[0].Inheritable, data[1].Inheritable)
	return effective, all, nil
}

// needed returns what a proxy with all its sockets open still needs of what it
// has. envelope is set on each socket; allowed are those that anybody may set.
func needed(cfg proxy.Config, envelope string, allowed []string, has capabilities) capabilities {
	foreign := cfg.Mark != 0 // what either of two capabilities permits
	for _, l := range cfg.Listeners {
		foreign = foreign || l.KeepClient
	}
	device := slices.ContainsFunc(cfg.Listeners, func(l proxy.ListenerConfig) bool {
		return string(l.Mode) == string(tunnel.ModeTUN) // a device that goes is made again
	})
	var keep capabilities
	switch {
	case foreign && !has.has(capNetAdmin):
		keep = capNetRaw
	case foreign, device, !slices.Contains(allowed, envelope):
		keep = capNetAdmin
	}
	// A port below 1024 gives little away, and a later listener may want one.
	return (keep | capNetBindService) & has
}

// drop gives up every capability outside keep, in all sets of all threads, and
// the way to get one back by starting a program. It returns what was given up.
func drop(keep capabilities) (dropped capabilities, err error) {
	effective, all, err := held()
	if err != nil {
		return 0, err
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return 0, fmt.Errorf("privileges: set no_new_privs: %w", errno)
	}
	// Nothing inheritable also empties the ambient set (capabilities(7)).
	permitted := all & keep
	effective &= keep
	data := [2]unix.CapUserData{
		{Effective: uint32(effective), Permitted: uint32(permitted)},
		{Effective: uint32(effective >> 32), Permitted: uint32(permitted >> 32)},
	}
	h := header()
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)), uintptr(unsafe.Pointer(&data)), 0)
	if errno != 0 {
		return 0, fmt.Errorf("privileges: drop capabilities: %w", errno)
	}
	return all &^ keep, nil
}

// dropPrivileges gives up what the proxy needed only to open its sockets. That
// it cannot is no reason not to run, but one to say so.
func (h *service) dropPrivileges() {
	if h.flags.keepPrivileges {
		return
	}
	_, has, err := held()
	if err != nil {
		h.log.Warn("privileges stay", "err", err)
		return
	}
	_, allowed, err := kernel.Envelopes()
	if err != nil { // then nothing counts as allowed
		h.log.Debug("which congestion controls are for everybody is unknown", "err", err)
	}
	keep := needed(h.cfg, h.proxy.Datapath.Beneath(), allowed, has) | h.neededToReread(has)
	dropped, err := drop(keep)
	switch {
	case err == nil:
		h.log.Info("privileges", "kept", keep.words(), "dropped", dropped.words())
	case has&^keep == 0:
		h.log.Debug("no_new_privs is not set", "err", err)
	default:
		h.log.Warn("privileges stay: "+whyTheyStay(err), "kept", has.words(), "err", err)
	}
}

// neededToReread returns what a reload needs to read again what the start has
// read, and says what no reload will be able to.
func (h *service) neededToReread(has capabilities) capabilities {
	closed, err := readOnlyBy(capDACOverride|capDACReadSearch, h.flags.loaded.Files)
	switch {
	case err != nil:
		h.log.Warn("whether a reload can read the configuration again is unknown", "err", err)
	case len(closed) == 0:
	case has.has(capDACReadSearch):
		h.log.Info("CAP_DAC_READ_SEARCH is kept, since a reload reads these files only with it; where this user may read them, such as in /etc/penstock, it is dropped",
			"uid", os.Getuid(), "files", closed)
		return capDACReadSearch
	default:
		h.log.Warn("a reload will not be able to read these files again: the privilege that read them is dropped; let this user read them and search their directories",
			"uid", os.Getuid(), "files", closed)
	}
	return 0
}

// readOnlyBy returns those of the files that cannot be opened without caps.
func readOnlyBy(caps capabilities, files []string) (closed []string, err error) {
	var data [2]unix.CapUserData
	h := header()
	runtime.LockOSThread() // whose capabilities change for a moment
	if err := unix.Capget(&h, &data[0]); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("privileges: read capabilities: %w", err)
	}
	less := data
	less[0].Effective &^= uint32(caps)
	less[1].Effective &^= uint32(caps >> 32)
	if less == data {
		runtime.UnlockOSThread()
		return nil, nil
	}
	if err := unix.Capset(&h, &less[0]); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("privileges: try without: %w", err)
	}
	for _, name := range files {
		fd, err := unix.Open(name, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			_ = unix.Close(fd)
		} else if errors.Is(err, unix.EACCES) {
			closed = append(closed, name)
		}
	}
	if err := unix.Capset(&h, &data[0]); err != nil {
		return nil, fmt.Errorf("privileges: take them back: %w", err) // and nothing else runs on this thread
	}
	runtime.UnlockOSThread()
	return closed, nil
}

// whyTheyStay says in words what keeps privileges from being dropped, and what
// to do about it.
func whyTheyStay(err error) string {
	switch {
	case errors.Is(err, syscall.ENOTSUP):
		return "this program was built with cgo, where they cannot be dropped on all threads; build it with CGO_ENABLED=0"
	case errors.Is(err, syscall.EPERM):
		return "a system call filter forbids it; allow capset (under systemd: SystemCallFilter=capset, after the other filters)"
	}
	return "the kernel refused"
}

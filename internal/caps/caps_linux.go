// Package caps reads, names and drops the capabilities of this process.
package caps

import (
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Set is a set of capabilities: bit n is the capability of number n
// (linux/capability.h).
type Set uint64

// Capabilities that Penstock uses or names, as in capabilities(7).
const (
	DACOverride    Set = 1 << unix.CAP_DAC_OVERRIDE
	DACReadSearch  Set = 1 << unix.CAP_DAC_READ_SEARCH
	NetAdmin       Set = 1 << unix.CAP_NET_ADMIN
	NetRaw         Set = 1 << unix.CAP_NET_RAW
	NetBindService Set = 1 << unix.CAP_NET_BIND_SERVICE
	BPF            Set = 1 << unix.CAP_BPF
	Perfmon        Set = 1 << unix.CAP_PERFMON
	SysAdmin       Set = 1 << unix.CAP_SYS_ADMIN

	// All is each that this program knows.
	All Set = 1<<(unix.CAP_LAST_CAP+1) - 1
)

// names are the names without CAP_, by number.
var names = [...]string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
	"LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
	"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
	"SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
	"MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
	"CHECKPOINT_RESTORE",
}

// Has reports whether all of some are in the set.
func (c Set) Has(some Set) bool { return c&some == some }

// String names them; empty: none.
func (c Set) String() string {
	words := make([]string, 0, bits.OnesCount64(uint64(c)))
	for n := range 64 {
		switch {
		case c&(1<<n) == 0:
		case n < len(names):
			words = append(words, "CAP_"+names[n])
		default: // of a kernel that is younger than this list
			words = append(words, fmt.Sprintf("capability %d", n))
		}
	}
	return strings.Join(words, " ")
}

// Words is String in short: of nearly all, those that are not there are of interest.
func (c Set) Words() string {
	rest := All &^ c
	switch {
	case rest == 0:
		return "all"
	case bits.OnesCount64(uint64(rest)) < 10:
		return "all but " + rest.String()
	}
	return c.String()
}

// capHeader is for every call about the calling thread's capabilities.
func capHeader() unix.CapUserHeader {
	return unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
}

// Held returns what the calling thread may use now, and what it could have:
// permitted to it, or handed on to a program that it starts.
func Held() (effective, all Set, err error) {
	effective, permitted, inheritable, err := readSets()
	return effective, permitted | inheritable, err
}

// readSets returns the sets of the calling thread.
func readSets() (effective, permitted, inheritable Set, err error) {
	var data [2]unix.CapUserData
	h := capHeader()
	if err := unix.Capget(&h, &data[0]); err != nil {
		return 0, 0, 0, fmt.Errorf("capabilities: read capabilities: %w", err)
	}
	join := func(low, high uint32) Set { return Set(high)<<32 | Set(low) }
	return join(data[0].Effective, data[1].Effective), join(data[0].Permitted, data[1].Permitted),
		join(data[0].Inheritable, data[1].Inheritable), nil
}

// Drop gives up every capability outside keep, in all sets of all threads, and
// the way to get one back by starting a program. It returns what was given up.
func Drop(keep Set) (dropped Set, err error) {
	effective, permitted, inheritable, err := readSets()
	if err != nil {
		return 0, err
	}
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return 0, fmt.Errorf("capabilities: set no_new_privs: %w", errno)
	}
	// Nothing inheritable also empties the ambient set (capabilities(7)).
	all := permitted | inheritable
	effective, permitted = effective&keep, permitted&keep
	data := [2]unix.CapUserData{
		{Effective: uint32(effective), Permitted: uint32(permitted)},
		{Effective: uint32(effective >> 32), Permitted: uint32(permitted >> 32)},
	}
	h := capHeader()
	_, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&h)),
		uintptr(unsafe.Pointer(&data)), 0)
	if errno != 0 {
		return 0, fmt.Errorf("capabilities: drop capabilities: %w", errno)
	}
	return all &^ keep, nil
}

// ReadOnlyBy returns those of the files that cannot be opened without some.
func ReadOnlyBy(some Set, files []string) (closed []string, err error) {
	var data [2]unix.CapUserData
	h := capHeader()
	runtime.LockOSThread() // whose capabilities change for a moment
	if err := unix.Capget(&h, &data[0]); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("capabilities: read capabilities: %w", err)
	}
	less := data
	less[0].Effective &^= uint32(some)
	less[1].Effective &^= uint32(some >> 32)
	if less == data {
		runtime.UnlockOSThread()
		return nil, nil
	}
	if err := unix.Capset(&h, &less[0]); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("capabilities: try without: %w", err)
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
		return nil, fmt.Errorf("capabilities: take them back: %w", err) // and nothing else runs on this thread
	}
	runtime.UnlockOSThread()
	return closed, nil
}

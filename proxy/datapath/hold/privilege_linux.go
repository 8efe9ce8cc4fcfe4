package hold

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LockPrivilege locks the calling goroutine to its thread for good, which keeps CAP_NET_ADMIN and nothing else, also
// when the process gives that capability up later. Verdicts need it of the thread that gives them, and no other thread
// may need it. The thread ends with its goroutine.
//
// A process gives capabilities up by capset(2) on each thread (syscall.AllThreadsSyscall). A seccomp filter of this
// thread alone makes that call succeed without effect. Go starts no thread from a locked one, so no other thread
// inherits the filter or the capability.
func LockPrivilege() error {
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData // of 32 capabilities each
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return fmt.Errorf("hold: capabilities of a thread: %w", err)
	}
	const netAdmin = 1 << unix.CAP_NET_ADMIN
	if sets[0].Effective&netAdmin == 0 {
		return fmt.Errorf("hold: CAP_NET_ADMIN: %w", os.ErrPermission)
	}
	sets = [2]unix.CapUserData{{Effective: netAdmin, Permitted: netAdmin}}
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return fmt.Errorf("hold: keep CAP_NET_ADMIN alone: %w", err)
	}
	// Without privileges only a thread that gains none by execve(2) may have a filter.
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("hold: set no_new_privs: %w", err)
	}
	const callNumber = 0 // offset in struct seccomp_data
	filter := [...]unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: callNumber},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_CAPSET, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO}, // errno 0
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, code := unix.RawSyscall(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER,
		uintptr(unsafe.Pointer(&program)))
	if code != 0 {
		return fmt.Errorf("hold: keep CAP_NET_ADMIN beside a process without: seccomp: %w", code)
	}
	return nil
}

package main

import "golang.org/x/sys/unix"

// forbidCoreDumps keeps the secrets in our memory, such as keys and passwords, off the disk where no
// unit does. The hard limit stays, so that prlimit(1) can have the kernel write a core all the same.
// PR_SET_DUMPABLE would do more, but takes /proc/self from an unprivileged process.
func forbidCoreDumps() {
	var core unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_CORE, &core) == nil {
		core.Cur = 0
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &core) // a lower soft limit is always allowed
	}
}

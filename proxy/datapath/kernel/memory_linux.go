package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

const (
	pressureEvery = 250 * time.Millisecond // between two checks of TCP's memory, while bytes come
	pressureLog   = time.Minute            // between two log lines
	shrinkAfter   = 8                      // checks under pressure after which a buffer shrinks to what it holds
	maxHalvings   = 11                     // of a receive window
	minReceive    = cc.Bytes(8 << 10)      // below which no receive window is halved
)

// memoryPressure follows how much memory the kernel's TCP uses, for all programs of the machine. Above a bound
// (net.ipv4.tcp_mem, by default a sixteenth of the memory) every connection advertises a window of four segments.
// Above a second one the kernel drops packets. Bytes that wait for thousands of slow readers can use that much, and
// then all connections are slow. So our receive windows are halved again and again while more than half of the bound
// is used. They are doubled while less than a quarter is.
//
// Goroutines that read from legs check the memory; nextCheck lets one of them do it at a time.
type memoryPressure struct {
	clock     func() cc.Time
	log       *slog.Logger
	bound     int64         // pages; above it the kernel advertises four segments
	nextCheck atomic.Int64  // cc.Time
	halvings  atomic.Int32  // of every receive window
	checks    atomic.Uint32 // so far
	loggedAt  atomic.Int64  // cc.Time; 0: never
}

// checkMemory checks the memory if that is due. It returns the numbers of halvings and of checks.
func (p *memoryPressure) checkMemory() (halvings int32, checks uint32) {
	now, due := p.clock(), p.nextCheck.Load()
	if int64(now) >= due && p.nextCheck.CompareAndSwap(due, int64(now.Add(pressureEvery))) {
		if used, err := tcpPages(); err == nil {
			p.addPages(used)
			p.logHalving(now, used)
		}
	}
	return p.halvings.Load(), p.checks.Load()
}

// addPages takes a reading of the pages in use.
func (p *memoryPressure) addPages(used int64) {
	p.checks.Add(1)
	switch h := p.halvings.Load(); {
	case used > p.bound/2:
		p.halvings.Store(min(h+1, maxHalvings))
	case used < p.bound/4:
		p.halvings.Store(max(h-1, 0))
	}
}

// logHalving warns that windows are halved, once in pressureLog.
func (p *memoryPressure) logHalving(now cc.Time, used int64) {
	logged := p.loggedAt.Load()
	if p.halvings.Load() > 0 && (logged == 0 || now.Sub(cc.Time(logged)) >= pressureLog) &&
		p.loggedAt.CompareAndSwap(logged, int64(now)) {
		p.log.Warn("TCP is short of memory (net.ipv4.tcp_mem): what connections may take in unread is less",
			"pages", used, "bound", p.bound)
	}
}

// TCPMemory returns how many pages of memory the kernel's TCP uses, for all programs. bound is the number of pages
// above which every connection advertises a small window.
func TCPMemory() (used, bound int64, err error) {
	if bound, err = tcpBound(); err == nil {
		used, err = tcpPages()
	}
	return used, bound, err
}

// tcpPages returns how many pages the kernel's TCP uses, in all network namespaces.
func tcpPages() (pages int64, err error) {
	const file = "/proc/net/sockstat" // TCP: inuse 5 orphan 0 tw 0 alloc 7 mem 1
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if counts, ok := strings.CutPrefix(line, "TCP:"); ok {
			_, mem, _ := strings.Cut(counts, " mem ")
			if _, err := fmt.Sscan(mem, &pages); err != nil {
				return 0, fmt.Errorf("%s: %w", file, err)
			}
			return pages, nil
		}
	}
	return 0, fmt.Errorf("%s: no line of TCP", file)
}

// tcpBound returns net.ipv4.tcp_mem's second number. Network namespaces other than the first do not show it; there it
// is what the kernel chooses by default (tcp(7)).
func tcpBound() (pages int64, err error) {
	var low int64
	if err = scanFile("/proc/sys/net/ipv4/tcp_mem", &low, &pages); !errors.Is(err, os.ErrNotExist) {
		return pages, err
	}
	var machine unix.Sysinfo_t
	if err := unix.Sysinfo(&machine); err != nil {
		return 0, os.NewSyscallError("sysinfo", err)
	}
	ram := uint64(machine.Totalram) * uint64(machine.Unit) //nolint:unconvert // 32 bits on some processors
	return int64(ram) / int64(os.Getpagesize()) / 16, nil
}

// receiveBounds are the limits of what receive buffers can be set to. By itself the kernel lets a buffer grow up to
// net.ipv4.tcp_rmem, also while the process reads nothing.
type receiveBounds struct {
	largest      cc.Bytes // size up to which the kernel lets a buffer grow; 0: buffers are not bounded, or cannot be
	unprivileged cc.Bytes // half of the size that needs no CAP_NET_ADMIN (net.core.rmem_max)
}

// probeReceiveBounds reads the bounds, partly from fd, an unconnected socket. why says what cannot be bounded.
func probeReceiveBounds(fd int) (b receiveBounds, why string) {
	if _, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_BUF_LOCK); err != nil {
		return b, "receive buffers cannot be bounded before Linux 5.14: readers that stall may hold as much as " +
			"net.ipv4.tcp_rmem allows"
	}
	var least, initial int64
	free := scanFile("/proc/sys/net/core/rmem_max", &b.unprivileged)
	if errors.Is(free, fs.ErrNotExist) { // in a network namespace, before Linux 6.11
		b.unprivileged, free = probeUnprivileged(fd)
	}
	if err := errors.Join(scanFile("/proc/sys/net/ipv4/tcp_rmem", &least, &initial, &b.largest), free); err != nil {
		return receiveBounds{}, fmt.Sprintf("receive buffers are not bounded: %v", err)
	}
	return b, ""
}

// probeUnprivileged finds rmem_max by asking for more: the kernel gives twice rmem_max at most (socket(7)).
func probeUnprivileged(fd int) (cc.Bytes, error) {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, math.MaxInt32/2); err != nil {
		return 0, os.NewSyscallError("setsockopt SO_RCVBUF", err)
	}
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
	return cc.Bytes(n) / 2, os.NewSyscallError("getsockopt SO_RCVBUF", err)
}

// setBuffer gives a socket a buffer of size bytes, if that is allowed.
func (b *receiveBounds) setBuffer(fd int, size cc.Bytes) bool {
	if size/2 <= b.unprivileged {
		return setBuffer(fd, size)
	}
	return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, int(size/2)) == nil
}

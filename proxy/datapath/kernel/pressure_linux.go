package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

const (
	// pressureEvery is how often TCP's memory is looked at, while bytes come.
	pressureEvery = 250 * time.Millisecond
	pressureLog   = time.Minute // at most one log line in this time
	shrinkAfter   = 8           // looks, under pressure, after which a buffer shrinks to what it holds
	// Under pressure a receive window is halved mostHalvings times at most, down to leastReceive bytes.
	maxHalvings = 11
	minReceive  = cc.Bytes(8 << 10)
)

// pressure follows how much memory the kernel's TCP uses, for all programs of the machine. Above
// a bound (net.ipv4.tcp_mem, by default a sixteenth of the memory) every connection advertises a
// window of four segments, and above a second one packets are dropped. Bytes that wait for
// thousands of slow readers can use that much, and then all connections are slow. So receive
// windows are halved again and again while more than half of the bound is used, and doubled while
// less than a quarter is.
type memoryPressure struct {
	clock    func() cc.Time
	log      *slog.Logger
	bound    int64         // pages
	nextLook atomic.Int64  // cc.Time of the next look
	halvings atomic.Int32  // of receive windows
	looks    atomic.Uint32 // so far
	loggedAt atomic.Int64  // cc.Time when it was logged; 0: never
}

// checkMemory looks at the memory if it is time to, and returns the numbers of halvings and of looks.
func (p *memoryPressure) checkMemory() (halvings int32, looks uint32) {
	now, due := p.clock(), p.nextLook.Load()
	if int64(now) >= due && p.nextLook.CompareAndSwap(due, int64(now.Add(pressureEvery))) {
		if used, err := tcpPages(); err == nil {
			p.addPages(used)
			p.logHalving(now, used)
		}
	}
	return p.halvings.Load(), p.looks.Load()
}

// logHalving logs that windows are halved, once in a while.
func (p *memoryPressure) logHalving(now cc.Time, used int64) {
	said := p.loggedAt.Load()
	if p.halvings.Load() > 0 && (said == 0 || now.Sub(cc.Time(said)) >= pressureLog) &&
		p.loggedAt.CompareAndSwap(said, int64(now)) {
		p.log.Warn("TCP is short of memory (net.ipv4.tcp_mem): what connections may take in unread is less",
			"pages", used, "bound", p.bound)
	}
}

// addPages takes in how many pages are in use.
func (p *memoryPressure) addPages(used int64) {
	p.looks.Add(1)
	switch h := p.halvings.Load(); {
	case used > p.bound/2:
		p.halvings.Store(min(h+1, maxHalvings))
	case used < p.bound/4:
		p.halvings.Store(max(h-1, 0))
	}
}

// TCPMemory tells how many pages of memory the kernel's TCP uses for all programs, and from
// how many on it has every connection advertise a small window.
func TCPMemory() (used, bound int64, err error) {
	if bound, err = tcpBound(); err == nil {
		used, err = tcpPages()
	}
	return used, bound, err
}

// tcpPages is how many pages the kernel's TCP uses, in all network namespaces.
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

// tcpBound is net.ipv4.tcp_mem's second number. Other network namespaces than the first do not
// show it: there it is what the kernel chooses by itself (tcp(7)).
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

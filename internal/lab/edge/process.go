package edge

import (
	"bytes"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// CPUTime is what the proxy has used so far.
func (p *Proxy) CPUTime() (time.Duration, error) { return CPUTime(p.cmd.Process.Pid) }

// CPUTime is the processor time a process has used so far: exact to the
// nanosecond, where /proc counts in hundredths of a second.
func CPUTime(pid int) (time.Duration, error) {
	// The kernel's name for another process's CPU clock: its complemented id
	// above three bits that select the scheduler's account.
	const schedulerAccount = 2
	var ts unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|schedulerAccount), &ts); err != nil {
		return 0, fmt.Errorf("read CPU time of process %d: %w", pid, err)
	}
	return time.Duration(ts.Nano()), nil
}

// Memory is the proxy's resident memory.
func (p *Proxy) Memory() (cc.Bytes, error) {
	var all, resident int64 // in pages
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	if err == nil {
		_, err = fmt.Sscan(string(text), &all, &resident)
	}
	if err != nil {
		return 0, fmt.Errorf("read the proxy's memory: %w", err)
	}
	return cc.Bytes(resident * int64(os.Getpagesize())), nil
}

// Tail keeps the end of what is written to it: the last Most bytes.
type Tail struct {
	Most int

	mu  sync.Mutex
	buf []byte
}

// tailBytes is enough for the last dozen lines of a log.
const tailBytes = 4 << 10

// Write implements io.Writer.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if extra := len(t.buf) - t.Most; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	return len(p), nil
}

// String is that end, without space around it.
func (t *Tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.buf))
}

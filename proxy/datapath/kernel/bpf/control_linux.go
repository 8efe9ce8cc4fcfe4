package bpf

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// Control is the congestion control, registered with the kernel under a name of
// its own until Close, or until the process ends in whatever way. Sockets that
// use it fall back to Reno after that; see control.bpf.c.
type Control struct {
	name    string
	objects controlObjects
	link    link.Link
	cells   []controlCell
	news    []uint64 // a bit for each cell that has not been read since it changed
	parts   []part

	mu       sync.Mutex
	sequence uint32 // of generations
	closed   bool
}

// part is every len(parts)th word of news, with their cells.
type part struct {
	turn int           // word after which News goes on
	used atomic.Uint32 // no word from this one on has a cell that was ever bound
	free []uint32      // cells that no socket is bound to, the lowest last; guarded by Control.mu
}

// Check returns nil if this process could open a Control here, or an error that says
// what is missing. It leaves nothing behind.
func Check() error {
	c, err := Open(Config{Cells: 1})
	if err != nil {
		return err
	}
	return c.Close()
}

// Open loads the program and registers it. It needs CAP_BPF and CAP_PERFMON,
// which may be dropped afterwards. An error that is ErrUnsupported says what to
// do about it.
func Open(cfg Config) (*Control, error) {
	c := &Control{}
	if err := c.openControl(cfg); err != nil {
		_ = c.Close()
		_, btf := os.Stat("/sys/kernel/btf/vmlinux")
		return nil, explainError(err, KernelRelease(), btf)
	}
	return c, nil
}

func (c *Control) openControl(cfg Config) error {
	spec, err := loadControl()
	if err != nil {
		return err
	}
	words := (cfg.Cells + 63) / 64
	spec.Maps[controlMapCells].MaxEntries = uint32(cfg.Cells)
	spec.Maps[controlMapNews].MaxEntries = uint32(words)
	name, err := nameField(spec.Maps[controlMapPenstock])
	if err != nil {
		return err
	}
	// Another process may have our number, in another namespace.
	for suffix := strconv.Itoa(os.Getpid()); ; suffix = strconv.FormatUint(uint64(rand.Uint32()), 36) { //nolint:forbidigo // only has to differ
		clear(name)
		copy(name[:len(name)-1], namePrefix+suffix)
		c.name = unix.ByteSliceToString(name)
		if err := c.registerControl(spec); !errors.Is(err, unix.EEXIST) {
			if err != nil {
				return err
			}
			break
		}
	}
	size := cfg.Cells * int(unsafe.Sizeof(controlCell{}))
	memory, err := unix.Mmap(c.objects.Cells.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the cells: %w", err)
	}
	runtime.AddCleanup(c, unmapMemory, memory)
	news, err := unix.Mmap(c.objects.News.FD(), 0, words*8, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map the news: %w", err)
	}
	runtime.AddCleanup(c, unmapMemory, news)
	c.news = unsafe.Slice((*uint64)(unsafe.Pointer(&news[0])), words)
	c.cells = unsafe.Slice((*controlCell)(unsafe.Pointer(&memory[0])), cfg.Cells)
	c.parts = make([]part, min(max(1, cfg.Parts), words))
	for i := cfg.Cells - 1; i >= 0; i-- {
		p := &c.parts[i/64%len(c.parts)]
		p.free = append(p.free, uint32(i))
	}
	for i := range c.parts {
		c.parts[i].turn = i
	}
	return nil
}

// unmapMemory runs once the control and its cells are unreachable: a writer that was
// underway at Close may still use its cell.
func unmapMemory(memory []byte) { _ = unix.Munmap(memory) }

// registerControl loads the objects and puts them into the kernel's list.
func (c *Control) registerControl(spec *ebpf.CollectionSpec) error {
	if err := spec.LoadAndAssign(&c.objects, nil); err != nil {
		return fmt.Errorf("load: %w", err)
	}
	l, err := link.AttachStructOps(link.StructOpsOptions{Map: c.objects.Penstock})
	if err != nil {
		_ = c.objects.Close()
		return fmt.Errorf("register %q: %w", c.name, err)
	}
	c.link = l
	return nil
}

// nameField returns where the name lies in what the kernel is given.
func nameField(ops *ebpf.MapSpec) ([]byte, error) {
	layout, ok := ops.Value.(*btf.Struct)
	if ok && len(ops.Contents) == 1 {
		if value, ok := ops.Contents[0].Value.([]byte); ok {
			for _, m := range layout.Members {
				if size, err := btf.Sizeof(m.Type); m.Name == "name" && err == nil {
					return value[m.Offset.Bytes():][:size], nil
				}
			}
		}
	}
	return nil, errors.New("the object has no congestion control in it")
}

// Name is what the kernel knows the control by.
func (c *Control) Name() string { return c.name }

// Parts is how many parts the cells are in; see Config.
func (c *Control) Parts() int { return len(c.parts) }

// Close takes the control off the kernel's list. Sockets that are still bound run
// Reno from then on.
func (c *Control) Close() error {
	var errs []error
	if c.link != nil {
		errs = append(errs, c.link.Close())
		c.link = nil
	}
	if c.objects.Cells != nil {
		errs = append(errs, c.objects.Close())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return errors.Join(errs...)
}

// KernelRelease returns the release of the running kernel, such as "6.10.3-amd64"; empty: unknown.
func KernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// explainError says what an error means on a kernel of that release, and what to do
// about it; btf is why there is no type information of the kernel, if so.
func explainError(err error, release string, btf error) error {
	var why string
	switch {
	case release != "" && !atLeast(release, 6, 10):
		why = "needs Linux 6.10 or later, this is " + release
	case errors.Is(btf, fs.ErrNotExist):
		why = "needs the kernel's type information in /sys/kernel/btf/vmlinux: use a kernel with " +
			"CONFIG_DEBUG_INFO_BTF=y"
	case errors.Is(err, unix.EPERM):
		why = "needs CAP_BPF and CAP_PERFMON at the start: run as root, or setcap cap_bpf,cap_perfmon+ep on the " +
			"binary, " +
			"or AmbientCapabilities=CAP_BPF CAP_PERFMON in the systemd unit"
	case errors.Is(err, ebpf.ErrNotSupported):
		why = "needs a kernel with CONFIG_BPF_SYSCALL=y, CONFIG_BPF_JIT=y and CONFIG_DEBUG_INFO_BTF=y"
	default:
		return fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return fmt.Errorf("%w: %s: %w", ErrUnsupported, why, err)
}

// atLeast compares a kernel release such as "6.10.3-amd64" with a version.
func atLeast(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return true // a scheme of its own; loading will tell
	}
	return a > major || a == major && b >= minor
}

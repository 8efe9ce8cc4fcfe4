//go:build linux

package bpf

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

// patience bounds every wait; only a hang reaches it.
const patience = 30 * time.Second

// segment is the MSS of the sockets here, options included.
const segment = 1000

// childEnv makes this test binary another process with a Control.
const childEnv = "PENSTOCK_BPF_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		if err := child(); err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(need.Run(m))
}

// child has a Control until its input ends.
func child() error {
	c, err := Open(Config{Cells: 1})
	if err != nil {
		return err
	}
	fmt.Println(os.Getpid(), c.Name())
	if _, err := bufio.NewReader(os.Stdin).ReadByte(); err != io.EOF {
		return err
	}
	return c.Close()
}

// open returns a Control that ends with the test.
func open(t testing.TB, cfg Config) *Control {
	t.Helper()
	if err := Check(); err != nil {
		t.Skip(err)
	}
	c, err := Open(cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// loopback is a network namespace of our own, in which nothing but what the
// window allows makes a socket send: a tail loss probe would exceed it by one.
var loopback = sync.OnceValues(func() (namespace int, err error) {
	err = aside(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing is in it
		lo, err := unix.NewIfreq("lo")
		if err != nil {
			return err
		}
		lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
		if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
			return err
		}
		if err := os.WriteFile("/proc/sys/net/ipv4/tcp_early_retrans", []byte("0"), 0); err != nil {
			return err
		}
		namespace, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		return err
	})
	return namespace, err
})

// aside runs f on a thread that ends with it, whatever f does to the thread.
func aside(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked
		done <- f()
	}()
	return <-done
}

// connect returns the ends of a connection on loopback.
func connect(t testing.TB) (sender, receiver *net.TCPConn) {
	t.Helper()
	namespace, err := loopback()
	if err != nil {
		need.Namespaces(t, err)
	}
	err = aside(func() error {
		if err := unix.Setns(namespace, unix.CLONE_NEWNET); err != nil {
			return err
		}
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		defer ln.Close()
		small := net.Dialer{Timeout: patience, Control: func(_, _ string, raw syscall.RawConn) (err error) {
			_ = raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, segment) })
			return err
		}}
		c, err := small.DialContext(context.Background(), "tcp", ln.Addr().String())
		if err != nil {
			return err
		}
		sender = c.(*net.TCPConn)
		receiver, err = ln.(*net.TCPListener).AcceptTCP()
		return err
	})
	require.NoError(t, err)
	for _, c := range []*net.TCPConn{sender, receiver} {
		require.NoError(t, c.SetDeadline(time.Now().Add(patience)))
		t.Cleanup(func() { _ = c.Close() })
	}
	return sender, receiver
}

// on calls f with the socket's descriptor.
func on(t testing.TB, c *net.TCPConn, f func(fd int) error) {
	t.Helper()
	require.NoError(t, tryOn(c, f))
}

func tryOn(c *net.TCPConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := raw.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// leg is one connection whose sending end is bound.
type leg struct {
	*Cell
	sender, receiver *net.TCPConn
	freed            bool
}

// bind binds the sending end until the test ends.
func bind(t testing.TB, c *Control, sender, receiver *net.TCPConn) *leg {
	t.Helper()
	l := &leg{sender: sender, receiver: receiver}
	on(t, sender, func(fd int) (err error) {
		l.Cell, err = c.Bind(fd, 0)
		return err
	})
	t.Cleanup(l.Free)
	return l
}

// bound is a connection of its own.
func bound(t testing.TB, c *Control) *leg {
	t.Helper()
	sender, receiver := connect(t)
	return bind(t, c, sender, receiver)
}

func (l *leg) Free() {
	if !l.freed {
		l.freed = true
		l.Cell.Free()
	}
}

// reading takes one, which has to be there.
func (l *leg) reading(t testing.TB) (s Seen) {
	t.Helper()
	for range 1000 { // it may be told faster than it can be copied
		if l.Read(&s) {
			return s
		}
	}
	require.FailNow(t, "there is no reading")
	return s
}

// settled waits until all that was written is acknowledged.
func (l *leg) settled(t testing.TB) (s Seen) {
	t.Helper()
	until(t, "everything is acknowledged", func() bool { return l.Read(&s) && s.Acked == s.End })
	return s
}

// apply applies a limit, in answer to all that the socket has said so far.
func (l *leg) apply(t testing.TB, cwnd uint32, rate uint64) Seen {
	t.Helper()
	s := l.reading(t)
	l.Apply(cwnd, rate)
	l.Answer(&s)
	return s
}

// window applies one of so many packets, unpaced.
func (l *leg) window(t testing.TB, packets uint32) Seen {
	t.Helper()
	return l.apply(t, packets*l.reading(t).Mss, 0)
}

// onTime skips the test if this process was late: its sockets fell back, as they
// should, and there is nothing to see.
func onTime(t testing.TB, s Seen) {
	t.Helper()
	if s.Fallbacks > 0 {
		t.Skip("this machine kept the process waiting for longer than a socket waits")
	}
}

// pass has n bytes go to the other end, and returns when they have arrived.
func (l *leg) pass(t testing.TB, n int) { t.Helper(); pass(t, l.sender, l.receiver, n) }

// transfer is pass with what is told meanwhile looked at over and over, and once
// more when everything is acknowledged.
func (l *leg) transfer(t testing.TB, n int, look func(Seen)) {
	t.Helper()
	done := make(chan struct{})
	wrote := inBackground(func() error { return produce(l.sender, n) })
	read := inBackground(func() error {
		defer close(done)
		return discard(l.receiver, n)
	})
	for going := true; going; {
		select {
		case <-done:
			going = false
		default:
		}
		if s := (Seen{}); l.Read(&s) {
			look(s)
		}
	}
	require.NoError(t, read())
	require.NoError(t, wrote())
	look(l.settled(t))
}

func info(t testing.TB, c *net.TCPConn) (i *unix.TCPInfo) {
	t.Helper()
	on(t, c, func(fd int) (err error) {
		i, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err
	})
	return i
}

// controlOf is the name of the socket's congestion control.
func controlOf(t testing.TB, c *net.TCPConn) (name string) {
	t.Helper()
	on(t, c, func(fd int) (err error) {
		name, err = unix.GetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION)
		return err
	})
	return strings.TrimRight(name, "\x00")
}

func list(t testing.TB) []string {
	t.Helper()
	text, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	require.NoError(t, err)
	return strings.Fields(string(text))
}

// filter has the socket see only the packets that the program keeps.
func filter(t testing.TB, c *net.TCPConn, program ...unix.SockFilter) {
	t.Helper()
	on(t, c, func(fd int) error {
		return unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]})
	})
}

// drop and keep end a filter's program.
var (
	drop = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	keep = unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: 0xffffffff}
)

// deafen has everything that comes to the socket lost on the way, until undeafen.
func deafen(t testing.TB, c *net.TCPConn) { t.Helper(); filter(t, c, drop) }

func undeafen(t testing.TB, c *net.TCPConn) {
	t.Helper()
	on(t, c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0) })
}

// loseOneIn has one packet in n lost on the way to the socket.
func loseOneIn(t testing.TB, c *net.TCPConn, n uint32) {
	t.Helper()
	const random = 0xfffff000 + 56 // SKF_AD_OFF + SKF_AD_RANDOM
	filter(t, c,
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: random},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, Jt: 1, K: 0xffffffff / n},
		drop, keep)
}

// loseShorterThan has segments of fewer than n bytes lost on the way to the socket.
func loseShorterThan(t testing.TB, c *net.TCPConn, n uint32) {
	t.Helper()
	filter(t, c,
		unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_LEN},
		unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K, Jt: 1, K: n},
		drop, keep)
}

// pass has n bytes go from one end to the other, and returns when they have
// arrived.
func pass(t testing.TB, from, to *net.TCPConn, n int) {
	t.Helper()
	wrote := inBackground(func() error { return produce(from, n) })
	require.NoError(t, discard(to, n))
	require.NoError(t, wrote())
}

func produce(c *net.TCPConn, n int) error {
	buf := make([]byte, min(n, 1<<20))
	for ; n > 0; n -= min(n, len(buf)) {
		if err := c.SetWriteDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if _, err := c.Write(buf[:min(n, len(buf))]); err != nil {
			return err
		}
	}
	return nil
}

// discard reads n bytes without copying them.
func discard(c *net.TCPConn, n int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	buf := make([]byte, min(n, 1<<20))
	for n > 0 {
		var got int
		var inner error
		if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		err := raw.Read(func(fd uintptr) bool {
			got, _, inner = unix.Recvfrom(int(fd), buf[:min(n, len(buf))], unix.MSG_TRUNC|unix.MSG_DONTWAIT)
			return !errors.Is(inner, unix.EAGAIN)
		})
		if err := errors.Join(err, inner); err != nil {
			return err
		}
		if got == 0 {
			return io.ErrUnexpectedEOF
		}
		n -= got
	}
	return nil
}

// inBackground runs f and returns a wait for its error.
func inBackground(f func() error) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return func() error { return <-done }
}

// until waits for what the kernel does in its own time.
func until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	hang := time.NewTimer(patience)
	defer hang.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-hang.C:
			require.FailNow(t, "never: "+what)
		}
	}
}

// segmentInSoftware has the loopback of this package's namespace take no packets of several
// segments, so that the receiver acknowledges parts of them.
func segmentInSoftware(t testing.TB) {
	t.Helper()
	namespace, err := loopback()
	require.NoError(t, err)
	require.NoError(t, aside(func() error {
		if err := unix.Setns(namespace, unix.CLONE_NEWNET); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) //nolint:errcheck // nothing is in it
		off := struct{ command, value uint32 }{command: unix.ETHTOOL_STSO}
		request := struct {
			name [unix.IFNAMSIZ]byte
			data unsafe.Pointer
			rest [16]byte
		}{data: unsafe.Pointer(&off)}
		copy(request.name[:], "lo")
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request)))
		if errno != 0 {
			return errno
		}
		return nil
	}))
}

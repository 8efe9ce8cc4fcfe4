//go:build linux

package eventloop

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath"
)

func TestMain(m *testing.M) { os.Exit(need.Run(m)) }

func start(tb testing.TB, n int) *Loops {
	tb.Helper()
	ls, err := New(n)
	require.NoError(tb, err)
	tb.Cleanup(ls.Close)
	return ls
}

// pair returns two ends of a stream that the loop watches.
func (l *Loop) pair(tb testing.TB) (a, b *Socket) {
	tb.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	require.NoError(tb, err)
	a, err = l.Watch(fds[0])
	require.NoError(tb, err)
	b, err = l.Watch(fds[1])
	require.NoError(tb, err)
	tb.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

func (s *Socket) read(b []byte) (n int, err error) {
	poll := s.Read(func(fd uintptr) bool {
		n, err = unix.Read(int(fd), b)
		return !errors.Is(err, unix.EAGAIN)
	})
	if poll != nil {
		return 0, poll
	}
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

func (s *Socket) write(b []byte) (n int, err error) {
	poll := s.Write(func(fd uintptr) bool {
		n, err = unix.Write(int(fd), b)
		return !errors.Is(err, unix.EAGAIN)
	})
	if poll != nil {
		return 0, poll
	}
	return n, err
}

func TestGoroutinesWaitForASocket(t *testing.T) {
	a, b := start(t, 1).Least().pair(t)
	const total = 4 << 20
	wrote := make(chan error, 1)
	go func() {
		piece := make([]byte, 64<<10)
		for sent := 0; sent < total; {
			n, err := a.write(piece[:min(len(piece), total-sent)])
			if err != nil {
				wrote <- err
				return
			}
			sent += n
		}
		wrote <- a.Close()
	}()
	got := 0
	buf := make([]byte, 10_000)
	for {
		n, err := b.read(buf)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		got += n
	}
	require.NoError(t, <-wrote)
	assert.Equal(t, total, got)
}

func TestADeadlineAndCloseEndAWait(t *testing.T) {
	a, _ := start(t, 1).Least().pair(t)
	require.NoError(t, a.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err := a.read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, a.SetReadDeadline(time.Now().Add(-time.Hour)))
	_, err = a.read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, a.SetReadDeadline(time.Time{}))

	ended := make(chan error)
	go func() {
		_, err := a.read(make([]byte, 1))
		ended <- err
	}()
	require.NoError(t, a.Close())
	require.ErrorIs(t, <-ended, net.ErrClosed)
	require.ErrorIs(t, a.Close(), net.ErrClosed)
	require.ErrorIs(t, a.Control(func(uintptr) {}), net.ErrClosed)
	require.ErrorIs(t, a.SetReadDeadline(time.Time{}), net.ErrClosed)
}

// echoing has a task send back what comes, until the end.
func (s *Socket) echoing(done func(error)) {
	var buf [4096]byte
	var have []byte
	var task *Task
	ended := false
	task = s.Loop().Task(func() {
		for !ended {
			for len(have) > 0 {
				n, err := s.write(have)
				if errors.Is(err, datapath.ErrWait) {
					return
				}
				if err != nil {
					ended = true
					done(err)
					return
				}
				have = have[n:]
			}
			n, err := s.read(buf[:])
			if errors.Is(err, datapath.ErrWait) {
				return
			}
			if err != nil {
				ended = true
				done(err)
				return
			}
			have = buf[:n]
		}
	})
	s.Drive(task)
	task.Post()
}

func TestATaskDrivesASocketWithoutWaiting(t *testing.T) {
	for _, loops := range []int{1, 4} {
		ls := start(t, loops)
		var all sync.WaitGroup
		for range 64 {
			a, b := ls.Least().pair(t)
			ended := make(chan error, 1)
			b.echoing(func(err error) { ended <- err })
			all.Go(func() {
				msg, got := make([]byte, 3000), make([]byte, 3000)
				for range 100 {
					_, err := a.write(msg)
					if !assert.NoError(t, err) {
						return
					}
					for n := 0; n < len(got); {
						k, err := a.read(got[n:])
						if !assert.NoError(t, err) {
							return
						}
						n += k
					}
				}
				assert.NoError(t, a.Close())
				assert.ErrorIs(t, <-ended, io.EOF)
			})
		}
		all.Wait()
	}
}

func TestATaskIsToldThatItsSocketIsClosed(t *testing.T) {
	_, b := start(t, 1).Least().pair(t)
	ended := make(chan error, 1)
	b.echoing(func(err error) { ended <- err })
	require.NoError(t, b.Close())
	assert.ErrorIs(t, <-ended, net.ErrClosed)
}

// Posts from everywhere, while the loop falls asleep and wakes, are all followed by a run.
func TestNoPostIsLost(t *testing.T) {
	ls := start(t, 2)
	const posters, posts = 8, 5000
	var all sync.WaitGroup
	for range posters {
		l := ls.Least()
		var asked, seen atomic.Int64
		came := make(chan struct{}, 1)
		task := l.Task(func() {
			seen.Store(asked.Load())
			select {
			case came <- struct{}{}:
			default:
			}
		})
		all.Go(func() {
			for i := range int64(posts) {
				asked.Store(i + 1)
				task.Post()
				for seen.Load() != i+1 {
					<-came
				}
			}
		})
	}
	all.Wait()
}

// What a loop is told of a descriptor that is closed is not taken for another's that has
// its slot.
func TestSlotsAreUsedAgain(t *testing.T) {
	l := start(t, 1).Least()
	for range 1000 {
		a, b := l.pair(t)
		_, err := a.write([]byte("x"))
		require.NoError(t, err)
		require.NoError(t, a.Close())
		require.NoError(t, b.Close())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	assert.Less(t, len(l.slots), 8)
	assert.Zero(t, l.Load())
}

// Goroutines have as many processors beside loops that wait as without loops, and none is left over.
func TestLoopsReserveProcessors(t *testing.T) {
	before, usable := runtime.GOMAXPROCS(0), Processors()
	first, err := New(0)
	require.NoError(t, err)
	second, err := New(3)
	require.NoError(t, err)
	assert.Equal(t, before+usable+3, runtime.GOMAXPROCS(0))
	assert.Equal(t, usable, Processors(), "a further New(0) starts as many loops as the first")
	assert.Len(t, first.all, usable)
	first.Close()
	first.Close()
	second.Close()
	assert.Equal(t, before, runtime.GOMAXPROCS(0))
}

// ticker counts the events of a timer.
type ticker struct {
	fd    int
	count atomic.Int64
}

func (x *ticker) handleEvent(*Loop, uint32) {
	var expirations [8]byte
	_, _ = unix.Read(x.fd, expirations[:])
	x.count.Add(1)
}

// A loop with an event each millisecond wakes little else in the process. Go's monitor would wake each 20 µs for a
// goroutine that is always found in a system call.
func TestALoopThatWaitsOftenKeepsNoMonitorAwake(t *testing.T) {
	const events = 500
	l := start(t, 1).Least()
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	require.NoError(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	x := &ticker{fd: fd}
	_, err = l.register(fd, unix.EPOLLIN|unix.EPOLLET&(1<<32-1), x)
	require.NoError(t, err)
	every := unix.NsecToTimespec(int64(time.Millisecond))
	require.NoError(t, unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: every, Value: every}, nil))

	before := threadSwitches(t)
	require.Eventually(t, func() bool { return x.count.Load() > events }, 10*time.Second, 100*time.Millisecond)
	assert.Less(t, threadSwitches(t)-before, int64(5*events/2))
}

// threadSwitches returns how often the threads of this process have waited.
func threadSwitches(tb testing.TB) (n int64) {
	tb.Helper()
	threads, err := filepath.Glob("/proc/self/task/*/status")
	require.NoError(tb, err)
	for _, thread := range threads {
		text, err := os.ReadFile(thread)
		require.NoError(tb, err)
		_, after, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:\t")
		count, _, _ := strings.Cut(after, "\n")
		waits, err := strconv.ParseInt(count, 10, 64)
		require.NoError(tb, err)
		n += waits
	}
	return n
}

// An int of 32 bits holds no number above 1<<31.
func TestTheTurnOfTheLoopsNeverEnds(t *testing.T) {
	ls := start(t, 3)
	ls.next.Store(math.MaxInt32)
	assert.NotNil(t, ls.Least())
}

func listening(tb testing.TB) (fd int, addr string) {
	tb.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	f, err := ln.(*net.TCPListener).File()
	require.NoError(tb, err)
	fd, err = unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	require.NoError(tb, err)
	require.NoError(tb, unix.SetNonblock(fd, true))
	require.NoError(tb, errors.Join(f.Close(), ln.Close()))
	return fd, ln.Addr().String()
}

func TestWhatIsToBeDoneOnceIsDoneAfterTheEnd(t *testing.T) {
	ls := start(t, 1)
	l := ls.Least()
	task := l.Task(func() { assert.Fail(t, "a task runs after the end") })
	ls.Close()
	task.Post()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	require.NoError(t, err)
	defer func() { _, _ = unix.Close(fds[0]), unix.Close(fds[1]) }()
	_, err = l.Watch(fds[0])
	require.ErrorIs(t, err, net.ErrClosed)

	done := 0 // the race detector tells if two run at a time
	var all sync.WaitGroup
	all.Add(100)
	for range 100 {
		l.Do(func() {
			done++
			all.Done()
		})
	}
	all.Wait()
	assert.Equal(t, 100, done)
	ls.waitForTurns()
}

func TestLoopsAcceptFromOneListener(t *testing.T) {
	ls := start(t, 3)
	fd, addr := listening(t)
	var taken, pauses atomic.Int64
	n, err := ls.Listen(fd, func(*Loop, int) time.Duration {
		if pauses.Add(1) == 1 {
			return time.Millisecond // as where descriptors are short
		}
		c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
		if err == nil {
			taken.Add(1)
			_ = unix.Close(c)
		}
		return 0
	})
	require.NoError(t, err)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			c, err := net.Dial("tcp", addr)
			if assert.NoError(t, err) {
				_, _ = c.Read(make([]byte, 1)) // until it is taken and closed
				_ = c.Close()
			}
		})
	}
	all.Wait()
	assert.EqualValues(t, 20, taken.Load())
	require.NoError(t, n.Close())
	require.ErrorIs(t, n.Close(), net.ErrClosed)
	_, err = net.Dial("tcp", addr)
	assert.Error(t, err)
}

func TestAListenerLeavesTheDescriptorsOfOthersAloneAfterTheEnd(t *testing.T) {
	ls := start(t, 1)
	fd, addr := listening(t)
	n, err := ls.Listen(fd, func(*Loop, int) time.Duration { return 0 })
	require.NoError(t, err)
	number := ls.Least().epoll
	ls.Close()

	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	require.NoError(t, err)
	defer func() { _ = unix.Close(epoll) }()
	other, err := unix.FcntlInt(uintptr(epoll), unix.F_DUPFD_CLOEXEC, number)
	require.NoError(t, err)
	defer func() { _ = unix.Close(other) }()
	socket, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) // with it the socket outlives fd
	require.NoError(t, err)
	defer func() { _ = unix.Close(socket) }()
	require.NoError(t, unix.EpollCtl(epoll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN}))
	require.NoError(t, n.Close())

	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer c.Close() //nolint:errcheck // nobody reads it
	events, err := unix.EpollWait(epoll, make([]unix.EpollEvent, 1), 10_000)
	require.NoError(t, err)
	assert.Equal(t, 1, events, "the other is still told")
}

func BenchmarkEcho(b *testing.B) {
	x, y := start(b, 1).Least().pair(b)
	y.echoing(func(error) {})
	msg := make([]byte, 100)
	b.ReportAllocs()
	for b.Loop() {
		_, _ = x.write(msg)
		_, _ = x.read(msg)
	}
}

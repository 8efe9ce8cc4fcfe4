package takeover

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// running is a process that offers n listeners at a path.
type running struct {
	path      string
	addresses []string
	left      chan int
	open      atomic.Int64
	batch     chan Batch  // what Park returns first
	settled   chan []bool // what settle got
}

// offer starts one.
func offer(t *testing.T, n int, stays ...string) *running {
	t.Helper()
	r := &running{path: filepath.Join(t.TempDir(), "takeover"), left: make(chan int, 1), settled: make(chan []bool, 1)}
	r.batch = make(chan Batch, 1)
	var listeners []*net.TCPListener
	for range n {
		ln, err := net.ListenTCP("tcp", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
		require.NoError(t, err)
		t.Cleanup(func() { _ = ln.Close() })
		listeners = append(listeners, ln)
		r.addresses = append(r.addresses, ln.Addr().String())
	}
	ln, err := Listen(r.path)
	require.NoError(t, err)
	o := Offer{
		Sockets: func() (all Sockets, _ []string, err error) {
			for _, ln := range listeners {
				s, err := Duplicate("listener", ln)
				if err != nil {
					return all, nil, err
				}
				all = append(all, s)
			}
			return all, stays, nil
		},
		Leave: func(pid int) {
			for _, ln := range listeners {
				_ = ln.Close()
			}
			r.left <- pid
		},
		Open: func() int { return int(r.open.Load()) },
		Left: func() time.Duration { return time.Minute },
		Park: func() (b Batch, _ func([]bool, bool)) {
			select {
			case b = <-r.batch:
			default:
			}
			return b, func(adopted []bool, _ bool) { r.settled <- adopted }
		},
		Log: slog.New(slog.DiscardHandler),
	}
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		o.Serve(ctx, ln)
	}()
	t.Cleanup(func() {
		end()
		<-ended
	})
	return r
}

// TestListenersGoOnInTheNextProcess has more sockets than one message carries.
func TestListenersGoOnInTheNextProcess(t *testing.T) {
	r := offer(t, 2*socketsAtOnce+3)
	r.open.Store(5)
	failed, err := Ask(r.path)
	require.NoError(t, err)
	failed.Close() // a process that does not start: the old one goes on

	p, err := Ask(r.path)
	require.NoError(t, err)
	defer p.Close()
	assert.Equal(t, os.Getpid(), p.PID)
	sockets := p.TakeSockets("listener", func(at string) bool { return at != r.addresses[0] })
	require.Len(t, sockets, len(r.addresses)-1)
	ended := make(chan struct{})
	require.NoError(t, p.Begin(nil, func() { close(ended) }))
	assert.Equal(t, os.Getpid(), <-r.left)
	assert.Equal(t, 5, p.Open())
	assert.Regexp(t, `process \d+, which this one took over from, drains 5 connections for (1m0|59)s at most`,
		p.DescribeDrain())
	for i, s := range sockets {
		assert.Equal(t, r.addresses[i+1], s.Address)
		ln, err := s.Listener()
		require.NoError(t, err)
		client, err := net.Dial("tcp", s.Address)
		require.NoError(t, err)
		server, err := ln.Accept()
		require.NoError(t, err)
		assert.NoError(t, client.Close())
		assert.NoError(t, server.Close())
		assert.NoError(t, ln.Close())
	}
	_, err = net.Dial("tcp", r.addresses[0])
	assert.Error(t, err, "nobody wanted it")
}

// takeOver is the new process by hand, up to the message with the batch.
func (r *running) takeOver(t *testing.T) (*net.UnixConn, message) {
	t.Helper()
	conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: r.path, Net: "unixpacket"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
	require.NoError(t, sendMessage(conn, message{Step: stepAsk, Version: Version, Batches: true}))
	m, err := expectStep(conn, stepSockets)
	require.NoError(t, err)
	m.closeDescriptors()
	require.NoError(t, sendMessage(conn, message{Step: stepBegin}))
	_, err = expectStep(conn, stepDraining)
	require.NoError(t, err)
	m, err = expectStep(conn, stepBatch)
	require.NoError(t, err)
	return conn, m
}

// TestEachConnectionHasOneProcess ends a process at each moment of a batch.
func TestEachConnectionHasOneProcess(t *testing.T) {
	for name, tt := range map[string]struct {
		answer func(t *testing.T, conn *net.UnixConn)
		want   []bool
	}{
		"the new one has both": {
			func(t *testing.T, c *net.UnixConn) { answerBatch(t, c, true, true) }, []bool{true, true},
		},
		"it has one": {
			func(t *testing.T, c *net.UnixConn) { answerBatch(t, c, false, true) }, []bool{false, true},
		},
		"it dies before it answers": {func(*testing.T, *net.UnixConn) {}, nil},
		"it says what is not asked": {
			func(_ *testing.T, c *net.UnixConn) { _ = sendMessage(c, message{Step: stepAsk}) }, nil,
		},
		"it answers after an unknown": {
			func(t *testing.T, c *net.UnixConn) { answerBatch(t, c); answerBatch(t, c, true) }, nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := offer(t, 1)
			read, write, err := os.Pipe()
			require.NoError(t, err)
			defer read.Close()
			r.batch <- Batch{Record: make([]byte, 100_000), FDs: []int{int(read.Fd()), int(write.Fd())}}
			conn, m := r.takeOver(t)
			b, err := m.readBatch()
			require.NoError(t, err)
			assert.Len(t, b.Record, 100_000)
			tt.answer(t, conn)
			_ = conn.Close() // there may be a message that it has not read
			assert.Equal(t, tt.want, <-r.settled)
			require.NoError(t, write.Close())
			_, err = unix.Write(b.FDs[1], []byte("x"))
			assert.NoError(t, err, "it is open by the other descriptor")
			CloseDescriptors(b.FDs)
		})
	}
}

// answerBatch sends the step adopted.
func answerBatch(t *testing.T, conn *net.UnixConn, adopted ...bool) {
	t.Helper()
	require.NoError(t, sendMessage(conn, message{Step: stepAdopted, Adopted: adopted}))
}

// TestAProcessThatTakesABatchBackKeepsIt has the old process live on without hearing the answer.
func TestAProcessThatTakesABatchBackKeepsIt(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "")
		conn, err := net.FileConn(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		ends[i] = conn.(*net.UnixConn)
	}
	pidfd, err := unix.PidfdOpen(os.Getpid(), 0)
	require.NoError(t, err)
	p := &Predecessor{conn: ends[1], process: os.NewFile(uintptr(pidfd), "")}
	defer p.Close()
	m, err := Batch{Record: []byte("x"), FDs: []int{0}}.makeMessage()
	require.NoError(t, err)
	require.NoError(t, sendMessage(ends[0], m))
	CloseDescriptors(m.fds[:1])
	more := p.handleNext(func(b Batch) ([]bool, func(bool)) {
		assert.Equal(t, "x", string(b.Record))
		CloseDescriptors(b.FDs)
		assert.NoError(t, ends[0].Close())
		return []bool{true}, func(kept bool) { assert.False(t, kept, "the old process has it") }
	})
	assert.False(t, more)
}

func TestAProxyThatCannotBeTakenOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "takeover")
	_, err := Ask(path)
	assert.ErrorIs(t, err, ErrNoProxy, "nothing there")
	ln, err := Listen(path)
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	_, err = Ask(path)
	assert.ErrorIs(t, err, ErrNoProxy, "a file that was left behind")
	require.NoError(t, os.WriteFile(path+".txt", nil, 0o600))
	_, err = Listen(path + ".txt")
	assert.ErrorContains(t, err, "is no socket")

	r := offer(t, 1, `listener "vpn", which ends a tunnel`)
	_, err = Ask(r.path)
	assert.ErrorContains(t, err, `listener "vpn", which ends a tunnel; restart it instead`)
}

// TestOnlyOneProcessTakesOver has a second one ask before the first has begun.
func TestOnlyOneProcessTakesOver(t *testing.T) {
	r := offer(t, 1)
	first, err := Ask(r.path)
	require.NoError(t, err)
	defer first.Close()
	second := make(chan error)
	go func() {
		p, err := Ask(r.path)
		p.Close()
		second <- err
	}()
	require.NoError(t, first.Begin(nil, func() {}))
	assert.Error(t, <-second, "the old process has gone with the first")
}

// TestAnotherUserIsRefused has a thread of another user ask, though the socket's mode would let it.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	r := offer(t, 1)
	require.NoError(t, os.Chmod(r.path, 0o666)) //nolint:gosec // for this test
	for dir := filepath.Dir(r.path); dir != filepath.Clean(os.TempDir()); dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755)) //nolint:gosec // for this test
	}
	refused := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with this function, since it is not unlocked
		const unchanged = ^uintptr(0)
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, unchanged, 65534, unchanged); errno != 0 {
			refused <- errno
			return
		}
		p, err := Ask(r.path)
		p.Close()
		refused <- err
	}()
	err := <-refused
	assert.ErrorIs(t, err, ErrRefused)
	assert.ErrorContains(t, err, "another user: uid 65534")
	p, err := Ask(r.path)
	require.NoError(t, err, "the proxy goes on, and its own user may ask")
	p.Close()
}

// TestAnswersOfNoPenstock have the running process go on, whatever it is told.
func TestAnswersOfNoPenstock(t *testing.T) {
	r := offer(t, 1)
	for _, words := range []string{
		"", "x", "{}", `{"step":"begin"}`, `{"step":"ask","version":9}`, `{"step":"ask","version":1,"sockets":[{}]}`,
		fmt.Sprintf(`{"step":%q}`, make([]byte, 100)),
	} {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: r.path, Net: "unixpacket"})
		require.NoError(t, err)
		require.NoError(t, conn.SetDeadline(time.Now().Add(10*time.Second)))
		_, err = conn.Write([]byte(words))
		require.NoError(t, err)
		if words == "" {
			require.NoError(t, conn.CloseWrite())
		}
		_, err = expectStep(conn, stepSockets)
		assert.Error(t, err, words)
		_ = conn.Close()
	}
	p, err := Ask(r.path)
	require.NoError(t, err)
	p.Close()
}

func TestSameAddress(t *testing.T) {
	for _, tt := range []struct {
		address, at string
		same        bool
	}{
		{"127.0.0.1:80", "127.0.0.1:80", true},
		{":80", "[::]:80", true},
		{":80", "0.0.0.0:80", true},
		{":80", "127.0.0.1:80", false},
		{"127.0.0.1:0", "127.0.0.1:80", false},
		{"[fe80::1%lo]:80", "[fe80::1%eth0]:80", false},
		{"x", "127.0.0.1:80", false},
	} {
		assert.Equal(t, tt.same, SameAddress(tt.address, tt.at), "%s, %s", tt.address, tt.at)
	}
}

// FuzzDecode reads what another process may say.
func FuzzDecode(f *testing.F) {
	text, err := json.Marshal(message{Step: stepSockets, Version: 1, Sockets: []Socket{{Role: "listener"}}})
	require.NoError(f, err)
	f.Add(text, 1)
	f.Add([]byte(`{"step":"refused","reason":"x"}`), 0)
	f.Fuzz(func(t *testing.T, text []byte, descriptors int) {
		m, err := decodeMessage(text, descriptors)
		if err == nil {
			assert.Len(t, m.Sockets, descriptors)
			assert.NotEqual(t, stepRefused, m.Step)
		}
	})
}

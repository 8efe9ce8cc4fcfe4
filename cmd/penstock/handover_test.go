package main

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// generation is one of several proxies that take over from each other, in a process of its own.
type generation struct {
	cmd *exec.Cmd
	log journal
	end chan struct{}
}

// succession is a configuration with the proxies that run it one after the other.
type succession struct {
	t           *testing.T
	args        []string
	at, socks   string // addresses of the listeners: one leads to serveMoving, the other waits for what clients want
	generations []*generation
	contained   bool         // each has a PID namespace of its own
	node        *netlab.Node // where they run; nil: here
}

// newSuccession starts the first proxy.
func newSuccession(t *testing.T, envelope, more string) *succession {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	return (&succession{t: t, at: vacantPort(t), socks: vacantPort(t)}).open(envelope, more, ln)
}

// open starts the first proxy in front of serveMoving.
func (s *succession) open(envelope, more string, server net.Listener) *succession {
	t := s.t
	t.Helper()
	serveMoving(t, server)
	file := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(file, fmt.Appendf(nil, "envelope: %s\nlisteners:\n"+
		"  - {name: moving, mode: forward, target: %q, address: %q}\n  - {name: waiting, mode: socks5, address: %q}\n"+
		"telemetry: {address: \"off\"}\nlog: {flows: false}\nlimits: {handshake_timeout: 5m, per_source: 0}\n"+
		"shutdown: {drain: 0s}\n%s", envelope, server.Addr().String(), s.at, s.socks, more), 0o600))
	s.args = []string{"run", "--keep-privileges", "--config", file, "--state-directory", t.TempDir(), "--takeover"}
	s.start()
	s.newest().log.has(t, "listening")
	t.Cleanup(func() {
		for i, g := range s.generations {
			if t.Failed() {
				t.Logf("process %d: %s", i, &g.log)
			}
			g.kill()
			assert.NotContains(t, g.log.String(), "DATA RACE")
		}
	})
	return s
}

// start starts the next proxy, and does not wait for it.
func (s *succession) start() *generation {
	s.t.Helper()
	g := &generation{cmd: clitest.Program(s.t.Context(), s.args...), end: make(chan struct{})}
	g.cmd.Stderr = &g.log
	if s.contained {
		g.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	}
	begin := g.cmd.Start
	if s.node != nil {
		begin = func() error { return s.node.Do(g.cmd.Start) }
	}
	require.NoError(s.t, begin())
	go func() {
		defer close(g.end)
		_ = g.cmd.Wait()
	}()
	s.generations = append(s.generations, g)
	return g
}

// newest returns the proxy that was started last.
func (s *succession) newest() *generation { return s.generations[len(s.generations)-1] }

// kill ends a proxy at once, and waits for that.
func (g *generation) kill() {
	_ = g.cmd.Process.Kill()
	<-g.end
}

// hasEnded reports whether the process is over.
func (g *generation) hasEnded() bool {
	select {
	case <-g.end:
		return true
	default:
		return false
	}
}

// stream is a seeded stream of bytes, with a pause after each piece.
type stream struct {
	random *rand.ChaCha8
	left   int
	pause  time.Duration
}

// newStream returns a stream of n bytes.
func newStream(seed, n int, pause time.Duration) *stream {
	return &stream{random: rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}), left: n, pause: pause}
}

// Read implements io.Reader.
func (s *stream) Read(b []byte) (int, error) {
	if s.left == 0 {
		return 0, io.EOF
	}
	time.Sleep(s.pause)
	b = b[:min(len(b), s.left, 32<<10)]
	s.left -= len(b)
	return s.random.Read(b)
}

// sumOf returns the hash of all that r has.
func sumOf(r io.Reader) (string, error) {
	h := sha256.New()
	_, err := io.Copy(h, r)
	return hex.EncodeToString(h.Sum(nil)), err
}

// serveMoving answers a line: "down SEED BYTES PAUSE" with a stream, "up" with the hash of what follows, "echo" with
// what follows.
func serveMoving(t *testing.T, ln net.Listener) {
	t.Helper()
	need.Serve(t, ln, func(conn net.Conn) {
		in := bufio.NewReaderSize(conn, 64)
		line, _ := in.ReadString('\n')
		var seed, n int
		var pause time.Duration
		switch _, err := fmt.Sscanf(line, "down %d %d %d", &seed, &n, &pause); {
		case err == nil:
			_, _ = io.Copy(struct{ io.Writer }{conn}, newStream(seed, n, pause))
		case line == "up\n":
			if sum, err := sumOf(in); err == nil {
				_, _ = io.WriteString(conn, sum)
			}
		case line == "echo\n":
			_, _ = io.Copy(struct{ io.Writer }{conn}, in)
		}
	})
}

// movingBytes is what a transfer carries: much more than sockets and pipes hold.
const movingBytes = 6 << 20

// transfer does one exchange with serveMoving over conn. It returns syscall.ECONNRESET for a connection that was lost,
// and any other error for bytes that are not the right ones.
type transfer func(conn net.Conn, seed int, over <-chan struct{}) error

// transfers are the kinds of connections that move. over is closed after the last upgrade.
var transfers = map[string]transfer{
	"download of a slow server": func(conn net.Conn, seed int, _ <-chan struct{}) error {
		return checkDownload(conn, seed, 20*time.Millisecond, 0)
	},
	"download by a slow client": func(conn net.Conn, seed int, _ <-chan struct{}) error {
		return checkDownload(conn, seed, 0, 20*time.Millisecond)
	},
	"download behind a half-closed side": func(conn net.Conn, seed int, _ <-chan struct{}) error {
		if _, err := fmt.Fprintf(conn, "down %d %d %d\n", seed, movingBytes, 20*time.Millisecond); err != nil {
			return err
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		return checkSum(conn, seed)
	},
	"upload": func(conn net.Conn, seed int, _ <-chan struct{}) error {
		sum, _ := sumOf(newStream(seed, movingBytes, 0))
		if _, err := io.WriteString(conn, "up\n"); err != nil {
			return err
		}
		if _, err := io.Copy(struct{ io.Writer }{conn}, newStream(seed, movingBytes, 20*time.Millisecond)); err != nil {
			return err
		}
		if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
			return err
		}
		got, err := io.ReadAll(conn)
		if err == nil && string(got) != sum {
			err = fmt.Errorf("the server has %q, not %q", got, sum)
		}
		return err
	},
	"a client that does not read": func(conn net.Conn, seed int, over <-chan struct{}) error {
		if _, err := fmt.Fprintf(conn, "down %d %d 0\n", seed, movingBytes); err != nil {
			return err
		}
		<-over
		return checkSum(conn, seed)
	},
	"an idle connection": func(conn net.Conn, _ int, over <-chan struct{}) error {
		if _, err := io.WriteString(conn, "echo\n"); err != nil {
			return err
		}
		if err := exchange(conn, "before"); err != nil {
			return err
		}
		<-over
		return exchange(conn, "after")
	},
}

// checkDownload downloads a stream, and pauses after each read.
func checkDownload(conn net.Conn, seed int, serverPause, clientPause time.Duration) error {
	if _, err := fmt.Fprintf(conn, "down %d %d %d\n", seed, movingBytes, serverPause); err != nil {
		return err
	}
	return checkSum(slowReader{conn, clientPause}, seed)
}

// slowReader pauses before each read.
type slowReader struct {
	io.Reader
	pause time.Duration
}

// Read implements io.Reader.
func (r slowReader) Read(b []byte) (int, error) {
	time.Sleep(r.pause)
	return r.Reader.Read(b)
}

// checkSum compares all that r has with a stream.
func checkSum(r io.Reader, seed int) error {
	want, _ := sumOf(newStream(seed, movingBytes, 0))
	got, err := sumOf(r)
	if err == nil && got != want {
		err = errors.New("the bytes are not those of the server")
	}
	return err
}

// traffic is transfers of all kinds.
type traffic struct {
	over           chan struct{} // closed: the last upgrade is over
	clients        sync.WaitGroup
	whole, lost    atomic.Int64
	mu             sync.Mutex
	stalls         []time.Duration // round trips of exchanges
	before         int             // how many of them were before the first upgrade
	failures       []string
	stopExchanging atomic.Bool
}

// startTraffic begins n transfers of each kind at a proxy, and waits until each has a connection.
func startTraffic(t *testing.T, at string, n int) *traffic {
	t.Helper()
	r := &traffic{over: make(chan struct{})}
	seed := 0
	for name, do := range transfers {
		for range n {
			seed++
			seed := seed // each has bytes of its own
			conn, err := net.Dial("tcp4", at)
			require.NoError(t, err)
			r.clients.Go(func() {
				defer conn.Close()
				r.note(fmt.Sprintf("%s %d", name, seed), do(conn, seed, r.over))
			})
		}
	}
	for range 4 { // these measure how long nothing moves
		conn, err := net.Dial("tcp4", at)
		require.NoError(t, err)
		r.clients.Go(func() {
			defer conn.Close()
			_, err := io.WriteString(conn, "echo\n")
			for err == nil && !r.stopExchanging.Load() {
				began := time.Now()
				err = exchange(conn, "now")
				r.mu.Lock()
				r.stalls = append(r.stalls, time.Since(began))
				r.mu.Unlock()
				time.Sleep(time.Millisecond)
			}
			r.note("exchanges", err)
		})
	}
	return r
}

// note counts how a transfer has ended.
func (r *traffic) note(name string, err error) {
	switch {
	case err == nil:
		r.whole.Add(1)
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		r.lost.Add(1)
	default:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.failures = append(r.failures, fmt.Sprintf("%s: %v", name, err))
	}
}

// finish lets the transfers end, and checks that none has got anything wrong.
func (r *traffic) finish(t *testing.T, what string) {
	t.Helper()
	close(r.over)
	r.stopExchanging.Store(true)
	r.clients.Wait()
	assert.Empty(t, r.failures)
	t.Logf("%s: %d connections whole, %d reset; exchanges take %s before the first upgrade, then %s", what,
		r.whole.Load(), r.lost.Load(), describeStalls(r.stalls[:r.before]), describeStalls(r.stalls[r.before:]))
}

// markUpgrade notes that the first upgrade begins.
func (r *traffic) markUpgrade() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.before = len(r.stalls)
}

// describeStalls says how long exchanges took.
func describeStalls(all []time.Duration) string {
	if len(all) == 0 {
		return "no time"
	}
	slices.Sort(all)
	at := func(part float64) time.Duration {
		return all[int(part*float64(len(all)-1))].Round(10 * time.Microsecond)
	}
	return fmt.Sprintf("%v (p50), %v (p99), %v (most)", at(.5), at(.99), at(1))
}

// eachTier runs a test where the kernel enforces windows, and where the relay does.
func eachTier(t *testing.T, test func(t *testing.T, envelope string)) {
	for _, envelope := range []string{"ebpf", "cubic"} {
		t.Run(envelope, func(t *testing.T) {
			if err := bpf.Check(); envelope == "ebpf" && err != nil {
				t.Skip(err)
			}
			test(t, envelope)
		})
	}
}

// TestConnectionsMoveWithEachUpgrade has several proxies take over while bytes move in connections of all kinds. Each
// old process has handed over all when it is killed, but for a client that has not said where it wants to go.
func TestConnectionsMoveWithEachUpgrade(t *testing.T) {
	eachTier(t, func(t *testing.T, envelope string) {
		s := newSuccession(t, envelope, "")
		r := startTraffic(t, s.at, 34)
		time.Sleep(time.Second) // the time of exchanges without an upgrade
		r.markUpgrade()
		for range 5 {
			waiting, err := net.Dial("tcp4", s.socks)
			require.NoError(t, err)
			defer waiting.Close()
			time.Sleep(time.Duration(rand.IntN(300)) * time.Millisecond)
			old := s.newest()
			s.start()
			old.log.has(t, `"stay_in_setup":1`)
			line := old.log.line(t, "connections have moved to the process that has taken over")
			t.Logf("%v moved in %v s, none stood still for longer than %v s", line["moved"], line["took_seconds"],
				line["longest_pause_seconds"])
			old.kill()
		}
		r.finish(t, envelope)
		assert.Zero(t, r.lost.Load(), "a connection was reset")
	})
}

// TestADeathInATakeoverLosesOnlyWhatTheDeadHad kills the old or the new process while connections move. What the other
// has goes on; what the dead one had is reset. Nothing ends in good order before it is whole.
func TestADeathInATakeoverLosesOnlyWhatTheDeadHad(t *testing.T) {
	eachTier(t, func(t *testing.T, envelope string) {
		for try := range 4 {
			s := newSuccession(t, envelope, "")
			r := startTraffic(t, s.at, 40)
			all := int64(40*len(transfers) + 4)
			old, next := s.newest(), s.start()
			next.log.has(t, `"msg":"taken over"`)
			time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
			if try%2 == 0 {
				old.kill()
				moved := next.log.line(t, "the process before this one has ended")["connections_taken_over"].(float64)
				r.finish(t, fmt.Sprintf("%s, the old process is killed once it has handed over %v", envelope, moved))
				assert.GreaterOrEqual(t, r.whole.Load(), int64(moved), "others may have been whole before")
			} else {
				next.kill()
				assert.Eventually(t, func() bool { return old.hasEnded() || strings.Contains(old.log.String(), "says no more") },
					30*time.Second, time.Millisecond)
				moved := lastMoved(t, old)
				r.finish(t, fmt.Sprintf("%s, the new process is killed once it has %v", envelope, moved))
				assert.LessOrEqual(t, r.lost.Load(), int64(moved), "the old process goes on with all others")
			}
			assert.Equal(t, all, r.whole.Load()+r.lost.Load())
		}
	})
}

// TestContainersTakeOver has each proxy be process 1 of a PID namespace. The old one does not end before its
// supervisor asks, because that would start it again.
func TestContainersTakeOver(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a PID namespace needs root")
	}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	s := (&succession{t: t, contained: true, at: vacantPort(t), socks: vacantPort(t)}).open("cubic", "", ln)
	r := startTraffic(t, s.at, 5)
	for range 3 {
		old := s.newest()
		next := s.start()
		old.log.has(t, "process 1 stays until a signal")
		next.log.has(t, "the process before this one has ended")
		require.True(t, next.watchesProcess(), "a number of another namespace leads to no process")
		require.False(t, old.hasEnded())
		require.NoError(t, old.cmd.Process.Signal(syscall.SIGTERM))
		<-old.end
		require.True(t, old.cmd.ProcessState.Success(), &old.log)
	}
	r.finish(t, "containers")
	assert.Zero(t, r.lost.Load(), "a connection was reset")
}

// watchesProcess reports whether the proxy would notice the death of another process: it has a pidfd.
func (g *generation) watchesProcess() bool {
	open := fmt.Sprintf("/proc/%d/fd/", g.cmd.Process.Pid)
	files, _ := os.ReadDir(open)
	return slices.ContainsFunc(files, func(f os.DirEntry) bool {
		to, _ := os.Readlink(open + f.Name())
		return to == "anon_inode:[pidfd]" || strings.HasPrefix(to, "pidfd:")
	})
}

// Phases of TestUpgradesOverALink.
const (
	settling = iota
	beforeUpgrades
	duringUpgrades
	afterUpgrades
	phases
)

// timedReader notes the longest time between two reads in each phase.
type timedReader struct {
	io.Reader
	phase   *atomic.Int32
	last    time.Time
	longest [phases]time.Duration
}

// Read implements io.Reader.
func (r *timedReader) Read(b []byte) (int, error) {
	n, err := r.Reader.Read(b)
	now, longest := time.Now(), &r.longest[r.phase.Load()]
	if !r.last.IsZero() && n > 0 {
		*longest = max(*longest, now.Sub(r.last))
	}
	r.last = now
	return n, err
}

// TestUpgradesOverALink has 32 downloads of four hosts share a link of 50 Mbit/s and 40 ms over ten upgrades. It
// prints how long a download stands still (2 RTT + 50 ms are 130 ms), and the queueing within 1 s of each upgrade.
func TestUpgradesOverALink(t *testing.T) {
	const upgrades, downloads, hosts, size = 10, 32, 4, 3 << 20
	need.OverLink(t)
	need.TUN(t)
	eachTier(t, func(t *testing.T, envelope string) {
		lab, err := netlab.NewCellular(netlab.CellularConfig{
			Hosts: hosts,
			Down:  sim.LinkConfig{Rate: 50e6, Delay: 20 * time.Millisecond, QueueBytes: 2e6},
			Up:    sim.LinkConfig{Delay: 20 * time.Millisecond},
		})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, lab.Close()) })
		server, err := lab.Server.Listen("tcp4", netip.AddrPortFrom(lab.ServerAddr.V4, 8080).String())
		require.NoError(t, err)
		edge := func(port uint16) string { return netip.AddrPortFrom(lab.EdgeNear.V4, port).String() }
		s := (&succession{t: t, node: lab.Edge, at: edge(7000), socks: edge(7001)}).open(envelope, "", server)
		lab.Path.Start()

		var phase atomic.Int32
		var clients sync.WaitGroup
		readers := make([]*timedReader, downloads)
		for i := range readers {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: lab.Hosts[i%hosts].V4.AsSlice()}}
			conn, err := lab.Client.DialWith(t.Context(), &d, "tcp4", s.at)
			require.NoError(t, err)
			readers[i] = &timedReader{Reader: conn, phase: &phase}
			clients.Go(func() {
				defer conn.Close()
				_, err := fmt.Fprintf(conn, "down %d %d 0\n", i, size)
				want, _ := sumOf(newStream(i, size, 0))
				got, readErr := sumOf(readers[i])
				assert.NoError(t, errors.Join(err, readErr))
				assert.Equal(t, want, got, "the bytes are those of the server")
			})
		}
		time.Sleep(1500 * time.Millisecond)
		phase.Store(beforeUpgrades)
		time.Sleep(3 * time.Second)
		queueing := func(from, to time.Duration) time.Duration {
			return lab.Path.Report(from, to).Down.DataQueueing.Centiles[95]
		}
		before := queueing(1500*time.Millisecond, lab.Path.Elapsed())
		phase.Store(duringUpgrades)
		var moments []time.Duration
		for range upgrades {
			old, began := s.newest(), time.Now()
			s.start().log.has(t, `"msg":"taken over"`)
			moments = append(moments, lab.Path.Elapsed())
			old.log.has(t, "connections have moved")
			time.Sleep(time.Until(began.Add(1100 * time.Millisecond)))
		}
		rest := lab.Path.Elapsed()
		phase.Store(afterUpgrades)
		clients.Wait()
		var p95, longestBefore, longest []time.Duration
		for _, at := range moments {
			p95 = append(p95, queueing(at, at+time.Second))
		}
		for _, r := range readers {
			longestBefore = append(longestBefore, r.longest[beforeUpgrades])
			longest = append(longest, r.longest[duringUpgrades])
		}
		down := lab.Path.Report(1500*time.Millisecond, rest).Down
		t.Logf("%s: longest stall of each download %s during upgrades (in 3 s before %s); queueing p95 %v before, then %s; "+
			"%.0f %% of the link used; lateness p99 %v", envelope, describeStalls(longest), describeStalls(longestBefore),
			before.Round(time.Millisecond/10), describeStalls(p95), 100*down.Utilisation, down.Lateness.Centiles[99])
	})
}

// lastMoved returns how many connections a process said last that it has handed over.
func lastMoved(t *testing.T, g *generation) (moved float64) {
	t.Helper()
	for text := range strings.Lines(g.log.String()) {
		var line struct {
			Moved *float64 `json:"moved"`
		}
		require.NoError(t, json.Unmarshal([]byte(text), &line), text)
		if line.Moved != nil {
			moved = *line.Moved
		}
	}
	return moved
}

// TestTenThousandIdleConnectionsMove says how long that takes. With fewer descriptors it moves fewer.
func TestTenThousandIdleConnectionsMove(t *testing.T) {
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	n := int(min(10_000, limit.Max*3/10))
	s := newSuccession(t, "auto", "")
	var conns []net.Conn
	for range n {
		conn, err := net.Dial("tcp4", s.at)
		require.NoError(t, err)
		defer conn.Close()
		conns = append(conns, conn)
		_, err = io.WriteString(conn, "echo\n")
		require.NoError(t, err)
		require.NoError(t, exchange(conn, "before"))
	}
	old := s.newest()
	s.start()
	<-old.end
	lines := bytes.Split([]byte(old.log.String()), []byte("\n"))
	i := slices.IndexFunc(lines, func(l []byte) bool { return bytes.Contains(l, []byte("connections have moved")) })
	require.GreaterOrEqual(t, i, 0)
	assert.Contains(t, string(lines[i]), fmt.Sprintf(`"moved":%d,`, n))
	t.Log(strings.TrimSpace(string(lines[i])))
	for i, conn := range conns {
		require.NoError(t, exchange(conn, fmt.Sprintf("after %d", i)))
	}
}

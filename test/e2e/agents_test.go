//go:build linux

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// agentSources is the variable that names the directory with the sources of the authors'
// agents: generic-cong-avoid and bbr, as they are published. Without it they are looked for
// beside the repository.
const agentSources = "PENSTOCK_CCP_AGENTS"

// buildLimit is how long cargo may take for one of them.
const buildLimit = 4 * time.Minute

// authors are the agents there, by the crate that has them.
var authors = []struct {
	name, crate string
	flags       []string
}{
	{"reno", "generic-cong-avoid", []string{"--features", "bin"}},
	{"cubic", "generic-cong-avoid", []string{"--features", "bin"}},
	{"bbr", "bbr", nil},
}

// crates are built once, by their names.
var crates sync.Map

// authorsAgent returns the program of an agent, built from the sources as they are.
func authorsAgent(t *testing.T, name string) string {
	t.Helper()
	needsPrivilege(t) // two tiers are enough
	sources := os.Getenv(agentSources)
	asked := sources != ""
	if !asked {
		sources = "../../../shared/ccp-agents"
	}
	if _, err := os.Stat(sources); err != nil && !asked {
		t.Skipf("%s names no directory with the sources of the authors' agents: %v", agentSources, err)
	}
	if _, err := exec.LookPath("cargo"); err != nil {
		t.Skipf("needs cargo: %v", err)
	}
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	for _, a := range authors {
		if a.name != name {
			continue
		}
		dir := filepath.Join(cache, "penstock-ccp-agents", a.crate)
		once, _ := crates.LoadOrStore(a.crate, sync.OnceValues(func() ([]byte, error) {
			if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // run by another user
				return nil, err
			}
			if err := os.CopyFS(dir, os.DirFS(filepath.Join(sources, a.crate))); err != nil && !os.IsExist(err) {
				return nil, err
			}
			ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
			defer cancel()
			cmd := exec.CommandContext(ctx, "cargo", append([]string{"build", "--release"}, a.flags...)...)
			cmd.WaitDelay = time.Second
			cmd.Dir = dir
			return cmd.CombinedOutput()
		}))
		out, err := once.(func() ([]byte, error))()
		if err != nil && !asked { // it needs the registry of crates, which may be out of reach
			t.Skipf("cargo does not build %s: %v: %s", a.crate, err, out)
		}
		require.NoError(t, err, "%s", out)
		return filepath.Join(dir, "target", "release", name)
	}
	require.Fail(t, "no such agent", name)
	return ""
}

// steering is an agent of the authors, which sees a /tmp of its own: its socket is a
// path there that cannot be changed.
type steering struct {
	s         *scene
	name, dir string
	program   string
	cmd       *exec.Cmd
}

// agentOf makes the place for an agent; start starts it.
func (s *scene) agentOf(name string) *steering {
	s.t.Helper()
	program := authorsAgent(s.t, name)
	dir, err := os.MkdirTemp("/var/tmp", "penstock-agent-")
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(s.t, os.Chmod(dir, 0o777)) //nolint:gosec // both processes make sockets there
	return &steering{s: s, name: name, dir: dir, program: program}
}

// yaml is the configuration that has the agent decide.
func (a *steering) yaml() string {
	return fmt.Sprintf("agents: [{name: %s, socket: %s/ccp/portus, reply: %s/penstock}]\n"+
		"defaults: {algorithm: \"ccp:%s,fallback=cubic\"}\n", a.name, a.dir, a.dir, a.name)
}

func (a *steering) start() {
	a.s.t.Helper()
	a.cmd = exec.Command("sh", "-c",
		`umask 0; mount --make-rprivate / && mount --bind "$0" /tmp && exec "$1"`, a.dir, a.program)
	a.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	require.NoError(a.s.t, a.cmd.Start())
	a.s.t.Cleanup(a.kill)
}

// kill ends the agent as a crash does.
func (a *steering) kill() {
	if a.cmd.ProcessState == nil {
		_ = a.cmd.Process.Kill()
		_ = a.cmd.Wait()
	}
}

// metric is one of the agent's.
func (a *steering) metric(name string, labels ...string) float64 {
	return a.s.proxy.metric("penstock_agent_"+name, append(labels, "agent="+strconv.Quote(a.name))...)
}

// decides waits until the agent decides for n windows or more, or none.
func (a *steering) decides(n float64) {
	a.s.t.Helper()
	require.Eventually(a.s.t, func() bool {
		got := a.metric("flows", `decides="agent"`)
		return n == 0 && got == 0 || n > 0 && got >= n
	}, patience, 5*time.Millisecond, "the agent is not to decide for %v windows", n)
}

// steered opens the network with a proxy whose flows an agent decides for.
func steered(t *testing.T, name, extra string) (w way, s *scene, a *steering) {
	t.Helper()
	w = present.way()
	s = newScene(t)
	a = s.agentOf(name)
	a.start()
	s.start(w.yaml(a.yaml() + extra))
	s.capture(w)
	require.Eventually(t, func() bool { return a.metric("up") == 1 }, patience, 10*time.Millisecond)
	return w, s, a
}

func TestUnmodifiedAgentsDriveConnections(t *testing.T) {
	for _, author := range authors {
		for flows, size := range map[int]int64{1: 4 * megabyte, 16: megabyte, 64: megabyte / 4} {
			t.Run(fmt.Sprintf("%s, %d flows", author.name, flows), func(t *testing.T) {
				w, _, a := steered(t, author.name, "")
				wait := w.manyAtOnce(a.s, flows, size, func(conn net.Conn) { // echo
					_, _ = io.Copy(conn, conn)
				}, func(i uint64, conn *net.TCPConn) {
					go func() {
						_, _ = io.Copy(struct{ io.Writer }{conn}, random(i, size))
						_ = conn.CloseWrite()
					}()
				})
				wait()
				assert.Positive(t, a.metric("decisions_total"))
				assert.Positive(t, a.metric("reports_total"))
				assert.EqualValues(t, 1, a.metric("connects_total"), "the agent has lived through it")
				assert.Zero(t, a.metric("fallbacks_total", `reason="gone"`))
				assert.Zero(t, a.metric("program_aborts_total"))
				assert.NotContains(t, a.s.proxy.said.String(), "agent lost")
			})
		}
	}
}

// underWay is a download that goes on until the test has had enough of it.
type underWay struct {
	t    *testing.T
	mu   sync.Mutex
	read int64
	end  chan struct{}
	done chan struct{}
}

// downloading begins one; all of its bytes are compared with those that were sent.
func downloading(t *testing.T, client, server *net.TCPConn) *underWay {
	d := &underWay{t: t, end: make(chan struct{}), done: make(chan struct{})}
	var sent int64
	writer := make(chan struct{})
	go func() {
		defer close(writer)
		source, buf := random(1, 1<<40), make([]byte, 32<<10)
		for {
			select {
			case <-d.end:
				_ = server.CloseWrite()
				return
			default:
			}
			n, _ := source.Read(buf)
			n, err := server.Write(buf[:n])
			if sent += int64(n); !assert.NoError(t, err) {
				return
			}
		}
	}()
	go func() {
		defer close(d.done)
		expected, buf, want := random(1, 1<<40), make([]byte, 32<<10), make([]byte, 32<<10)
		for {
			n, err := client.Read(buf)
			_, _ = io.ReadFull(expected, want[:n])
			if !assert.Equal(t, want[:n], buf[:n], "bytes have changed") {
				return
			}
			d.mu.Lock()
			d.read += int64(n)
			d.mu.Unlock()
			if err != nil {
				<-writer
				assert.ErrorIs(t, err, io.EOF)
				assert.Equal(t, sent, d.read, "bytes are missing")
				return
			}
		}
	}()
	return d
}

// progress waits for another so many bytes.
func (d *underWay) progress(bytes int64) {
	d.t.Helper()
	at := func() int64 { d.mu.Lock(); defer d.mu.Unlock(); return d.read }
	from := at()
	require.Eventually(d.t, func() bool { return at() >= from+bytes }, patience, time.Millisecond)
}

func (d *underWay) finish() {
	d.t.Helper()
	close(d.end)
	select {
	case <-d.done:
	case <-time.After(patience):
		require.Fail(d.t, "the download does not end")
	}
}

func TestAnAgentsFaultsCostNoByte(t *testing.T) {
	w := present.way()
	s := newScene(t)
	s.shapeLinkTo(8 * shapedRate)
	a := s.agentOf("reno")
	a.start()
	s.start(w.yaml(a.yaml()))
	s.capture(w)
	client, server := w.pair(s)
	d := downloading(t, client, server)
	a.decides(1)
	d.progress(2 * megabyte)

	a.kill()
	a.decides(0)
	d.progress(2 * megabyte)
	assert.Positive(t, a.metric("fallbacks_total", `reason="gone"`))
	a.start()
	a.decides(1)
	d.progress(2 * megabyte)

	require.NoError(t, a.cmd.Process.Signal(syscall.SIGSTOP))
	a.decides(0)
	d.progress(2 * megabyte)
	assert.Positive(t, a.metric("fallbacks_total", `reason="stalled"`))
	require.NoError(t, a.cmd.Process.Signal(syscall.SIGCONT))
	a.decides(1)
	d.progress(2 * megabyte)

	second := &steering{s: s, name: a.name, dir: a.dir, program: a.program}
	second.start() // takes the path; the first is still the one that is talked to
	d.progress(2 * megabyte)
	a.kill()
	require.Eventually(t, func() bool { return a.metric("connects_total") == 3 }, patience, 10*time.Millisecond)
	a.decides(1)
	d.progress(2 * megabyte)
	d.finish()
}

func TestARuleMovesRunningFlowsToAnAgentAndBack(t *testing.T) {
	w := present.way()
	s := newScene(t)
	s.shapeLinkTo(8 * shapedRate)
	a := s.agentOf("cubic")
	a.start()
	agents, _, _ := strings.Cut(a.yaml(), "defaults:")
	builtIn := w.yaml(agents + "defaults: {algorithm: copa}\n")
	path := s.write(present.configure(builtIn))
	s.proxy = s.launch(append(append([]string{}, present.command...), executable, "run", "--config", path)...)
	s.capture(w)
	client, server := w.pair(s)
	d := downloading(t, client, server)
	d.progress(2 * megabyte)
	assert.Zero(t, a.metric("flows"))
	for _, config := range []string{w.yaml(a.yaml()), builtIn} {
		require.NoError(t, os.WriteFile(path, []byte(present.configure(config)), 0o640)) //nolint:gosec // by its group
		require.NoError(t, s.proxy.cmd.Process.Signal(syscall.SIGHUP))
		if config == builtIn {
			a.decides(0)
		} else {
			a.decides(1)
		}
		d.progress(2 * megabyte)
	}
	d.finish()
}

//go:build linux

package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// agentSources is the variable that names the directory with the sources of the authors'
// agents: generic-cong-avoid and bbr, as they are published. Without it they are looked for
// beside the repository.
const agentSources = "PENSTOCK_CCP_AGENTS"

// buildLimit is how long cargo may take for one of them.
const buildLimit = 10 * time.Minute

// authors are the agents there, by the crate that has them.
var authors = []struct {
	name, crate string
	flags       []string
}{
	{"reno", "generic-cong-avoid", []string{"--features", "bin"}},
	{"cubic", "generic-cong-avoid", []string{"--features", "bin"}},
	{"bbr", "bbr", nil},
}

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
	for _, a := range authors {
		if a.name == name {
			return cargo(t, a.crate, name, a.flags, func(dir string) error {
				if err := os.CopyFS(dir, os.DirFS(filepath.Join(sources, a.crate))); !os.IsExist(err) {
					return err
				}
				return nil
			})
		}
	}
	require.Fail(t, "no such agent", name)
	return ""
}

// portus are the versions of the library that agents are built on, by their last release.
var portus = []string{"0.5", "0.6", "0.7", "0.8", "0.9"}

// portusAgent returns a small agent of ours that is built on a version of portus. That takes
// minutes, so it is done where the authors' agents are asked for.
func portusAgent(t *testing.T, version string) string {
	t.Helper()
	needsPrivilege(t) // two tiers are enough
	if os.Getenv(agentSources) == "" {
		t.Skipf("cargo builds portus %s only where %s is set", version, agentSources)
	}
	return cargo(t, "portus-"+version, "halve", nil, func(dir string) error {
		manifest := fmt.Sprintf("[package]\nname = \"halve\"\nversion = \"0.0.0\"\nedition = \"2018\"\n"+
			"[dependencies]\nportus = \"~%s.0\"\n", version)
		script := "fn main() {}"
		if version == "0.5" { // which takes a logger
			script = `fn main() { println!("cargo:rustc-cfg=logger"); }`
		}
		text, err := os.ReadFile("testdata/portus/main.rs")
		if err != nil {
			return err
		}
		return errors.Join(
			os.MkdirAll(filepath.Join(dir, "src"), 0o755), //nolint:gosec // run by another user
			os.WriteFile(filepath.Join(dir, "Cargo.toml"), []byte(manifest), 0o644),
			os.WriteFile(filepath.Join(dir, "build.rs"), []byte(script), 0o644),
			os.WriteFile(filepath.Join(dir, "src", "main.rs"), text, 0o644),
		)
	})
}

// crates are built once, by their names.
var crates sync.Map

// cargo returns a program of a crate, whose sources prepare puts into a directory that
// stays from run to run.
func cargo(t *testing.T, crate, program string, flags []string, prepare func(dir string) error) string {
	t.Helper()
	need.Programs(t, "cargo")
	cache, err := os.UserCacheDir()
	require.NoError(t, err)
	dir := filepath.Join(cache, "penstock-ccp-agents", crate)
	once, _ := crates.LoadOrStore(crate, sync.OnceValues(func() ([]byte, error) {
		if err := errors.Join(os.MkdirAll(dir, 0o755), prepare(dir)); err != nil { //nolint:gosec // run by another user
			return nil, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
		defer cancel()
		cmd := exec.CommandContext(ctx, "cargo", append([]string{"build", "--release"}, flags...)...)
		cmd.WaitDelay = time.Second
		cmd.Dir = dir
		return cmd.CombinedOutput()
	}))
	out, err := once.(func() ([]byte, error))()
	if err != nil && os.Getenv(agentSources) == "" { // it needs the registry of crates, which may be out of reach
		t.Skipf("cargo does not build %s: %v: %s", crate, err, out)
	}
	require.NoError(t, err, "%s", out)
	return filepath.Join(dir, "target", "release", program)
}

// steering is an agent, a process of its own.
type steering struct {
	s         *scene
	name, dir string
	socket    string
	reply     string   // empty: penstock, in dir
	args      []string // of what starts it
	cmd       *netlab.Cmd
}

// meetingPlace makes a directory that an agent and the proxy reach.
func (s *scene) meetingPlace() string {
	s.t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "penstock-agent-")
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(s.t, os.Chmod(dir, 0o777)) //nolint:gosec // both processes make sockets there
	return dir
}

// agentOf makes the place for an agent of the authors, which sees a /tmp of its own: its
// socket is a path there that cannot be changed. start starts it.
func (s *scene) agentOf(name string) *steering {
	s.t.Helper()
	return s.inItsOwnTmp(name, authorsAgent(s.t, name))
}

func (s *scene) inItsOwnTmp(name, program string) *steering {
	s.t.Helper()
	dir := s.meetingPlace()
	return &steering{s: s, name: name, dir: dir, socket: dir + "/ccp/portus", args: []string{
		"sh", "-c", `umask 0; mount --make-rprivate / && mount --bind "$0" /tmp && exec "$1"`, dir, program,
	}}
}

// ownReno is our own Reno, built once.
var ownReno = sync.OnceValues(func() (string, error) {
	program := filepath.Join(place, "reno")
	out, err := exec.Command("go", "build", "-o", program,
		"github.com/penstock-net/penstock/agents/go/reno").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build the agent: %w: %s", err, out)
	}
	return program, nil
})

// ownAgent makes the place for our own Reno.
func (s *scene) ownAgent() *steering {
	s.t.Helper()
	needsPrivilege(s.t) // two tiers are enough
	program, err := ownReno()
	require.NoError(s.t, err)
	dir := s.meetingPlace()
	socket := filepath.Join(dir, "agent")
	return &steering{s: s, name: "reno", dir: dir, socket: socket, args: []string{
		"sh", "-c", `umask 0; exec "$0" "$1"`, program, socket,
	}}
}

// declared is the agent as a configuration names it.
func (a *steering) declared() string {
	return fmt.Sprintf("agents: [{name: %s, socket: %s, reply: %s}]\n",
		a.name, a.socket, cmp.Or(a.reply, a.dir+"/penstock"))
}

// yaml is the configuration that has the agent decide, for each connection by itself.
func (a *steering) yaml() string {
	return a.declared() + fmt.Sprintf("defaults: {algorithm: \"ccp:%s,fallback=cubic\", group: flow}\n", a.name)
}

func (a *steering) start() {
	a.s.t.Helper()
	a.cmd = a.s.Edge.Command(context.Background(), a.args[0], a.args[1:]...)
	a.cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWNS
	require.NoError(a.s.t, a.cmd.Start())
	a.s.t.Cleanup(a.kill)
}

// awaitsReply waits until the proxy's path is there that the configuration names, a newer
// one than before.
func (a *steering) awaitsReply(before os.FileInfo) (there os.FileInfo) {
	a.s.t.Helper()
	if a.reply == "" {
		return nil
	}
	require.Eventually(a.s.t, func() bool {
		var err error
		there, err = os.Stat(a.reply)
		return err == nil && (before == nil || !there.ModTime().Equal(before.ModTime()))
	}, patience, time.Millisecond)
	return there
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

// TestAgentsOnEachPortusDriveConnections is of what other agents are built on. Version 0.5
// has two paths, and wants that of the proxy to be there as it starts.
func TestAgentsOnEachPortusDriveConnections(t *testing.T) {
	for _, version := range portus {
		t.Run(version, func(t *testing.T) {
			w := present.way()
			program := portusAgent(t, version)
			s := newScene(t)
			s.shapeLinkTo(8 * shapedRate)
			a := s.inItsOwnTmp("halve", program)
			if version == "0.5" {
				both := filepath.Join(a.dir, "ccp", "0")
				require.NoError(t, os.MkdirAll(both, 0o777)) //nolint:gosec // as above
				a.socket, a.reply = both+"/in", both+"/out"
			}
			s.start(w.yaml(a.yaml()))
			s.capture(w)
			there := a.awaitsReply(nil)
			a.start()
			downloads := w.load(s, 2)
			a.decides(2)
			downloads.progress(megabyte)
			a.kill()
			a.decides(0)
			a.awaitsReply(there)
			a.start()
			a.decides(2)
			downloads.progress(megabyte)
			s.shapeLinkTo(wide)
			downloads.finish()
			assert.Positive(t, a.metric("decisions_total"))
			assert.Zero(t, a.metric("program_aborts_total"))
		})
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

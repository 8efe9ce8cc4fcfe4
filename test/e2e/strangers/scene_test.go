//go:build linux

// Package strangers has programs of others, as Debian ships them, talk to each
// other through the shipped program, which drops its privileges as it does for
// users:
//
//	client ──── cell0 ──── edge ──── wan0 ──── server
//	10.77.1.2          penstock run          10.77.2.2
package strangers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// patience bounds every wait; nothing that works needs a tenth of it.
const patience = time.Minute

func TestMain(m *testing.M) { labtest.Main(m) }

// scene is a network with the proxy at its edge, and a directory for the
// programs' files, which all users may read.
type scene struct {
	*netlab.Routed
	t     *testing.T
	proxy *edge.Proxy
	dir   string
}

// find skips the test where a program is missing, and returns the paths.
func find(t *testing.T, programs ...string) map[string]string {
	t.Helper()
	paths := map[string]string{}
	var missing []string
	for _, p := range programs {
		path, err := exec.LookPath(p)
		if err != nil { // servers are not in an ordinary user's PATH, and PostgreSQL's in nobody's
			found, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + p)
			if found = append(found, "/usr/sbin/"+p); len(found) > 1 {
				found = found[len(found)-2:]
			}
			path, err = exec.LookPath(found[0])
		}
		if paths[p] = path; err != nil {
			missing = append(missing, p)
		}
	}
	if missing != nil {
		t.Skip("not installed: ", strings.Join(missing, ", "))
	}
	if paths["wireguard-go"] != "" {
		need.WireGuardGo(t)
	}
	return paths
}

// open builds the network with a proxy.
func open(t *testing.T, o edge.Options) *scene {
	t.Helper()
	s := lay(t)
	s.start(o)
	return s
}

// lay builds the network.
func lay(t *testing.T) *scene {
	t.Helper()
	labtest.Need(t)
	need.Users(t)
	lab, err := netlab.NewRouted()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lab.Close()) })
	return newScene(t, lab)
}

// newScene gives a network a directory.
func newScene(t *testing.T, lab *netlab.Routed) *scene {
	t.Helper()
	dir, err := os.MkdirTemp("", "penstock-strangers-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755)) //nolint:gosec // servers read it as users of their own
	return &scene{Routed: lab, t: t, dir: dir}
}

// start starts a proxy, which ends with the test at the latest.
func (s *scene) start(o edge.Options) {
	s.t.Helper()
	o.Executable, o.Server = labtest.Penstock(s.t), s.ServerAddr.V4
	p, err := edge.Start(s.t.Context(), s.Edge, o)
	require.NoError(s.t, err)
	s.proxy = p
	s.t.Cleanup(func() { require.NoError(s.t, p.Stop()) })
}

// captured is open with connections to these ports of the server captured.
func captured(t *testing.T, ports ...uint16) *scene {
	t.Helper()
	return open(t, edge.Options{Ports: ports})
}

// write puts a file into the scene's directory and returns its path.
func (s *scene) write(name, content string) string {
	s.t.Helper()
	path := filepath.Join(s.dir, name)
	require.NoError(s.t, os.MkdirAll(filepath.Dir(path), 0o755)) //nolint:gosec // as above
	require.NoError(s.t, os.WriteFile(path, []byte(content), 0o644))
	return path
}

// file is write for random bytes.
func (s *scene) file(name string, seed byte, size int64) string {
	s.t.Helper()
	content, err := io.ReadAll(io.LimitReader(rand.NewChaCha8([32]byte{seed}), size))
	require.NoError(s.t, err)
	return s.write(name, string(content))
}

// serve starts a server inside a node and waits until it listens at the port; 0:
// at none. It ends with the test.
func (s *scene) serve(at *netlab.Node, port uint16, program string, args ...string) {
	s.t.Helper()
	out, ended := &need.Output{}, make(chan struct{})
	cmd := at.Command(context.WithoutCancel(s.t.Context()), program, args...)
	cmd.Stdout, cmd.Stderr, cmd.Dir = out, out, s.dir
	cmd.SysProcAttr.Setpgid = true // it may start others, which end with it
	cmd.WaitDelay = time.Second
	require.NoError(s.t, cmd.Start())
	go func() {
		_ = cmd.Wait() // its words say how it ended
		close(ended)
	}()
	s.t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
		if s.t.Failed() {
			s.t.Logf("%s said:\n%s", program, out)
		}
	})
	require.Eventually(s.t, func() bool {
		select {
		case <-ended:
			s.t.Fatalf("%s ended at once:\n%s", program, out)
		default:
		}
		return port == 0 || listens(at, port)
	}, patience, 10*time.Millisecond, "%s does not listen", program)
}

// listens tells whether a node has a socket that listens at the port. It does not
// connect, as some servers serve one client only.
func listens(at *netlab.Node, port uint16) (found bool) {
	const stateListen = "0A" // TCP_LISTEN in /proc/net/tcp
	_ = at.Do(func() error {
		for _, table := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
			sockets, err := os.ReadFile(table)
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(sockets)) {
				f := strings.Fields(line)
				found = found || f[3] == stateListen && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port))
			}
		}
		return nil
	})
	return found
}

// run runs a program at the client and returns what it printed.
func (s *scene) run(stdin io.Reader, program string, args ...string) string {
	s.t.Helper()
	return s.runAt(s.Client, stdin, program, args...)
}

// runAt is run at another node.
func (s *scene) runAt(node *netlab.Node, stdin io.Reader, program string, args ...string) string {
	s.t.Helper()
	out, err := s.attempt(node, stdin, program, args...)
	require.NoError(s.t, err)
	return out
}

// attempt runs a program, which may fail.
func (s *scene) attempt(node *netlab.Node, stdin io.Reader, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	var out, diag bytes.Buffer
	cmd := node.Command(ctx, program, args...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Dir = stdin, &out, &diag, s.dir
	cmd.WaitDelay = time.Second
	cmd.Env = append(os.Environ(), "HOME="+s.dir, "LC_ALL=C")
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %q: %w\n%s\n%s", program, args, err, &out, &diag)
	}
	return out.String(), nil
}

// same checks that two files are the same.
func (s *scene) same(want, got string) {
	s.t.Helper()
	assert.Equal(s.t, sumOf(s.t, want), sumOf(s.t, got), got)
}

func sumOf(t *testing.T, path string) string {
	t.Helper()
	content, err := os.ReadFile(path)
	require.NoError(t, err)
	return hash(content)
}

func hash(content []byte) string {
	sum := sha256.Sum256(content)
	return hex.EncodeToString(sum[:])
}

// carried checks that so many connections, or more, have come through the proxy.
func (s *scene) carried(least float64) {
	s.t.Helper()
	assert.GreaterOrEqual(s.t, s.flows(), least, "connections through the proxy")
}

// flows returns how many connections have come through the proxy.
func (s *scene) flows() (total float64) {
	s.t.Helper()
	for line := range strings.Lines(s.metrics()) {
		if series, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok &&
			strings.HasPrefix(series, "penstock_flows_total") {
			n, err := strconv.ParseFloat(value, 64)
			require.NoError(s.t, err)
			total += n
		}
	}
	return total
}

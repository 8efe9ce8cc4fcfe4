// Package labtest is what the tests have in common that build labs and run the
// proxy in them.
package labtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

var (
	none  error  // why there can be no lab
	place string // for the programs
)

// Main runs a package's tests where labs can be built: as root, or inside a user
// namespace. Where neither is to be had, the tests that need one skip. No goroutine
// may be left behind.
func Main(m *testing.M) {
	code, ran, err := netlab.Enter()
	if ran {
		os.Exit(code)
	}
	none = err
	if place, err = os.MkdirTemp("", "penstock-test-"); err != nil {
		panic(err)
	}
	code = need.Run(m)
	_ = os.RemoveAll(place) // what is left there does no harm
	os.Exit(code)
}

// Need skips the test where there can be no lab, and else marks it as one over an emulated link.
func Need(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs in real time, left out with -short")
	}
	need.OverLink(t)
	if none != nil {
		need.Namespaces(t, none)
	}
	l := netlab.New()
	_, err := l.Node("probe")
	require.NoError(t, errors.Join(err, l.Close()))
	need.TUN(t)
}

// builds are the programs as they are shipped, each built once for the package.
var builds = map[string]func() (string, error){
	"penstock":     sync.OnceValues(func() (string, error) { return build(place, "penstock") }),
	"penstock-lab": sync.OnceValues(func() (string, error) { return build(place, "penstock-lab") }),
}

// Penstock returns the program that is the proxy.
func Penstock(t *testing.T) string { return program(t, "penstock") }

// Laboratory returns the program penstock-lab.
func Laboratory(t *testing.T) string { return program(t, "penstock-lab") }

// program returns one of builds.
func program(t *testing.T, name string) string {
	t.Helper()
	for _, tool := range []string{"go", "make"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("%s is missing, which builds the proxy", tool)
		}
	}
	path, err := builds[name]()
	require.NoError(t, err)
	return path
}

// StartAgent starts a congestion control agent, which has nothing to say and ends with the
// test, and waits until its socket is there.
func StartAgent(t testing.TB, cmd *exec.Cmd, socket string) {
	t.Helper()
	said := &need.Output{}
	cmd.Stdout, cmd.Stderr = said, said
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		assert.Empty(t, said.String())
	})
	require.Eventually(t, func() bool {
		info, err := os.Stat(socket)
		return err == nil && info.Mode().Type() == os.ModeSocket
	}, 20*time.Second, 5*time.Millisecond)
}

// Agents has the programs of agents that recipes start be found, which it builds.
func Agents(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	_, err := build(dir, "agents")
	require.NoError(t, err)
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
}

// Build builds the program as it is shipped, into a directory.
func Build(dir string) (path string, err error) { return build(dir, "penstock") }

// build makes a target, and returns the path of the program that has its name.
func build(dir, target string) (path string, err error) {
	root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find the module of the program: %w", err)
	}
	build := exec.Command("make", "-C", strings.TrimSpace(string(root)), target, "BIN="+dir)
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", target, err, out)
	}
	return filepath.Join(dir, target), nil
}

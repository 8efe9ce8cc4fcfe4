// Package labtest is what the tests have in common that build labs and run the
// proxy in them.
package labtest

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/penstock-net/penstock/internal/netlab"
)

var (
	none  error  // why there can be no lab
	place string // for the program
	built sync.Once
	exe   string
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
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(place) // what is left there harms nobody
		os.Exit(code)
	}))
}

// Need skips the test where there can be no lab.
func Need(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs in real time, left out with -short")
	}
	if none != nil {
		t.Skip(none)
	}
	l := netlab.New()
	_, err := l.Node("probe")
	require.NoError(t, errors.Join(err, l.Close()))
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skip(err)
	}
}

// Penstock is the program under test, built once for the package.
func Penstock(t *testing.T) string {
	t.Helper()
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("the go command is missing, which builds the proxy")
	}
	built.Do(func() {
		path := filepath.Join(place, "penstock")
		out, err := exec.Command(goTool, "build", "-o", path, "github.com/penstock-net/penstock/cmd/penstock").CombinedOutput()
		require.NoError(t, err, string(out))
		exe = path
	})
	require.NotEmpty(t, exe, "it could not be built")
	return exe
}

package stage

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

// TestMain runs the tests where labs can be built: as root, or inside a user
// namespace. Where neither is to be had, the tests that need one skip.
func TestMain(m *testing.M) {
	code, ran, err := netlab.Enter()
	if ran {
		os.Exit(code)
	}
	noLab = err
	if place, err = os.MkdirTemp("", "penstock-stage-"); err != nil {
		panic(err)
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		_ = os.RemoveAll(place) // what is left there harms nobody
		os.Exit(code)
	}))
}

var noLab error

func needLab(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("runs in real time, left out with -short")
	}
	if noLab != nil {
		t.Skip(noLab)
	}
	l := netlab.New()
	_, err := l.Node("probe")
	require.NoError(t, errors.Join(err, l.Close()))
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		t.Skip(err)
	}
}

// penstock is the program under test, built once.
func penstock(t *testing.T) Env {
	t.Helper()
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("the go command is missing, which builds the proxy")
	}
	built.Do(func() {
		exe := filepath.Join(place, "penstock")
		out, err := exec.Command(goTool, "build", "-o", exe, "..").CombinedOutput()
		require.NoError(t, err, string(out))
		env.Executable = exe
	})
	require.NotEmpty(t, env.Executable, "it could not be built")
	return env
}

var (
	place string // for the program
	built sync.Once
	env   Env
)

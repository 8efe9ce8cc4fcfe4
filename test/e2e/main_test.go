//go:build linux

// Package e2e runs the real program between real clients and servers, each in a
// network namespace of its own:
//
//	client ──── cell0 ──── edge ──── wan0 ──── server
//	10.77.1.2          penstock run          10.77.2.2
//	fd77:1::2                                fd77:2::2
package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// The program, in two forms.
var (
	// released is as it is shipped: static, without cgo, where alone privileges can
	// be dropped on all threads. A tier names it, or a test.
	released string
	// racing is built with the race detector: then a race anywhere fails the test in
	// which it happens. It is released where there is no C compiler.
	racing string
	// executable is the one under test.
	executable string
	// place is where other programs are built.
	place string
)

// raced tells whether the program under test has the race detector.
func raced() bool { return executable != released }

// use has a test run one of the programs, whatever its tier has.
func use(t *testing.T, program string) {
	t.Helper()
	tiers := executable
	executable = program
	t.Cleanup(func() { executable = tiers })
}

func TestMain(m *testing.M) {
	code, ran, err := netlab.Enter()
	switch {
	case ran:
		os.Exit(code)
	case err != nil:
		os.Exit(need.NoNamespaces(err))
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "penstock-e2e-")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if err := errors.Join(os.Chmod(dir, 0o755), build(dir)); err != nil { //nolint:gosec // run by another user
		fmt.Println(err)
		return 1
	}
	place = dir
	return eachTier(m.Run)
}

// build builds the program.
func build(dir string) (err error) {
	if released, err = labtest.Build(dir); err != nil {
		return err
	}
	racing = released
	if _, missing := exec.LookPath("gcc"); missing == nil {
		racing = filepath.Join(dir, "penstock-race")
		cmd := exec.Command("go", "build", "-race", "-o", racing, "github.com/penstock-net/penstock/cmd/penstock")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("build the program with the race detector: %w\n%s", err, out)
		}
	}
	return nil
}

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

	"github.com/penstock-net/penstock/internal/netlab"
)

// executable is the program under test, built once.
var executable string

// released is the program as it is shipped: without cgo, where alone privileges
// can be dropped on all threads. It is executable where there is no C compiler.
var released string

// raced tells whether executable was built with the race detector.
var raced bool

func TestMain(m *testing.M) {
	code, ran, err := netlab.Enter()
	switch {
	case ran:
		os.Exit(code)
	case err != nil:
		fmt.Println("SKIPPED: the end-to-end tests need network namespaces:", err)
		os.Exit(0)
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
	return eachTier(m.Run)
}

// build builds the program, also with the race detector where there is a C
// compiler for it: then a race anywhere fails the test in which it happens.
func build(dir string) error {
	released = filepath.Join(dir, "penstock")
	executable = released
	err := compile(released, "CGO_ENABLED=0")
	if _, missing := exec.LookPath("gcc"); missing == nil {
		raced = true
		executable = filepath.Join(dir, "penstock-race")
		err = errors.Join(err, compile(executable, "CGO_ENABLED=1", "-race"))
	}
	return err
}

func compile(to, env string, flags ...string) error {
	args := append([]string{"build", "-o", to}, flags...)
	cmd := exec.Command("go", append(args, "github.com/penstock-net/penstock/cmd/penstock")...)
	cmd.Env = append(os.Environ(), env)
	if out, err := cmd.CombinedOutput(); err != nil {
		return errors.Join(fmt.Errorf("build the program: %w", err), errors.New(string(out)))
	}
	return nil
}

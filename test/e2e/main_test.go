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

// raced tells whether it was built with the race detector.
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
	executable = filepath.Join(dir, "penstock")
	if err := build(); err != nil {
		fmt.Println(err)
		return 1
	}
	return m.Run()
}

// build builds the program, with the race detector where there is a C compiler
// for it: then a race anywhere fails the test in which it happens.
func build() error {
	args := []string{"build", "-o", executable}
	if _, err := exec.LookPath("gcc"); err == nil {
		raced = true
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, "github.com/penstock-net/penstock/cmd/penstock")...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return errors.Join(fmt.Errorf("build the program: %w", err), errors.New(string(out)))
	}
	return nil
}

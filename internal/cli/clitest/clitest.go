// Package clitest is what the tests of both programs have in common.
package clitest

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// variable of the environment makes a test binary the program itself.
const variable = "PENSTOCK_TEST_PROGRAM"

// Environment is that of a test binary that is to be the program.
func Environment() []string { return append(os.Environ(), variable+"=1") }

// Main runs the tests of a program, or the program where the environment has it so. It
// fails where goroutines stay; after is called at the end.
func Main(m *testing.M, program func(), after ...func()) {
	if os.Getenv(variable) != "" {
		program()
	}
	code := need.Run(m)
	for _, f := range after {
		f()
	}
	os.Exit(code)
}

// Program is the program in a process of its own, once it is started.
func Program(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Env = Environment()
	return cmd
}

// Run executes one command line of a program and returns its exit code and what it said.
func Run(
	t *testing.T, execute func(context.Context, []string, io.Writer, io.Writer) int, args []string,
) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = execute(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

// Doc returns a page below docs.
func Doc(t *testing.T, name string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/" + name)
	require.NoError(t, err)
	return string(page)
}

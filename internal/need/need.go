// Package need is what tests of many packages need, first of all of the machine that they
// run on. A test that a machine cannot run is skipped, with what is missing; where the
// environment requires it, as CI does, it fails.
package need

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Variable is of the environment: what must be there, separated by commas.
const Variable = "PENSTOCK_REQUIRE"

// namespaces is the need that most machines of users lack.
const namespaces = "namespaces"

// required reports whether the environment forbids to skip tests for what is missing.
func required(what string) bool {
	return slices.Contains(strings.Split(os.Getenv(Variable), ","), what)
}

// Namespaces ends a test that cannot make a network namespace, for missing.
func Namespaces(tb testing.TB, missing error) {
	tb.Helper()
	if required(namespaces) {
		tb.Fatalf("%s requires network namespaces: %v", Variable, missing)
	}
	tb.Skipf("needs network namespaces (run as root, or unshare -rn go test): %v", missing)
}

// OneGoroutine leaves a test out under the race detector, where it has nothing to find and takes
// many times as long.
func OneGoroutine(tb testing.TB) {
	tb.Helper()
	notRaced(tb, "one goroutine")
}

// SameCode leaves a test out under the race detector, where another test runs the same code and
// only the kernel does something else.
func SameCode(tb testing.TB) {
	tb.Helper()
	notRaced(tb, "runs the code of another test")
}

// notRaced skips a test under the race detector.
func notRaced(tb testing.TB, why string) {
	tb.Helper()
	if raced {
		tb.Skip(why + ", which the race detector would make slow")
	}
}

// NoNamespaces is the exit code of a test binary that tests nothing without network
// namespaces, where none can be made, for missing.
func NoNamespaces(missing error) (code int) {
	if required(namespaces) {
		fmt.Printf("FAIL: %s requires network namespaces: %v\n", Variable, missing)
		return 1
	}
	fmt.Println("SKIPPED: the tests here need network namespaces:", missing)
	return 0
}

// Programs skips a test of a machine that lacks one of these programs.
func Programs(tb testing.TB, names ...string) {
	tb.Helper()
	for _, name := range names {
		if _, err := exec.LookPath(name); err != nil {
			tb.Skipf("needs %s: %v", name, err)
		}
	}
}

package main

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/need"
)

func TestMain(m *testing.M) {
	clitest.Main(m, main, func() { _ = os.RemoveAll(shellPlace) }) // what is left there does no harm
}

// run executes one command line.
func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return clitest.Run(t, runCommandLine, args)
}

func TestWhatGivesNoResultIsRefused(t *testing.T) {
	for says, args := range map[string][]string{
		"--seeds has 1 twice": {"bench", "--seeds", "1,2,1"},
		"its round trip takes 2h0m0s, but must be shorter than the run": {"sim", "-a", "cubic", "--delay", "1h"},
	} {
		code, _, stderr := run(t, args...)
		assert.Equal(t, cli.ExitInput, code)
		assert.Contains(t, stderr, says)
	}
}

func TestTheLaboratoryNamesWhatIsWrongWithACommandLine(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		code int
		says string // in standard error
	}{
		"an unknown command": {
			[]string{"sin"},
			cli.ExitInput,
			`unknown command "sin" for "penstock-lab"; did you mean sim?`,
		},
		"an unknown command of trace": {
			[]string{"trace", "describe", "x"},
			cli.ExitInput,
			`unknown command "describe" for "penstock-lab trace"`,
		},
		"a time without its unit": {
			[]string{"bench", "--duration", "5"},
			cli.ExitInput,
			`--duration: "5" is not a time with its unit, such as 10s`,
		},
		"a word for a number": {
			[]string{"bench", "--seeds", "abc"},
			cli.ExitInput,
			`--seeds: "abc" is not a whole number`,
		},
		"a word for a number of runs": {
			[]string{"bench", "--runs", "many"},
			cli.ExitInput,
			`--runs: "many" is not a whole number`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := run(t, c.args...)
			assert.Equal(t, c.code, code)
			assert.Empty(t, stdout)
			assert.Contains(t, stderr, c.says)
			assert.Contains(t, stderr, "Run 'penstock-lab ")
		})
	}
}

func TestTheLaboratoryNamesItself(t *testing.T) {
	code, stdout, _ := run(t, "version")
	require.Equal(t, cli.ExitOK, code)
	assert.Regexp(t, `^penstock-lab \S+ .*go1\.\d+\S* linux/\w+\n$`, stdout)
}

func TestAProxyThatIsNotThereIsNamedBeforeAnyRun(t *testing.T) {
	for _, flag := range []string{"/nowhere/penstock", "/dev/null"} {
		code, stdout, stderr := run(t, "bench", "--penstock", flag, "--sender", "cubic@sim", "--sender", "penstock",
			"--duration", "2s")
		if strings.Contains(stderr, "a user namespace is needed") {
			need.Namespaces(t, errors.New(stderr)) //nolint:err113 // the program's words
		}
		assert.Equal(t, cli.ExitFail, code)
		assert.Empty(t, stdout)
		assert.Contains(t, stderr, flag)
		assert.Contains(t, stderr, "build it by make build, or name it by --penstock")
	}
}

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

// assertRefused runs a command with several arguments, and looks for what one line says of each.
func assertRefused(t *testing.T, command string, complaints map[string]string) {
	t.Helper()
	for args, says := range complaints {
		code, stdout, stderr := run(t, strings.Fields(command+" "+args)...)
		assert.Equal(t, cli.ExitInput, code, args)
		assert.Empty(t, stdout, args)
		assert.Contains(t, stderr, says, args)
		said, _, _ := strings.Cut(stderr, "Run 'penstock-lab ")
		assert.Equal(t, 1, strings.Count(said, "\n"), "%s: one line", args)
	}
}

func TestTheLaboratoryNamesWhatIsWrongWithACommandLine(t *testing.T) {
	assertRefused(t, "", map[string]string{
		"sin":                     `unknown command "sin" for "penstock-lab"; did you mean sim?`,
		"trace describe x":        `unknown command "describe" for "penstock-lab trace"`,
		"bench --duration 5":      `--duration: "5" is not a time with its unit, such as 10s`,
		"bench --duration a":      "Run 'penstock-lab bench --help' for usage.",
		"bench --seeds abc":       `--seeds: "abc" is not a whole number`,
		"bench --runs many":       `--runs: "many" is not a whole number`,
		"bench --seeds 1,2,1":     "--seeds has 1 twice",
		"sim -a cubic --delay 1h": "its round trip takes 2h0m0s, but must be shorter than the run",
	})
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

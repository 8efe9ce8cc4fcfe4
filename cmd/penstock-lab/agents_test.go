package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/need"
)

// agentAt starts an agent and returns its socket once it is there.
func agentAt(t *testing.T, command string, args ...string) string {
	t.Helper()
	need.Programs(t, command)
	socket := filepath.Join(t.TempDir(), "agent")
	cmd := exec.Command(command, append(args, socket)...)
	cmd.Env = append(os.Environ(), "PYTHONPATH=../../agents/python/src", "PYTHONDONTWRITEBYTECODE=1")
	labtest.StartAgent(t, cmd, socket)
	return socket
}

func TestAnAgentDrivesTheSimulator(t *testing.T) {
	socket := agentAt(t, "python3", "../../agents/python/reno.py")
	args := []string{
		"sim", "-a", "ccp:mine", "-a", "ccp:mine,max_window=20", "--agent", "mine=" + socket, "--link", "12mbit",
		"--delay", "20ms", "--buffer", "40pkt", "--duration", "5s",
	}
	code, stdout, stderr := run(t, args...)
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Regexp(t, `(?m)^ccp:mine +1 .* [1-9]\.\d\d +\d\.\d\d$`, stdout, "Reno fills the queue until it overflows")
	assert.Regexp(t, `(?m)^ccp:mine,max_window=20 +1 .* 0\.00 +0\.00$`, stdout, "and not where it may not")
	_, again, _ := run(t, args...)
	assert.Equal(t, stdout, again, "one seed, one result")

	code, stdout, stderr = run(t, "bench", "--sender", "ccp:mine@sim", "--agent", "mine="+socket,
		"--link", "12mbit", "--buffer", "40pkt", "--duration", "3s")
	require.Equal(t, cli.ExitOK, code, stderr)
	assert.Contains(t, stdout, "ccp:mine@sim")
}

func TestAnAgentThatIsNotThereIsNamed(t *testing.T) {
	nowhere := filepath.Join(t.TempDir(), "nowhere")
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"none is named": {[]string{"sim", "-a", "ccp:x"}, cli.ExitInput, "add --agent x=SOCKET"},
		"another is": {
			[]string{"bench", "--sender", "ccp:x@sim", "--agent", "y"},
			cli.ExitInput,
			"add --agent x=SOCKET",
		},
		"it has no socket": {[]string{"sim", "--agent", "x="}, cli.ExitInput, "it has no socket"},
		"it is named twice": {
			[]string{"sim", "--agent", "x", "--agent", "x=y"},
			cli.ExitInput,
			"there is another agent x",
		},
		"it has a bad name": {[]string{"bench", "--agent", "X"}, cli.ExitInput, `--agent: "X" is no agent's name`},
		"it does not listen": {
			[]string{"sim", "-a", "ccp:x", "--agent", "x=" + nowhere},
			cli.ExitFail,
			"connecting to " + nowhere + ": no such file or directory, for 5s; start the agent first",
		},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, stderr := run(t, c.args...)
			assert.Equal(t, c.code, code)
			assert.Contains(t, stderr, c.says)
		})
	}
}

func TestARecipesAgentThatCannotStartIsNamedBeforeAnyRun(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	code, stdout, stderr := run(t, "bench", "recipe", "hosts", "ccp-b10", "--virtual", "--short")
	assert.Equal(t, cli.ExitInput, code)
	assert.Empty(t, stdout)
	assert.Contains(t, stderr, "penstock-agent-reno is neither beside this program nor in $PATH; build it by make build")
	assert.NotContains(t, stderr, "hosts 1/", "nothing has run")
}

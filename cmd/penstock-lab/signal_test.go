package main

import (
	"bytes"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
)

// A run in virtual time may take long. Who ends it keeps what was made before.
func TestWhatIsDoneIsKeptAtTheEnd(t *testing.T) {
	const file = `
link: {rate: 40mbit, rtt: 40ms, queue: 40pkt}
flows: {download: {}}
runs:
  - {name: short, algorithm: copa, duration: 2s}
  - {name: long, algorithm: cubic, duration: 1h}
`
	for name, args := range map[string][]string{
		"sim":    {"sim", "two.yaml"},
		"recipe": {"bench", "recipe", "two.yaml", "--virtual"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			require.NoError(t, os.WriteFile("two.yaml", []byte(file), 0o600))
			var said bytes.Buffer
			cmd := clitest.Program(t.Context(), append(args, "--json", "runs.jsonl", "--csv", "runs.csv")...)
			cmd.Stdout, cmd.Stderr = &said, &said
			require.NoError(t, cmd.Start())
			over := make(chan struct{})
			go func() {
				defer close(over)
				_ = cmd.Wait()
			}()
			lines := func() int {
				text, _ := os.ReadFile("runs.jsonl")
				return bytes.Count(text, []byte("\n"))
			}
			require.Eventually(t, func() bool { return lines() == 1 }, time.Minute, 5*time.Millisecond)
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
			select {
			case <-over:
			case <-time.After(time.Minute):
				_ = cmd.Process.Kill()
				require.Fail(t, "it goes on")
			}
			assert.Equal(t, cli.ExitFail, cmd.ProcessState.ExitCode(), said.String())
			assert.Equal(t, 1, lines())
			csv, err := os.ReadFile("runs.csv")
			require.NoError(t, err)
			assert.Equal(t, 2, strings.Count(string(csv), "\n"))
			assert.Contains(t, said.String(), "terminated") // in the long run, or right before it
		})
	}
}

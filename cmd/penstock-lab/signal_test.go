package main

import (
	"bytes"
	"os"
	"path/filepath"
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
  - {name: short, algorithm: copa, duration: 2s, virtual: true}
  - {name: long, algorithm: cubic, duration: 1h, virtual: true}
`
	for name, args := range map[string][]string{
		"sim":    {"sim", "two.yaml", "--plot", "out.png", "--trace-out", "windows.jsonl"},
		"recipe": {"bench", "recipe", "two.yaml", "--virtual", "--plot", "out.png"},
		"bench":  {"bench", "two.yaml", "--plot", "out.png"},
		"must":   {"bench", "recipe", "must.yaml", "--virtual", "--plot", "out.png"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			require.NoError(t, os.WriteFile("two.yaml", []byte(file), 0o600))
			must := file + "must: [run(\"long\").utilisation >= 0.5]\n"
			require.NoError(t, os.WriteFile("must.yaml", []byte(must), 0o600))
			var said bytes.Buffer
			cmd := clitest.Program(t.Context(), append(args, "--json", "runs.jsonl")...)
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
			assert.Contains(t, said.String(), "terminated") // in the long run, or right before it
			assert.Regexp(t, `(?m)^(short|two +40mbit|short +1) +3\d\.\d`, said.String(), "a row of a table")
			assert.NotRegexp(t, "left out|it is there", said.String())
			drawn, err := filepath.Glob("out*.png")
			require.NoError(t, err)
			assert.Len(t, drawn, 1)
			if name == "sim" {
				windows, err := os.ReadFile("windows.jsonl")
				require.NoError(t, err)
				assert.Equal(t, 200, bytes.Count(windows, []byte("\n")))
			}
		})
	}
}

package agent

import (
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// python is a command that finds the package penstock_agent.
func python(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skipf("needs python3: %v", err)
	}
	sources, err := filepath.Abs("../../agents/python/src")
	require.NoError(t, err)
	cmd := exec.Command("python3", args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+sources, "PYTHONDONTWRITEBYTECODE=1")
	return cmd
}

// TestPythonAndGoCompileAlike compares the messages that install some programs.
func TestPythonAndGoCompileAlike(t *testing.T) {
	reno, err := os.ReadFile("../../agents/python/reno.py")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(reno), `"reno": """`)
	require.True(t, found)
	perRTT, _, found := strings.Cut(rest, `"""`)
	require.True(t, found)
	for name, text := range map[string]string{
		"the example's": perRTT,
		"all operations": `(def (Report (volatile acked 0) (least +infinity))
				(volatile turns 3) (every 10) (Report.old 1) (mark true))
			(when (&& (> Micros every) (|| Flow.was_timeout mark)) # both
				(:= mine (+ 1 (* 2 (- Ack.now (/ 9 3))))) (:= Report.least (min Report.least Flow.rtt_sample_us))
				(:= turns (ewma 2 mine)) (:= every (if (== 1 2) (max 3 4))) (:= every (!if (< 1 2) (wrapped_max 3 4)))
				(:= Cwnd 5) (:= Rate mine) (fallthrough))
			(when false (report))`,
	} {
		t.Run(name, func(t *testing.T) {
			cmd := python(t, "-c", "import sys, penstock_agent as p\n"+
				"print(p.compile_program(sys.stdin.read()).install(7).hex())")
			cmd.Stdin = strings.NewReader(text)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			code, err := ccp.Compile(text)
			require.NoError(t, err)
			assert.Equal(t, hex.EncodeToString(code.Install(7).Append(nil)), strings.TrimSpace(string(out)))
		})
	}
}

func TestThePythonAgentDecides(t *testing.T) {
	s := start(t)
	cmd := python(t, "../../agents/python/reno.py", s.path)
	var said strings.Builder
	cmd.Stderr = &said
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		assert.Empty(t, said.String())
	})
	s.until("agent")
	assert.Greater(t, s.decided(), cc.Bytes(14480), "what has arrived has opened the window")
}

func TestAPythonAgentRemovesNothingButSockets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notes")
	require.NoError(t, os.WriteFile(path, []byte("mine"), 0o600))
	out, err := python(t, "-c", "import sys, penstock_agent as p\np.Agent(p.Flow, sys.argv[1])", path).CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), "Address already in use")
	kept, err := os.ReadFile(path)
	require.NoError(t, err)
	assert.Equal(t, "mine", string(kept))
}

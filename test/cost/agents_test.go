//go:build linux

package cost

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// BenchmarkAgent has the agent agents/go/reno decide for each flow, beside the Reno that is
// built in. The processor time is the proxy's; the agent's comes on top.
func BenchmarkAgent(b *testing.B) {
	executable := build(b)
	dir := b.TempDir()
	program, socket := filepath.Join(dir, "reno"), filepath.Join(dir, "socket")
	reno := "github.com/penstock-net/penstock/agents/go/reno"
	out, err := exec.Command("go", "build", "-o", program, reno).CombinedOutput()
	require.NoError(b, err, "%s", out)
	agent := exec.Command(program, socket)
	agent.Stderr = os.Stderr
	require.NoError(b, agent.Start())
	defer func() {
		_ = agent.Process.Kill()
		_ = agent.Wait()
	}()
	const window = "max_window=1000" // packets; nothing is lost here that would bound it
	for _, flows := range []int{1, 16, 64, 1000} {
		l := load{name: fmt.Sprintf("%dflows-500mbit", flows), flows: flows, rate: 500e6, wall: measure}
		compare(b, executable, l, []carrier{
			{name: "reno-ebpf", envelope: "ebpf", algorithm: "reno", terms: eachAlone},
			{
				name: "agent-ebpf", envelope: "ebpf", algorithm: "ccp:reno," + window, terms: eachAlone,
				more: fmt.Sprintf("agents: [{name: reno, socket: %q}]\n", socket),
			},
		})
	}
}

package edge

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestCPUTimeOfAnotherProcess(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c",
		"i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; echo done; read x")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	_, err = out.Read(make([]byte, 8))
	require.NoError(t, err)
	used, err := CPUTime(cmd.Process.Pid)
	require.NoError(t, err)
	assert.Positive(t, used)
	require.NoError(t, in.Close())
	_ = cmd.Wait() // its read met the end of the input
	total := (cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()).Seconds()
	assert.InDelta(t, total, used.Seconds(), 0.1, "what the parent is told in the end")
	_, err = CPUTime(1 << 21)
	assert.Error(t, err)
}

func TestTailKeepsTheEnd(t *testing.T) {
	tl := Tail{Most: tailBytes}
	for range 1000 {
		n, err := tl.Write([]byte("0123456789\n"))
		require.NoError(t, err)
		require.Equal(t, 11, n)
	}
	_, err := tl.Write([]byte("the end\n"))
	require.NoError(t, err)
	assert.LessOrEqual(t, len(tl.String()), tailBytes)
	assert.True(t, strings.HasSuffix(tl.String(), "9\nthe end"))
}

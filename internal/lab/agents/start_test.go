package agents_test

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/need"
)

func TestAgentsAreStartedAndEnded(t *testing.T) {
	labtest.Agents(t)
	there, stop, err := agents.Agents{{Name: "a", Program: "reno"}, {Name: "cubic"}, {Name: "x", Socket: "/x"}}.Start()
	require.NoError(t, err)
	for _, a := range there[:2] {
		_, err := os.Stat(a.Socket)
		assert.NoError(t, err)
	}
	assert.Equal(t, "/x", there[2].Socket)
	used, err := there.CPUTime()
	require.NoError(t, err)
	assert.Positive(t, used)
	stop()
	for _, a := range there[:2] {
		_, err := os.Stat(filepath.Dir(a.Socket))
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
	_, err = there.CPUTime()
	assert.Error(t, err)
}

func TestAnAgentThatDoesNotStartIsNamed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	const complaint = "agent nonesuch: penstock-agent-nonesuch is neither beside this program nor in $PATH; " +
		"build it by make build; or start one yourself and name it by --agent nonesuch=SOCKET"
	missing := agents.Agents{{Name: "there", Socket: "/x"}, {Name: "run", Command: "x"}, {Name: "nonesuch"}}
	require.EqualError(t, missing.Startable(), complaint)
	_, _, err := missing[2:].Start()
	require.EqualError(t, err, complaint)
	script := "#!/bin/sh\necho no; exit 1\n"
	dies := filepath.Join(dir, "penstock-agent-dies")
	require.NoError(t, os.WriteFile(dies, []byte(script), 0o755)) //nolint:gosec // it is run
	require.NoError(t, agents.Agents{{Name: "one", Program: "dies"}}.Startable())
	_, _, err = agents.Agents{{Name: "one", Program: "dies"}}.Start()
	assert.ErrorContains(t, err, "ended: no")
}

func TestWhatIsThereTakesThePlaceOfWhatIsStarted(t *testing.T) {
	own := agents.Agents{{Name: "reno", Algorithm: "10ms"}, {Name: "cubic", Program: "c"}}
	all := agents.Agents{{Name: "reno", Socket: "/reno"}, {Name: "more", Socket: "/more"}}.Over(own)
	assert.Equal(t, agents.Agents{
		{Name: "reno", Socket: "/reno", Algorithm: "10ms"},
		{Name: "more", Socket: "/more"},
		{Name: "cubic", Program: "c"},
	}, all)
	assert.Equal(t, all[2:], all.In("defaults: {algorithm: \"ccp:cubic\"}"))
	assert.Empty(t, all.In("ccp:reno-2 ccp:reno_2"), "which are others")
	assert.Equal(t, all[:2], all.In("ccp:more,fallback=copa ccp:reno"))
	assert.Contains(t, all.YAML(), `{name: cubic, socket: "/cubic", algorithm: ""}`, "a place until it is started")
}

func TestAnAgentsPathLeavesRoomForOurs(t *testing.T) {
	longest := "/" + strings.Repeat("x", 80)
	_, err := agents.Parse([]string{"mine=" + longest})
	require.NoError(t, err)
	_, err = agents.Parse([]string{"mine=" + longest + "x"})
	assert.EqualError(t, err, "--agent mine="+longest+"x: the path of its socket has 82 bytes; it may have 81, as "+
		"ours is beside it")
}

// commanded is an agent by a command, which listens where agents on portus do.
func commanded(t *testing.T, name, command string) agents.Agents {
	t.Helper()
	need.Programs(t, "mount")
	all, err := agents.Parse([]string{name + "=run:" + command})
	require.NoError(t, err)
	return all
}

// forbidden tells whether an error is that of a machine where users may not mount anything,
// or have no user namespaces: the kernel then says that there is no space.
func forbidden(said string) bool {
	return strings.Contains(said, "not permitted") || strings.Contains(said, "ermission denied") ||
		strings.Contains(said, "no space left on device") || strings.Contains(said, "not mount point")
}

func TestACommandStartsAnAgent(t *testing.T) {
	labtest.Agents(t)
	all := append(commanded(t, "fixed", "penstock-agent-reno /tmp/ccp/portus"),
		commanded(t, "named", `penstock-agent-cubic "$SOCKET"`)...)
	there, stop, err := all.Start()
	if err != nil && forbidden(err.Error()) {
		t.Skip(err)
	}
	require.NoError(t, err)
	defer stop()
	assert.NotEqual(t, there[0].Socket, there[1].Socket)
	for _, a := range there {
		scenario := sim.Scenario{
			Down: sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 40}, Duration: time.Second,
			Flows: []sim.FlowConfig{{Algorithm: "ccp:" + a.Name}},
		}
		result, err := there.RunScenario(scenario)
		require.NoError(t, err, a.Name)
		assert.Positive(t, result.Flows[0].Throughput)
	}
	used, err := there.CPUTime()
	require.NoError(t, err)
	assert.Positive(t, used)

	_, _, err = commanded(t, "dies", "sh -c 'echo no; exit 1'").Start()
	assert.ErrorContains(t, err, "ended: no")
	t.Setenv(crashing, "1")
	_, err = commanded(t, "crashes", os.Args[0]).RunScenario(sim.Scenario{
		Down: sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 40}, Duration: time.Second,
		Flows: []sim.FlowConfig{{Algorithm: "ccp:crashes"}},
	})
	require.ErrorContains(t, err, "nobody reads what is sent")
	assert.ErrorContains(t, err, "panic: a mistake")
	assert.Less(t, len(err.Error()), 4096)
	_, err = agents.Parse([]string{"x=run: "})
	assert.ErrorContains(t, err, "it has no command; write x=run:./x")
}

const (
	// dying makes the test binary start agents and print their processes' ids, and wait.
	dying = "PENSTOCK_TEST_AGENTS_DYING"
	// crashing makes the test binary an agent that crashes at its first message.
	crashing = "PENSTOCK_TEST_AGENTS_CRASHING"
	// old makes the test binary an agent of the form of portus 0.5.
	old = "PENSTOCK_TEST_AGENTS_OLD"
)

// crash listens as an agent does, prints much, and panics when the first message comes.
func crash() {
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: os.Getenv("SOCKET"), Net: "unixgram"})
	if err != nil {
		panic(err)
	}
	fmt.Println(strings.Repeat("no", 9999))
	_, _, _ = c.ReadFrom(make([]byte, 9999))
	panic("a mistake")
}

func TestMain(m *testing.M) {
	if os.Getenv(crashing) != "" {
		crash()
	}
	if os.Getenv(old) != "" {
		fmt.Println(serveOldForm("/tmp/ccp/0/in", "/tmp/ccp/0/out"))
		os.Exit(1)
	}
	if os.Getenv(dying) != "" {
		_, _, err := agents.Agents{{Name: "reno"}, {Name: "fixed", Command: "penstock-agent-reno $SOCKET"}}.Start()
		fmt.Println(err)
		select {}
	}
	os.Exit(m.Run())
}

func TestAgentsEndWithWhoStartedThem(t *testing.T) {
	labtest.Agents(t)
	place := t.TempDir()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), dying+"=1", "TMPDIR="+place)
	said, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(said).ReadString('\n')
	require.NoError(t, err)
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	if forbidden(line) {
		t.Skip(line)
	}
	require.Equal(t, "<nil>\n", line)
	sockets, err := filepath.Glob(place + "/*/*o*") // socket and portus
	require.NoError(t, err)
	require.Len(t, sockets, 2)
	for _, path := range sockets {
		require.Eventually(t, func() bool {
			conn, err := net.Dial("unixgram", path)
			if err == nil {
				_ = conn.Close()
			}
			return errors.Is(err, syscall.ECONNREFUSED)
		}, time.Minute, 5*time.Millisecond, "an agent still listens at %s", path)
	}
}

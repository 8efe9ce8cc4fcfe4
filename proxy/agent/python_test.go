package agent

import (
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/internal/need"
)

// python is a command that finds the package penstock_agent.
func python(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	need.Programs(t, "python3")
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

// TestPythonRefusesWhatGoRefuses is of programs that would run, and fold nothing.
func TestPythonRefusesWhatGoRefuses(t *testing.T) {
	for name, c := range map[string]struct{ text, says string }{
		"a name that is misspelt": {
			`(def (Report (volatile acked 0))) (when true (:= Report.acked (+ Report.aked Ack.bytes_acked)) (report))`,
			"Report.aked is declared nowhere",
		},
		"a misspelt average": {
			"(def (Report (rtt 0))) (when true (:= Report.rtt (ewma 2 Flow.rtt_us)) (report))",
			"Flow.rtt_us is declared nowhere",
		},
		"a misspelt condition": {"(def (every 0)) (when (> Micros evry) (report))", "evry is declared nowhere"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ccp.Compile(c.text)
			require.ErrorIs(t, err, ccp.ErrProgram)
			cmd := python(t, "-c", "import sys, penstock_agent as p\np.compile_program(sys.stdin.read())")
			cmd.Stdin = strings.NewReader(c.text)
			out, err := cmd.CombinedOutput()
			require.Error(t, err)
			assert.Contains(t, string(out), "ProgramError: "+c.says)
		})
	}
	// Go's agents refuse it as well, where they begin to serve.
	cmd := python(t, "-c", "import penstock_agent as p\n"+
		"p.compile_program('(def (Report (acked 0) (rtt Flow.rtt_sample_us))) (when true (report))')")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), "ProgramError: Report.rtt needs a number as its first value")
}

// TestPythonAndGoCountAlike is of programs at the limits of what a datapath runs, and one step beyond.
func TestPythonAndGoCountAlike(t *testing.T) {
	numbered := func(n int, format string) (all string) {
		for i := range n {
			all += fmt.Sprintf(format, i)
		}
		return all
	}
	const event, when = "(when true (report))", "(def (Report (x 0))) (when true "
	var texts, want strings.Builder
	for what, c := range map[string]struct {
		most int
		text func(n int) string
	}{
		"fields":       {110, func(n int) string { return "(def (Report" + numbered(n, "(x%d 0)") + "))" + event }},
		"variables":    {110, func(n int) string { return "(def" + numbered(n, "(x%d 0)") + ")" + event }},
		"locals":       {8, func(n int) string { return when + numbered(n, "(:= x%d 1)") + ")" }},
		"instructions": {254, func(n int) string { return when + strings.Repeat("(report)", n) + ")" }},
		"operations": {16, func(n int) string {
			return when + "(:= Report.x " + strings.Repeat("(+ 1 ", n) + "1" + strings.Repeat(")", n+2)
		}},
	} {
		for n := c.most; n <= c.most+1; n++ {
			_, err := ccp.Compile(c.text(n))
			require.Equal(t, n == c.most, err == nil, "%d %s: %v", n, what, err)
			fmt.Fprintln(&texts, c.text(n))
			fmt.Fprintln(&want, n == c.most)
		}
	}
	cmd := python(t, "-c", `import sys, penstock_agent as p
for text in sys.stdin:
    try: print(bool(p.compile_program(text)) and "true")
    except p.ProgramError: print("false")
class Many(p.Flow): programs = {str(i): text for i in range(257)}
p.Agent(Many, sys.argv[1])`, filepath.Join(t.TempDir(), "socket"))
	cmd.Stdin = strings.NewReader(texts.String())
	var said, wrong strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &wrong
	require.Error(t, cmd.Run())
	assert.Equal(t, want.String(), said.String())
	assert.Contains(t, wrong.String(), "ProgramError: a datapath takes 256 programs; these are 257")
}

func TestPythonSetsVariablesOfAnyName(t *testing.T) {
	out, err := python(t, "-c", `import struct, sys, penstock_agent as p
class Any(p.Flow):
    programs = {"any": "(def (program 0) (self 0)) (when true (:= program self))"}
class Quiet(p.Agent):
    def _transmit(self, address, message): print(message.hex())
agent = Quiet(Any, sys.argv[1])
flow = Any(agent, "x", 5, 14480, 1448, "")
flow.run("any", program=1, self=2)
flow.update(program=3, self=4)`, filepath.Join(t.TempDir(), "socket")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	set := func(program uint32, values ...uint64) string {
		c := ccp.Change{Flow: 5, Program: program}
		for i, v := range values {
			c.Updates = append(c.Updates, ccp.Update{Register: ccp.Register{Index: uint32(i)}, Value: v})
		}
		return hex.EncodeToString(c.Append(nil))
	}
	assert.Equal(t, set(1, 1, 2)+"\n"+set(0, 3, 4)+"\n", string(out))
}

func TestAPythonFlowHearsOfItsEnd(t *testing.T) {
	cmd := python(t, "-c", `import sys, penstock_agent as p
class Said(p.Flow):
    programs = {"any": "(def (Report (x 0))) (when true (report))"}
    def on_create(self): print("+%d" % self._sid, end=" ")
    def on_close(self): print("-%d" % self._sid, end=" ")
agent = p.Agent(Said, sys.argv[1])
agent._transmit = lambda address, message: None
for message in sys.stdin.read().split():
    agent.receive(bytes.fromhex(message), "x")`, filepath.Join(t.TempDir(), "socket"))
	var messages strings.Builder
	for _, b := range [][]byte{
		ccp.Create{Flow: 1}.Append(nil), ccp.Create{Flow: 2}.Append(nil), ccp.Measure{Flow: 1, Program: 1}.Append(nil),
		ccp.Measure{Flow: 1}.Append(nil),
		ccp.Create{Flow: 2}.Append(nil), ccp.Ready{Datapath: 1}.Append(nil), ccp.Measure{Flow: 2}.Append(nil),
	} {
		messages.WriteString(hex.EncodeToString(b) + "\n")
	}
	cmd.Stdin = strings.NewReader(messages.String())
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", said)
	assert.Equal(t, "+1 +2 -1 -2 +2 -2 ", string(said), "once each; a report of a program that has no fields is no end")
}

func TestAPythonFlowHearsOfWholeReportsAlone(t *testing.T) {
	cmd := python(t, "-c", `import sys, penstock_agent as p
class Said(p.Flow):
    programs = {"any": "(def (Report (x 0))) (when true (report))"}
    def on_create(self): self.run("any")
    def on_report(self, report): print(report.x, end=" ")
agent = p.Agent(Said, sys.argv[1])
agent._transmit = lambda address, message: None
for message in sys.stdin.read().split():
    agent.receive(bytes.fromhex(message), "x")`, filepath.Join(t.TempDir(), "socket"))
	messages := hex.EncodeToString(ccp.Create{Flow: 1}.Append(nil)) + "\n"
	for _, fields := range [][]uint64{{1}, {}, {2, 3}, {4}} {
		messages += hex.EncodeToString(ccp.Measure{Flow: 1, Program: 1, Fields: fields}.Append(nil)) + "\n"
	}
	cmd.Stdin = strings.NewReader(messages)
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", said)
	assert.Equal(t, "1 4 ", string(said))
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

func TestADatapathThatReadsNothingHoldsUpNoOther(t *testing.T) {
	path := filepath.Join(t.TempDir(), "portus")
	cmd := python(t, "../../agents/python/reno.py", path)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	to := &net.UnixAddr{Name: path, Net: "unixgram"}
	ready := func(p *peer) bool {
		_, err := p.sock.WriteToUnix(ccp.Ready{Datapath: 1}.Append(nil), to)
		return err == nil
	}
	hung, other := listen(t, path+".hung"), listen(t, path+".other")
	require.Eventually(t, func() bool { return ready(hung) }, patience, time.Millisecond)
	for range 14 { // its socket has room for ten answers, or eleven
		ready(hung)
	}
	require.True(t, ready(other))
	assert.Equal(t, ccp.KindInstall, other.next().Kind)
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

//go:build linux

package agents

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/agent"
)

// startPython starts an agent in Python, Reno, and returns where it listens.
func startPython(t *testing.T) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "socket")
	startScript(t, "../../agents/python/reno.py", socket)
	return socket
}

// startScript starts an agent in Python that listens at a socket.
func startScript(t *testing.T, script, socket string) {
	t.Helper()
	need.Programs(t, "python3")
	cmd := exec.Command("python3", script, socket)
	cmd.Env = append(os.Environ(), "PYTHONPATH=../../agents/python/src", "PYTHONDONTWRITEBYTECODE=1")
	labtest.StartAgent(t, cmd, socket)
}

func TestTheExampleOfThePageUsesTheLink(t *testing.T) {
	page, err := os.ReadFile("../../docs/agents.md")
	require.NoError(t, err)
	_, rest, found := strings.Cut(string(page), "```python\n")
	require.True(t, found)
	text, _, found := strings.Cut(rest, "```")
	require.True(t, found)
	script := filepath.Join(t.TempDir(), "example.py")
	socket := filepath.Join(filepath.Dir(script), "socket")
	text = regexp.MustCompile(`"/run/[a-z]+/agent"`).ReplaceAllLiteralString(text, strconv.Quote(socket))
	require.NoError(t, os.WriteFile(script, []byte(text), 0o600))
	startScript(t, script, socket)

	who := agents.Agents{{Name: "example", Socket: socket}}
	link := sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 160}
	const length = 10 * time.Second
	rates, _ := perRTT(t, who.RunScenario, "ccp:example", link, length)
	assert.Greater(t, total(rates)*8/length.Seconds(), 0.8*12e6, "bit/s")
}

// Where a whole first flight is lost, losses are found before there is a sample of the round trip.
func TestAgentsHeedLossesAfterOneBeforeTheFirstRoundTrip(t *testing.T) {
	for name, place := range map[string]func(*testing.T) string{
		"Reno":   func(t *testing.T) string { return start(t, "reno")[0].Socket },
		"Python": startPython,
		"CUBIC":  func(t *testing.T) string { return start(t, "cubic")[0].Socket },
	} {
		t.Run(name, func(t *testing.T) {
			v, err := agent.Reach(agent.Config{Name: "x", Socket: place(t)})
			require.NoError(t, err)
			defer func() { assert.NoError(t, v.Close()) }()
			params, err := v.Spec().Resolve(nil)
			require.NoError(t, err)
			const mss, rtt = 1448, 20 * time.Millisecond
			f := v.Spec().New(cc.Config{MSS: mss, InitialCwnd: 10 * mss, Params: params})
			now := cc.Time(time.Second)
			state := func() cc.State { return cc.State{Now: now, MSS: mss, SRTT: rtt, MinRTT: rtt} }
			f.OnTick(state())
			require.Equal(t, "agent", f.Control().Phase)

			f.OnLoss(cc.Loss{State: state(), Lost: mss})
			assert.Less(t, f.Control().Cwnd, cc.Bytes(10*mss), "the first loss")
			for end := now.Add(10 * time.Second); now < end; now = now.Add(time.Millisecond) {
				f.OnAck(cc.Ack{State: state(), Acked: mss, RTT: rtt, DeliveryRate: 1e6})
			}
			before := f.Control().Cwnd
			f.OnLoss(cc.Loss{State: state(), Lost: mss})
			assert.Less(t, f.Control().Cwnd, before*3/4, "a loss 10 s later")
			require.NoError(t, v.Err())
		})
	}
}

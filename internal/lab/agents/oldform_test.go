package agents_test

import (
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/agents"
)

// serveOldForm is an agent as portus 0.5 makes them: it sends its program as it starts, and ends where nobody takes
// that. It sets a window of 30 packets for each flow that it knows by its number.
func serveOldForm(in, out string) error {
	code, err := ccp.Compile(`(def (Report (volatile acked 0)))
		(when true (:= Report.acked (+ Report.acked Ack.bytes_acked)) (fallthrough))
		(when (> Micros 10000) (report) (:= Micros 0))`)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(in), 0o700); err != nil {
		return err
	}
	_ = os.Remove(in)
	sock, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: in, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer sock.Close() //nolint:errcheck // it was not written to
	say := func(b []byte) error {
		_, err := sock.WriteToUnix(b, &net.UnixAddr{Name: out, Net: "unixgram"})
		return err
	}
	if err := say(code.Install(1).Append(nil)); err != nil {
		return err
	}
	flows := map[uint32]bool{}
	for buf := make([]byte, 2*ccp.MaxToAgent); ; {
		n, err := sock.Read(buf)
		if err != nil {
			return err
		}
		m, _, err := ccp.Next(buf[:n])
		if err != nil {
			return err
		}
		switch {
		case m.Kind == ccp.KindCreate:
			flows[m.Flow] = true
			err = say(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
		case m.Kind == ccp.KindMeasure && flows[m.Flow]:
			set := []ccp.Update{{Register: code.Registers["Cwnd"], Value: 30 * 1448}}
			err = say(ccp.Change{Flow: m.Flow, Updates: set}.Append(nil))
		}
		if err != nil {
			return err
		}
	}
}

// playOldForm has agents decide twice, and for two datapaths at a time.
func playOldForm(t *testing.T, there agents.Agents) {
	t.Helper()
	play := func() float64 {
		result, err := there.RunScenario(sim.Scenario{
			Down: sim.LinkConfig{Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 40}, Duration: 2 * time.Second,
			Up:    sim.LinkConfig{Delay: 20 * time.Millisecond},
			Flows: []sim.FlowConfig{{Algorithm: "ccp:" + there[0].Name}},
		})
		require.NoError(t, err)
		return float64(result.Flows[0].Throughput)
	}
	first := play()
	assert.InEpsilon(t, 30*1448*8/0.04, first, 0.15, "bit/s: 30 packets in each round trip")
	assert.InDelta(t, first, play(), 0, "one seed, one result; and the next datapath has the program, too")
	both := make(chan float64)
	go func() { both <- play() }()
	assert.InDelta(t, first, play(), 0)
	assert.InDelta(t, first, <-both, 0, "flows of the same numbers are told apart")
}

func TestAnAgentOfTheOldFormIsStartedByItsCommand(t *testing.T) {
	t.Setenv(old, "1")
	there, stop, err := commanded(t, "old", os.Args[0]).Start()
	if err != nil && forbidden(err.Error()) {
		t.Skip(err)
	}
	require.NoError(t, err)
	defer stop()
	playOldForm(t, there)
}

func TestAnAgentOfTheOldFormIsNamedByItsTwoSockets(t *testing.T) {
	in, out := filepath.Join(t.TempDir(), "in"), filepath.Join(t.TempDir(), "out")
	all, err := agents.Parse([]string{"old=" + in + "," + out})
	require.NoError(t, err)
	require.NoError(t, all.Startable())
	go func() {
		for { // it ends until the path is there to which it answers
			_ = serveOldForm(in, out)
			if _, err := os.Stat(filepath.Dir(in)); err != nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	there, stop, err := all.Start()
	require.NoError(t, err)
	playOldForm(t, there)
	stop()
	_, err = os.Stat(out)
	assert.ErrorIs(t, err, os.ErrNotExist)

	_, err = agents.Parse([]string{"old=/x,"})
	assert.ErrorContains(t, err, "write old=/tmp/ccp/0/in,/tmp/ccp/0/out")
}

package agent

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// answering is an agent on a goroutine of its own that reads until its socket closes and
// answers each message with what answer makes of it.
func answering(t *testing.T, path string, answer func(ccp.Message) [][]byte) (die func()) {
	t.Helper()
	sock, err := listenAt(path)
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		buf := make([]byte, 2*ccp.MaxToAgent)
		for {
			n, from, err := sock.ReadFromUnix(buf)
			if err != nil {
				return
			}
			m, _, err := ccp.Next(buf[:n])
			if !assert.NoError(t, err) {
				return
			}
			for _, b := range answer(m) {
				if _, err := sock.WriteToUnix(b, from); err != nil {
					return
				}
			}
		}
	}()
	die = func() {
		_ = sock.Close()
		<-done
	}
	t.Cleanup(die)
	return die
}

// counting sets the window to a segment more with each report, in two messages.
func counting(t *testing.T) func(ccp.Message) [][]byte {
	code, err := ccp.Compile(text)
	require.NoError(t, err)
	flow, cwnd := uint32(0), uint64(0)
	return func(m ccp.Message) [][]byte {
		switch m.Kind {
		case ccp.KindReady:
			return [][]byte{code.Install(1).Append(nil), code.Install(2).Append(nil)}
		case ccp.KindCreate:
			flow, cwnd = m.Flow, 14480
			return [][]byte{ccp.Change{Flow: m.Flow, Program: 1}.Append(nil)}
		case ccp.KindMeasure:
			if m.Flow != flow {
				return nil
			}
			cwnd += 1448
			set := func(v uint64) []byte {
				return ccp.Change{Flow: m.Flow, Updates: []ccp.Update{{
					Register: code.Registers["Cwnd"],
					Value:    v,
				}}}.Append(nil)
			}
			return [][]byte{set(1), set(cwnd)}
		}
		return nil
	}
}

// driven is a flow in virtual time.
type driven struct {
	v    *Virtual
	flow cc.Algorithm
	now  cc.Time
}

func reach(t *testing.T, path string, limit time.Duration) *driven {
	t.Helper()
	v, err := Reach(Config{Name: "x", Socket: path, Limit: limit})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, v.Close()) })
	spec := v.Spec()
	params, err := spec.Resolve(nil)
	require.NoError(t, err)
	cfg := cc.Config{MSS: 1448, InitialCwnd: 14480, Params: params}
	return &driven{v: v, flow: spec.New(cfg), now: cc.Time(time.Second)}
}

func (d *driven) ack() cc.Control {
	d.now = d.now.Add(time.Millisecond)
	d.flow.OnAck(cc.Ack{
		State: cc.State{Now: d.now, MSS: 1448, SRTT: time.Millisecond, MinRTT: time.Millisecond},
		Acked: 1448, RTT: time.Millisecond, DeliveryRate: 1e6,
	})
	return d.flow.Control()
}

func TestVirtualTimeStandsWhileTheAgentThinks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "portus")
	answering(t, path, counting(t))
	for range 2 {
		d := reach(t, path, patience)
		for i := range 500 {
			ctl := d.ack()
			require.Equal(t, "agent", ctl.Phase, "the program is there when the flow is announced")
			require.EqualValues(t, 1448*(11+i), ctl.Cwnd, "all that the agent says to a report holds at once")
		}
		require.NoError(t, d.v.Err())
	}
}

func TestARunInVirtualTimeLeavesNoFlowAtTheAgent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "portus")
	code, err := ccp.Compile(text)
	require.NoError(t, err)
	flows := map[uint32]bool{}
	die := answering(t, path, func(m ccp.Message) [][]byte {
		switch r, err := m.Measure(); {
		case m.Kind == ccp.KindReady:
			return [][]byte{code.Install(1).Append(nil)}
		case m.Kind == ccp.KindCreate:
			flows[m.Flow] = true
			return [][]byte{ccp.Change{Flow: m.Flow, Program: 1}.Append(nil)}
		case m.Kind == ccp.KindMeasure && err == nil && r.Program == 0 && len(r.Fields) == 0:
			delete(flows, m.Flow)
		}
		return nil
	})
	v, err := Reach(Config{Name: "x", Socket: path, Limit: patience})
	require.NoError(t, err)
	params, err := v.Spec().Resolve(nil)
	require.NoError(t, err)
	for range 3 {
		d := driven{v: v, flow: v.Spec().New(cc.Config{MSS: 1448, InitialCwnd: 14480, Params: params}), now: 1}
		require.Equal(t, "agent", d.ack().Phase)
	}
	require.NoError(t, v.Err())
	require.NoError(t, v.Close())
	die()
	assert.Empty(t, flows)
}

func TestVirtualTimeDoesNotWaitForEver(t *testing.T) {
	t.Run("there is none", func(t *testing.T) {
		_, err := Reach(Config{Name: "x", Socket: filepath.Join(t.TempDir(), "portus")})
		assert.ErrorContains(t, err, "no such file")
	})
	t.Run("it does not read", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "portus")
		listen(t, path)
		_, err := Reach(Config{Name: "x", Socket: path, Limit: 10 * time.Millisecond})
		assert.ErrorContains(t, err, "not taken a message within 10ms")
	})
	t.Run("it answers nothing", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "portus")
		answering(t, path, func(ccp.Message) [][]byte { return nil })
		d := reach(t, path, 200*time.Millisecond)
		assert.Equal(t, "fallback", d.ack().Phase)
		assert.ErrorContains(t, d.v.Err(), "set no program")
	})
	t.Run("it dies", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "portus")
		die := answering(t, path, counting(t))
		d := reach(t, path, patience)
		assert.Equal(t, "agent", d.ack().Phase)
		die()
		d.ack()
		assert.Equal(t, "fallback", d.ack().Phase)
		assert.ErrorContains(t, d.v.Err(), "nobody reads")
	})
	t.Run("it speaks nonsense", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "portus")
		answering(t, path, func(ccp.Message) [][]byte { return [][]byte{{1, 2, 3}} })
		_, err := Reach(Config{Name: "x", Socket: path})
		assert.ErrorIs(t, err, ccp.ErrMalformed)
		assert.Equal(t, 1, strings.Count(err.Error(), path), "it is named once")
	})
}

package ccpagent

import (
	"context"
	"errors"
	"flag"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/ccp"
)

// patience bounds every wait; only a hang reaches it.
const patience = time.Minute

const (
	folds = `(def (Report (volatile acked 0) (rtt 0)) (every 10))
		(when true (:= Report.acked (+ Report.acked Ack.bytes_acked)) (report))`
	other = `(def (Report (volatile lost 0))) (when true (report))`
)

// double sets twice what has been acknowledged.
type double struct {
	flow    *Flow
	reports []uint64
}

func (d *double) Report(r Report) {
	d.reports = append(d.reports, r.Field("acked"))
	d.flow.Update(Set{"Cwnd": 2 * r.Field("acked")})
}

// wire is a datapath's end: what the agent says to it.
type wire struct {
	t    *testing.T
	peer *peer
	said []ccp.Message
	err  error
}

// start has an agent with controllers that begin as begin has them.
func start(t *testing.T, begin func(f *Flow) Controller) (*Agent, *wire) {
	a := &Agent{Programs: map[string]string{"folds": folds, "other": other}, New: begin}
	require.NoError(t, a.compilePrograms())
	w := &wire{t: t}
	w.peer = a.newPeer(func(b []byte) error {
		if w.err != nil {
			return w.err
		}
		m, rest, err := ccp.Next(append([]byte(nil), b...))
		require.NoError(t, err)
		require.Empty(t, rest)
		w.said = append(w.said, m)
		return nil
	})
	return a, w
}

// hear is what the agent says to b.
func (w *wire) hear(b []byte) []ccp.Message {
	w.t.Helper()
	w.said = nil
	require.Equal(w.t, w.err, w.peer.takeDatagram(b))
	return w.said
}

func create(flow uint32) []byte {
	remote := netip.MustParseAddrPort("10.0.0.2:80")
	return ccp.Create{Flow: flow, InitialCwnd: 14480, MSS: 1448, Algorithm: "x", Remote: remote}.Append(nil)
}

func measure(flow, program uint32, fields ...uint64) []byte {
	return ccp.Measure{Flow: flow, Program: program, Fields: fields}.Append(nil)
}

func TestAnAgentInstallsRunsAndUpdates(t *testing.T) {
	var d *double
	a, w := start(t, func(f *Flow) Controller {
		d = &double{flow: f}
		f.Run("folds", Set{"every": 20, "Cwnd": 5})
		return d
	})
	for range 2 {
		said := w.hear(ccp.Ready{Datapath: 1}.Append(nil))
		require.Len(t, said, 2)
		for i, m := range said {
			in, err := m.Install()
			require.NoError(t, err)
			assert.EqualValues(t, i+1, in.Program)
			_, err = in.Verify()
			assert.NoError(t, err)
		}
	}
	said := w.hear(create(7))
	require.Len(t, said, 1, "the datapath has the programs")
	c, err := said[0].Change()
	require.NoError(t, err)
	cwnd, every := ccp.Register{Class: ccp.ClassImplicit, Index: 4}, ccp.Register{Class: ccp.ClassControl}
	set := []ccp.Update{{Register: cwnd, Value: 5}, {Register: every, Value: 20}}
	assert.Equal(t, ccp.Change{Flow: 7, Program: 1, Updates: set}, c)
	assert.EqualValues(t, 14480, d.flow.InitialCwnd)
	assert.Equal(t, "x", d.flow.Algorithm)
	assert.Equal(t, "10.0.0.2:80", d.flow.Remote.String())

	said = w.hear(measure(7, 1, 3000, 0))
	require.Len(t, said, 1)
	c, err = said[0].Change()
	require.NoError(t, err)
	assert.Equal(t, ccp.Change{Flow: 7, Updates: []ccp.Update{{Register: cwnd, Value: 6000}}}, c)

	for name, late := range map[string][]byte{
		"of another program":        measure(7, 2, 1),
		"with a field too few":      measure(7, 1, 1),
		"of a flow there is not":    measure(8, 1, 1, 2),
		"a header alone":            {1, 0, 8, 0},
		"longer than the datagram":  {1, 0, 99, 0, 7, 0, 0, 0},
		"of a kind that is not":     {99, 0, 8, 0, 7, 0, 0, 0},
		"nothing":                   {},
		"a create that is too long": append(create(9), 0),
	} {
		if name == "a create that is too long" {
			late[2] = 97
		}
		assert.Empty(t, w.hear(late), name)
	}
	assert.Equal(t, []uint64{3000}, d.reports)
	assert.Len(t, w.hear(append(measure(7, 1, 1, 0), measure(7, 1, 2, 0)...)), 2, "several messages in one datagram")
	w.hear(measure(7, 0))
	assert.Empty(t, w.hear(measure(7, 1, 3000, 0)), "the flow is closed")
	assert.NoError(t, a.firstFault())
}

func TestADatapathThatAnAgentLearnsOfLaterGetsTheProgramsFirst(t *testing.T) {
	_, w := start(t, func(f *Flow) Controller {
		f.Run("other", nil)
		return &double{flow: f}
	})
	said := w.hear(create(1))
	require.Len(t, said, 3)
	assert.Equal(t, ccp.KindInstall, said[0].Kind)
	assert.Equal(t, ccp.KindChange, said[2].Kind)
}

func TestAControllersMistakeIsNamed(t *testing.T) {
	for says, begin := range map[string]func(f *Flow){
		`no program "nothing" to run`:           func(f *Flow) { f.Run("nothing", nil) },
		`no register "nothing" to set`:          func(f *Flow) { f.Run("folds", Set{"nothing": 1}) },
		"a flow was updated that runs no":       func(f *Flow) { f.Update(Set{"Cwnd": 1}) },
		`program "other" reports no field "ack`: func(f *Flow) { f.Run("other", nil) },
	} {
		a, w := start(t, func(f *Flow) Controller {
			begin(f)
			return &double{flow: f}
		})
		w.hear(create(1))
		w.hear(measure(1, 2, 5))
		assert.ErrorContains(t, a.firstFault(), says)
	}
	ctx := context.Background()
	assert.ErrorContains(t, (&Agent{}).Serve(ctx, ""), "needs a program")
	wrong := &Agent{Programs: map[string]string{"x": "(def"}, New: func(*Flow) Controller { return nil }}
	assert.ErrorContains(t, wrong.Serve(ctx, ""), `program "x"`)
	many := &Agent{New: wrong.New, Programs: map[string]string{}}
	for i := range mostPrograms + 1 {
		many.Programs[strconv.Itoa(i)] = folds
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	assert.ErrorContains(t, many.Serve(over, filepath.Join(t.TempDir(), "x")), "takes 256 programs; these are 257")
	// A datapath reports what has a first value: it would report one field, and nobody would hear of it.
	short := &Agent{New: wrong.New, Programs: map[string]string{
		"x": "(def (Report (acked 0) (rtt Flow.rtt_sample_us))) (when true (report))",
	}}
	assert.ErrorContains(t, short.Serve(ctx, filepath.Join(t.TempDir(), "x")), `program "x": each field of its Report`)
}

// closing notes the flows that have ended.
type closing struct {
	flow   uint32
	closed *[]uint32
}

func (closing) Report(Report) {}
func (c closing) Close()      { *c.closed = append(*c.closed, c.flow) }

func TestAControllerHearsOfItsFlowsEnd(t *testing.T) {
	var closed []uint32
	_, w := start(t, func(f *Flow) Controller { return closing{f.id, &closed} })
	for flow := range uint32(4) {
		w.hear(create(flow + 1))
	}
	w.hear(measure(2, 0))
	assert.Equal(t, []uint32{2}, closed)
	w.hear(measure(2, 0))
	w.hear(measure(4, 1)) // a report without fields
	w.hear(create(3))
	assert.Equal(t, []uint32{2, 3}, closed, "it is announced anew")
	w.hear(ccp.Ready{Datapath: 1}.Append(nil))
	assert.Equal(t, []uint32{2, 3, 1, 3, 4}, closed, "the datapath has started anew")
	w.hear(create(5))
	w.peer.closeFlows()
	assert.Equal(t, []uint32{2, 3, 1, 3, 4, 5}, closed, "the datapath has gone")
}

func TestADatapathThatHasGoneIsForgotten(t *testing.T) {
	_, w := start(t, func(f *Flow) Controller {
		f.Run("folds", nil)
		return &double{flow: f}
	})
	w.err = errors.New("connection refused")
	assert.Empty(t, w.hear(create(1)))
}

func TestADatapathThatReadsNothingHoldsUpNoOther(t *testing.T) {
	a := &Agent{Programs: map[string]string{"folds": folds}, New: func(*Flow) Controller { return nil }}
	at := &net.UnixAddr{Name: filepath.Join(t.TempDir(), "agent"), Net: "unixgram"}
	served := make(chan error, 1)
	go func() { served <- a.Serve(t.Context(), at.Name) }()
	datapath := func(name string) *net.UnixConn {
		c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: at.Name + name, Net: "unixgram"})
		require.NoError(t, err)
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	ready := func(c *net.UnixConn) func() bool {
		return func() bool {
			_, err := c.WriteToUnix(ccp.Ready{Datapath: 1}.Append(nil), at)
			return err == nil
		}
	}
	hung, other := datapath(".hung"), datapath(".other")
	require.Eventually(t, ready(hung), patience, time.Millisecond)
	for range 14 { // its socket has room for ten answers, or eleven
		ready(hung)()
	}
	require.True(t, ready(other)())
	installed := func(c *net.UnixConn) {
		b := make([]byte, ccp.MaxFromAgent)
		require.NoError(t, c.SetReadDeadline(time.Now().Add(patience)))
		n, err := c.Read(b)
		require.NoError(t, err)
		m, _, err := ccp.Next(b[:n])
		require.NoError(t, err)
		assert.Equal(t, ccp.KindInstall, m.Kind)
	}
	installed(other)
	for range 11 {
		installed(hung)
	}
	_, err := hung.WriteToUnix(create(1), at)
	require.NoError(t, err)
	installed(hung) // once more, as what was lost may have been a program
}

func TestServingEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	a := &Agent{Programs: map[string]string{"folds": folds}, New: func(*Flow) Controller { return nil }}
	cancel()
	assert.NoError(t, a.Serve(ctx, filepath.Join(t.TempDir(), "deep", "agent")))
}

func TestArgumentsOfAnAgentsProgram(t *testing.T) {
	const use = "usage: mine [SOCKET]"
	for _, c := range []struct {
		args   []string
		socket string
		wrong  string // empty: it is right
	}{
		{nil, DefaultSocket, ""},
		{[]string{"/run/mine"}, "/run/mine", ""},
		{[]string{"--", "-x"}, "-x", ""},
		{[]string{"--socket=/run/mine"}, "", "not defined: -socket; " + use},
		{[]string{"-v"}, "", "not defined: -v; " + use},
		{[]string{"/run/mine", "--help"}, "", "and not 2; " + use},
		{[]string{""}, "", "is empty; " + use},
	} {
		var out strings.Builder
		socket, err := parseArguments("mine", c.args, &out)
		assert.Equal(t, c.socket, socket, c.args)
		assert.Empty(t, out.String())
		if c.wrong == "" {
			assert.NoError(t, err, c.args)
		} else {
			assert.ErrorContains(t, err, c.wrong)
		}
	}
	for _, ask := range []string{"-h", "--help", "-help"} {
		var out strings.Builder
		_, err := parseArguments("mine", []string{ask}, &out)
		assert.ErrorIs(t, err, flag.ErrHelp)
		assert.Contains(t, out.String(), use)
		assert.Contains(t, out.String(), DefaultSocket)
	}
}

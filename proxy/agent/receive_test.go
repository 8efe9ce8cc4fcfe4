package agent

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

// roundTrip is that of a crowd's flows.
const roundTrip = 20 * time.Millisecond

// crowd is flows that ticks drive in virtual time, and an agent that reads when it is told to.
type crowd struct {
	*peer
	code   *ccp.Code
	clock  atomic.Int64
	link   *Link
	events *events
	flows  []cc.Algorithm
	seen   []ccp.Message
}

// gather has no goroutine serve the link.
func gather(t *testing.T, flows int) *crowd {
	t.Helper()
	path := filepath.Join(t.TempDir(), "portus")
	c := &crowd{peer: listen(t, path)}
	c.clock.Store(int64(time.Second))
	var err error
	c.code, err = ccp.Compile(text)
	require.NoError(t, err)
	c.link, err = newLink(Config{Name: "x", Socket: path, Clock: c.now})
	require.NoError(t, err)
	fd, early, err := c.link.cfg.dialSocket(&c.link.own)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, unix.Close(fd)) })
	c.events, err = newEvents(fd)
	require.NoError(t, err)
	t.Cleanup(c.events.closeFile)
	require.NoError(t, c.link.beginConnection(connection{fd, c.events, early}))
	require.Equal(t, ccp.KindReady, c.next().Kind)
	c.say(c.code.Install(1).Append(nil))
	for range flows {
		c.join()
	}
	return c
}

// serve has goroutines serve the link.
func (c *crowd) serve() {
	ctx, end := context.WithCancel(c.t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = c.link.watchAgent(ctx) })
	running.Go(func() { _ = c.link.serveEvents(c.events) })
	c.t.Cleanup(func() {
		end()
		c.events.closeFile()
		running.Wait()
	})
}

func (c *crowd) join() cc.Algorithm {
	spec := c.link.Spec()
	params, err := spec.Resolve(nil)
	require.NoError(c.t, err)
	f := spec.New(cc.Config{MSS: 1448, InitialCwnd: 14480, Params: params})
	c.flows = append(c.flows, f)
	return f
}

func (c *crowd) now() cc.Time { return cc.Time(c.clock.Load()) }

func (c *crowd) state() cc.State {
	return cc.State{Now: c.now(), MSS: 1448, SRTT: roundTrip, MinRTT: roundTrip}
}

// tick has the flows hear of acknowledgements, or of the time alone.
func (c *crowd) tick(after time.Duration, acks bool) {
	c.clock.Add(int64(after))
	c.link.Hold()
	for _, f := range c.flows {
		if acks {
			f.OnAck(cc.Ack{State: c.state(), Acked: 1448, RTT: roundTrip, DeliveryRate: 1e6})
		} else {
			f.OnTick(c.state())
		}
	}
	c.link.Release()
}

// read is the next message, if there is one.
func (c *crowd) read() (m ccp.Message, there bool) {
	raw, err := c.sock.SyscallConn()
	require.NoError(c.t, err)
	buf := make([]byte, 2*ccp.MaxToAgent)
	n := 0
	require.NoError(c.t, raw.Control(func(fd uintptr) { n, _, err = unix.Recvfrom(int(fd), buf, unix.MSG_DONTWAIT) }))
	if err != nil {
		require.ErrorIs(c.t, err, unix.EAGAIN)
		return m, false
	}
	m, _, err = ccp.Next(buf[:n])
	require.NoError(c.t, err)
	return m, true
}

// answer answers a message as an agent that leaves the window alone.
func (c *crowd) answer(m ccp.Message) {
	switch m.Kind {
	case ccp.KindCreate:
		c.say(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
	case ccp.KindMeasure:
		c.say(ccp.Change{
			Flow: m.Flow, Updates: []ccp.Update{{Register: c.code.Registers["Cwnd"], Value: 14480}},
		}.Append(nil))
	}
}

// pass has time pass, in which the agent reads a message now and then, and says nothing.
func (c *crowd) pass(d time.Duration) {
	const turn = 20 * time.Millisecond
	for ; d > 0; d -= turn {
		c.tick(turn, false)
		if m, there := c.read(); there {
			c.seen = append(c.seen, m)
		}
	}
}

// about reads all that is sent, and returns the kinds of those messages about a flow that were read of late.
func (c *crowd) about(flow uint32) (kinds []ccp.Kind) {
	for m, there := c.read(); there; m, there = c.read() {
		c.seen = append(c.seen, m)
		require.NoError(c.t, c.link.flushBacklog())
	}
	for _, m := range c.seen {
		if m.Flow == flow {
			kinds = append(kinds, m.Kind)
		}
	}
	return kinds
}

func TestATickTakesInWhatTheAgentHasSaid(t *testing.T) {
	c := gather(t, 1)
	c.tick(time.Millisecond, false)
	c.answer(c.next())
	c.tick(time.Millisecond, true)
	assert.Equal(t, "agent", c.flows[0].Control().Phase, "before the flow goes on")
	require.Equal(t, ccp.KindMeasure, c.next().Kind)
}

func TestAProgramThatIsRefusedIsAWarning(t *testing.T) {
	for why, of := range map[string]struct {
		accepted     uint32 // before
		instructions []ccp.Instruction
	}{
		"program 9: instruction 0: the result goes to a register of class primitive": {
			0, []ccp.Instruction{{Result: ccp.Register{Class: ccp.ClassPrimitive}}},
		},
		"one of 0 events and 257 instructions": {0, make([]ccp.Instruction, 257)},
		"256 programs are installed":           {255, nil}, // beside gather's
	} {
		t.Run(why, func(t *testing.T) {
			var said strings.Builder
			c := gather(t, 0)
			c.link.log = slog.New(slog.NewTextHandler(&said, nil))
			for i := range of.accepted + maxMalformed {
				c.say(ccp.Install{Program: 9 + i, Instructions: of.instructions}.Append(nil))
				c.link.tryTakeDatagrams()
			}
			assert.EqualValues(t, maxMalformed, c.link.Info().Malformed)
			assert.NoError(t, c.link.failureCause(), "others of it may run")
			assert.Equal(t, 1, strings.Count(said.String(), "\n"))
			assert.Contains(t, said.String(), "level=WARN")
			assert.Contains(t, said.String(), why)
		})
	}
}

func TestAnAnswerWakesSomebodyBetweenTicks(t *testing.T) {
	c := gather(t, 1)
	c.tick(time.Millisecond, false)
	c.serve()
	c.answer(c.next())
	require.Eventually(t, func() bool { return c.link.Info().Decisions == 1 }, patience, time.Millisecond)
}

func TestAnAgentHearsOfAFlowOnce(t *testing.T) {
	create := []ccp.Kind{ccp.KindCreate}
	c := gather(t, 10)
	c.tick(time.Millisecond, false)
	first, _ := c.read()
	c.pass(160 * time.Millisecond)
	last := uint32(len(c.flows))
	assert.Equal(t, create, c.about(last), "not while it has not read the first")
	c.pass(300 * time.Millisecond)
	assert.Equal(t, append(create, create...), c.about(last), "but where it has, and says nothing")

	fill := func() {
		for n := 0; n < 60; n++ { // that find no room
			if c.link.waiting.isEmpty() {
				n = 0
			}
			c.join().OnTick(c.state())
		}
		c.seen = nil
	}
	fill()
	c.pass(700 * time.Millisecond)
	c.answer(first)
	c.tick(time.Millisecond, false)
	assert.NotContains(t, c.about(first.Flow), ccp.KindCreate, "nor once it has answered")

	f := c.join()
	f.OnTick(c.state())
	flow := uint32(len(c.flows))
	assert.Equal(t, create, c.about(flow))
	fill()
	c.pass(150 * time.Millisecond)
	cc.Close(f)
	assert.Equal(t, []ccp.Kind{ccp.KindMeasure}, c.about(flow), "nor once it is closed")
}

// An agent that has as much to read that a message waits for longer than a flow has patience.
func TestAnAgentThatReadsSteadilyKeepsItsFlowsHoweverLongItsQueue(t *testing.T) {
	const flows, turn = 40, 25 // ms
	c := gather(t, flows)
	steered := func() int { return c.link.Info().Steered }
	for ms := 0; steered() < flows; ms++ {
		require.Less(t, ms, 20_000)
		c.tick(time.Millisecond, true)
		if ms%turn == 0 {
			if m, there := c.read(); there {
				c.answer(m)
			}
		}
	}
	for ms := range 2000 {
		c.tick(time.Millisecond, true)
		if ms%turn == 0 {
			m, there := c.read()
			require.True(t, there)
			if ms < 1000 { // then it reads, and says nothing
				c.answer(m)
			}
		}
	}
	for ms, there := 0, true; there; ms++ { // and nothing more is asked
		c.tick(time.Millisecond, false)
		if ms%turn == 0 {
			_, there = c.read()
		}
	}
	assert.Equal(t, flows, steered())
	assert.Zero(t, c.link.Info().Fallbacks["stalled"])

	stopped := c.now()
	for steered() > 0 {
		c.tick(time.Millisecond, true)
		require.Less(t, c.now().Sub(stopped), ccp.Patience(roundTrip)+unreadPeriod+2*time.Millisecond, "it reads no more")
	}
	assert.EqualValues(t, flows, c.link.Info().Fallbacks["stalled"])
}

// An agent that takes longer over a new flow than flows have patience.
func TestAnAgentMayTakeItsTimeOverANewFlow(t *testing.T) {
	const flows = 4
	c := gather(t, flows)
	announced := map[uint32]int{}
	turn := func(over time.Duration) {
		c.tick(time.Millisecond, true)
		m, there := c.read()
		if !there {
			return
		}
		if m.Kind == ccp.KindCreate {
			announced[m.Flow]++
			for end := c.now().Add(over); c.now() < end; {
				c.tick(time.Millisecond, true)
			}
		}
		c.answer(m)
	}
	for range 2000 {
		turn(150 * time.Millisecond)
	}
	assert.Equal(t, flows, c.link.Info().Steered)
	assert.Equal(t, map[uint32]int{1: 1, 2: 1, 3: 1, 4: 1}, announced)
	assert.Zero(t, c.link.Info().Fallbacks["stalled"])

	c.join()
	for announced[flows+1] == 0 {
		turn(maxSetUp + 4*roundTrip)
	}
	assert.EqualValues(t, flows, c.link.Info().Fallbacks["stalled"], "but not for ever")
}

func TestMessagesThatAreNotHeededAreCountedByReason(t *testing.T) {
	c := gather(t, 1)
	c.tick(time.Millisecond, false)
	flow := c.next().Flow
	for reason, b := range map[string][]byte{
		"malformed":       {1, 2, 3},
		"no_such_flow":    ccp.Change{Flow: flow + 1}.Append(nil),
		"no_such_program": ccp.Change{Flow: flow, Program: 99}.Append(nil),
		"unexpected_kind": ccp.Create{Flow: flow}.Append(nil),
	} {
		before := c.link.Info().Refused
		c.say(b)
		c.link.tryTakeDatagrams()
		for other, n := range c.link.Info().Refused {
			want := before[other]
			if other == reason {
				want++
			}
			assert.Equal(t, want, n, "%s after %s", other, reason)
		}
	}
	c.say(make([]byte, ccp.MaxFromAgent+1))
	c.link.tryTakeDatagrams()
	assert.EqualValues(t, 2, c.link.Info().Refused["malformed"], "a message that is too long is malformed, too")
}

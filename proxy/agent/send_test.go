package agent

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
)

func TestOfEachFlowOneReportWaits(t *testing.T) {
	report := func(flow uint32, acked ...uint64) []byte {
		return ccp.Measure{Flow: flow, Program: uint32(min(len(acked), 1)), Fields: acked}.Append(nil)
	}
	var q backlog
	require.True(t, q.isEmpty())
	q.noteFull()
	assert.True(t, q.addMessage(1, report(1, 10)))
	assert.True(t, q.addMessage(2, report(2, 20)))
	assert.False(t, q.addMessage(3, report(1, 11)), "the next one has what it would have told")
	assert.False(t, q.addMessage(3, ccp.Measure{Flow: 1, Program: 1}.Append(nil)), "one without fields is no close")
	assert.True(t, q.addMessage(3, ccp.Create{Flow: 3}.Append(nil)))
	assert.True(t, q.addMessage(3, ccp.Create{Flow: 3}.Append(nil)), "which is the same")
	assert.True(t, q.addMessage(4, report(2)), "nobody wants a report of a flow that is closed")
	assert.Equal(t, message{report(1, 10), 1}, q.removeFirst())
	assert.True(t, q.addMessage(6, report(1, 12)))
	assert.Equal(t, message{report(2), 2}, q.removeFirst())
	assert.Equal(t, message{ccp.Create{Flow: 3}.Append(nil), 3}, q.removeFirst())
	assert.Equal(t, message{report(1, 12), 6}, q.removeFirst())
	assert.True(t, q.isEmpty())
	assert.Empty(t, q.waits)

	for i := range uint32(maxWaiting) {
		require.True(t, q.addMessage(8, report(i, 1)))
	}
	assert.False(t, q.addMessage(8, report(maxWaiting, 1)))
}

// More flows than may wait are announced at once, as when an agent comes back to a large proxy.
func TestAFlowForWhichThereIsNoRoomIsAnnouncedOnceThereIs(t *testing.T) {
	const flows = maxWaiting + 20
	c := gather(t, flows)
	for range 4 {
		c.tick(10*time.Millisecond, false)
	}
	announced := map[uint32]int{}
	for len(announced) < flows {
		m, there := c.read()
		if !there {
			c.tick(10*time.Millisecond, false)
			m, there = c.read()
			require.True(t, there)
		}
		announced[m.Flow]++
		require.NoError(t, c.link.flushBacklog())
	}
	for flow, times := range announced {
		require.Equal(t, 1, times, "flow %d", flow)
	}
}

// met is a link, and an agent that has heard of it.
func met(t *testing.T) (link *Link, p *peer, now func() cc.Time) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "portus")
	p = listen(t, path)
	began := time.Now()
	now = func() cc.Time { return cc.Time(time.Second + time.Since(began)) }
	link, err := Start(Config{Name: "x", Socket: path, Clock: now})
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, link.Close()) })
	require.Equal(t, ccp.KindReady, p.next().Kind)
	require.Eventually(t, func() bool { return link.Info().Up }, patience, time.Millisecond)
	return link, p, now
}

// An agent's socket has room for ten messages. Here it reads none until all flows have
// reported twice.
func TestReportsOfManyFlowsWaitForRoom(t *testing.T) {
	const flows, fill = 300, 5
	link, p, now := met(t)
	code, err := ccp.Compile(text)
	require.NoError(t, err)
	p.say(code.Install(1).Append(nil))
	require.Eventually(t, func() bool { return link.Info().Programs == 1 }, patience, time.Millisecond)

	spec := link.Spec()
	params, err := spec.Resolve(nil)
	require.NoError(t, err)
	state := func() cc.State { return cc.State{Now: now(), MSS: 1448, SRTT: patience, MinRTT: patience} }
	all := make([]cc.Algorithm, flows)
	for i := range all {
		all[i] = spec.New(cc.Config{MSS: 1448, InitialCwnd: 14480, Params: params})
		all[i].OnTick(state())
	}
	for range flows {
		m := p.next()
		require.Equal(t, ccp.KindCreate, m.Kind, "each is announced once")
		p.say(ccp.Change{Flow: m.Flow, Program: 1}.Append(nil))
	}
	require.Eventually(t, func() bool { return link.Info().Decisions == flows }, patience, time.Millisecond)
	for range fill {
		for _, f := range all {
			f.OnAck(cc.Ack{State: state(), Acked: 1448, RTT: time.Millisecond, DeliveryRate: 1e6})
		}
	}
	assert.EqualValues(t, flows*fill, link.Info().Reports+link.Info().Dropped)
	assert.GreaterOrEqual(t, link.Info().Reports, uint64(flows), "at least one of each")

	report := func() ccp.Measure {
		m := p.next()
		for m.Kind == ccp.KindCreate { // once more, where the answer took its time
			m = p.next()
		}
		r, err := m.Measure()
		require.NoError(t, err)
		return r
	}
	sums := map[uint32]uint64{}
	for range link.Info().Reports {
		r := report()
		sums[r.Flow] += r.Fields[0]
	}
	assert.Len(t, sums, flows)
	for _, f := range all {
		f.OnAck(cc.Ack{State: state(), Acked: 1448, RTT: time.Millisecond, DeliveryRate: 1e6})
	}
	for range flows {
		r := report()
		sums[r.Flow] += r.Fields[0]
	}
	for flow, acked := range sums {
		assert.EqualValues(t, (fill+1)*1448, acked, "flow %d", flow)
	}
	for _, f := range all {
		cc.Close(f)
	}
	for range flows {
		assert.Empty(t, report().Fields)
	}
}

// What a tick has flows send leaves at its end, in order.
func TestWhatIsHeldLeavesTogether(t *testing.T) {
	link, p, now := met(t)
	spec := link.Spec()
	params, err := spec.Resolve(nil)
	require.NoError(t, err)
	const flows = 2 * batchLen
	announce := func() {
		for range flows {
			f := spec.New(cc.Config{MSS: 1448, InitialCwnd: 14480, Params: params})
			f.OnTick(cc.State{Now: now(), MSS: 1448, SRTT: patience, MinRTT: patience})
		}
	}

	link.Hold()
	link.Hold() // by another tick
	announce()
	require.NoError(t, p.sock.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	_, _, err = p.sock.ReadFromUnix(make([]byte, ccp.MaxToAgent))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	link.Release()
	for i := range flows {
		m := p.next()
		require.Equal(t, ccp.KindCreate, m.Kind)
		require.EqualValues(t, i+1, m.Flow)
	}
	link.Release()

	link.Hold()
	announce()
	p.die()
	link.Release()
	require.Eventually(t, func() bool { return !link.Info().Up }, patience, time.Millisecond)
}

func TestACreateIsDroppedFromWhereverItWaits(t *testing.T) {
	create := func(flow uint32) []byte { return ccp.Create{Flow: flow}.Append(nil) }
	report := ccp.Measure{Flow: 1, Program: 1, Fields: []uint64{1}}.Append(nil)
	for _, scarce := range []bool{false, true} {
		var q backlog
		if scarce {
			q.noteFull()
		}
		for _, b := range [][]byte{create(1), create(2), report, create(3), create(4)} {
			require.True(t, q.addMessage(1, b))
		}
		q.dropCreate(2)
		q.dropCreate(2)
		q.dropCreate(4)
		assert.Equal(t, []message{{create(1), 1}}, q.firstMessages(batchLen))
		q.dropCreate(1)
		assert.Equal(t, []message{{report, 1}, {create(3), 1}}, q.firstMessages(batchLen))
		assert.Len(t, q.firstMessages(1), 1)
		assert.True(t, q.addMessage(2, create(2)), "after all others")
		assert.Equal(t, message{report, 1}, q.removeFirst())
		q.dropCreate(3)
		assert.Equal(t, message{create(2), 2}, q.removeFirst())
		assert.True(t, q.isEmpty())
		assert.Empty(t, q.waits)
	}
}

package telemetry

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
)

// stuck is a disk that takes nothing until it is let go.
type stuck struct {
	bytes.Buffer
	free chan struct{}
}

func (s *stuck) Write(p []byte) (int, error) {
	<-s.free
	return s.Buffer.Write(p)
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("disk full") }

func TestTraceWritesOneJSONObjectPerEvent(t *testing.T) {
	var out bytes.Buffer
	trace := NewTrace(&out)
	trace.Event(flow.Event{
		Kind: flow.KindAck, Flow: 7, Group: "a \"quoted\" " +
			"host\n", Algorithm: "copa", Bytes: 1448, RTT: 41500 * time.Microsecond,
		Reverse: 7500 * time.Microsecond,
		State: cc.State{
			Now: cc.Time(2*time.Second + 3), Inflight: 14480, Delivered: 99, SRTT: 40 * time.Millisecond,
			MinRTT: 20 * time.Millisecond, CwndLimited: true, OneWay: true,
		},
		Control: cc.Control{Cwnd: 28960, PacingRate: 12e6, Phase: "steady"},
		// In the order of its Spec.
		Internals: cc.Internals{20.5, 2, 0.02, 41.25},
	})
	trace.Event(flow.Event{Kind: flow.KindTick, Algorithm: "bbr"})
	require.NoError(t, trace.Close())

	lines := bufio.NewScanner(&out)
	require.True(t, lines.Scan())
	var got map[string]any
	require.NoError(t, json.Unmarshal(lines.Bytes(), &got), lines.Text())
	assert.Equal(t, map[string]any{
		"t_seconds": 2.000000003, "event": "ack", "flow": 7.0, "group": "a \"quoted\" host\n", "algorithm": "copa",
		"bytes": 1448.0, "inflight_bytes": 14480.0, "delivered_bytes": 99.0, "cwnd_bytes": 28960.0,
		"pacing_bits_per_second": 12e6, "rtt_seconds": 0.0415, "srtt_seconds": 0.04, "min_rtt_seconds": 0.02,
		"cwnd_limited": true, "phase": "steady", "one_way": true, "reverse_queue_seconds": 0.0075,
		"internals": map[string]any{
			"target_packets": 20.5, "velocity": 2.0, "delta": 0.02, "standing_rtt_ms": 41.25,
			"min_rtt_ms": 0.0,
		},
	}, got)
	require.True(t, lines.Scan())
	assert.True(t, json.Valid(lines.Bytes()))
	assert.False(t, lines.Scan(), "a line too many")
	assert.Zero(t, trace.Dropped())
	assert.ErrorIs(t, trace.Close(), ErrTraceClosed)
	trace.Event(flow.Event{}) // after Close: ignored, and no panic
}

func TestTraceDropsRatherThanWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := &stuck{free: make(chan struct{})}
		trace := NewTrace(disk)
		const sent = 3 * traceBacklog
		for range sent {
			trace.Event(flow.Event{Kind: flow.KindAck}) // a wait here would deadlock the bubble
		}
		dropped := trace.Dropped()
		assert.Positive(t, dropped)
		close(disk.free)
		require.NoError(t, trace.Close())
		assert.Equal(t, sent, bytes.Count(disk.Bytes(), []byte("\n"))+int(dropped), "written and dropped")
	})
}

func TestTraceFlushesWithinASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		trace := NewTrace(&out)
		trace.Event(flow.Event{Kind: flow.KindAck})
		time.Sleep(traceFlush + time.Millisecond)
		synctest.Wait()
		assert.NotZero(t, out.Len())
		require.NoError(t, trace.Close())
	})
}

func TestTraceReportsAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		trace := NewTrace(full{})
		trace.Event(flow.Event{})
		time.Sleep(traceFlush + time.Millisecond)
		trace.Event(flow.Event{})
		assert.ErrorContains(t, trace.Close(), "disk full")
		assert.EqualValues(t, 2, trace.Dropped(), "the first was lost, too")
	})
}

// small is a disk with room for so many bytes.
type small struct {
	bytes.Buffer
	room int
}

func (s *small) Write(p []byte) (int, error) {
	n := min(len(p), s.room)
	s.room -= n
	_, _ = s.Buffer.Write(p[:n])
	if n < len(p) {
		return n, errors.New("disk full")
	}
	return n, nil
}

// What is not whole on a disk that has become full is lost.
func TestTraceCountsAllThatAFullDiskLost(t *testing.T) {
	disk := &small{room: 100_000}
	trace := NewTrace(disk)
	const sent = 1000
	for range sent {
		trace.Event(flow.Event{Kind: flow.KindAck})
	}
	assert.ErrorContains(t, trace.Close(), "disk full")
	assert.Equal(t, sent, bytes.Count(disk.Bytes(), []byte("\n"))+int(trace.Dropped()), "written and dropped")
}

// pieces keeps what is written at once apart.
type pieces struct{ all [][]byte }

func (p *pieces) Write(b []byte) (int, error) {
	p.all = append(p.all, bytes.Clone(b))
	return len(b), nil
}

// Whoever takes the file away between two writes, or kills the process, has whole lines.
func TestTraceWritesWholeLines(t *testing.T) {
	var out pieces
	trace := NewTrace(&out)
	for range 1000 {
		trace.Event(flow.Event{Kind: flow.KindAck})
	}
	require.NoError(t, trace.Close())
	require.Greater(t, len(out.all), 2)
	for _, piece := range out.all {
		assert.Equal(t, byte('{'), piece[0])
		assert.Equal(t, byte('\n'), piece[len(piece)-1])
	}
}

func TestSecondsAreExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(math.MinInt64+1, math.MaxInt64).Draw(t, "d"))
		text := string(appendSeconds(nil, d))
		back, err := time.ParseDuration(text + "s")
		require.NoError(t, err)
		require.Equal(t, d, back)
		_, err = strconv.ParseFloat(text, 64)
		require.NoError(t, err)
	})
}

func FuzzEventIsOneLineOfJSON(f *testing.F) {
	f.Add("10.0.0.1", "steady", int64(1), int64(-1))
	f.Add("\x00\xff\u2028\"", "", int64(math.MinInt64), int64(math.MaxInt64))
	f.Fuzz(func(t *testing.T, group, phase string, n, d int64) {
		if !json.Valid([]byte(`"` + phase + `"`)) {
			t.Skip("phases are literals in the code")
		}
		if d == math.MinInt64 {
			t.Skip("no such duration")
		}
		line := appendEvent(nil, flow.Event{
			Kind: flow.KindLoss, Group: group, Bytes: cc.Bytes(n), RTT: time.Duration(d),
			Control: cc.Control{Phase: phase},
		})
		require.True(t, json.Valid(line), "%q", line)
		require.Equal(t, 1, bytes.Count(line, []byte("\n")))
	})
}

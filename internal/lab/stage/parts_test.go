package stage

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

func TestAPatternTellsItsPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := patternOf(rapid.IntRange(0, 600).Draw(t, "actor"), rapid.IntRange(0, 1000).Draw(t, "stream"))
		at := rapid.Uint64Range(0, 1<<40).Draw(t, "at")
		b := make([]byte, rapid.IntRange(16, 4000).Draw(t, "length"))
		p.fill(b, at)
		assert.True(t, p.holds(b, at))
		cut := rapid.IntRange(0, len(b)).Draw(t, "cut")
		assert.True(t, p.holds(b[cut:], at+uint64(cut)), "however it is cut")
		assert.False(t, p.holds(b, at+rapid.Uint64Range(1, 1<<30).Draw(t, "shift")), "shifted")
		assert.False(t, (p+1).holds(b, at), "of another connection")
		b[rapid.IntRange(0, len(b)-1).Draw(t, "hit")] ^= 1 << rapid.IntRange(0, 7).Draw(t, "bit")
		assert.False(t, p.holds(b, at), "a bit is wrong")
	})
}

func TestQuestionsTravelAsTheyAre(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := question{
			actor: rapid.IntRange(0, 1000).Draw(t, "actor"), stream: rapid.IntRange(0, 1<<30).Draw(t, "stream"),
			size: cc.Bytes(rapid.Int64Range(0, 1<<50).Draw(t, "size")),
		}
		in := bufio.NewReader(bytes.NewReader(append(q.text(), q.text()...)))
		for range 2 {
			got, err := readQuestion(in)
			require.NoError(t, err)
			assert.Equal(t, q, got)
		}
		_, err := readQuestion(in)
		assert.Equal(t, io.EOF, err)
		_, err = readQuestion(bufio.NewReader(bytes.NewReader(q.text()[:len(q.text())-1])))
		assert.Error(t, err, "cut short")
	})
	_, err := readQuestion(bufio.NewReader(bytes.NewBufferString("GET /index.html HTTP/1.1\r\n\r\n")))
	assert.ErrorContains(t, err, "read question")
}

func TestTurnsCoverTheRunAlternately(t *testing.T) {
	s := Stage{Duration: 10 * time.Second, Seed: 7, Actors: []Actor{
		{Start: time.Second, On: 2 * time.Second, Off: time.Second},
		{Start: time.Second, Stop: 5 * time.Second},
		{On: time.Second, Off: time.Second, Random: true},
		{On: time.Second, Off: time.Second, Random: true},
	}}
	assert.Equal(t, []sim.Turn{
		{From: time.Second, To: 3 * time.Second},
		{From: 4 * time.Second, To: 6 * time.Second},
		{From: 7 * time.Second, To: 9 * time.Second},
	}, s.Turns(0))
	assert.Equal(t, []sim.Turn{{From: time.Second, To: 5 * time.Second}}, s.Turns(1))
	assert.Equal(t, s.Turns(2), s.Turns(2), "the same seed")
	assert.NotEqual(t, s.Turns(2), s.Turns(3), "each actor for itself")

	turns := s.Turns(0)
	for _, c := range []struct{ now, ran, next time.Duration }{
		{0, 0, time.Second},
		{2 * time.Second, time.Second, 2 * time.Second},
		{3 * time.Second, 2 * time.Second, 4 * time.Second},
		{5 * time.Second, 3 * time.Second, 5 * time.Second},
		{8999 * time.Millisecond, 5999 * time.Millisecond, 8999 * time.Millisecond},
	} {
		assert.Equal(t, c.ran, ranFor(turns, c.now), "ran by %s", c.now)
		next, more := nextTurn(turns, c.now)
		assert.True(t, more)
		assert.Equal(t, c.next, next, "next after %s", c.now)
	}
	_, more := nextTurn(turns, 9*time.Second)
	assert.False(t, more)
}

func TestAStageThatCannotBePlayedIsRefused(t *testing.T) {
	good := func() Stage {
		return Stage{Name: "x", Duration: time.Second, Actors: []Actor{{Name: "a", Kind: Bulk}}}
	}
	require.NoError(t, good().Check())
	for want, spoil := range map[string]func(*Stage){
		"duration is 0s":                         func(s *Stage) { s.Duration = 0 },
		"warm-up is 1s":                          func(s *Stage) { s.Warmup = time.Second },
		"there is no actor":                      func(s *Stage) { s.Actors = nil },
		"app is \"\"":                            func(s *Stage) { s.Actors[0].Kind = "" },
		"size of what it requests is missing":    func(s *Stage) { s.Actors[0].Kind = Web },
		"a video needs the rate of the encoding": func(s *Stage) { s.Actors[0].Kind = Video },
		"its rate is missing":                    func(s *Stage) { s.Actors[0].Kind = UDP },
		"one of cubic, bbr, reno":                func(s *Stage) { s.Actors[0].Kind, s.Actors[0].Control = Upload, "copa" },
		"app: upload goes on without end":        func(s *Stage) { s.Actors[0].Kind, s.Actors[0].Size = Upload, 1 },
		"host is 100":                            func(s *Stage) { s.Actors[0].Host = 100 },
		"on and off must be at least 10ms":       func(s *Stage) { s.Actors[0].Random, s.Actors[0].On = true, 1e9 },
		"but no on":                              func(s *Stage) { s.Actors[0].Off = 1 },
		"stop is 1ns, which is not":              func(s *Stage) { s.Actors[0].Start, s.Actors[0].Stop = 2, 1 },
		"there is none: give algorithm or edge":  func(s *Stage) { s.Changes = []Change{{Edge: "defaults: {}"}} },
		"there is one of them":                   func(s *Stage) { s.Cell, s.Down.Rate = &sim.CellConfig{}, 1 },
		"change 0 is at 1s":                      func(s *Stage) { s.Changes = []Change{{At: time.Second, Delay: 1}} },
		"change 1 is at 1ns, which is before": func(s *Stage) {
			s.Changes = []Change{{At: 2, Delay: 1}, {At: 1, Delay: 1}}
		},
		"it is for a transparent proxy": func(s *Stage) { s.Hold = true },
		"the edge holds all UDP": func(s *Stage) {
			s.Hold, s.Edge = true, "defaults: {}"
			s.Actors[0] = Actor{Name: "a", Kind: QUIC, Direct: true}
		},
		"take native or control out": func(s *Stage) {
			s.Native, s.Actors[0] = true, Actor{Name: "a", Kind: Upload, Control: "bbr"}
		},
		"take native or app: quic out": func(s *Stage) { s.Native, s.Actors[0].Kind = true, QUIC },
		"shortest period is 1ms":       func(s *Stage) { s.Hints = -1 },
	} {
		s := good()
		spoil(&s)
		assert.ErrorContains(t, s.Check(), want)
	}
}

// lateHop hands packets over late, but in the warm-up.
type lateHop struct{ late time.Duration }

func (h lateHop) Report(from, _ time.Duration) (r netlab.Report) {
	if from > 0 {
		r.Up.Lateness.P99 = h.late
	}
	return r
}

func (lateHop) Series(netlab.Direction, time.Duration, time.Duration) []netlab.Point { return nil }

func TestWhatIsLateAfterTheWarmUpDisturbsARun(t *testing.T) {
	s := Stage{Warmup: time.Second, Duration: 2 * time.Second}
	var r Record
	r.passed(s, lateHop{netlab.Late})
	assert.False(t, r.Disturbed())
	r.passed(s, lateHop{netlab.Late + 1})
	assert.True(t, r.Disturbed())
}

// A peer that sends one wrong byte, as a proxy would that mixes up two pieces.
func TestBytesThatTheServerDidNotSendAreTold(t *testing.T) {
	r := &run{stage: Stage{Duration: time.Second}, lab: &netlab.Cellular{Path: &netlab.Path{}}}
	a := &actor{run: r, number: 3, record: ActorRecord{Bytes: make([]cc.Bytes, 10)}}
	ours, theirs := net.Pipe()
	l := &line{actor: a, Conn: ours, buf: make([]byte, 100)}
	sent := make([]byte, 400)
	patternOf(3, 0).fill(sent, 0)
	sent[250]++
	told := make(chan error, 1)
	go func() {
		_, err := readQuestion(bufio.NewReader(theirs))
		if err == nil {
			_, err = theirs.Write(sent[:300])
		}
		told <- err
	}()
	err := l.get(400)
	require.NoError(t, <-told)
	assert.EqualError(t, err, "connection 1, bytes 200 to 300 are not what was sent")
	assert.Equal(t, err.Error(), a.record.Corrupt)
	assert.Equal(t, cc.Bytes(300), total(a.record))
	require.NoError(t, errors.Join(ours.Close(), theirs.Close()))
}

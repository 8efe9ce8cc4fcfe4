//go:build linux

package e2e

import (
	"errors"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// What a proxy leaves behind that says nothing any more.
//
// The relay writes nothing then, and with the 10 ms worth that usually wait in a
// socket it would all be over before there is anything to see. So the tests raise
// what may wait there, through a copy of the socket, and the proxy itself writes
// a second or more ahead before it falls silent.

// patient is how many round trips a sender goes on with the window that it was
// told last: four without an answer, one until that is noticed and one that
// begins in the middle.
const patient = 6

// assertLossBased checks that a sender that was left alone with a window does
// what Reno does (RFC 5681 §3): each loss halves the window, and in between it
// grows by a packet a round trip.
func assertLossBased(t *testing.T, rs []round, window int) {
	t.Helper()
	require.Greater(t, len(rs), 3*patient, "there was something to send")
	// The window grows from its first moment of patience on, or from half of what
	// it had grown to before the last loss event.
	most, from, since := window, window, patient-2
	halved := 0
	for i := patient; i+3 < len(rs); i++ {
		// A round trip with losses behind two without: a new loss event.
		if resent(rs[i-2:i]) == 0 && rs[i].again > 0 {
			least := min(rs[i].pipe, rs[i+1].pipe, rs[i+2].pipe, rs[i+3].pipe)
			if assert.LessOrEqual(t, least, most/2+2, "a loss halves the window: round trips from %d on: %+v", i,
				rs[i:i+4]) {
				halved++
			}
			most, from, since = most/2, most/2, i
		}
		if i-since < 3 && since >= patient {
			continue // the old window is still coming back
		}
		most = max(most, rs[i].pipe)
		assert.LessOrEqual(t, rs[i].pipe, from+i-since+3,
			"a window grows by a packet: round trip %d, from %d at %d: %+v", i, from, since, rs[i])
	}
	assert.True(t, halved > 0 || slices.ContainsFunc(rs,
		func(r round) bool { return r.pipe <= window/2+1 }), "no loss has halved the window: %+v", rs)
}

// TestAStoppedProxyLeavesALossBasedSender has a window of 40 packets on a path
// that holds 20 and loses one packet in 66, to which a fixed window pays no heed
// and every standard sender does.
func TestAStoppedProxyLeavesALossBasedSender(t *testing.T) {
	needsHeld(t)
	const window = 40
	w := ways[0]
	link := slow(100)
	link.Loss, link.Seed = 0.015, 1
	s, path := newCellular(t, link)
	p := s.start(w.yaml(fixed(window)))
	s.capture(w)
	record := s.record(path)
	path.StartOnData()
	d := w.download(s, 1, 4*megabyte)
	d.reaches(megabyte)
	fd := p.fill(d.peer(), 700*segment)
	defer unix.Close(fd) //nolint:errcheck // a copy

	t.Cleanup(func() { _ = p.cmd.Process.Signal(syscall.SIGCONT) }) // or it would not end
	p.signal(syscall.SIGSTOP)
	stopped := record.now()
	require.Eventually(t, func() bool { return tcpInfo(t, fd).Notsent_bytes == 0 }, patience, time.Millisecond)
	resumed := record.now()
	p.signal(syscall.SIGCONT)
	require.Eventually(t, func() bool {
		client := leg(t, p.relaying(1)[0], "client")
		return client["fallbacks"].(float64) >= 1 && client["cwnd_bytes"] == float64(window*segment)
	}, patience, time.Millisecond, "the window is the proxy's again")
	obeyed := record.now()
	d.arrives()
	assert.GreaterOrEqual(t, p.metric("penstock_datapath_fallbacks_total"), 1.0)

	sending := record.sending(d)
	assert.InDelta(t, window, mostPipe(rounds(sending, 0, stopped)), 3, "its window before")
	assertLossBased(t, rounds(sending, stopped, resumed), window)
	assert.InDelta(t, window, mostPipe(rounds(sending, obeyed, record.now())), 3, "and after")
}

func TestAKilledProxyLeavesNoControlBehind(t *testing.T) {
	needsHeld(t)
	w := ways[0]
	s, path := newCellular(t, slow(38))
	p := s.start(w.yaml(fixed(60)))
	s.capture(w)
	path.StartOnData()
	d := w.download(s, 1, 64*megabyte)
	d.reaches(megabyte / 2)
	control := p.announced("control")
	require.True(t, registered(t, control))
	require.NoError(t, unix.Close(p.fill(d.peer(), 1000*segment)))

	p.signal(syscall.SIGKILL)
	require.Eventually(t, func() bool { return !registered(t, control) }, patience, time.Millisecond,
		"what nobody speaks for any more cannot be chosen")
	got := d.ends()
	assert.ErrorIs(t, got.err, syscall.ECONNRESET, "though the kernel had bytes to send: they are a part only")
	assert.Equal(t, digestOf(d.seed, got.n), got.sum)
	select {
	case err := <-d.sent:
		assert.True(t, errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE), "%v", err)
	case <-time.After(patience):
		assert.Fail(t, "the server waits for ever")
	}
}

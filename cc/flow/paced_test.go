package flow

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
)

// pacedBuffer is what a writer fills: no more than a new connection may send at once.
const pacedBuffer = cc.InitialCwndPackets * mss

// pacedSocket is a transport that enforces a pacing rate, with a writer that comes late.
type pacedSocket struct {
	*leg
	refill  cc.Time       // when its writer comes; 0: it need not
	every   time.Duration // between reports, at least
	visited cc.Time
	back    []cc.Time // when what is in flight will be acknowledged
}

// run lets the socket do what is due at now.
func (s *pacedSocket) run(now cc.Time) {
	const rtt = time.Millisecond
	if s.refill != 0 && s.refill <= now {
		s.refill = 0
		s.write(pacedBuffer-s.r.Unsent, 0)
		s.paced = max(s.paced, now)
	}
	for s.r.Unsent >= mss && s.paced <= now && s.r.Pipe+mss <= s.limit.Cwnd {
		s.r.Unsent -= mss
		s.r.Pipe += mss
		s.back = append(s.back, now.Add(rtt))
		s.paced = s.paced.Add(s.limit.PacingRate.TimeFor(mss))
	}
	if len(s.back) == 0 || s.back[0] > now || now.Sub(s.visited) < s.every {
		return
	}
	s.visited = now
	for len(s.back) > 0 && s.back[0] <= now {
		s.back = s.back[1:]
		s.r.Acked += mss
		s.r.Pipe -= mss
	}
	s.r.RTT = rtt
	s.report()
}

// TestManyPacedMembersKeepToTheRate has the writers of a thousand sockets come late, so
// that these run empty and take turns, and then all stand still for a while. Each could
// have the whole rate for the short time that it has something to send.
func TestManyPacedMembersKeepToTheRate(t *testing.T) {
	need.OneGoroutine(t)
	const members = 1000
	for _, row := range []struct {
		mbit               float64
		late, still, every time.Duration
	}{
		{mbit: 500, late: 10 * time.Millisecond},
		{mbit: 500, late: 200 * time.Millisecond},
		{mbit: 500, late: 200 * time.Millisecond, still: 600 * time.Millisecond, every: 5 * time.Millisecond},
		{mbit: 500, late: 400 * time.Millisecond},
		{mbit: 500, late: 400 * time.Millisecond, still: 600 * time.Millisecond, every: 20 * time.Millisecond},
		{mbit: 50, late: 400 * time.Millisecond},
		{mbit: 50, late: 800 * time.Millisecond, still: 3 * time.Second},
	} {
		p := newTestbed(t)
		rng := rand.New(rand.NewPCG(1, 2))
		terms := static(40 * members)
		terms.Params["pacing_mbit"] = row.mbit
		var sockets []*pacedSocket
		for range members {
			s := &pacedSocket{leg: p.openEnforced(terms), refill: p.now, every: row.every}
			s.report()
			sockets = append(sockets, s)
		}
		play := func(lasts time.Duration, writes bool) cc.Rate {
			acked := cc.Bytes(0)
			for end := p.now.Add(lasts); p.now < end; {
				p.wait(time.Millisecond)
				for _, s := range sockets {
					before := s.r.Acked
					s.run(p.now)
					acked += s.r.Acked - before
					if writes && s.refill == 0 && s.r.Unsent < pacedBuffer/2 {
						s.refill = p.now.Add(time.Duration(rng.Int64N(int64(row.late))))
					}
				}
			}
			return cc.RateOf(acked, lasts)
		}
		play(time.Second, true)
		play(row.still, false)
		play(2*time.Second, true) // each may burst after silence
		assert.LessOrEqual(t, play(2*time.Second, true).Mbps(), 1.1*row.mbit, "%+v", row)
	}
}

package flow

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// peer sends as much as a window lets it, over a path of a rate with a queue that never drops.
type peer struct {
	t      *testing.T
	r      *Receiving
	window cc.Bytes
	now    cc.Time
	got    cc.Bytes
	unread cc.Bytes
}

const (
	peerRTT  = 20 * time.Millisecond
	peerRate = cc.Rate(11_584_000) // a segment in a millisecond
)

func newPeer(t *testing.T, m *Manager, terms Terms) *peer {
	t.Helper()
	p := &peer{t: t, now: cc.Time(time.Second), got: ReceiveBulk}
	r, err := m.Receive(p.now, terms, func(n cc.Bytes) { p.window = n })
	require.NoError(t, err)
	p.r = r
	return p
}

// send has it send for a time with no more than so much in flight.
func (p *peer) send(d time.Duration, most cc.Bytes) {
	for end := p.now.Add(d); p.now < end; p.now = p.now.Add(time.Millisecond) {
		window := p.window
		if window == 0 {
			window = ReceiveBulk
		}
		inflight := min(window, most)
		rtt := max(peerRTT, peerRate.TimeFor(inflight))
		p.got += min(cc.RateOf(inflight, peerRTT), peerRate).BytesIn(time.Millisecond)
		p.r.Arrived(Arrivals{
			At: p.now, Received: p.got, RTT: rtt, Window: window, Unread: p.unread,
			MSS: cc.DefaultMSS,
		})
	}
}

func uploadTerms(algorithm string) Terms {
	return Terms{Group: "host", Host: netip.MustParseAddr("192.0.2.1"), Algorithm: algorithm}
}

func TestTheWindowOfAReceiverFollowsThePath(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	p.send(10*time.Second, cc.MaxCwnd)
	s := p.r.Snapshot()
	bdp := peerRate.BytesIn(peerRTT)
	assert.Greater(t, p.window, bdp)
	assert.Less(t, p.window, 3*bdp)
	assert.Equal(t, p.window, s.Share)
	assert.Equal(t, p.got-ReceiveBulk-1448, s.Delivered, "what had come before is not counted")
	assert.Equal(t, LimitedByCwnd, s.LimitedBy)
	assert.InEpsilon(t, float64(peerRate), float64(s.DeliveryRate), 0.1)
}

// A window that its peer does not fill says nothing about the path, and stays.
func TestTheWindowOfAReceiverLeavesAPeerAloneThatFillsItNot(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	p.send(10*time.Second, 10e3)
	assert.GreaterOrEqual(t, p.window, firstReceive)
	assert.Equal(t, LimitedByApplication, p.r.Snapshot().LimitedBy)
}

// Nor does one whose reader lags behind.
func TestTheWindowOfAReceiverDoesNotFollowItsReader(t *testing.T) {
	p := newPeer(t, &Manager{}, uploadTerms("penstock"))
	p.unread = 100e3
	p.send(10*time.Second, cc.MaxCwnd)
	assert.GreaterOrEqual(t, p.window, firstReceive)
	assert.Equal(t, LimitedByApplication, p.r.Snapshot().LimitedBy)
}

func TestWhoReceivesSharesWithNobodyWhoSends(t *testing.T) {
	m := &Manager{}
	sender, err := m.Open(1, uploadTerms("penstock"), Leg{})
	require.NoError(t, err)
	first, second := newPeer(t, m, uploadTerms("penstock")), newPeer(t, m, uploadTerms("penstock"))
	assert.Equal(t, 1, sender.Snapshot().Members)
	assert.Equal(t, 2, first.r.Snapshot().Members)

	host := netip.MustParsePrefix("192.0.2.1/32")
	assert.Equal(t, 1, m.Hint(host, cc.Hint{At: 2, Capacity: 1e6}), "hints are about the way to the host")

	require.NoError(t, second.r.Move(second.now, uploadTerms("vegas")))
	assert.Equal(t, "vegas", second.r.Snapshot().Algorithm)
	assert.Equal(t, 1, first.r.Snapshot().Members)
	first.r.Close(first.now)
}

// What needs signals or means that a receiver has not is refused by name.
func TestWhichAlgorithmsReceive(t *testing.T) {
	var can []string
	for _, spec := range cc.Specs() {
		_, err := (&Manager{}).Receive(1, Terms{Group: "a", Algorithm: spec.Name}, func(cc.Bytes) {})
		if slices.Contains(spec.Needs, cc.NeedsPacing) || slices.Contains(spec.Needs, cc.NeedsHints) {
			assert.ErrorContains(t, err, spec.Name+" does not go as the algorithm of a receive window")
			assert.ErrorContains(t, err, "there are cubic")
		} else {
			assert.NoError(t, err)
			can = append(can, spec.Name)
		}
	}
	assert.Subset(t, can, []string{"cubic", "penstock", "reno", "sprout", "vegas"})
	assert.NotContains(t, can, "bbr")
}

//go:build linux

package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

func TestTheKernelObeysAFixedWindowAtEachMoment(t *testing.T) {
	needsHeld(t)
	const window = 22
	// With no packet lost there is one opinion on what is in flight. The kernel
	// takes a packet for lost (RACK, RFC 8985) before three have passed it, and
	// sends it again; for the record, which goes by RFC 6675, it is in flight
	// twice until then.
	for name, tt := range map[string]struct {
		loss  float64
		early int
	}{
		"without loss":           {0, 0},
		"one packet in 100 lost": {0.01, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w := ways[0]
			link := slow(100)
			link.Loss, link.Seed = tt.loss, 7
			s, path := newCellular(t, link)
			s.start(w.yaml(fixed(window)))
			s.capture(w)
			record := s.record(path).answered()
			path.StartOnData()
			d := w.download(s, 1, 2*megabyte)
			d.arrives()
			fallbacks := s.proxy.metric("penstock_datapath_fallbacks_total")

			sending := record.sending(d)
			assert.Zero(t, fallbacks)
			again := len(sending.Again())
			t.Logf("%d packets were sent again", again)
			assert.Equal(t, tt.loss > 0, again > 0)
			assert.LessOrEqual(t, excess(sending, window), tt.early)
			_, pipe := sending.Levels()
			assert.Equal(t, window, packets(pipe.P50), "it is used")
			assert.LessOrEqual(t, packets(pipe.P95), window)
		})
	}
}

// The outages begin a while into a transfer and last for several retransmission
// timeouts.
const (
	outageAt  = time.Second
	outageFor = 1200 * time.Millisecond
)

func TestAfterAnOutageTheWindowIsOursAtOnce(t *testing.T) {
	needsHeld(t)
	t.Run("in which packets wait", func(t *testing.T) {
		trace, err := sim.Steps("12 Mbit/s with an outage", time.Minute,
			sim.Step{Rate: linkRate}, sim.Step{At: outageAt}, sim.Step{At: outageAt + outageFor, Rate: linkRate})
		require.NoError(t, err)
		outlives(t, sim.LinkConfig{Trace: trace, Delay: linkDelay, QueuePackets: 100}, func(*scene, *netlab.Path) {})
	})
	t.Run("in which packets are lost", func(t *testing.T) {
		outlives(t, slow(100), func(s *scene, path *netlab.Path) {
			until(t, path, outageAt)
			s.setClientLink(netlink.LinkSetDown)
			until(t, path, outageAt+outageFor)
			s.setClientLink(netlink.LinkSetUp)
			require.NoError(t, s.Client.Route(netip.Prefix{}, s.EdgeNear.V4), "which went with the link")
		})
	})
}

func until(t *testing.T, path *netlab.Path, at time.Duration) {
	t.Helper()
	require.Eventually(t, func() bool { return path.Elapsed() >= at }, patience, time.Millisecond)
}

func (s *scene) setClientLink(state func(netlink.Link) error) {
	s.t.Helper()
	require.NoError(s.t, s.Client.Do(func() error {
		link, err := netlink.LinkByName(netlab.NearDevice)
		if err != nil {
			return err
		}
		return state(link)
	}))
}

// outlives has a transfer go through an outage, which breaks makes where the link
// does not.
func outlives(t *testing.T, link sim.LinkConfig, breaks func(*scene, *netlab.Path)) {
	t.Helper()
	const window = 22
	w := ways[0]
	s, path := newCellular(t, link)
	p := s.start(w.yaml(fixed(window)))
	s.capture(w)
	record := s.record(path).answered()
	path.StartOnData()
	d := w.download(s, 1, 5*megabyte/2)
	breaks(s, path)
	until(t, path, outageAt+outageFor)
	control := p.relaying(1)[0]["down"].(map[string]any)["control"].(map[string]any)
	d.arrives()

	sending := record.sending(d)
	assert.GreaterOrEqual(t, control["timeouts"], 1.0)
	began, _ := sending.First()
	back := sending.Between(began+outageAt+outageFor, record.now())
	heard := slices.IndexFunc(back.Steps, func(p Step) bool { return p.Payload == 0 && p.Acked > back.Steps[0].Acked })
	require.Positive(t, heard)
	at := back.Steps[heard].At
	// In the first round trip the sender hears that the link is back. In the second
	// it may send something new, to find out whether what it takes for lost is
	// (F-RTO, RFC 5682), and there may be only little of that.
	early := sent(sending.Between(at, at+4*linkDelay+slack))
	assert.GreaterOrEqual(t, early, window-2, "at the beginning of the third round trip at the latest the window "+
		"is in use")
	assert.LessOrEqual(t, early, 3*window, "no more than a window in each of the round trips that this may span")
	rs := rounds(sending, at, record.now())
	require.Greater(t, len(rs), 10)
	_, pipe := sending.Between(rs[3].from, record.now()).Levels()
	assert.Equal(t, window, packets(pipe.P50), "and it stays with that")
	assert.Equal(t, window, packets(pipe.P95))
}

// sent is how many packets left with data.
func sent(s Sending) (n int) {
	for _, p := range s.Steps {
		if p.Payload > 0 {
			n++
		}
	}
	return n
}

// TestAFullTableLeavesTheOthersToTheRelay has six flows at once, of one direction
// each, and room for the windows of two.
func TestAFullTableLeavesTheOthersToTheRelay(t *testing.T) {
	needsHeld(t)
	w := ways[0]
	config := strings.Replace(w.yaml(fixed(22)), "limits: {", "limits: {held_legs: 2, ", 1)
	s, path := newCellular(t, slow(100))
	p := s.start(config)
	s.capture(w)
	path.Start()
	for range 2 { // the second time shows that the first gave back what it had
		var downloads []*transfer
		for seed := range 6 {
			downloads = append(downloads, w.prepare(s, uint64(seed), megabyte/3))
		}
		envelopes := map[any]int{}
		for _, f := range p.relaying(6) {
			l := leg(t, f, "client")
			envelopes[l["envelope"]]++
			if l["envelope"] != kernel.EBPF {
				assert.Contains(t, fmt.Sprint(l["missing"]), "limits.held_legs", "the leg says why")
			}
		}
		assert.Equal(t, map[any]int{kernel.EBPF: 2, p.announced("otherwise"): 4}, envelopes)
		assert.Equal(t, 2.0, p.metric("penstock_datapath_enforced_legs"))
		for _, d := range downloads {
			d.begin()
		}
		for _, d := range downloads {
			d.arrives()
		}
		p.relaying(0)
	}
	assert.Zero(t, p.metric("penstock_datapath_enforced_legs"))
	assert.Equal(t, 8.0, p.metric("penstock_datapath_unenforced_legs_total", `reason="full"`))
	assert.Zero(t, p.metric("penstock_datapath_unenforced_legs_total", `reason="failed"`))
}

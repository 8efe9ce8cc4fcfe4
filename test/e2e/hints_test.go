//go:build linux

package e2e

import (
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/penstock-net/penstock/internal/netlab"
)

// The link towards the client, as its router shapes it.
const (
	shapedRate  = 8_000_000 // bit/s
	shapedQueue = 120_000   // bytes
)

// hinted is the configuration of a router whose shaped interface tells hints.
const hinted = "hints: [{interface: " + netlab.NearDevice + "}]\n"

// shapeLink has the edge's device towards the client send no faster.
func (s *scene) shapeLink() { s.shapeLinkTo(shapedRate) }

// shapeLinkTo is shapeLink with a rate in bit/s.
func (s *scene) shapeLinkTo(rate uint64) {
	s.t.Helper()
	require.NoError(s.t, s.Edge.Do(func() error {
		link, err := netlink.LinkByName(netlab.NearDevice)
		if err != nil {
			return err
		}
		return netlink.QdiscReplace(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{
				LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
				Parent: netlink.HANDLE_ROOT,
			},
			Rate: rate / 8, Limit: shapedQueue, Buffer: netlink.Xmittime(rate/8, 15140),
		})
	}))
}

// backlog is what waits in the edge's queue towards the client, and has left it.
func (s *scene) backlog() (waits, sent int) {
	s.t.Helper()
	require.NoError(s.t, s.Edge.Do(func() error {
		link, err := netlink.LinkByName(netlab.NearDevice)
		if err != nil {
			return err
		}
		all, err := netlink.QdiscList(link)
		if err != nil {
			return err
		}
		for _, q := range all {
			if q.Attrs().Parent == netlink.HANDLE_ROOT {
				waits, sent = int(q.Attrs().Statistics.Queue.Backlog), int(q.Attrs().Statistics.Basic.Bytes)
			}
		}
		return nil
	}))
	return waits, sent
}

// overShapedLink downloads for a while and returns how much waited in the queue,
// in rising order, and the rate in bit/s at which it was emptied.
func overShapedLink(t *testing.T, config string) (s *scene, waited []int, rate float64) {
	t.Helper()
	w := ways[0]
	s = newScene(t)
	s.shapeLink()
	s.start(w.yaml(config))
	s.capture(w)
	client, server := w.pair(s)
	go func() { _, _ = io.Copy(io.Discard, client) }()
	go func() { _, _ = io.Copy(struct{ io.Writer }{server}, random(1, 1<<40)) }()
	require.Eventually(t, func() bool { _, sent := s.backlog(); return sent > 1<<20 }, patience, 5*time.Millisecond)

	const samples = 200
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	_, before := s.backlog()
	began := time.Now()
	for range samples {
		<-tick.C
		waits, _ := s.backlog()
		waited = append(waited, waits)
	}
	_, after := s.backlog()
	slices.Sort(waited)
	return s, waited, float64(after-before) * 8 / time.Since(began).Seconds()
}

func TestARoutersOwnQueueTellsNACCToKeepItShort(t *testing.T) {
	needsPrivilege(t)
	needsHeld(t) // bbr beneath keeps any queue short
	var cubic, nacc []int
	var cubicRate, naccRate float64
	t.Run("cubic", func(t *testing.T) {
		_, cubic, cubicRate = overShapedLink(t, "defaults: {algorithm: cubic}\n")
	})
	t.Run("nacc", func(t *testing.T) {
		var s *scene
		s, nacc, naccRate = overShapedLink(t, hinted+"defaults: {algorithm: \"nacc:wired\"}\n")
		assert.Contains(t, s.proxy.page("/flows"), `"guided"`)
		assert.Zero(t, s.proxy.metric("penstock_hint_source_errors_total"))
	})
	median, p95 := len(cubic)/2, len(cubic)*95/100
	t.Logf("queue, median and 95th percentile: cubic %d and %d bytes at %.2f Mbit/s, nacc %d and %d at %.2f",
		cubic[median], cubic[p95], cubicRate/1e6, nacc[median], nacc[p95], naccRate/1e6)
	assert.Less(t, nacc[p95], cubic[p95]/3)
	assert.Less(t, nacc[median], cubic[median]/3)
	assert.Greater(t, naccRate, 0.85*cubicRate)
}

func TestHintsAreReadWithoutAnyPrivilege(t *testing.T) {
	needsPrivilege(t)
	s := newScene(t)
	s.shapeLink()
	p := s.launch(released, "run", "--config", s.write(ways[9].yaml(hinted)))
	if !strings.Contains(p.said.String(), `"dropped"`) {
		t.Skip("privileges were not dropped: is this a container that forbids it?")
	}
	const reads = "penstock_hint_source_readings_total"
	until := p.metric(reads) + 10
	require.Eventually(t, func() bool { return p.metric(reads) > until }, patience, 20*time.Millisecond)
	assert.Zero(t, p.metric("penstock_hint_source_errors_total"))
	assert.EqualValues(t, 1, p.metric("penstock_hint_source_up", `interface="`+netlab.NearDevice+`"`))
}

//go:build !race

package stage

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

func TestAVirtualStageHasTheTransportOfTheRealOne(t *testing.T) {
	for name, c := range map[string]struct {
		edge   string
		tunnel Tunnel
		want   sim.Transport
	}{
		"no proxy":                        {"", "", sim.Kernel},
		"a tunnel past the edge":          {"", WireGuard, sim.Kernel},
		"what the proxy chooses":          {"defaults: {algorithm: copa}\n", "", sim.Kernel},
		"our control in the kernel":       {"envelope: ebpf\n", "", sim.Kernel},
		"a relay above bbr":               {"envelope: bbr\n", "", sim.Relay},
		"a tunnel that ends in the proxy": {"defaults: {algorithm: copa}\n", WireGuard, sim.Relay},
	} {
		s := short(Actor{Name: "bulk", Kind: Bulk})
		s.Edge, s.Tunnel = c.edge, c.tunnel
		v := virtual{stage: s, flows: make([][]int, len(s.Actors))}
		require.NoError(t, v.prepare(), name)
		assert.Equal(t, c.want, v.scenario.Transport, name)
	}
}

// What comes in a last step that is shorter than the others counts in no whole one.
func TestAVirtualRunMayEndWithinAStep(t *testing.T) {
	for d, steps := range map[time.Duration]int{Step / 2: 1, 2*Step - 1: 2} {
		s := short(Actor{Name: "bulk", Kind: Bulk})
		s.Duration, s.Warmup = d, 0
		s.Down.Rate, s.Down.Delay, s.Up.Delay = 12e6, time.Millisecond, time.Millisecond
		r, err := PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		require.Len(t, r.Actors[0].Bytes, steps)
		assert.LessOrEqual(t, r.Actors[0].Rate(0, Step), cc.Rate(12e6), "the link's")
	}
}

func TestWhatVirtualTimeAloneCanPlayIsRefusedOverRealSockets(t *testing.T) {
	for says, change := range map[string]func(*Stage){
		"leave acks out":                 func(s *Stage) { s.AckEvery = Step },
		"ecn l4s":                        func(s *Stage) { s.Actors[0].ECN = sim.ECNL4S },
		"do not change":                  func(s *Stage) { s.Native, s.Changes = true, []Change{{At: Step, Delay: Step}} },
		"download without end":           func(s *Stage) { s.Native, s.Actors[0].Size = true, 1000 },
		"no congestion control nonesuch": func(s *Stage) { s.Kernel = "nonesuch" },
	} {
		s := short(Actor{Name: "bulk", Kind: Bulk})
		require.NoError(t, s.Realisable())
		change(&s)
		_, err := Play(t.Context(), Env{}, s, nil)
		assert.ErrorContains(t, err, says)
	}
}

func TestAConnectionOfItsOwnIsDialledOverTheLinksDelay(t *testing.T) {
	const oneWay = 30 * time.Millisecond
	took := func(change func(*Stage)) (all []time.Duration) {
		s := Stage{
			Name: "web", Down: sim.LinkConfig{Rate: 100e6}, Duration: 4 * time.Second,
			Actors: []Actor{{Name: "web", Kind: Web, Size: 1000, Every: time.Second}},
		}
		change(&s)
		rec, err := PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		for _, q := range rec.Actors[0].Requests {
			all = append(all, q.Took.Round(2*time.Millisecond))
		}
		return all
	}
	same := slices.Repeat([]time.Duration{4 * oneWay}, 4) // a handshake, the request and the answer
	assert.Equal(t, same, took(func(s *Stage) { s.Down.Delay, s.Up.Delay = oneWay, oneWay }))
	moves, err := sim.ReadDelayTrace("moves", strings.NewReader("30\n"))
	require.NoError(t, err)
	assert.Equal(t, same, took(func(s *Stage) { s.Down.Delays, s.Up.Delays = moves, moves }), "a trace's")
	assert.Equal(t, same, took(func(s *Stage) {
		s.Down, s.Up.Delay = sim.LinkConfig{}, oneWay
		s.Cell = &sim.CellConfig{Delay: oneWay - 20*time.Millisecond}
		s.Cell.Hosts = []sim.CellHost{{Delay: 19 * time.Millisecond}}
	}), "the host's, and a subframe")
	same[2], same[3] = 8*oneWay, 8*oneWay
	assert.Equal(t, same, took(func(s *Stage) {
		s.Down.Delay, s.Up.Delay = oneWay, oneWay
		s.Changes = []Change{{At: 1500 * time.Millisecond, Delay: 2 * oneWay}}
	}), "what it is by then")
}

// Requests begin while the application runs, as over real sockets, and one that has begun is not held up by a rest.
func TestAWebApplicationRests(t *testing.T) {
	s := Stage{
		Name: "web", Down: sim.LinkConfig{Rate: 1e6, Delay: 20 * time.Millisecond}, Duration: 10 * time.Second, Seed: 1,
		Actors: []Actor{{
			Name: "web", Kind: Web, Size: 20_000, Every: 500 * time.Millisecond, Start: time.Second,
			Stop: 9 * time.Second,
			On:   600 * time.Millisecond, Off: 1900 * time.Millisecond,
		}},
	}
	play := func() (at []time.Duration) {
		rec, err := PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		for _, q := range rec.Actors[0].Requests {
			at = append(at, q.At)
			assert.Greater(t, q.Took, 200*time.Millisecond, "it goes on")
			assert.Less(t, q.Took, 500*time.Millisecond, "it goes on")
		}
		return at
	}
	const half = 500 * time.Millisecond
	assert.Equal(t, []time.Duration{2 * half, 3 * half, 7 * half, 8 * half, 12 * half, 13 * half, 17 * half}, play())
	s.Actors[0].Random = true
	var want []time.Duration
	due := s.Actors[0].Start
	for from, more := nextTurn(s.Turns(0), due); more; from, more = nextTurn(s.Turns(0), from+half) {
		want = append(want, from)
	}
	assert.Equal(t, want, play(), "of the actor's own turns")
}

func TestWhatVirtualTimeCannotPlayIsToldBeforeTheRun(t *testing.T) {
	for says, a := range map[string]Actor{
		"flows.a: in virtual time a web application has a time": {Kind: Web, Size: 1},
		"flows.a.on: in virtual time app: requests has no":      {Kind: Requests, Size: 1, On: Step, Off: Step},
		"flows.a.on: in virtual time app: video has no rests":   {Kind: Video, Rate: 1e6, Every: Step, On: Step},
	} {
		a.Name = "a"
		_, _, err := Scenario(short(a))
		assert.ErrorContains(t, err, says)
	}
}

func TestAChangeIsWrongOnPurposeOnly(t *testing.T) {
	for edge, says := range map[string]string{
		"defaults: {algorithm: cubic}": "",
		"defaults: {algorithm: cubi}":  `defaults.algorithm: no algorithm "cubi"`,
		"envelope: bbr":                "envelope: cannot change while running",
	} {
		s := short(Actor{Name: "bulk", Kind: Bulk})
		s.Edge = "defaults: {algorithm: copa}"
		s.Changes = []Change{{At: Step, Delay: Step}, {At: 2 * Step, Edge: edge}}
		asked := s.CheckEdge()
		s.Changes[1].Refused = true
		onPurpose := s.CheckEdge()
		if says == "" {
			require.NoError(t, asked)
			require.ErrorContains(t, onPurpose, "changes: the one at 200ms is not refused")
			continue
		}
		require.ErrorContains(t, asked, "changes: the one at 200ms is refused: "+says)
		require.NoError(t, onPurpose)
		r, err := PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		assert.Contains(t, r.Reloads[0].Error, says, "as the proxy answers")
	}
}

func TestWhatTheSimulatorRefusesIsKnownBeforeARun(t *testing.T) {
	for says, change := range map[string]func(*Stage){
		"none leaves the window": func(s *Stage) { s.Edge, s.Kernel = "", "none" },
		"flows.a.every: these are more than 50000 requests": func(s *Stage) {
			s.Actors[0] = Actor{Name: "a", Kind: Web, Size: 1000, Every: time.Microsecond}
		},
	} {
		s := short(Actor{Name: "a", Kind: Bulk})
		_, _, err := Scenario(s)
		require.NoError(t, err)
		change(&s)
		_, _, err = Scenario(s)
		assert.ErrorContains(t, err, says)
	}
}

// A server's own control, and a group of each flow's own, know nothing of the connection before.
func TestEachConnectionOfAWebApplicationBeginsAnew(t *testing.T) {
	for name, edge := range map[string]string{
		"the server's own": "", "its own group": "defaults: {algorithm: cubic, group: flow}\n",
	} {
		s := Stage{
			Name: "web", Down: lastHop(), Up: lastHop(), Edge: edge, Duration: 4 * time.Second,
			Actors: []Actor{
				{Name: "web", Kind: Web, Size: 200_000, Every: time.Second}, {Name: "small", Kind: Requests, Size: 1},
			},
		}
		if edge != "" {
			s.Changes = []Change{{At: 2500 * time.Millisecond, Edge: edge}}
		}
		r, err := PlayVirtual(t.Context(), s, nil)
		require.NoError(t, err)
		asked := r.Actors[0].Requests
		require.Len(t, asked, 4)
		for _, q := range asked[1:] {
			assert.InEpsilon(t, asked[0].Took, q.Took, 0.02, name)
		}
		scenario, _, err := Scenario(s)
		require.NoError(t, err)
		groups := map[string]bool{}
		for _, f := range scenario.Flows {
			groups[f.Group] = true
		}
		assert.Len(t, groups, 5, name)
		for _, c := range scenario.Changes {
			assert.True(t, groups[c.Terms.Group], "it stays where it is")
		}
	}
}

func TestDatagramsUnderWayAtTheirEndStillArrive(t *testing.T) {
	s := short(Actor{Name: "bulk", Kind: Bulk}, Actor{Name: "udp", Kind: UDP, Rate: mbit, Stop: time.Second})
	s.Down.Delay, s.Duration = 250*time.Millisecond, 1300*time.Millisecond
	r, err := PlayVirtual(t.Context(), s, nil)
	require.NoError(t, err)
	udp := r.Actors[1]
	assert.Equal(t, udp.Sent, total(udp))
	for k, n := range udp.Bytes {
		assert.Equal(t, k >= 2 && k < 13, n > 0, "step %d", k)
	}
	f := r.Virtual.Flows[1]
	assert.Equal(t, s.Actors[1].Stop, f.To)
	assert.InEpsilon(t, 0.75*1400/1428, f.Throughput.Mbps(), 0.02, "of the time it was there")
}

func TestAServersOwnWindowRestartsAsLinuxsDo(t *testing.T) {
	for kernel, restarts := range map[string]bool{"": true, "cubic": true, "reno": true, "bbr": false} {
		s := short(Actor{Name: "own", Kind: Bulk, Direct: true}, Actor{Name: "managed", Kind: Bulk})
		s.Kernel = kernel
		scenario, _, err := Scenario(s)
		require.NoError(t, err)
		assert.Equal(t, restarts, scenario.Flows[0].Restarts, kernel)
		assert.False(t, scenario.Flows[1].Restarts)
	}
}

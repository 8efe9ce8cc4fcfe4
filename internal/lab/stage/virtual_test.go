package stage

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

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

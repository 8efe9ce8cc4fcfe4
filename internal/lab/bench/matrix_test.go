package bench

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

func testMatrix(t *testing.T, senders ...string) Matrix {
	t.Helper()
	all, err := ParseSenders(senders, nil)
	require.NoError(t, err)
	return Matrix{
		Name: "bench", Senders: all, Links: []string{"12mbit"}, Up: record.Same, Buffers: []string{"250pkt"},
		Losses: []float64{0}, Delay: 10 * time.Millisecond, Duration: 3 * time.Second, AQM: sim.DropTail.String(),
	}
}

func stagesOf(t *testing.T, m Matrix) []stage.Stage {
	t.Helper()
	r, err := m.Experiment()
	require.NoError(t, err)
	all, err := r.Stages(recipe.Full, 1)
	require.NoError(t, err)
	return all
}

func TestAMatrixIsAnExperiment(t *testing.T) {
	m := testMatrix(t, "cubic", "copa:delta=0.1@bbr", "copa@wireguard", "copa@native", "copa@sim")
	m.Losses, m.Reorder, m.ReorderBy, m.AQM = []float64{0, 0.01}, 0.02, 3*time.Millisecond, sim.DualPI2.String()
	all := stagesOf(t, m)
	require.Len(t, all, 10, "senders take turns")
	for i, s := range all {
		assert.Equal(t, m.Senders[i%5].Name, s.Name)
		assert.InDelta(t, m.Losses[i/5], s.Down.Loss, 0)
		assert.Equal(t, cc.Rate(12e6), s.Down.Rate)
		assert.Equal(t, 250, s.Down.QueuePackets)
		assert.Equal(t, sim.DualPI2, s.Down.AQM)
		assert.Equal(t, 3*time.Millisecond, s.Down.ReorderBy)
		assert.Equal(t, sim.LinkConfig{Rate: 12e6, Delay: 10 * time.Millisecond, QueuePackets: 250}, s.Up,
			"data alone are lost")
		assert.Equal(t, 3*time.Second, s.Duration)
		assert.Zero(t, s.Warmup)
		assert.Len(t, s.Actors, 1)
	}
	cubic, copa, tunnel, native, virtual := all[0], all[1], all[2], all[3], all[4]
	assert.Empty(t, cubic.Edge)
	assert.Equal(t, "cubic", cubic.Kernel)
	assert.Contains(t, copa.Edge, "envelope: bbr\ndefaults: {algorithm: \"copa:delta=0.1\", group: flow}")
	assert.Equal(t, stage.WireGuard, tunnel.Tunnel)
	assert.True(t, native.Native)
	assert.True(t, virtual.Virtual)
	assert.False(t, copa.Virtual)

	all = stagesOf(t, testMatrix(t, "cubic", "reno"))
	assert.Len(t, all, 2, "nobody decides for these")

	m.Up = "2mbit"
	assert.Equal(t, cc.Rate(2e6), stagesOf(t, m)[0].Up.Rate)
	m.Up = record.Free
	assert.Zero(t, stagesOf(t, m)[0].Up.Rate)
}

func TestGeneratedLinksTakeTheSeedUnlessTheyHaveOne(t *testing.T) {
	m := testMatrix(t, "copa@sim")
	m.Links = []string{"generate:lte", "generate:lte:2"}
	r, err := m.Experiment()
	require.NoError(t, err)
	one, err := r.Stages(recipe.Full, 1)
	require.NoError(t, err)
	two, err := r.Stages(recipe.Full, 2)
	require.NoError(t, err)
	assert.NotEqual(t, one[0].Down.Trace, two[0].Down.Trace)
	assert.Equal(t, one[1].Down.Trace.Name, two[1].Down.Trace.Name)
	assert.Equal(t, one[1].Down.Trace.MeanRate(), two[1].Down.Trace.MeanRate(),
		"the same trace, from another moment on")
	assert.Equal(t, "generate:lte", one[0].Down.Trace.Name)
}

func TestAMatrixThatCannotBeNamesTheFlag(t *testing.T) {
	for flag, spoil := range map[string]func(*Matrix){
		"--sender":                    func(m *Matrix) { m.Senders = nil },
		"--duration":                  func(m *Matrix) { m.Duration = 0 },
		"--warmup":                    func(m *Matrix) { m.Warmup = m.Duration },
		"--link, --buffer and --loss": func(m *Matrix) { m.Losses = nil },
		"--delay":                     func(m *Matrix) { m.Delay = -1 },
		"--loss":                      func(m *Matrix) { m.Losses = []float64{0, 1} },
		"--reorder ":                  func(m *Matrix) { m.Reorder = 1 },
		"--reorder-by":                func(m *Matrix) { m.Reorder = 0.1 },
		"--hints":                     func(m *Matrix) { m.Hints = time.Microsecond },
		"--link":                      func(m *Matrix) { m.Links = []string{"12"} },
		"two runs are called":         func(m *Matrix) { m.Links = []string{"12mbit", "12mbit"} },
		"--up":                        func(m *Matrix) { m.Up = "generate:moon" },
		"--buffer":                    func(m *Matrix) { m.Buffers = []string{"2"} },
		"--aqm":                       func(m *Matrix) { m.AQM = "red" },
		"--ecn":                       func(m *Matrix) { m.ECN = "yes" },
		"--hints: there is no proxy": func(m *Matrix) {
			m.Hints, m.Senders = time.Second, []Sender{{Name: "cubic", Kernel: "cubic"}}
		},
	} {
		m := testMatrix(t, "copa")
		spoil(&m)
		_, err := m.Experiment()
		assert.ErrorContains(t, err, flag)
	}
}

func TestVirtualTimeHasTheTransportOfTheRealRuns(t *testing.T) {
	for name, c := range map[string]struct {
		senders []string
		want    sim.Transport
	}{
		"none beside it":               {[]string{"copa@sim"}, sim.Kernel},
		"our control in the kernel":    {[]string{"copa@ebpf", "copa@sim"}, sim.Kernel},
		"the proxy's own choice":       {[]string{"copa", "copa@sim"}, sim.Kernel},
		"a tunnel":                     {[]string{"copa@wireguard", "copa@sim"}, sim.Relay},
		"a relay above bbr":            {[]string{"copa@sim", "copa@bbr", "cubic"}, sim.Relay},
		"both":                         {[]string{"copa@bbr", "copa@ebpf", "copa@sim"}, sim.Kernel},
		"another algorithm's":          {[]string{"penstock@bbr", "copa@sim"}, sim.Kernel},
		"the same with other settings": {[]string{"copa:delta=0.5@bbr", "copa@sim"}, sim.Kernel},
	} {
		for _, s := range stagesOf(t, testMatrix(t, c.senders...)) {
			if s.Virtual {
				scenario, _, err := stage.Scenario(s)
				require.NoError(t, err)
				assert.Equal(t, c.want, scenario.Transport, name)
			}
		}
	}
}

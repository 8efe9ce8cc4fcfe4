package bench

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/netlab"
)

func TestParseLink(t *testing.T) {
	dir := t.TempDir()
	trace := filepath.Join(dir, "walk.down")
	require.NoError(t, os.WriteFile(trace, []byte("1\n2\n2\n5\n"), 0o600))

	t.Run("a rate", func(t *testing.T) {
		l, err := ParseLink("12mbit")
		require.NoError(t, err)
		cfg, err := l.Config(7)
		require.NoError(t, err)
		assert.Equal(t, "12mbit", l.Name)
		assert.Equal(t, cc.Rate(12e6), cfg.Rate)
		assert.Nil(t, cfg.Trace)
	})
	t.Run("a trace file goes by its base name", func(t *testing.T) {
		l, err := ParseLink(trace)
		require.NoError(t, err)
		cfg, err := l.Config(7)
		require.NoError(t, err)
		assert.Equal(t, "walk.down", l.Name)
		assert.Equal(t, 5*time.Millisecond, cfg.Trace.Duration())
		assert.Zero(t, cfg.Rate)
	})
	t.Run("a generated trace takes the run's seed", func(t *testing.T) {
		l, err := ParseLink("generate:lte")
		require.NoError(t, err)
		one, err := l.Config(1)
		require.NoError(t, err)
		again, err := l.Config(1)
		require.NoError(t, err)
		two, err := l.Config(2)
		require.NoError(t, err)
		assert.Equal(t, one.Trace, again.Trace)
		assert.NotEqual(t, one.Trace, two.Trace)
	})
	t.Run("a generated trace with a seed of its own stays the same", func(t *testing.T) {
		l, err := ParseLink("generate:lte:2")
		require.NoError(t, err)
		one, err := l.Config(1)
		require.NoError(t, err)
		two, err := l.Config(2)
		require.NoError(t, err)
		assert.Equal(t, one.Trace, two.Trace)
	})

	require.NoError(t, os.WriteFile(filepath.Join(dir, "broken"), []byte("1\nx\n"), 0o600))
	for name, c := range map[string]struct {
		spec string
		says []string
	}{
		"neither rate nor file":   {filepath.Join(dir, "none"), []string{"12mbit", "generate:NAME", "no such file"}},
		"a rate of nothing":       {"0mbit", []string{"carries nothing"}},
		"an unknown preset":       {"generate:moon", []string{"moon"}},
		"a seed that is no count": {"generate:lte:x", []string{"seed"}},
		"a broken trace":          {filepath.Join(dir, "broken"), []string{"broken", "2"}},
		"nothing":                 {"", []string{"12mbit"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseLink(c.spec)
			require.Error(t, err)
			for _, s := range c.says {
				assert.ErrorContains(t, err, s)
			}
		})
	}
}

func TestParseBuffer(t *testing.T) {
	for spec, want := range map[string]Buffer{
		"2MB":    {Name: "2MB", bytes: 2_000_000},
		"64KiB":  {Name: "64KiB", bytes: 65536},
		"250pkt": {Name: "250pkt", packets: 250},
		"none":   {Name: "none"},
	} {
		got, err := ParseBuffer(spec)
		require.NoError(t, err, spec)
		assert.Equal(t, want, got)
	}
	for _, spec := range []string{
		"", "2", "pkt", "0pkt", "-3pkt", "2.5pkt", "100B", "many",
		"99999999999999999999pkt",
	} {
		_, err := ParseBuffer(spec)
		assert.ErrorContains(t, err, `"`+spec+`"`)
	}
}

func testPlan(t *testing.T) Plan {
	t.Helper()
	link, err := ParseLink("12mbit")
	require.NoError(t, err)
	buffer, err := ParseBuffer("250pkt")
	require.NoError(t, err)
	senders, err := ParseSenders([]string{"cubic", "static:cwnd_packets=22"}, nil)
	require.NoError(t, err)
	return Plan{
		Senders: senders, Links: []Link{link}, Buffers: []Buffer{buffer}, Losses: []float64{0}, Seeds: []uint64{1}, Runs: 1,
		Delay: 10 * time.Millisecond, Duration: 3 * time.Second, Ingress: IngressTPROXY, Late: netlab.Late,
	}
}

func TestPlanValidate(t *testing.T) {
	require.NoError(t, testPlan(t).Validate())
	for flag, spoil := range map[string]func(*Plan){
		"--sender":     func(p *Plan) { p.Senders = nil },
		"--seeds":      func(p *Plan) { p.Seeds = nil },
		"--duration":   func(p *Plan) { p.Duration = 10 * time.Millisecond },
		"--loss and":   func(p *Plan) { p.Losses = nil },
		"--delay":      func(p *Plan) { p.Delay = -1 },
		"--loss":       func(p *Plan) { p.Losses = []float64{0, 1} },
		"--reorder ":   func(p *Plan) { p.Reorder = 1 },
		"--reorder-by": func(p *Plan) { p.Reorder = 0.1 },
		"--runs":       func(p *Plan) { p.Runs = 0 },
		"--ingress":    func(p *Plan) { p.Ingress = "socks5" },
		"--sample":     func(p *Plan) { p.Sample = -1 },
		"--hints":      func(p *Plan) { p.Hints = time.Microsecond },
		"--packets":    func(p *Plan) { p.Packets, p.Senders = true, []Sender{{Algorithm: "copa", Envelope: "wireguard"}} },
	} {
		p := testPlan(t)
		spoil(&p)
		assert.ErrorContains(t, p.Validate(), flag)
	}
}

func TestSendersTakeTurns(t *testing.T) {
	p := testPlan(t)
	p.Runs, p.Seeds = 2, []uint64{5, 6}
	var order []string
	for _, trial := range p.Trials() {
		assert.Equal(t, "12mbit", trial.Link.Name)
		order = append(order, trial.Sender.Name[:1]+string(rune('0'+trial.Run))+string(rune('0'+trial.Seed)))
	}
	assert.Equal(t, []string{"c15", "s15", "c16", "s16", "c25", "s25", "c26", "s26"}, order)
}

func TestLossesTakeTurnsWithinARun(t *testing.T) {
	p := testPlan(t)
	p.Senders, p.Losses, p.Runs = p.Senders[:1], []float64{0, 0.01}, 2
	var losses []float64
	for _, trial := range p.Trials() {
		losses = append(losses, trial.Loss)
	}
	assert.Equal(t, []float64{0, 0.01, 0, 0.01}, losses)
}

func TestDirections(t *testing.T) {
	p := testPlan(t)
	p.Losses, p.Reorder, p.ReorderBy, p.AQM = []float64{0.01}, 0.02, 3*time.Millisecond, sim.DualPI2
	trial := p.Trials()[0]
	t.Run("the link carries the same both ways, random loss and reordering hit data only", func(t *testing.T) {
		down, up, err := p.directions(trial)
		require.NoError(t, err)
		assert.Equal(t, cc.Rate(12e6), down.Rate)
		assert.Equal(t, 250, down.QueuePackets)
		assert.Equal(t, 10*time.Millisecond, down.Delay)
		assert.InDelta(t, 0.01, down.Loss, 0)
		assert.InDelta(t, 0.02, down.Reorder, 0)
		assert.Equal(t, 3*time.Millisecond, down.ReorderBy)
		assert.Equal(t, sim.DualPI2, down.AQM)
		down.Loss, down.Reorder, down.ReorderBy, down.AQM = 0, 0, 0, sim.DropTail
		assert.Equal(t, down, up)
	})
	t.Run("unless told otherwise", func(t *testing.T) {
		back, err := ParseLink("2mbit")
		require.NoError(t, err)
		p.Up = &back
		down, up, err := p.directions(trial)
		require.NoError(t, err)
		assert.Equal(t, cc.Rate(12e6), down.Rate)
		assert.Equal(t, cc.Rate(2e6), up.Rate)
		assert.Equal(t, 250, up.QueuePackets)
	})
}

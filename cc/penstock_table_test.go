package cc_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
)

// BenchmarkPenstockTable prints what the default algorithm does on all kinds of paths, in virtual time:
//
//	go test ./cc -run '^$' -bench PenstockTable -benchtime 1x -timeout 60m
//
// PenstockTable/rivals prints one of its tables.
func BenchmarkPenstockTable(b *testing.B) {
	for _, each := range []struct {
		name  string
		print func(*testing.B, *table)
	}{
		{"traces", tableOfTraces},
		{"alike", tableOfItself},
		{"rivals", tableOfRivals},
		{"upload", tableOfUpload},
		{"growing", tableOfGrowingPaths},
		{"long", tableOfLongPaths},
		{"objects", tableOfObjects},
		{"gaps", tableOfGaps},
		{"marks", tableOfMarks},
	} {
		b.Run(each.name, func(b *testing.B) {
			for range b.N {
				var t table
				each.print(b, &t)
				_, err := os.Stdout.WriteString(t.String()) // b.Log cuts what is long
				require.NoError(b, err)
			}
		})
	}
}

// table is one in Markdown.
type table struct{ strings.Builder }

func (t *table) row(format string, args ...any) { fmt.Fprintf(t, "| "+format+" |\n", args...) }

// head begins with columns, with | between them.
func (t *table) head(columns string) {
	fmt.Fprintf(t, "\n| %s |\n|%s\n", columns, strings.Repeat("---|", strings.Count(columns, "|")+1))
}

func used(r sim.Result) string {
	return fmt.Sprintf("%.1f %%, p95 %d ms", 100*r.Utilisation, r.Queueing.P95.Round(ms)/ms)
}

// mean is a flow's throughput from one second to another, in Mbit/s.
func mean(f sim.FlowResult, from, to int) (sum float64) {
	for _, rate := range f.PerSecond[from:to] {
		sum += rate.Mbps() / float64(to-from)
	}
	return sum
}

func tableOfTraces(b *testing.B, t *table) {
	t.head("link | perfect way back | the same trace on it | the uplink recorded with it")
	for _, name := range []string{
		"mahimahi/Verizon-LTE-short.down", "mahimahi/Verizon-LTE-short.up",
		"mahimahi/TMobile-LTE-short.down", "mahimahi/TMobile-LTE-short.up",
		"mahimahi/ATT-LTE-driving-2016.down", "mahimahi/ATT-LTE-driving-2016.up",
		"alcc/highwayGold", "alcc/rapidGold", "alcc/CampusWalk", "alcc/City", "alcc/CityDrive", "alcc/Highway",
	} {
		s := cellular(recorded(b, name), 2*time.Minute, cc.Default)
		s.Transport = sim.Kernel
		cells := []any{filepath.Base(name), used(play(b, s))}
		s.Up.Trace = s.Down.Trace
		cells = append(cells, used(play(b, s)), "")
		if up, paired := strings.CutSuffix(name, ".down"); paired {
			s.Up.Trace = recorded(b, up+".up")
			cells[3] = used(play(b, s))
		}
		t.row("%s | %s | %s | %s", cells...)
	}
}

// itself is a run of so many flows with windows of their own, a second apart.
func itself(link sim.LinkConfig, base time.Duration, flows int) sim.Scenario {
	link.QueueBytes = 2e6
	s := over(link, base, 2*time.Minute)
	s.Warmup = 30 * time.Second
	for i := range flows {
		s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: cc.Default, Start: time.Duration(i) * time.Second})
	}
	return s
}

func tableOfItself(b *testing.B, t *table) {
	t.head("link | flows | used | queueing p50, p95 | over one's p95 | Jain")
	add := func(name string, link sim.LinkConfig, base time.Duration) {
		var one time.Duration
		for _, n := range []int{1, 2, 4, 8} {
			r := play(b, itself(link, base, n))
			if n == 1 {
				one = r.Queueing.P95
			}
			t.row("%s, %v | %d | %.1f %% | %d, %d ms | %.1f | %.2f", name, base, n, 100*r.Utilisation,
				r.Queueing.P50.Round(ms)/ms, r.Queueing.P95.Round(ms)/ms, r.Queueing.P95.Seconds()/one.Seconds(),
				r.Jain)
		}
	}
	for seed := range uint64(3) {
		trace, err := sim.Generate("lte", seed+1, time.Minute)
		require.NoError(b, err)
		add(fmt.Sprintf("lte:%d", seed+1), sim.LinkConfig{Trace: trace}, 20*ms)
	}
	for _, base := range []time.Duration{20 * ms, 40 * ms} {
		add("12 Mbit/s", sim.LinkConfig{Rate: 12e6}, base)
	}
	add("50 Mbit/s", sim.LinkConfig{Rate: 50e6}, 40*ms)
	add("20 Mbit/s", sim.LinkConfig{Rate: 20e6}, 300*ms)
}

func tableOfRivals(b *testing.B, t *table) {
	for _, rival := range []string{"cubic", "bbr"} {
		for _, base := range []time.Duration{20 * ms, 60 * ms} {
			const columns = "12 Mbit/s, %v, queue | share, %s second | after it left | share, %s first | after it left"
			t.head(fmt.Sprintf(columns, base, rival, rival))
			for _, queue := range []cc.Bytes{200e3, 500e3, 1e6, 2e6, 4e6} {
				cells := []any{queue / 1000}
				for _, first := range []string{cc.Default, rival} {
					r := besideRival(b, rival, first, 5*time.Second, base, queue)
					cells = append(cells, fmt.Sprintf("%.0f %%", 100*r.share),
						fmt.Sprintf("%.1f Mbit/s, p95 %d ms", r.after, r.queue/ms))
				}
				t.row("%d kB | %s | %s | %s | %s", cells...)
			}
		}
	}
	t.head("12 Mbit/s, Cubic first, queue | share, 2, 4, 6, 8, 12 and 16 s later")
	for _, base := range []time.Duration{20 * ms, 60 * ms} {
		for _, queue := range []cc.Bytes{200e3, 500e3, 1e6, 2e6, 4e6} {
			var shares []string
			for _, later := range []int{2, 4, 6, 8, 12, 16} {
				r := besideRival(b, "cubic", "cubic", time.Duration(later)*time.Second, base, queue)
				shares = append(shares, fmt.Sprintf("%.0f", 100*r.share))
			}
			t.row("%v, %d kB | %s %%", base, queue/1000, strings.Join(shares, ", "))
		}
	}
}

// contest is our share in seconds 30 to 90 beside one flow, of which one comes later, and between
// 5 and 20 s after the other has left our rate, in Mbit/s, and the p95 of the queue.
type contest struct {
	share, after float64
	queue        time.Duration
}

func besideRival(tb testing.TB, rival, first string, later, base time.Duration, queue cc.Bytes) contest {
	tb.Helper()
	const leaves = 90
	s := over(sim.LinkConfig{Rate: 12e6, QueueBytes: queue}, base, (leaves+20)*time.Second)
	s.Transport = sim.Kernel
	s.Flows = []sim.FlowConfig{
		{Algorithm: cc.Default},
		{Algorithm: rival, Params: sim.KernelParams(rival), Stop: leaves * time.Second},
	}
	if first == rival {
		s.Flows[0].Start = later
	} else {
		s.Flows[1].Start = later
	}
	var late []time.Duration
	s.Watch = func(p sim.Packet) {
		if !p.Up && p.At > (leaves+5)*time.Second && p.Dropped == sim.DropNone {
			late = append(late, p.Departs-p.At)
		}
	}
	r := play(tb, s)
	ours, theirs := mean(r.Flows[0], 30, leaves), mean(r.Flows[1], 30, leaves)
	return contest{ours / (ours + theirs), mean(r.Flows[0], leaves+5, leaves+20), p95(late)}
}

func tableOfUpload(b *testing.B, t *table) {
	t.head("second | Mbit/s")
	r := play(b, besideUpload())
	for i, rate := range r.Flows[0].PerSecond {
		if i >= 5 && i < 20 {
			t.row("%d | %.1f", i, rate.Mbps())
		}
	}
	t.row("20 to 70 | %.1f", mean(r.Flows[0], 20, 70))
	t.row("p95 of its queue | %d ms", r.Flows[0].Queueing.P95/ms)
}

func tableOfGrowingPaths(b *testing.B, t *table) {
	t.head("12 Mbit/s, from 20 ms to | Mbit/s in each second from then on")
	for _, to := range []time.Duration{60 * ms, 120 * ms, 320 * ms, 1300 * ms} {
		for _, transport := range []sim.Transport{sim.Kernel, sim.Relay} {
			r := play(b, growing(12e6, 20*ms, to, transport))
			t.row("%v, %v | %s", to, transport, rates(r.Flows[0], 15, 40))
		}
	}
}

// rates are a flow's in each second from one to another, in Mbit/s.
func rates(f sim.FlowResult, from, to int) string {
	var all []string
	for _, rate := range f.PerSecond[from:to] {
		all = append(all, fmt.Sprintf("%.1f", rate.Mbps()))
	}
	return strings.Join(all, ", ")
}

// growing is a path that is longer from the 16th second on.
func growing(rate cc.Rate, from, to time.Duration, transport sim.Transport) sim.Scenario {
	s := over(sim.LinkConfig{Rate: rate, QueueBytes: 2e6}, from, 45*time.Second, cc.Default)
	s.Transport = transport
	s.Changes = []sim.Change{{At: 15 * time.Second, Delay: to / 2}}
	return s
}

func tableOfLongPaths(b *testing.B, t *table) {
	t.head("path | from the start | from 15 s on")
	for _, tt := range []struct {
		rate cc.Rate
		base time.Duration
		loss float64
	}{
		{1e9, 20 * ms, 0},
		{50e6, 100 * ms, 0},
		{200e6, 100 * ms, 0},
		{200e6, 200 * ms, 0},
		{50e6, 600 * ms, 0},
		{20e6, 300 * ms, 0.005},
	} {
		d := time.Minute
		if tt.rate == 1e9 {
			d = 20 * time.Second
		}
		s := over(sim.LinkConfig{Rate: tt.rate, QueueBytes: 8e6, Loss: tt.loss}, tt.base, d, cc.Default)
		cells := []any{tt.rate, tt.base, 100 * tt.loss, used(play(b, s))}
		s.Warmup = 15 * time.Second
		t.row("%v, %v, %.1f %% loss | %s | %s", append(cells, used(play(b, s)))...)
	}
}

func tableOfObjects(b *testing.B, t *table) {
	t.head("100 KB every 4 s | p50, p95, cubic | p50, p95, ours | ratio of p50")
	add := func(name string, link sim.LinkConfig, base time.Duration) {
		link.QueueBytes = 2e6
		var all [2]sim.Delays
		for i, algorithm := range []string{"cubic", cc.Default} {
			s := over(link, base, 2*time.Minute)
			s.Transport = sim.Kernel
			s.Flows = []sim.FlowConfig{{Algorithm: algorithm, Bytes: 100e3, Every: 4 * time.Second}}
			all[i] = play(b, s).Flows[0].FCT
		}
		t.row("%s, %v | %d, %d ms | %d, %d ms | %.2f", name, base, all[0].P50/ms, all[0].P95/ms,
			all[1].P50/ms, all[1].P95/ms, all[1].P50.Seconds()/all[0].P50.Seconds())
	}
	for seed := range uint64(3) {
		trace, err := sim.Generate("lte", seed+1, time.Minute)
		require.NoError(b, err)
		add(fmt.Sprintf("lte:%d", seed+1), sim.LinkConfig{Trace: trace}, 40*ms)
	}
	for _, base := range []time.Duration{20 * ms, 40 * ms, 100 * ms} {
		add("12 Mbit/s", sim.LinkConfig{Rate: 12e6}, base)
		add("50 Mbit/s", sim.LinkConfig{Rate: 50e6}, base)
	}
}

func tableOfGaps(b *testing.B, t *table) {
	t.head("12 Mbit/s, 40 ms, gap | algorithm | Mbit/s in each second from the link's return on")
	for _, gap := range []int{1, 4, 10, 60} {
		back := 10 + gap
		end := time.Duration(back+6) * time.Second
		trace, err := sim.Steps("gap", end, sim.Step{Rate: 12e6}, sim.Step{At: 10 * time.Second},
			sim.Step{At: time.Duration(back) * time.Second, Rate: 12e6})
		require.NoError(b, err)
		for _, algorithm := range []string{cc.Default, "copa", "bbr", "bbr3"} {
			s := over(sim.LinkConfig{Trace: trace, QueueBytes: 375_000}, 40*ms, end, algorithm)
			s.Transport = sim.Kernel
			t.row("%d s | %s | %s", gap, algorithm, rates(play(b, s).Flows[0], back, back+6))
		}
	}
}

func tableOfMarks(b *testing.B, t *table) {
	t.head("DualPI2, marks | alone | beside a classic Cubic: used, ours, Cubic's p95")
	for _, algorithm := range []string{"prague", cc.Default} {
		for _, base := range []time.Duration{20 * ms, 60 * ms} {
			s := over(sim.LinkConfig{Rate: 24e6, QueueBytes: 2e6, AQM: sim.DualPI2}, base, time.Minute)
			s.Transport, s.Warmup = sim.Kernel, 5*time.Second
			s.Flows = []sim.FlowConfig{{Algorithm: algorithm, ECN: sim.ECNL4S}}
			alone := play(b, s)
			s.Flows = append(s.Flows, sim.FlowConfig{Algorithm: "cubic", ECN: sim.ECNClassic})
			r := play(b, s)
			ours, theirs := r.Flows[0], r.Flows[1]
			t.row("%s, %v | %s | %.1f %%, %.1f of %.1f Mbit/s, p95 %d ms, %d ms", algorithm, base, used(alone),
				100*r.Utilisation, ours.Throughput.Mbps(), ours.Throughput.Mbps()+theirs.Throughput.Mbps(),
				ours.Queueing.P95/ms, theirs.Queueing.P95/ms)
		}
	}
}

// p95 of delays, which it sorts; 0 of none.
func p95(all []time.Duration) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)*95/100]
}

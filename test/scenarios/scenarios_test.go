// Package scenarios runs the experiments in testdata, one case each, and every
// algorithm in each standard case, in virtual time: their expectations must hold,
// and the course of every flow must be the one in its golden file. After a wanted
// change, run
//
//	make golden
//
// and review the difference.
package scenarios

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestScenarios(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			t.Parallel()
			play(t, file)
		})
	}
}

func play(t *testing.T, file string) {
	t.Helper()
	r, err := recipe.Open(file, nil)
	require.NoError(t, err)
	compareGolden(t, strings.TrimSuffix(file, ".yaml")+".golden", courseOf(asserted(t, r)))
}

// asserted plays the only run of an experiment, whose assertions must hold.
func asserted(t *testing.T, r recipe.Recipe) (time.Duration, sim.Result) {
	t.Helper()
	o, err := r.Play(t.Context(), recipe.Full, 1, recipe.Virtual, func(recipe.Progress) {})
	require.NoError(t, err)
	require.Len(t, o.Runs, 1)
	require.NotEmpty(t, o.Findings, "a case that asserts nothing tests nothing")
	for _, f := range o.Findings {
		assert.True(t, f.OK, "%s: %s, but must be %s", f.What, f.Got, f.Bound)
	}
	return o.Runs[0].Stage.Sample, *o.Runs[0].Record.Virtual
}

// compareGolden compares a course with the golden file, or writes that with -update.
func compareGolden(t *testing.T, golden string, course []byte) {
	t.Helper()
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(golden), 0o755))
		require.NoError(t, os.WriteFile(golden, course, 0o644))
		return
	}
	if runtime.GOARCH != "amd64" {
		t.Skip("the golden files were written on amd64; elsewhere a fused multiply-add may round otherwise")
	}
	want, err := os.ReadFile(golden)
	if errors.Is(err, fs.ErrNotExist) {
		require.Fail(t, "there is no "+golden, "run make golden, which writes it, and review what it says")
	}
	require.NoError(t, err)
	compare(t, string(want), string(course))
}

// courseOf writes the samples of all flows, one line for each that is due, and what the run
// came to.
func courseOf(every time.Duration, r sim.Result) []byte {
	var b bytes.Buffer
	b.WriteString("seconds flow cwnd_packets inflight_packets srtt_ms phase\n")
	for _, f := range r.Flows {
		for _, s := range f.Samples {
			if s.At%every != 0 {
				continue
			}
			const mss = 1448.
			fmt.Fprintf(&b, "%.1f %s %.1f %.1f %.1f %s\n", s.At.Seconds(), f.Name,
				float64(s.Share)/mss, float64(s.Inflight)/mss, float64(s.SRTT)/float64(time.Millisecond), s.Phase)
		}
	}
	for _, f := range r.Flows {
		fmt.Fprintf(&b, "flow %s: %.3f Mbit/s, queueing %v p50 %v p95, %d packets, %d drops, %d losses, %d retransmits, %d timeouts\n",
			f.Name, f.Throughput.Mbps(), f.Queueing.P50, f.Queueing.P95, f.Packets, f.Drops, f.Losses, f.Retransmits, f.Timeouts)
	}
	fmt.Fprintf(&b, "utilisation %.4f, queue %.2f packets, jain %.4f\n", r.Utilisation, r.QueuePackets, r.Jain)
	return b.Bytes()
}

// compare shows the first lines that differ, not all of them.
func compare(t *testing.T, want, got string) {
	t.Helper()
	if want == got {
		return
	}
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	shown := 0
	for i := 0; i < max(len(w), len(g)) && shown < 5; i++ {
		a, b := line(w, i), line(g, i)
		if a != b {
			t.Errorf("line %d\n golden: %s\n now:    %s", i+1, a, b)
			shown++
		}
	}
	t.Error("the course differs from the golden file; if it should, run make golden and review the difference")
}

func line(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(nothing)"
}

// One seed gives one result, to the last bit.
func TestScenariosRepeat(t *testing.T) {
	r, err := recipe.Open("testdata/copa-lte.yaml", nil)
	require.NoError(t, err)
	stages, err := r.Stages(recipe.Full, 1)
	require.NoError(t, err)
	c, _, err := stage.Scenario(stages[0])
	require.NoError(t, err)
	c.Down.Loss = 0.01
	first, err := sim.Run(c)
	require.NoError(t, err)
	again, err := sim.Run(c)
	require.NoError(t, err)
	assert.Equal(t, first, again)

	c.Seed++
	other, err := sim.Run(c)
	require.NoError(t, err)
	assert.NotEqual(t, first.Flows, other.Flows)
}

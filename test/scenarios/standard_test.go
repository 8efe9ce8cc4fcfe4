package scenarios

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/recipe"
)

// standard is where the courses of the standard cases are kept, one file for
// each case and algorithm.
const standard = "testdata/standard"

func goldenOf(c recipe.StandardCase, algorithm string) string {
	return filepath.Join(standard, c.Name, algorithm+".golden")
}

func TestEveryAlgorithmInEveryStandardCase(t *testing.T) {
	for _, s := range recipe.Standard() {
		t.Run(s.Name, func(t *testing.T) {
			for _, spec := range sim.Algorithms() {
				t.Run(spec.Name, func(t *testing.T) {
					t.Parallel()
					playStandard(t, s, spec.Name)
				})
			}
		})
	}
}

// mostSilent is for how many whole seconds in a row an open flow may deliver
// nothing: the longest outage of the cases takes 1.2 s, and a retransmission
// timer that has backed off meanwhile as much again.
const mostSilent = 3

func playStandard(t *testing.T, s recipe.StandardCase, algorithm string) {
	t.Helper()
	r, err := s.Recipe(algorithm, nil)
	require.NoError(t, err)
	every, result := asserted(t, r)
	for _, f := range result.Flows {
		silent, at := longestSilence(f)
		assert.LessOrEqual(t, silent, mostSilent, "flow %s delivers nothing for %d s from second %d on", f.Name, silent, at)
	}
	compareGolden(t, goldenOf(s, algorithm), courseOf(every, result))
}

// longestSilence is the longest row of seconds, between the flow's first and the
// end of the run, in which nothing arrived; and when it began.
func longestSilence(f sim.FlowResult) (longest, at int) {
	began := slices.IndexFunc(f.PerSecond, func(r cc.Rate) bool { return r > 0 })
	if began < 0 {
		return len(f.PerSecond), 0
	}
	row := 0
	for i := began; i < len(f.PerSecond); i++ {
		if row++; f.PerSecond[i] > 0 {
			row = 0
		}
		if row > longest {
			longest, at = row, i+1-row
		}
	}
	return longest, at
}

// What is left of a case or an algorithm that is gone would be compared with nothing.
func TestEveryStandardGoldenFileIsOfACase(t *testing.T) {
	expected := map[string]bool{}
	for _, s := range recipe.Standard() {
		for _, spec := range sim.Algorithms() {
			expected[goldenOf(s, spec.Name)] = true
		}
	}
	files, err := filepath.Glob(filepath.Join(standard, "*", "*"))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		assert.True(t, expected[file], "%s is of no standard case, or of no algorithm: remove it", file)
	}
}

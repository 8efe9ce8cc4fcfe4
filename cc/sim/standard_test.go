package sim

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestStandardHasEveryFile(t *testing.T) {
	files, err := standardFiles.ReadDir("standard")
	require.NoError(t, err)
	var names []string
	for _, f := range files {
		names = append(names, strings.TrimSuffix(f.Name(), ".txt"))
	}
	assert.ElementsMatch(t, names, standardNames)
	for _, s := range Standard() {
		assert.NotContains(t, s.About, "#", "%s begins with a sentence on what it is", s.Name)
		assert.True(t, strings.HasSuffix(s.About, "."), "%s: %q", s.Name, s.About)
	}
}

func TestStandardCasesAreForEveryAlgorithm(t *testing.T) {
	for _, s := range Standard() {
		for _, spec := range Algorithms() {
			c, err := s.Case(spec.Name)
			require.NoError(t, err, "%s for %s", s.Name, spec.Name)
			assert.Equal(t, spec.Name, c.Flows[0].Algorithm, s.Name)
			assert.Equal(t, standardTested, c.Flows[0].Name, s.Name)
			assert.NotEmpty(t, c.Expect, s.Name)
			assert.Equal(t, slices.Contains(spec.Needs, cc.NeedsHints), c.Hints > 0,
				"%s for %s: hints are for those that need them", s.Name, spec.Name)
			assert.GreaterOrEqual(t, c.Sample, time.Second, "a golden file stays short")
			assert.Contains(t, []int{1, 2}, len(c.Flows), s.Name)
		}
	}
}

func TestStandardCaseTakesSettings(t *testing.T) {
	for _, s := range Standard() {
		c, err := s.Case("copa:paper,delta=0.25")
		require.NoError(t, err)
		assert.InDelta(t, 0.25, c.Flows[0].Params["delta"], 0, s.Name)
	}
	_, err := Standard()[0].Case("kopa")
	assert.ErrorContains(t, err, `no algorithm "kopa"`)
	_, err = Standard()[0].Case("none")
	assert.ErrorContains(t, err, "none leaves the window to the transport below")
}

func TestStandardCaseFindsTheFlowItIsFor(t *testing.T) {
	for _, s := range Standard() {
		c, err := s.Case("reno")
		require.NoError(t, err)
		c.Duration, c.Warmup, c.Expect = 6*time.Second, 0, nil
		r, err := Run(c.Scenario)
		require.NoError(t, err)
		tested := s.Tested(r)
		assert.Equal(t, "reno", tested.Algorithm, s.Name)
		assert.Positive(t, tested.Throughput, s.Name)
	}
}

func TestAllAlgorithmsButNoneAreSimulated(t *testing.T) {
	var names []string
	for _, s := range Algorithms() {
		names = append(names, s.Name)
	}
	for _, s := range cc.Specs() {
		assert.Equal(t, s.Name != "none", slices.Contains(names, s.Name), s.Name)
	}
}

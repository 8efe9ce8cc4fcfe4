package recipe

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/record"
)

// A finding with when may be there with one seed and not with another.
func TestFindingsOfSeveralSeedsMayDiffer(t *testing.T) {
	finding := func(what, got string, ok bool) record.Finding {
		return record.Finding{What: what, Bound: "at least 2", Got: got, OK: ok}
	}
	seeds := [][]record.Finding{
		{finding("a", "1", false), finding("c", "3", true), finding("c", "4", true)},
		{finding("a", "2", true), finding("b", "1", false), finding("c", "5", true), finding("c", "6", true)},
		{},
	}
	for _, order := range [][3]int{{0, 1, 2}, {1, 2, 0}, {2, 0, 1}} {
		var all []record.Run
		for _, i := range order {
			all = append(all, record.Run{Findings: seeds[i]})
		}
		var b strings.Builder
		require.NoError(t, writeFindings(&b, all))
		var got []string
		for line := range strings.Lines(b.String()) {
			got = append(got, strings.Join(strings.Fields(line), " "))
		}
		ours := func(texts ...string) string {
			return strings.Join([]string{texts[order[0]], texts[order[1]], texts[order[2]]}, " · ")
		}
		assert.Equal(t, []string{
			"finding paper bound ours",
			"FAIL 1 of 2 a - at least 2 " + ours("1", "2", "-"),
			"FAIL b - at least 2 " + ours("-", "1", "-"),
			"ok c - at least 2 " + ours("3", "5", "-"),
			"ok c - at least 2 " + ours("4", "6", "-"),
		}, got)
	}
}

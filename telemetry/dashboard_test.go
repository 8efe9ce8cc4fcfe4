package telemetry

import (
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	familyName = regexp.MustCompile(`penstock_[a-z0-9_]+`)
	labelsUsed = regexp.MustCompile(`by \(([^)]*)\)|{{(\w+)}}`)
)

// TestTheDashboardShowsEveryFamily has each family of metrics in a panel of the shipped
// dashboard, or in its description with those that it leaves out, and no other names.
func TestTheDashboardShowsEveryFamily(t *testing.T) {
	data, err := os.ReadFile("../deploy/grafana.json")
	require.NoError(t, err)
	var dashboard struct {
		Description string
		Panels      []struct {
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	require.NoError(t, json.Unmarshal(data, &dashboard))
	families := familyLabels()
	shown, leftOut := map[string]bool{}, map[string]bool{}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			for _, name := range familyName.FindAllString(target.Expr, -1) {
				name = strings.TrimSuffix(name, "_bucket")
				shown[name] = true
				for _, label := range labels(target.Expr + target.LegendFormat) {
					assert.Contains(t, append(families[name], "le", "instance"), label, "%s shown by %s", name, target.Expr)
				}
			}
		}
	}
	for _, name := range familyName.FindAllString(dashboard.Description, -1) {
		leftOut[name] = true
	}

	for name := range families {
		assert.True(t, shown[name] != leftOut[name], "%s: shown %v, said to be left out %v", name, shown[name], leftOut[name])
	}
	for name := range shown {
		assert.Contains(t, families, name, "the dashboard asks for what does not exist")
	}
	for name := range leftOut {
		assert.Contains(t, families, name, "the dashboard leaves out what does not exist")
	}
}

// familyLabels returns the labels of all families of the proxy, by name.
func familyLabels() map[string][]string {
	of := map[string][]string{}
	for _, f := range families {
		of[f.name] = f.labels
	}
	return of
}

// labels are those that a query groups by and that its legend shows.
func labels(text string) (all []string) {
	for _, m := range labelsUsed.FindAllStringSubmatch(text, -1) {
		for name := range strings.SplitSeq(m[1]+m[2], ",") {
			all = append(all, strings.TrimSpace(name))
		}
	}
	return all
}

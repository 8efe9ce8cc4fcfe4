package config_test

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

const changeable = lan + `defaults: {algorithm: cubic, max_rate: 8mbit}
rules:
  - {name: bulk, match: {ports: [873]}, algorithm: copa, params: {delta: 0.1}, down: {weight: 3}}
  - {name: video, match: {ports: [443]}, max_rate: 4mbit}
  - {name: closed, match: {ports: [25]}, refuse: no mail}
`

// algorithms are what each rule gives, and last the defaults.
func algorithms(t *testing.T, c config.Config) (out []string) {
	t.Helper()
	require.NoError(t, c.Validate())
	routes, err := c.Routes()
	require.NoError(t, err)
	for _, r := range routes {
		out = append(out, r.Down.Algorithm+" "+r.Up.Algorithm)
	}
	return out
}

func TestSetAlgorithmChangesThatAlone(t *testing.T) {
	file, err := config.Parse([]byte(changeable))
	require.NoError(t, err)
	before := algorithms(t, file)
	assert.Equal(t, []string{"copa copa", "cubic cubic", " ", "cubic cubic"}, before)
	for name, c := range map[string]struct {
		rule, direction, algorithm string
		want, different            []string
	}{
		"both ways of a rule": {
			"bulk", "", "vegas", []string{"vegas vegas", "cubic cubic", " ", "cubic cubic"}, []string{"bulk"},
		},
		"one way of a rule that had the defaults": {
			"video", "up", "none", []string{"copa copa", "cubic none", " ", "cubic cubic"}, []string{"video"},
		},
		"the defaults, and who has them": {
			"", "down", "reno", []string{"copa copa", "reno cubic", " ", "reno cubic"}, []string{""},
		},
		"to what it is": {"video", "", "cubic", before, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := file.SetAlgorithm(c.rule, c.direction, c.algorithm)
			require.NoError(t, err)
			assert.Equal(t, c.want, algorithms(t, got))
			different, err := got.ChangedVerdicts(file)
			require.NoError(t, err)
			var names []string
			for _, v := range different {
				names = append(names, v.Rule)
			}
			assert.Equal(t, c.different, names)
			assert.Equal(t, before, algorithms(t, file), "the one before stays")
			assert.NoError(t, file.CheckReload(got))
		})
	}
}

func TestSetAlgorithmKeepsTheOtherTerms(t *testing.T) {
	file, err := config.Parse([]byte(changeable))
	require.NoError(t, err)
	got, err := file.SetAlgorithm("bulk", "", "copa:delta=0.3")
	require.NoError(t, err)
	routes, err := got.Routes()
	require.NoError(t, err)
	assert.Equal(t, 0.3, routes[0].Down.Params["delta"])
	assert.Equal(t, 0.3, routes[0].Up.Params["delta"])
	assert.Equal(t, 3, routes[0].Down.Weight)
	assert.EqualValues(t, 8e6, routes[0].Down.MaxRate)
	back, err := got.SetAlgorithm("bulk", "", "copa:delta=0.1")
	require.NoError(t, err)
	different, err := back.ChangedVerdicts(file)
	require.NoError(t, err)
	assert.Empty(t, different, "what is set back is as in the file")
}

func TestSetAlgorithmNamesWhatIsWrong(t *testing.T) {
	file, err := config.Parse([]byte(changeable))
	require.NoError(t, err)
	for says, c := range map[string][3]string{
		`algorithm: no algorithm "frob"; there are `: {"bulk", "", "frob"},
		`algorithm: `:                         {"bulk", "", "copa:delta=-1"},
		`rule: there is none of the name "x"`: {"x", "", "copa"},
		`rule: closed refuses connections`:    {"closed", "", "copa"},
		`direction is "left", but must be`:    {"bulk", "left", "copa"},
	} {
		got, err := file.SetAlgorithm(c[0], c[1], c[2])
		require.ErrorContains(t, err, says)
		assert.Equal(t, algorithms(t, file), algorithms(t, got))
	}
	got, err := file.SetAlgorithm("bulk", "", "")
	require.Error(t, err)
	assert.Equal(t, algorithms(t, file), algorithms(t, got))
}

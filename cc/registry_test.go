package cc

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		ref, name string
		params    Params
	}{
		{"cubic", "cubic", Params{}},
		{"copa:delta=0.1", "copa", Params{"delta": 0.1}},
		{"copa:delta=0.1,mode=auto", "copa", Params{"delta": 0.1, "mode": 1}},
		{"copa:alcc", "copa", Params{"delta": 0.02, "mode": 1}},
		{"copa:alcc,delta=0.05", "copa", Params{"delta": 0.05, "mode": 1}},
		{"static:cwnd_packets=40,pacing_mbit=12", "static", Params{"cwnd_packets": 40, "pacing_mbit": 12}},
	} {
		name, params, err := Parse(tt.ref)
		require.NoError(t, err, tt.ref)
		assert.Equal(t, tt.name, name, tt.ref)
		assert.Equal(t, tt.params, params, tt.ref)
	}
}

func TestParseNamesTheMistake(t *testing.T) {
	var names []string
	for _, s := range Specs() {
		names = append(names, s.Name)
	}
	all := strings.Join(names, ", ")
	for ref, want := range map[string]string{
		"":                    `no algorithm ""; there are ` + all,
		"bic":                 `no algorithm "bic"; there are ` + all,
		"copa:dleta=1":        `copa has no parameter "dleta"; it takes delta, mode`,
		"copa:delta=x":        `copa: parameter delta is "x", but must be a number`,
		"copa:delta=NaN":      `copa: parameter delta is NaN, but must be between 0.001 and 5`,
		"copa:delta=0":        `copa: parameter delta is 0, but must be between 0.001 and 5`,
		"copa:mode=fast":      `copa: parameter mode is "fast", but must be one of constant, auto, coop`,
		"copa:mode=1":         `copa: parameter mode is "1", but must be one of constant, auto, coop`,
		"copa:":               `copa has no profile ""; write settings as copa:name=value`,
		"copa:turbo":          `copa has no profile "turbo"; write settings as copa:name=value`,
		"reno:beta=0.5":       `reno has no parameter "beta": it takes none`,
		"static:cwnd_packets": `static has no profile "cwnd_packets"; write settings as static:name=value`,
	} {
		_, _, err := Parse(ref)
		assert.ErrorContains(t, err, want, "%q", ref)
	}
}

func TestResolve(t *testing.T) {
	s, err := Lookup("copa")
	require.NoError(t, err)
	p, err := s.Resolve(nil)
	require.NoError(t, err)
	assert.Equal(t, Params{"delta": copaDefaultDelta, "mode": 0}, p)

	p, err = s.Resolve(Params{"delta": 0.1})
	require.NoError(t, err)
	assert.Equal(t, Params{"delta": 0.1, "mode": 0}, p)

	for _, bad := range []Params{
		{"beta": 1},
		{"delta": math.NaN()},
		{"delta": math.Inf(1)},
		{"delta": -1},
		{"mode": 3},
		{"mode": 0.5},
		{"mode": -1},
	} {
		_, err = s.Resolve(bad)
		assert.ErrorContains(t, err, "copa", "%v", bad)
	}
}

func TestResolveChecksWhatGoesTogether(t *testing.T) {
	s := Spec{
		Name:   "made-up",
		Params: []Param{{Name: "least", Default: 1, Max: 9}, {Name: "most", Default: 5, Max: 9}},
		Check: func(p Params) error {
			if p["least"] > p["most"] {
				return errors.New("least is above most")
			}
			return nil
		},
	}
	p, err := s.Resolve(Params{"least": 5})
	require.NoError(t, err)
	assert.Equal(t, Params{"least": 5, "most": 5}, p)
	_, err = s.Resolve(Params{"least": 6})
	require.EqualError(t, err, "made-up: least is above most", "with the default of the other")
	_, err = s.Resolve(Params{"least": 6, "most": 10})
	assert.EqualError(t, err, "made-up: parameter most is 10, but must be between 0 and 9",
		"each by itself comes first")
}

func TestEverySpecIsComplete(t *testing.T) {
	for _, s := range Specs() {
		assert.NotEmpty(t, s.About, s.Name)
		assert.NotEmpty(t, s.Source, s.Name)
		defaults, err := s.Resolve(nil)
		require.NoError(t, err, s.Name)
		_, err = s.Resolve(defaults)
		assert.NoError(t, err, "%s: the defaults are within their ranges", s.Name)
		for _, d := range s.Params {
			assert.NotEmpty(t, d.About, "%s %s", s.Name, d.Name)
			assert.True(t, len(d.Choices) > 0 || d.Min < d.Max, "%s %s has a range", s.Name, d.Name)
		}
		for _, f := range s.Profiles {
			assert.NotEmpty(t, f.About, "%s %s", s.Name, f.Name)
			_, _, err := Parse(s.Name + ":" + f.Name)
			require.NoError(t, err)
			_, err = s.Resolve(f.Params)
			assert.NoError(t, err, "%s %s", s.Name, f.Name)
		}
	}
}

func TestNewFillsIn(t *testing.T) {
	a, err := New("reno", Config{})
	require.NoError(t, err)
	assert.Equal(t, 10*DefaultMSS, a.Control().Cwnd, "ten segments of the default size")

	a, err = New("reno", Config{MSS: 1000, InitialCwnd: 4000})
	require.NoError(t, err)
	assert.Equal(t, Bytes(4000), a.Control().Cwnd)

	_, err = New("reno", Config{Params: Params{"x": 1}})
	require.Error(t, err)
	_, err = New("bic", Config{})
	require.Error(t, err)
}

func TestRegisterRefusesATakenName(t *testing.T) {
	assert.Panics(t, func() { Register(Spec{Name: "reno", New: func(Config) Algorithm { return none{} }}) })
	assert.Panics(t, func() { Register(Spec{Name: "new"}) }, "nothing to build")
	assert.Panics(t, func() { Register(Spec{New: func(Config) Algorithm { return none{} }}) }, "no name")
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"copa:alcc,delta=0.05", "cubic:hystart=off", "copa:delta=", "static:cwnd_packets=1e3",
		":", "copa:mode=auto,,",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, ref string) {
		name, params, err := Parse(ref)
		if err != nil {
			return
		}
		_, err = New(name, Config{Params: params})
		assert.NoError(t, err, "what Parse accepts can be built")
	})
}

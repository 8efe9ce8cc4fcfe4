package telemetry

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

func TestInternalsKeepTheOrderOfTheSpec(t *testing.T) {
	for _, spec := range cc.Specs() {
		var values cc.Internals
		for i := range values {
			values[i] = float64(i) + 0.5
		}
		in := InternalsOf(spec.Name, values)
		require.Len(t, in, len(spec.Internals), spec.Name)
		for i, show := range spec.Internals {
			assert.Equal(t, Internal{show.Name, float64(i) + 0.5}, in[i], spec.Name)
		}
		if in == nil {
			continue
		}
		text, err := json.Marshal(in)
		require.NoError(t, err)
		var again Internals
		require.NoError(t, json.Unmarshal(text, &again))
		assert.Equal(t, in, again, "%s: %s", spec.Name, text)
	}
	assert.Nil(t, InternalsOf("frob", cc.Internals{1}))
}

func TestInternalsAsJSON(t *testing.T) {
	text, err := json.Marshal(struct {
		In Internals `json:"internals,omitempty"`
	}{Internals{{"velocity", 2}, {"delta", 0.02}, {"bytes", 12345678}}})
	require.NoError(t, err)
	assert.Equal(t, `{"internals":{"velocity":2,"delta":0.02,"bytes":1.23457e+07}}`, string(text))

	var in Internals
	require.NoError(t, json.Unmarshal([]byte("null"), &in))
	assert.Nil(t, in)
	require.NoError(t, json.Unmarshal([]byte(`{ "b" : 1, "a" : -2e3 }`), &in))
	assert.Equal(t, Internals{{"b", 1}, {"a", -2000}}, in)
	assert.ErrorContains(t, json.Unmarshal([]byte(`[1]`), &in), "are an object")
	assert.ErrorContains(t, json.Unmarshal([]byte(`{"a":"x"}`), &in), "internal a")
}

package config

import (
	"bytes"
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// documents makes configurations out of the schema, most of them with a mistake.
type documents struct{ *rand.Rand }

// ways are listeners that need nothing else.
var ways = []string{
	`{"name": "local", "mode": "mixed", "address": "127.0.0.1:1080"}`,
	`{"name": "lan", "mode": "tproxy", "address": "[::]:7000", "keep_client": true}`,
	`{"name": "one", "mode": "forward", "address": ":8000", "target": "server.example:443", "connections": 10}`,
	`{"name": "tun", "mode": "tun", "device": "penstock0", "tunnel": {"mtu": 1400}}`,
}

// wrong is a value that fits few keys or none.
func (g documents) wrong() any {
	all := []any{
		nil, true, false, 0, 1, 7, -1, 70000, 1 << 30, 1.5, "", "7", "-1", "0.5", "99999", "1..5s", "10s", "0s",
		"1e-3gbit", "-5mbit",
		"1_000mbit", "20mbit", "64KiB", "1e3B", "nonsense", "off", "v1", "10.0.0.0/8", "443", "8000-8100", "0x20",
		"65536", "example.com",
		[]any{},
		[]any{nil},
		[]any{"a"},
		map[string]any{},
		map[string]any{"no_such_key": 1},
	}
	return all[g.IntN(len(all))]
}

// document is one; roughly half have listeners that the parser takes.
func (g documents) document(schema object) any {
	doc := g.value(schema, 0).(map[string]any)
	if g.IntN(4) > 0 {
		var listener any
		if err := json.Unmarshal([]byte(ways[g.IntN(len(ways))]), &listener); err != nil {
			panic(err)
		}
		doc["listeners"] = []any{listener}
	}
	for range g.IntN(3) {
		g.spoil(doc)
	}
	return doc
}

// spoil puts another value somewhere.
func (g documents) spoil(at map[string]any) {
	var keys []string
	for k := range at {
		keys = append(keys, k)
	}
	if len(keys) == 0 {
		return
	}
	slices.Sort(keys)
	key := keys[g.IntN(len(keys))]
	switch inner := at[key].(type) {
	case map[string]any:
		g.spoil(inner)
	case []any:
		if len(inner) > 0 {
			if m, ok := inner[0].(map[string]any); ok {
				g.spoil(m)
				return
			}
		}
		at[key] = g.wrong()
	default:
		at[key] = g.wrong()
	}
}

// value is one that a schema takes.
func (g documents) value(schema object, depth int) any {
	if either, ok := schema["anyOf"].([]any); ok {
		schema = either[g.IntN(len(either))].(object)
	}
	if list, ok := schema["enum"].([]any); ok {
		return list[g.IntN(len(list))]
	}
	if list, ok := schema["examples"].([]any); ok {
		return list[g.IntN(len(list))]
	}
	kind := ""
	switch t := schema["type"].(type) {
	case string:
		kind = t
	case []any:
		kind = t[g.IntN(len(t))].(string)
	}
	bound := func(key string, without float64) int {
		if v, ok := schema[key].(float64); ok {
			without = v
		}
		return int(without)
	}
	switch kind {
	case "object":
		out := map[string]any{}
		properties, _ := schema["properties"].(object)
		var keys []string
		for k := range properties {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			need, _ := schema["required"].([]any)
			if slices.Contains(need, any(k)) || g.IntN(3+depth*2) == 0 {
				out[k] = g.value(properties[k].(object), depth+1)
			}
		}
		return out
	case "array":
		out := []any{}
		for range g.IntN(3) {
			out = append(out, g.value(schema["items"].(object), depth+1))
		}
		return out
	case "boolean":
		return g.IntN(2) == 0
	case "integer":
		least, most := bound("minimum", -3), bound("maximum", 5000)
		return least + g.IntN(most-least+1)
	case "number":
		return g.Float64()
	}
	if schema["pattern"] != nil { // a port, a mark or a key
		for _, s := range []string{"443", "hkI5rNl0ogbnO8PrQCWp+bO2U1o2MFx4BE7tVUUYSHE="} {
			if ok, _ := matches(schema, s); ok {
				return s
			}
		}
	}
	return []string{"a", "phone", "127.0.0.1:80", "penstock1", "/run/x.sock"}[g.IntN(5)]
}

func matches(schema object, s string) (bool, error) {
	v, err := validator(schema)
	return err == nil && v.Validate(s) == nil, err
}

func validator(schema any) (*jsonschema.Schema, error) {
	c := jsonschema.NewCompiler()
	if err := c.AddResource("penstock.json", schema); err != nil {
		return nil, err
	}
	return c.Compile("penstock.json")
}

// What the parser takes the schema takes too, and what the schema takes the parser can
// read. Then it alone checks what a schema cannot say: relations between keys, such as a
// name that is taken or a key of another mode, and what a name or an address means.
func TestSchemaAndParserAgree(t *testing.T) {
	encoded, err := json.Marshal(Schema())
	require.NoError(t, err)
	decoded, err := jsonschema.UnmarshalJSON(bytes.NewReader(encoded))
	require.NoError(t, err)
	agreed, err := validator(decoded)
	require.NoError(t, err)
	var schema object // as generators like it: numbers are float64
	require.NoError(t, json.Unmarshal(encoded, &schema))
	taken, refused := 0, 0
	for seed := range uint64(400) {
		doc, err := json.Marshal(documents{rand.New(rand.NewPCG(seed, 0))}.document(schema))
		require.NoError(t, err)
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
		require.NoError(t, err)
		bySchema := agreed.Validate(value)
		_, _, unread := shape(doc)
		_, byParser := Parse(doc)
		if bySchema == nil {
			assert.NoError(t, unread, "seed %d: the schema takes %s", seed, doc)
		}
		if byParser == nil {
			assert.NoError(t, bySchema, "seed %d: the parser takes %s", seed, doc)
			taken++
		}
		if bySchema != nil {
			refused++
		}
	}
	assert.Greater(t, taken, 40, "both take")
	assert.Greater(t, refused, 100, "both refuse")
	t.Logf("of 400 documents the parser takes %d, the schema refuses %d", taken, refused)
}

func TestNoConnectionIsIdleForShorterThanMiddleboxesMustBear(t *testing.T) {
	assert.GreaterOrEqual(t, time.Duration(defaults().Limits.IdleTimeout), 2*time.Hour+4*time.Minute, "RFC 5382 REQ-5")
	assert.GreaterOrEqual(t, time.Duration(defaults().Limits.HalfClosedTimeout), 4*time.Minute, "likewise, of closing ones")
}

// Package configtest makes configurations for tests, as a reader of the schema would
// write them and as people get them wrong.
package configtest

import (
	"encoding/json"
	"math/rand/v2"
	"regexp"
	"slices"
)

// object is a piece of JSON Schema, as encoding/json decodes it.
type object = map[string]any

// Document is a configuration as JSON, made out of its schema, most of them with a
// mistake; one seed always gives the same.
func Document(schema map[string]any, seed uint64) []byte {
	doc, err := json.Marshal(documents{rand.New(rand.NewPCG(seed, 0))}.document(schema))
	if err != nil {
		panic(err)
	}
	return doc
}

// documents makes configurations.
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
	bound := func(key string, without int64) int64 {
		if v, ok := schema[key].(float64); ok {
			return int64(v)
		}
		return without
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
		return least + g.Int64N(most-least+1)
	case "number":
		return g.Float64()
	}
	if schema["pattern"] != nil { // a port, a mark or a key
		for _, s := range []string{"443", "hkI5rNl0ogbnO8PrQCWp+bO2U1o2MFx4BE7tVUUYSHE="} {
			if regexp.MustCompile(schema["pattern"].(string)).MatchString(s) {
				return s
			}
		}
	}
	return []string{"a", "phone", "127.0.0.1:80", "penstock1", "/run/x.sock"}[g.IntN(5)]
}

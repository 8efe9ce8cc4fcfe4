package config_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// The schema is walked as a reader of the document would, without looking at
// the types it was made from; the parser is asked about every key in it.
func TestSchemaAndParserAcceptTheSameKeys(t *testing.T) {
	encoded, err := json.Marshal(config.Schema())
	require.NoError(t, err)
	var root map[string]any
	require.NoError(t, json.Unmarshal(encoded, &root))
	assert.Equal(t, "https://json-schema.org/draft/2020-12/schema", root["$schema"])
	seen := 0
	var visit func(schema map[string]any, path []string)
	visit = func(schema map[string]any, path []string) {
		switch schema["type"] {
		case "array":
			visit(schema["items"].(map[string]any), append(slices.Clone(path), "-"))
		case "object":
			properties, ok := schema["properties"].(map[string]any)
			if !ok {
				return // any key is fine
			}
			assert.Equal(t, false, schema["additionalProperties"], "%v", path)
			assert.True(t, unknown(t, append(slices.Clone(path), "no_such_key")),
				"%v refuses what the schema does not have",
				path)
			for _, name := range slices.Sorted(maps.Keys(properties)) {
				seen++
				full := append(slices.Clone(path), name)
				property := properties[name].(map[string]any)
				assert.False(t, unknown(t, full), "%v is in the schema", full)
				assert.NotEmpty(t, property["description"], "%v", full)
				visit(property, full)
			}
		}
	}
	visit(root, nil)
	assert.Greater(t, seen, 60, "the whole schema was visited")

	var keys []string
	require.NoError(t, err)
	var document any
	require.NoError(t, yaml.Unmarshal([]byte(whole), &document))
	collect(document, "", &keys)
	for _, key := range keys {
		assert.True(t, inSchema(root, strings.Split(strings.TrimPrefix(key, "."), ".")),
			"%s is in the whole configuration, so also in the schema", key)
	}
}

// unknown asks the parser about the one key at path.
func unknown(t *testing.T, path []string) bool {
	t.Helper()
	var doc strings.Builder
	for i, step := range path {
		if step == "-" {
			doc.WriteString("[")
			continue
		}
		fmt.Fprintf(&doc, "{%s: ", step)
		if i == len(path)-1 {
			doc.WriteString("0")
		}
	}
	for _, step := range slices.Backward(path) {
		if step == "-" {
			doc.WriteString("]")
		} else {
			doc.WriteString("}")
		}
	}
	_, err := config.Parse([]byte(doc.String()))
	require.Error(t, err)
	return strings.Contains(err.Error(), "unknown key")
}

func collect(node any, path string, keys *[]string) {
	switch n := node.(type) {
	case map[string]any:
		for k, v := range n {
			*keys = append(*keys, path+"."+k)
			collect(v, path+"."+k, keys)
		}
	case []any:
		for _, v := range n {
			collect(v, path, keys)
		}
	}
}

func inSchema(schema map[string]any, path []string) bool {
	if schema["type"] == "array" {
		return inSchema(schema["items"].(map[string]any), path)
	}
	if len(path) == 0 {
		return true
	}
	properties, ok := schema["properties"].(map[string]any)
	if !ok {
		return schema["additionalProperties"] != nil && schema["additionalProperties"] != false
	}
	next, ok := properties[path[0]].(map[string]any)
	return ok && inSchema(next, path[1:])
}

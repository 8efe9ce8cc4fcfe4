package config

import (
	"bytes"
	"encoding/json"
	"testing"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config/configtest"
)

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
	for seed := range uint64(600) {
		doc := configtest.Document(schema, seed)
		value, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
		require.NoError(t, err)
		bySchema := agreed.Validate(value)
		r := newReading()
		r.readShape(doc)
		var unread error
		if e := r.firstMistake(nil); e != nil {
			unread = e
		}
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
	t.Logf("of 600 documents the parser takes %d, the schema refuses %d", taken, refused)
}

func TestNoConnectionIsIdleForShorterThanMiddleboxesMustBear(t *testing.T) {
	assert.GreaterOrEqual(t, defaultConfig().Limits.IdleTimeout, 2*time.Hour+4*time.Minute, "RFC 5382 REQ-5")
	assert.GreaterOrEqual(t, defaultConfig().Limits.HalfClosedTimeout, 4*time.Minute,
		"likewise, of closing ones")
}

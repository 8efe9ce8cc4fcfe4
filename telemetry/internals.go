package telemetry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/penstock-net/penstock/cc"
)

// Internals are the internal values that an algorithm shows, in the order of its Spec. JSON has them as an object with
// keys in this order: {"target_packets":20.5,"velocity":2}.
type Internals []Internal

// Internal is one value; 0: the algorithm does not know it yet.
type Internal struct {
	Name  string
	Value float64
}

// InternalsOf returns values with their names; nil for an algorithm that shows none.
func InternalsOf(algorithm string, values cc.Internals) Internals {
	spec, err := cc.Lookup(algorithm)
	if err != nil {
		return nil
	}
	var in Internals
	for i, show := range spec.Internals {
		in = append(in, Internal{show.Name, values[i]})
	}
	return in
}

// MarshalJSON writes the object.
func (in Internals) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, v := range in {
		b = appendInternal(b, i, v.Name, v.Value)
	}
	return append(b, '}'), nil
}

// UnmarshalJSON reads what MarshalJSON wrote, in its order.
func (in *Internals) UnmarshalJSON(text []byte) error {
	*in = nil
	d := json.NewDecoder(bytes.NewReader(text))
	open, err := d.Token()
	if err != nil || open == nil {
		return err
	}
	if open != json.Delim('{') {
		return fmt.Errorf("telemetry: internals are an object, not %v", open)
	}
	for d.More() {
		var v Internal
		name, err := d.Token()
		if err != nil {
			return err
		}
		v.Name = name.(string) // JSON has no other keys
		if err := d.Decode(&v.Value); err != nil {
			return fmt.Errorf("telemetry: internal %s: %w", v.Name, err)
		}
		*in = append(*in, v)
	}
	return nil
}

// appendInternal writes the i-th member of the object, with six digits, because more would only lengthen the trace.
func appendInternal(b []byte, i int, name string, value float64) []byte {
	if i > 0 {
		b = append(b, ',')
	}
	b = append(b, '"')
	b = append(b, name...)
	b = append(b, `":`...)
	return strconv.AppendFloat(b, value, 'g', 6, 64)
}

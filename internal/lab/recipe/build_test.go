package recipe

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTermsAreOfOneFlowAlone(t *testing.T) {
	read := func(flows string) error {
		_, err := readText("my", "my", []byte("link: {rate: 12mbit, rtt: 40ms}\nduration: 2s\nflows:\n"+flows), loader{})
		return err
	}
	require.NoError(t, read("  a: {algorithm: copa}\n  b: {algorithm: cubic, port: 9000}\n  c: {}\n  d: {port: 80}\n"))
	for says, flows := range map[string]string{
		`my:5:3: flows.b.port: it is 8001, by which the edge knows flow "a"`: "  a: {weight: 2}\n  b: {port: 8001}",
		`my:4:3: flows.a.port: it is 8002, by which the edge knows flow "b"`: "  a: {port: 8002}\n  b: {weight: 2}",

		"my:5:3: flows.b.port: it is 80, by which": "  a: {weight: 2, port: 80}\n  b: {}",
		"my:4:3: flows.a.port: it is 9, by which":  "  a: {weight: 2, port: 9}\n  b: {weight: 3, port: 9}",
	} {
		assert.ErrorContains(t, read(flows), says)
	}
}

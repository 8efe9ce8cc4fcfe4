package config

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheMarkOfPacketsIsInherited(t *testing.T) {
	for text, want := range map[string][]bool{ // of the rules, and where none matches
		"rules: [{name: a, match: {ports: [1]}, dscp: keep}, {name: b, match: {ports: [2]}}]": {true, false, false},
		"defaults: {dscp: keep}\nrules: [{name: a, match: {ports: [1]}}, {name: b, match: {ports: [2]}, dscp: off}]": {
			true, false, true,
		},
	} {
		c, err := Parse([]byte("listeners: [{name: x, mode: socks5, address: \"127.0.0.1:0\"}]\n" + text))
		require.NoError(t, err)
		p, err := c.Policy()
		require.NoError(t, err)
		var got []bool
		for _, v := range p.Verdicts() {
			got = append(got, v.KeepDSCP)
		}
		assert.Equal(t, want, got, text)
		assert.True(t, p.KeepsDSCP())
	}
	_, err := Parse([]byte("listeners: [{name: x, mode: socks5, address: \"127.0.0.1:0\"}]\ndefaults: {dscp: ef}\n"))
	assert.ErrorContains(t, err, "keep")
}

package layout

import (
	"os"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMeasurementsAreShort(t *testing.T) {
	page, err := os.ReadFile("../../docs/measurements.md")
	require.NoError(t, err)
	hand, _, generated := strings.Cut(string(page), "<!-- Generated")
	assert.True(t, generated, "what follows is written by make measurements")
	assert.LessOrEqual(t, utf8.RuneCountInString(hand), 2_600)
	assert.LessOrEqual(t, utf8.RuneCountInString(string(page)), 17_000,
		"two verdicts for each recipe, and a reason for each miss")
}

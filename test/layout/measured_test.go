package layout

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// Figures are of one build. A change of an algorithm may make them others, which this tells
// and does not forbid: make measurements makes them again.
func TestTheFiguresAreOfTheseAlgorithms(t *testing.T) {
	made, err := os.ReadFile("../../docs/measurements/cc.sha256")
	require.NoError(t, err)
	git := exec.CommandContext(t.Context(), "git", "ls-files", "-s", "cc")
	git.Dir = "../.."
	files, err := git.Output()
	if err != nil {
		t.Skip("this is no checkout of git, which knows what cc holds")
	}
	sum := sha256.New()
	for line := range strings.Lines(string(files)) {
		if !strings.Contains(line, "_test.go") {
			sum.Write([]byte(line))
		}
	}
	if hex.EncodeToString(sum.Sum(nil)) != strings.TrimSpace(string(made)) {
		t.Skip("cc has changed since the figures in docs/measurements.md were made: make measurements")
	}
}

func TestMeasurementsAreShortByHand(t *testing.T) {
	page, err := os.ReadFile("../../docs/measurements.md")
	require.NoError(t, err)
	hand, _, generated := strings.Cut(string(page), "<!-- Generated")
	assert.True(t, generated, "what follows is written by make measurements")
	assert.LessOrEqual(t, utf8.RuneCountInString(hand), 10_000)
}

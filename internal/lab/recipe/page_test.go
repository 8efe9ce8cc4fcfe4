package recipe

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the list of docs/recipe-list.md")

// TestThePageListsEveryRecipe compares the list of docs/recipe-list.md with the library.
func TestThePageListsEveryRecipe(t *testing.T) {
	const path, generated = "../../../docs/recipe-list.md",
		"<!-- Generated from the recipes (make docs); a test compares it with them. -->\n"
	page, err := os.ReadFile(path)
	require.NoError(t, err)
	written, list, found := strings.Cut(string(page), generated)
	require.True(t, found)
	var want strings.Builder
	want.WriteString("\n| recipe | what is played | published in |\n|---|---|---|\n")
	for _, r := range All(nil) {
		fmt.Fprintf(&want, "| `%s` | %s | %s |\n", r.Name, r.About, r.Source)
	}
	if *update {
		require.NoError(t, os.WriteFile(path, []byte(written+generated+want.String()), 0o644)) //nolint:gosec // a page
		return
	}
	assert.Equal(t, want.String(), list, "docs/recipe-list.md is not what the recipes say; run: make docs")
}

// The file that docs/recipes.md shows is one that plays, and its bounds hold.
func TestTheExampleOfThePagePlays(t *testing.T) {
	page, err := os.ReadFile("../../../docs/recipes.md")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(page), "```yaml\n")
	example, _, found := strings.Cut(rest, "```")
	require.True(t, found)
	for _, f := range playText(t, example).Findings {
		assert.True(t, f.OK, "%s: %s", f.What, f.Got)
	}
}

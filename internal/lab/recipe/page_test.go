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

var update = flag.Bool("update", false, "rewrite the list of docs/recipes.md")

// TestThePageListsEveryRecipe compares the list of docs/recipes.md with the library.
func TestThePageListsEveryRecipe(t *testing.T) {
	const path, generated = "../../../docs/recipes.md",
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
	assert.Equal(t, want.String(), list, "docs/recipes.md is not what the recipes say; run: make docs")
}

package recipe

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite what docs/recipe-list.md and docs/recipes.md say of the recipes")

// TestThePagesListRecipesAndExpressions compares docs/recipe-list.md with the library, and docs/recipes.md with the
// names that expressions know.
func TestThePagesListRecipesAndExpressions(t *testing.T) {
	var recipes strings.Builder
	recipes.WriteString("\n| recipe | what is played | published in |\n|---|---|---|\n")
	for _, r := range All(nil) {
		fmt.Fprintf(&recipes, "| `%s` | %s | %s |\n", r.Name, r.About, r.Source)
	}
	const generated = "<!-- Generated from the recipes (make docs); a test compares it with them. -->\n"
	for path, want := range map[string]string{
		"../../../docs/recipe-list.md": recipes.String(), "../../../docs/recipes.md": tabulateView(t),
	} {
		page, err := os.ReadFile(path)
		require.NoError(t, err)
		written, list, found := strings.Cut(string(page), generated)
		require.True(t, found, path)
		if *update {
			require.NoError(t, os.WriteFile(path, []byte(written+generated+want), 0o644)) //nolint:gosec // a page
			continue
		}
		assert.Equal(t, want, list, "%s is not what the code says; run: make docs", path)
	}
}

// tabulateView returns the names of expressions, each with the comment of its field of view.
func tabulateView(t *testing.T) string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "view.go", nil, parser.ParseComments)
	require.NoError(t, err)
	var table strings.Builder
	table.WriteString("\n| name | what it is |\n|---|---|\n")
	for _, f := range file.Scope.Lookup("view").Decl.(*ast.TypeSpec).Type.(*ast.StructType).Fields.List {
		name := regexp.MustCompile(`expr:"(\w+)"`).FindStringSubmatch(f.Tag.Value)[1]
		if call, ok := f.Type.(*ast.FuncType); ok {
			var arguments []string
			for _, of := range call.Params.List {
				for _, argument := range of.Names {
					arguments = append(arguments, argument.Name)
				}
			}
			name += "(" + strings.Join(arguments, ", ") + ")"
		}
		about := strings.Join(strings.Fields(f.Doc.Text()), " ")
		assert.NotEmpty(t, about, name)
		fmt.Fprintf(&table, "| `%s` | %s |\n", name, about)
	}
	return table.String()
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

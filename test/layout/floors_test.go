package layout

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// layered are the packages with files that call only files below them, in the order of the package comment.
var layered = []string{"cc/flow", "proxy", "proxy/config"}

func TestFilesCallOnlyFilesBelow(t *testing.T) {
	for _, dir := range layered {
		folder := filepath.Join(root, filepath.FromSlash(dir))
		doc, err := parser.ParseFile(token.NewFileSet(), filepath.Join(folder, "doc.go"), nil, parser.ParseComments)
		require.NoError(t, err)
		floors := floorsIn(doc.Doc.Text())
		var files []string
		entries, err := os.ReadDir(folder)
		require.NoError(t, err)
		for _, e := range entries {
			if name := e.Name(); strings.HasSuffix(name, ".go") && !strings.HasSuffix(name, "_test.go") && name != "doc.go" {
				files = append(files, name)
			}
		}
		assert.ElementsMatch(t, files, floors, "%s: the files that its package comment lists", dir)
		wrong, err := upwardUses(folder, floors)
		require.NoError(t, err)
		assert.Empty(t, wrong)
	}
}

func TestUpwardUsesAreFound(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"top.go":    "package p\n\nimport \"time\"\n\ntype top struct{ bottom }\n\nfunc (t top) fall(time.Time) { t.hold() }\n",
		"bottom.go": "package p\n\ntype bottom struct{ above *top }\n\nfunc (b bottom) hold() { b.above.fall(nil) }\n",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600))
	}
	wrong, err := upwardUses(folder, []string{"top.go", "bottom.go"})
	require.NoError(t, err)
	require.Len(t, wrong, 2)
	assert.Contains(t, wrong[0], "bottom.go:3:28: top of top.go is above")
	assert.Contains(t, wrong[1], "bottom.go:5:34: fall of top.go is above")
}

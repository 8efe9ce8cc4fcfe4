package telemetry

import (
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "rewrite the tables of docs/metrics.md and docs/http-api.md")

// generated ends the part of a page that is written by hand.
const generated = "<!-- Generated from package telemetry (make docs); a test compares it with the code. -->\n"

func TestReferencePagesAreCurrent(t *testing.T) {
	for path, tables := range map[string]string{
		"../docs/metrics.md":  familyTable(),
		"../docs/http-api.md": objectTables(t, "lists.go", "held.go", "hints.go", "signals.go"),
	} {
		page, err := os.ReadFile(path)
		require.NoError(t, err)
		written, rest, found := strings.Cut(string(page), generated)
		require.True(t, found)
		if *update {
			require.NoError(t, os.WriteFile(path, []byte(written+generated+tables), 0o644)) //nolint:gosec // a page
			continue
		}
		assert.Equal(t, tables, rest, "%s is not what the code says; run: make docs", path)
	}
}

func TestPagesNameMetricsThatThereAre(t *testing.T) {
	known := familyLabels()
	pages, err := os.ReadDir("../docs")
	require.NoError(t, err)
	for _, entry := range pages {
		if entry.IsDir() || !strings.HasSuffix(entry.Name(), ".md") {
			continue
		}
		page, err := os.ReadFile("../docs/" + entry.Name())
		require.NoError(t, err)
		for _, name := range familyName.FindAllString(string(page), -1) {
			name = strings.TrimSuffix(name, "_bucket")
			if !strings.HasSuffix(name, "_") && !strings.HasPrefix(name, "penstock_wg") && name != "penstock_agent" {
				assert.Contains(t, known, name, entry.Name())
			}
		}
	}
}

// familyTable returns a row for each family, by name.
func familyTable() string {
	kinds := map[prometheus.ValueType]string{
		prometheus.CounterValue: "counter", prometheus.GaugeValue: "gauge", prometheus.UntypedValue: "histogram",
	}
	var b strings.Builder
	b.WriteString("\n| metric | type | labels | meaning |\n|---|---|---|---|\n")
	byName := func(f, g *family) int { return cmp.Compare(f.name, g.name) }
	for _, f := range slices.SortedFunc(slices.Values(families), byName) {
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", f.name, kinds[f.kind], strings.Join(f.labels, ", "), f.help)
	}
	return b.String()
}

// objectTables returns a table of fields for each type in the files that is written as JSON, with the comments of
// these fields.
func objectTables(t *testing.T, files ...string) string {
	t.Helper()
	var b strings.Builder
	for _, name := range files {
		file, err := parser.ParseFile(gotoken.NewFileSet(), name, nil, parser.ParseComments)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			if decl, ok := n.(*ast.GenDecl); ok && decl.Tok == gotoken.TYPE {
				spec := decl.Specs[0].(*ast.TypeSpec)
				object, ok := spec.Type.(*ast.StructType)
				if ok && spec.Name.IsExported() && object.Fields.List[0].Tag != nil {
					fmt.Fprintf(&b, "\n### %s\n\n%s\n\n| key | meaning |\n|---|---|\n%s", spec.Name,
						oneLine(decl.Doc), fieldRows(object))
				}
			}
			return true
		})
	}
	return b.String()
}

// fieldRows returns a row for each field of an object. Where its comment names fields, the row names their keys.
func fieldRows(object *ast.StructType) string {
	keys := map[string]string{}
	for _, field := range object.Fields.List {
		tag := reflect.StructTag(strings.Trim(field.Tag.Value, "`")).Get("json")
		keys[field.Names[0].Name], _, _ = strings.Cut(tag, ",")
	}
	var b strings.Builder
	for _, field := range object.Fields.List {
		about := strings.TrimSpace(oneLine(field.Doc) + " " + oneLine(field.Comment))
		about = regexp.MustCompile(`\b[A-Z]\w*\b`).ReplaceAllStringFunc(about, func(word string) string {
			if key := keys[word]; key != "" {
				return "`" + key + "`"
			}
			return word
		})
		key := keys[field.Names[0].Name]
		about = regexp.MustCompile("^`"+key+"` (is|are) ").ReplaceAllString(about, "")
		fmt.Fprintf(&b, "| `%s` | %s |\n", key, strings.TrimSuffix(about, "."))
	}
	return b.String()
}

// oneLine returns the text of a comment without line breaks; nil: none.
func oneLine(c *ast.CommentGroup) string { return strings.Join(strings.Fields(c.Text()), " ") }

// TestTheAPIPageHasEveryRoute compares docs/http-api.md with the patterns that handlers are registered under.
func TestTheAPIPageHasEveryRoute(t *testing.T) {
	page, err := os.ReadFile("../docs/http-api.md")
	require.NoError(t, err)
	pattern := regexp.MustCompile(`HandleFunc\("((?:GET|POST|DELETE) /\S*)"`)
	files, err := filepath.Glob("*.go")
	require.NoError(t, err)
	found := 0
	for _, file := range append(files, "page/page.go") {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		code, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range pattern.FindAllStringSubmatch(string(code), -1) {
			route := strings.TrimSuffix(m[1], "{$}")
			if strings.Contains(route, ".") || strings.Contains(route, "/debug/pprof/") && !strings.HasSuffix(route, "/") {
				continue // a part of the page, or of the profiles
			}
			found++
			assert.Contains(t, string(page), "| `"+route+"`")
		}
	}
	assert.Greater(t, found, 10)
}

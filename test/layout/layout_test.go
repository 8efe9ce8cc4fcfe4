package layout

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const root = "../.."

func TestTopLevelHasOnlyWhatTheHouseHas(t *testing.T) {
	entries, err := os.ReadDir(root)
	require.NoError(t, err)
	var dirs []string
	for _, e := range entries {
		name := e.Name()
		switch {
		case e.IsDir() && strings.HasPrefix(name, "."), slices.Contains(ignored, name):
		case e.IsDir():
			dirs = append(dirs, name)
		default:
			assert.Contains(t, files, name, "a file at the top level")
		}
	}
	assert.Equal(t, directories, dirs)
}

func TestImportsFollowTheTable(t *testing.T) {
	units := listUnits(t)
	require.Greater(t, len(units), 5, "go list found too little to mean anything")
	for _, u := range units {
		for _, wrong := range check(u, table, homes) {
			assert.Fail(t, wrong)
		}
	}
}

func TestPurePartUsesNoClockNoGlobalRandomnessNoGoroutines(t *testing.T) {
	pure := purity{clock: true, globalRand: true, goroutines: true}
	assert.NotZero(t, walk(t, "cc", func(path string) {
		wrong, err := impurities(path, nil, pure)
		require.NoError(t, err)
		assert.Empty(t, wrong)
	}), "no files seen")
}

func TestAlgorithmsShareNothingButOneTable(t *testing.T) {
	seen := false
	walk(t, "cc", func(path string) {
		name, err := filepath.Rel(root, path)
		require.NoError(t, err)
		name = filepath.ToSlash(name)
		switch {
		case name == sharedTable:
			seen = true
			wrong, err := impurities(path, nil, purity{shared: true})
			require.NoError(t, err)
			assert.Empty(t, wrong)
		case filepath.ToSlash(filepath.Dir(name)) == "cc":
			assert.False(t, importsOf(t, path)["sync"], "%s imports sync, which is for %s alone", name, sharedTable)
		}
	})
	assert.True(t, seen, "there is no %s: then cc may do without sync altogether", sharedTable)
}

// importsOf tells what a file imports.
func importsOf(t *testing.T, path string) map[string]bool {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
	require.NoError(t, err)
	imports := map[string]bool{}
	for _, imp := range file.Imports {
		name, err := strconv.Unquote(imp.Path.Value)
		require.NoError(t, err)
		imports[name] = true
	}
	return imports
}

func TestNothingIsNamedAfterNothing(t *testing.T) {
	empty := []string{"util", "utils", "common", "helpers", "types", "pkg"}
	walk(t, ".", func(path string) {
		for _, part := range strings.Split(filepath.ToSlash(path), "/") {
			assert.NotContains(t, empty, strings.TrimSuffix(part, ".go"), path)
		}
	})
}

// walk calls visit for every Go file below dir that is not a test, and counts them.
func walk(t *testing.T, dir string, visit func(path string)) (n int) {
	t.Helper()
	err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != "..":
			return fs.SkipDir
		case d.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		n++
		visit(path)
		return nil
	})
	require.NoError(t, err)
	return n
}

// listUnits asks the go command for every package and its direct imports.
func listUnits(t *testing.T) []unit {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports,TestImports,XTestImports", "./...")
	cmd.Dir = root
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "go list: %s", stderr.String())
	var units []unit
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p struct {
			ImportPath                         string
			Imports, TestImports, XTestImports []string
		}
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			return units
		}
		require.NoError(t, err)
		units = append(units, unit{
			path:    strings.TrimPrefix(p.ImportPath, module+"/"),
			imports: p.Imports,
			tests:   slices.Concat(p.TestImports, p.XTestImports),
		})
	}
}

package layout

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// goFile is the name of a file of a package.
var goFile = regexp.MustCompile(`\b[a-z_]+\.go\b`)

// floorsIn returns the files that a package comment lists in indented lines, from the top floor down.
func floorsIn(comment string) (floors []string) {
	for line := range strings.Lines(comment) {
		if strings.HasPrefix(line, "\t") {
			floors = append(floors, goFile.FindAllString(line, -1)...)
		}
	}
	return floors
}

// noImports imports nothing: what a package has of its own is resolved without the packages that it imports.
type noImports struct{}

// Import implements types.Importer.
func (noImports) Import(string) (*types.Package, error) { return nil, errors.New("not imported") }

// upwardUses returns where a file of the package in a folder names something of a file above it, one sentence each.
// floors are its files from the top down; fields do not count.
func upwardUses(folder string, floors []string) (wrong []string, err error) {
	fset := token.NewFileSet()
	var files []*ast.File
	for _, name := range floors {
		file, err := parser.ParseFile(fset, filepath.Join(folder, name), nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, fmt.Errorf("layout: %w", err)
		}
		files = append(files, file)
	}
	info := types.Info{Uses: map[*ast.Ident]types.Object{}}
	config := types.Config{Importer: noImports{}, Error: func(error) {}} // errors are of imported names
	pkg, _ := config.Check(folder, fset, files, &info)
	floorOf := func(p token.Pos) int { return slices.Index(floors, filepath.Base(fset.Position(p).Filename)) }
	for id, used := range info.Uses {
		if _, isVar := used.(*types.Var); used.Pkg() != pkg || isVar && used.Parent() != pkg.Scope() {
			continue
		}
		if from, to := floorOf(id.Pos()), floorOf(used.Pos()); from > to {
			wrong = append(wrong, fmt.Sprintf("%s: %s of %s is above", fset.Position(id.Pos()), id.Name, floors[to]))
		}
	}
	slices.Sort(wrong)
	return wrong, nil
}

package layout

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
)

// clockCalls read or wait for the real clock.
var clockCalls = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"}

// seeded are the names of math/rand/v2 that do not draw from the global source.
var seeded = []string{"New", "NewPCG", "NewChaCha8", "NewZipf", "Rand", "Source", "PCG", "ChaCha8", "Zipf"}

// purity says which constructs a part of the tree does without.
type purity struct {
	clock      bool // no real clock
	globalRand bool // no unseeded randomness
	goroutines bool // no go statements, no channels
	shared     bool // of sync, nothing but OnceValue
}

// impurities returns where the file breaks p, one sentence each.
func impurities(name string, src any, p purity) ([]string, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("layout: %w", err)
	}
	imported := map[string]string{} // local name → path
	for _, imp := range file.Imports {
		path, _ := strconv.Unquote(imp.Path.Value)
		switch {
		case imp.Name != nil:
			imported[imp.Name.Name] = path
		case path == "time" || path == "math/rand" || path == "sync":
			imported[path[len(path)-4:]] = path
		case path == "math/rand/v2":
			imported["rand"] = path
		}
	}
	var wrong []string
	complain := func(n ast.Node, format string, args ...any) {
		wrong = append(wrong, fmt.Sprintf("%s: %s", fset.Position(n.Pos()), fmt.Sprintf(format, args...)))
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			if p.goroutines {
				complain(n, "starts a goroutine")
			}
		case *ast.ChanType:
			if p.goroutines {
				complain(n, "has a channel")
			}
		case *ast.SelectorExpr:
			pkg, ok := n.X.(*ast.Ident)
			if !ok {
				return true
			}
			switch imported[pkg.Name] {
			case "time":
				if p.clock && slices.Contains(clockCalls, n.Sel.Name) {
					complain(n, "uses the real clock: time.%s", n.Sel.Name)
				}
			case "math/rand", "math/rand/v2":
				if p.globalRand && !slices.Contains(seeded, n.Sel.Name) {
					complain(n, "draws from the global source: rand.%s", n.Sel.Name)
				}
			case "sync":
				if p.shared && n.Sel.Name != "OnceValue" {
					complain(n, "shares more than a value that is built once: sync.%s", n.Sel.Name)
				}
			}
		}
		return true
	})
	return wrong, nil
}

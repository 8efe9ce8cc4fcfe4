package mobile_test

import (
	"fmt"
	"go/ast"
	"go/build"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// surface checks exported names against what gobind documents that it takes ("Type restrictions").
type surface struct {
	pkg   *types.Package
	found []string
}

// checkPackage checks all that a package exports.
func (s *surface) checkPackage() []string {
	for _, name := range s.pkg.Scope().Names() {
		o := s.pkg.Scope().Lookup(name)
		if !o.Exported() {
			continue
		}
		switch o := o.(type) {
		case *types.Const, *types.Var:
			s.checkType(name, o.Type())
		case *types.Func:
			s.checkFunc(name, o.Type().(*types.Signature))
		case *types.TypeName:
			s.checkNamed(name, o)
		}
	}
	return s.found
}

// checkNamed checks the fields and methods of a type.
func (s *surface) checkNamed(name string, o *types.TypeName) {
	named, ok := o.Type().(*types.Named)
	if !ok || o.IsAlias() || named.TypeParams().Len() > 0 {
		s.refuse(name, "an alias or a generic type")
		return
	}
	switch under := named.Underlying().(type) {
	case *types.Struct:
		for f := range under.Fields() {
			if f.Embedded() {
				s.refuse(name+"."+f.Name(), "embedded")
			} else if f.Exported() {
				s.checkType(name+"."+f.Name(), f.Type())
			}
		}
	case *types.Interface:
		for m := range under.Methods() {
			s.checkFunc(name+"."+m.Name(), m.Type().(*types.Signature))
		}
	default:
		s.refuse(name, "a type that is neither a struct nor an interface")
	}
	for m := range named.Methods() {
		if m.Exported() {
			s.checkFunc(name+"."+m.Name(), m.Type().(*types.Signature))
		}
	}
}

// checkFunc checks parameters and results.
func (s *surface) checkFunc(name string, f *types.Signature) {
	if f.Variadic() || f.TypeParams().Len() > 0 {
		s.refuse(name, "variadic or generic")
	}
	for p := range f.Params().Variables() {
		s.checkType(name+" "+p.Name(), p.Type())
	}
	for i := range f.Results().Len() {
		t := f.Results().At(i).Type()
		isError := types.Identical(t, types.Universe.Lookup("error").Type())
		if i > 1 || i == 1 && !isError {
			s.refuse(name, "results other than (T, error)")
		}
		if !isError {
			s.checkType(name, t)
		}
	}
}

// checkType checks the type of a value that crosses.
func (s *surface) checkType(name string, t types.Type) {
	if p, ok := t.(*types.Pointer); ok {
		if n, ok := p.Elem().(*types.Named); ok && n.Obj().Pkg() == s.pkg {
			if _, ok := n.Underlying().(*types.Struct); ok {
				return
			}
		}
		s.refuse(name, t)
		return
	}
	switch t := t.(type) {
	case *types.Basic:
		allowed := types.IsBoolean | types.IsString | types.IsInteger | types.IsFloat
		if t.Info()&allowed == 0 || t.Info()&types.IsUnsigned != 0 && t.Kind() != types.Byte {
			s.refuse(name, t)
		}
	case *types.Slice:
		if b, ok := t.Elem().(*types.Basic); !ok || b.Kind() != types.Byte {
			s.refuse(name, t)
		}
	case *types.Named: // of the package itself, and no struct by value
		if _, ok := t.Underlying().(*types.Interface); !ok || t.Obj().Pkg() != s.pkg {
			s.refuse(name, t)
		}
	default:
		s.refuse(name, t)
	}
}

// refuse notes what gobind would not take.
func (s *surface) refuse(name string, what any) {
	s.found = append(s.found, fmt.Sprintf("%s: %v", name, what))
}

// check returns what gobind would not take of a package of these files.
func check(t *testing.T, path string, set *token.FileSet, files ...*ast.File) []string {
	t.Helper()
	root, err := exec.CommandContext(t.Context(), "go", "env", "GOROOT").Output()
	require.NoError(t, err)
	build.Default.GOROOT = strings.TrimSpace(string(root)) // which -trimpath leaves out
	build.Default.CgoEnabled = false                       // the importer would run cgo
	conf := types.Config{Importer: importer.ForCompiler(set, "source", nil)}
	pkg, err := conf.Check(path, set, files, nil)
	require.NoError(t, err)
	return (&surface{pkg: pkg}).checkPackage()
}

// Whatever is exported can be bound, on the systems of phones.
func TestAllThatIsExportedCanBeBound(t *testing.T) {
	set := token.NewFileSet()
	var files []*ast.File
	sources, err := build.ImportDir(".", 0)
	require.NoError(t, err)
	for _, name := range sources.GoFiles {
		f, err := parser.ParseFile(set, name, nil, 0)
		require.NoError(t, err)
		files = append(files, f)
	}
	assert.Empty(t, check(t, "mobile", set, files...))
}

// Each rule finds what breaks it.
func TestWhatCannotBeBoundIsFound(t *testing.T) {
	for source, want := range map[string]string{
		"func F(a []string) {}":                        "F a: []string",
		"func F(a ...int) {}":                          "F: variadic or generic",
		"func F[T any](a int) {}":                      "F: variadic or generic",
		"func F() (int, int) { return 0, 0 }":          "F: results other than (T, error)",
		"func F() (a, b int, err error) { return }":    "F: results other than (T, error)",
		"func F(m map[string]int) {}":                  "F m: map[string]int",
		"func F(c chan int) {}":                        "F c: chan int",
		"func F(u uint32) {}":                          "F u: uint32",
		"func F(f func()) {}":                          "F f: func()",
		"func F(a any) {}":                             "F a: any",
		"type S struct{ A int }; func F(s S) {}":       "F s: x.S",
		"type S struct{ A []int }":                     "S.A: []int",
		"type S struct{ T }; type T struct{}":          "S.T: embedded",
		"type S struct{}; func (S) M(c complex128) {}": "S.M c: complex128",
		"type I interface{ M(p *int) }":                "I.M p: *int",
		"type D int64":                                 "D: a type that is neither a struct nor an interface",
		"type S[T any] struct{}":                       "S: an alias or a generic type",
		"import \"time\"; var V time.Duration":         "V: time.Duration",
		"import \"time\"; func F(t *time.Time) error":  "F t: *time.Time",
	} {
		set := token.NewFileSet()
		f, err := parser.ParseFile(set, "x.go", "package x; "+source, 0)
		require.NoError(t, err, source)
		assert.Contains(t, check(t, "x", set, f), want, source)
	}
}

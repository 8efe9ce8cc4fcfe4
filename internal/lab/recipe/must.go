package recipe

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math"
	"strconv"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/vm"
	yaml "github.com/goccy/go-yaml/ast"

	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/proxy/config"
)

// mustForm is what is asserted of an experiment, as the file says it.
type mustForm struct {
	For     raw     `yaml:"for"`
	When    formula `yaml:"when"`
	Run     string  `yaml:"run"`
	What    string  `yaml:"what"`
	Paper   string  `yaml:"paper"`
	Is      formula `yaml:"is"`
	Unit    string  `yaml:"unit"`
	AtLeast formula `yaml:"at_least"`
	AtMost  formula `yaml:"at_most"`
	Above   formula `yaml:"above"`
	Below   formula `yaml:"below"`
}

// formula is an expression, or a number.
type formula string

// UnmarshalYAML implements the YAML library's NodeUnmarshaler.
func (f *formula) UnmarshalYAML(n yaml.Node) error {
	text, ok := scalar(n)
	if !ok || strings.TrimSpace(text) == "" {
		return at(n, "", "expected an expression; one with a colon, a comma or a quote in the wrong place stands in quotes")
	}
	*f = formula(text)
	return nil
}

// must is one assertion, ready to be checked.
type must struct {
	node   yaml.Node
	key    string
	form   mustForm
	when   *vm.Program // nil: always
	is     *vm.Program
	bounds [4]*vm.Program // by comparisons; nil: none
}

// comparison is one way to bound a value.
type comparison struct {
	sign, words string
	holds       func(got, bound float64) bool
}

var comparisons = [4]comparison{
	{">=", "at least", func(a, b float64) bool { return a >= b }},
	{"<=", "at most", func(a, b float64) bool { return a <= b }},
	{">", "above", func(a, b float64) bool { return a > b }},
	{"<", "below", func(a, b float64) bool { return a < b }},
}

// alone has the names that any expression can use; about adds the names for an expression about one run.
type (
	alone struct {
		Run  func(name string) (*view, error) `expr:"run"`
		Runs []string                         `expr:"runs"` // names of the runs of this form
		Inf  float64                          `expr:"inf"`
		functions
	}
	about struct {
		*view
		alone
	}
)

// readMusts reads what is asserted.
func (r *Recipe) readMusts(n yaml.Node) (all []must, err error) {
	if n == nil {
		return nil, nil
	}
	list, ok := n.(*yaml.SequenceNode)
	if !ok {
		return nil, at(n, "must", "expected a list, such as [utilisation >= 0.9]")
	}
	for i, item := range list.Values {
		key := fmt.Sprintf("must[%d]", i)
		form, err := r.mustForm(key, item)
		if err != nil {
			return nil, err
		}
		values, err := rows(form.For.Node, key+".for")
		if err != nil {
			return nil, err
		}
		for _, row := range values {
			m, err := r.compile(must{node: item, key: key, form: form.with(row)})
			if err != nil {
				return nil, err
			}
			all = append(all, m)
		}
	}
	return all, nil
}

// mustForm reads one item: a section, or a comparison by itself.
func (r *Recipe) mustForm(key string, item yaml.Node) (f mustForm, err error) {
	text, ok := scalar(item)
	if !ok {
		if err := config.Decode(r.text, key, item, &f); err != nil {
			return f, err
		}
		if f.Is == "" {
			return f, at(item, key, "is, what is measured, is missing: write is: utilisation")
		}
		return f, nil
	}
	tree, err := parser.Parse(text)
	if err != nil {
		return f, at(item, key, "%s", firstLine(err))
	}
	if two, ok := tree.Node.(*ast.BinaryNode); ok {
		f.What, f.Is = two.Left.String(), formula(two.Left.String())
		for i, bound := range f.bounds() {
			sign := comparisons[i].sign
			if two.Operator == sign || two.Operator == "==" && strings.Contains(sign, "=") {
				*bound = formula(two.Right.String())
			}
		}
	}
	if f.AtLeast+f.AtMost+f.Above+f.Below == "" {
		return f, at(item, key, "expected a comparison, such as utilisation >= 0.9")
	}
	return f, nil
}

// bounds are those of comparisons, in their order.
func (f *mustForm) bounds() []*formula { return []*formula{&f.AtLeast, &f.AtMost, &f.Above, &f.Below} }

// with puts the values of variables in.
func (f mustForm) with(v variables) mustForm {
	for _, s := range []*string{&f.Run, &f.What, &f.Paper, &f.Unit} {
		*s = v.in(*s)
	}
	for _, s := range append(f.bounds(), &f.When, &f.Is) {
		*s = formula(v.in(string(*s)))
	}
	return f
}

// compile reads the expressions of an assertion.
func (r *Recipe) compile(m must) (must, error) {
	var env any = about{view: &view{}}
	if len(r.all) > 1 && m.form.Run == "" {
		env = alone{}
	}
	if m.form.Run != "" && !r.all[m.form.Run] {
		return m, at(m.node, m.key+".run", "there is no run %q", m.form.Run)
	}
	var failed error
	read := func(name string, f formula) *vm.Program {
		if f == "" || failed != nil {
			return nil
		}
		options := append([]expr.Option{expr.Env(env)}, language...)
		if name == ".when" {
			options = append(options, expr.AsBool())
		}
		program, err := expr.Compile(string(f), options...)
		if err == nil {
			failed = r.checkNames(m, name, program)
			return program
		}
		cure := ""
		if _, ok := env.(alone); ok && strings.Contains(err.Error(), "unknown name") {
			cure = `; of which run? give it run: NAME, or write run("NAME") and a dot before it`
		}
		if strings.Contains(err.Error(), "unexpected token EOF") {
			cure = comment
		}
		failed = at(m.node, m.key+name, "%s%s", firstLine(err), cure)
		return nil
	}
	m.when, m.is = read(".when", m.form.When), read(".is", m.form.Is)
	for i, f := range m.form.bounds() {
		m.bounds[i] = read("", *f)
	}
	return m, failed
}

// checkNames finds arguments of functions that name a run or a flow which is not there. A name may be the beginning of
// several flows' names.
func (r *Recipe) checkNames(m must, key string, program *vm.Program) (failed error) {
	ast.Find(program.Node(), func(n ast.Node) bool {
		call, ok := n.(*ast.CallNode)
		if !ok {
			return false
		}
		callee := call.Callee.String()
		for k, argument := range call.Arguments {
			named, ok := argument.(*ast.StringNode)
			switch {
			case !ok, strings.HasSuffix(callee, "internal") && k > 0: // the name of what the algorithm shows
			case callee == "run" && !r.all[named.Value]:
				failed = at(m.node, m.key+key, "there is no run %q", named.Value)
			case callee != "run" && !r.hasFlow(named.Value):
				failed = at(m.node, m.key+key, "there is no flow %q", named.Value)
			}
		}
		return failed != nil
	})
	return failed
}

// hasFlow reports whether a flow of any run has a name that begins so.
func (r *Recipe) hasFlow(prefix string) bool {
	for name := range r.flows {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// DigestMusts returns a digest of what must hold, and of what is known not to.
func (r Recipe) DigestMusts() string {
	digest := fnv.New64a()
	for _, m := range r.musts {
		m.form.For = raw{} // what it repeats is in the rest
		fmt.Fprintf(digest, "%q\n", m.form)
	}
	fmt.Fprintf(digest, "%q", r.missed)
	return strconv.FormatUint(digest.Sum64(), 16)
}

func firstLine(err error) string {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// judge compares what came of the runs with what is asserted.
func (r *Recipe) judge(runs []Run) (all []record.Finding) {
	views, names := map[string]*view{}, []string(nil)
	for _, run := range runs {
		views[run.Stage.Name] = run.view()
		names = append(names, run.Stage.Name)
	}
	for _, m := range r.musts {
		if m.form.Run != "" && views[m.form.Run] == nil {
			continue // a run of the other form
		}
		rest := alone{Inf: math.Inf(1), Runs: names, functions: judging, Run: func(name string) (*view, error) {
			if v := views[name]; v != nil {
				return v, nil
			}
			return nil, fmt.Errorf("there is no run %q", name)
		}}
		var env any = rest
		if v := views[m.form.Run]; v != nil {
			env = about{v, rest}
		} else if len(r.all) == 1 {
			env = about{views[runs[0].Stage.Name], rest}
		}
		if f, there := m.judge(env); there {
			all = append(all, f)
		}
	}
	if broken := findBroken(runs); len(broken) > 0 && r.Asserts() {
		all = append(all, record.Finding{
			What: "flows that broke", Bound: "at most 0", Got: fmt.Sprintf("%d: %s", len(broken), broken[0]),
		})
	}
	for i := range all {
		if f := &all[i]; !f.OK {
			f.Why = r.missedReason(f.What)
		}
	}
	return all
}

// findBroken names flows that ended before their time or got wrong bytes: a queue that such a flow has left is short,
// whatever the algorithm does.
func findBroken(runs []Run) (broken []string) {
	for _, run := range runs {
		for _, a := range run.Record.Actors {
			if what := a.Corrupt + a.Error; what != "" {
				broken = append(broken, fmt.Sprintf("%s: %s: %s", run.Stage.Name, a.Name, what))
			}
		}
	}
	return broken
}

const (
	comparing = "for comparison" // the bound of a finding without one
	// notMeasured is the figure of a finding without one. It is the verdict if the experiment was not played, does not
	// apply, or was disturbed by the machine.
	notMeasured = "not measured"
)

// name is that of the finding.
func (m must) name() string { return cmp.Or(m.form.What, string(m.form.Is)) }

// judge evaluates the assertion; false: it is not about this run. What cannot be evaluated does not hold.
func (m must) judge(env any) (f record.Finding, there bool) {
	is, got, err := any(true), math.NaN(), error(nil)
	if m.when != nil {
		is, err = expr.Run(m.when, env)
	}
	if err == nil {
		if is != true {
			return f, false
		}
		got, err = number(m.is, env)
	}
	f = record.Finding{What: m.name(), Paper: m.form.Paper, OK: true}
	var bounds []string
	for i, c := range comparisons {
		if m.bounds[i] == nil {
			continue
		}
		bound, failed := number(m.bounds[i], env)
		text := figure(bound, m.form.Unit)
		if failed != nil {
			err, text = cmp.Or(err, failed), string(*m.form.bounds()[i])
		}
		bounds = append(bounds, c.words+" "+text)
		f.OK = f.OK && c.holds(got, bound)
	}
	f.Bound = cmp.Or(strings.Join(bounds, ", "), comparing)
	switch {
	case err != nil:
		f.Got, f.OK = notMeasured+": "+firstLine(err), false
	case math.IsNaN(got):
		f.Got = notMeasured
	default:
		f.Got = figure(got, m.form.Unit)
	}
	return f, true
}

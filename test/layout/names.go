package layout

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"unicode"
)

// nameLimits are what the names and comments of one folder keep to.
type nameLimits struct {
	oneWord  int // percentage of functions with a name of one word, at most
	comments int // lines of comments beside 100 lines of code, at least
	riddles  int // words in comments that the list riddle has, at most
}

// standardLimits hold for every folder that limitsOf does not list.
var standardLimits = nameLimits{oneWord: 45, comments: 8}

// limitsOf are folders that keep to other limits. Those that are wider are today's figures: they only get narrower.
var limitsOf = map[string]nameLimits{
	"agents/go/ccpagent":          {oneWord: 45, comments: 7},
	"agents/go/cubic":             {oneWord: 45, comments: 5},
	"cc/flow":                     {oneWord: 20, comments: 18},
	"cc/sim":                      {oneWord: 82, comments: 8},
	"cmd/penstock":                {oneWord: 10, comments: 9},
	"cmd/penstock-lab":            {oneWord: 48, comments: 2},
	"internal/doctor":             {oneWord: 40, comments: 15, riddles: 0},
	"internal/lab/agents":         {oneWord: 62, comments: 5},
	"internal/lab/bench":          {oneWord: 76, comments: 7},
	"internal/lab/edge":           {oneWord: 85, comments: 8},
	"internal/lab/linktrace":      {oneWord: 45, comments: 6},
	"internal/lab/native":         {oneWord: 76, comments: 8},
	"internal/lab/recipe":         {oneWord: 78, comments: 5},
	"internal/lab/record":         {oneWord: 78, comments: 8},
	"internal/lab/report":         {oneWord: 45, comments: 6},
	"internal/lab/stage":          {oneWord: 76, comments: 8},
	"internal/need":               {oneWord: 66, comments: 8},
	"internal/netlab":             {oneWord: 78, comments: 8},
	"proxy":                       {oneWord: 20, comments: 16},
	"proxy/capture":               {oneWord: 40, comments: 15, riddles: 0},
	"proxy/config/configtest":     {oneWord: 45, comments: 6},
	"proxy/datapath":              {oneWord: 66, comments: 25},
	"proxy/datapath/datapathtest": {oneWord: 58, comments: 5},
	"proxy/datapath/eventloop":    {oneWord: 52, comments: 18},
	"proxy/datapath/kernel":       {oneWord: 25, comments: 18},
	"proxy/datapath/kernel/bpf":   {oneWord: 67, comments: 16},
	"proxy/datapath/netstack":     {oneWord: 45, comments: 18},
	"proxy/datapath/quic":         {oneWord: 45, comments: 16},
	"proxy/happyeyeballs":         {oneWord: 45, comments: 12},
	"proxy/ingress":               {oneWord: 45, comments: 16},
	"proxy/linkstat":              {oneWord: 40, comments: 15, riddles: 0},
	"proxy/tunnel":                {oneWord: 45, comments: 18, riddles: 0},
	"proxy/tunnel/kernelspace":    {oneWord: 45, comments: 15, riddles: 0},
	"proxy/tunnel/userspace":      {oneWord: 35, comments: 15, riddles: 0},
	"telemetry":                   {oneWord: 20, comments: 10},
	"telemetry/page":              {oneWord: 20, comments: 10},
	"test/agents/nonsense":        {oneWord: 100, comments: 5},
	"test/kubernetes/pod":         {oneWord: 100, comments: 5, riddles: 1},
	"test/layout":                 {oneWord: 100, comments: 5, riddles: 1},
}

// fewFunctions have no share to speak of: below this number oneWord is not looked at.
const fewFunctions = 25

// maxDefinitions bounds how often one name is defined in the whole tree: a search finds a name that is rare.
// Methods of interfaces are excepted, and the functions that the language calls.
const maxDefinitions = 10

// riddle finds words that make the reader search a sentence for what they stand for.
var riddle = regexp.MustCompile(`(?i)\b(?:whose|nobody|somebody|likewise|meanwhile|(?:is|are) told|` +
	`so (?:many|much)|tells whether|has it be|of (?:those|which)|who sends|lest)\b`)

// wellKnown are the functions that the language calls, and methods of the standard library's interfaces.
var wellKnown = []string{
	"init", "main", "Close", "Error", "Read", "Write", "String", "Unwrap", "UnmarshalYAML", "MarshalJSON",
}

// nameCounts are counts over the files of a folder, or over the tree.
type nameCounts struct {
	functions int
	oneWord   int // functions with a name of one word
	code      int // lines
	comments  int // lines
	riddles   []string
	defined   map[string]int  // how often each function or method is defined
	methods   map[string]bool // names of the methods of interfaces
}

// addFile adds what a file holds; src is as for parser.ParseFile. A generated file adds nothing.
func (c *nameCounts) addFile(name string, src []byte) error {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, name, src, parser.SkipObjectResolution|parser.ParseComments)
	if err != nil {
		return fmt.Errorf("layout: %w", err)
	}
	if ast.IsGenerated(file) {
		return nil
	}
	if c.defined == nil {
		c.defined, c.methods = map[string]int{}, map[string]bool{}
	}
	for line := range strings.Lines(string(src)) {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "//"):
			c.comments++
		case line != "":
			c.code++
		}
	}
	for _, group := range file.Comments {
		for _, comment := range group.List {
			for _, found := range riddle.FindAllString(comment.Text, -1) {
				c.riddles = append(c.riddles, fmt.Sprintf("%s: %q", fset.Position(comment.Pos()), found))
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			c.functions++
			c.defined[n.Name.Name]++
			if countWords(n.Name.Name) == 1 {
				c.oneWord++
			}
		case *ast.InterfaceType:
			for _, method := range n.Methods.List {
				for _, name := range method.Names {
					c.methods[name.Name] = true
				}
			}
		}
		return true
	})
	return nil
}

// countWords counts the words of a name in camel case. An abbreviation is one word.
func countWords(name string) (words int) {
	runes := []rune(name)
	for i, r := range runes {
		switch {
		case r == '_':
		case i == 0 || runes[i-1] == '_':
			words++
		case unicode.IsUpper(r) && !unicode.IsUpper(runes[i-1]): // takeIt
			words++
		case unicode.IsUpper(r) && i+1 < len(runes) && unicode.IsLower(runes[i+1]): // the C of TCPConn
			words++
		}
	}
	return words
}

// exceeded returns what breaks the limits, one sentence each.
func (c *nameCounts) exceeded(folder string, limits nameLimits) (wrong []string) {
	if c.functions >= fewFunctions && 100*c.oneWord > limits.oneWord*c.functions {
		wrong = append(wrong, fmt.Sprintf("%s: %d of %d functions have a name of one word, above %d %%: say verb and object",
			folder, c.oneWord, c.functions, limits.oneWord))
	}
	if c.code > 0 && 100*c.comments < limits.comments*c.code {
		wrong = append(wrong, fmt.Sprintf("%s: %d lines of comments beside %d of code, below %d per 100: say units and reasons",
			folder, c.comments, c.code, limits.comments))
	}
	if len(c.riddles) > limits.riddles {
		wrong = append(wrong, fmt.Sprintf("%s: %d words that make a reader guess, above %d: put the sentence plainly:\n%s",
			folder, len(c.riddles), limits.riddles, strings.Join(c.riddles, "\n")))
	}
	return wrong
}

// commonNames returns the names that are defined more than maxDefinitions times, one sentence each.
func (c *nameCounts) commonNames() (wrong []string) {
	for name, times := range c.defined {
		if times > maxDefinitions && !c.methods[name] && !slices.Contains(wellKnown, name) {
			wrong = append(wrong, fmt.Sprintf("%s is defined %d times, above %d: say what it acts on",
				name, times, maxDefinitions))
		}
	}
	slices.SortFunc(wrong, cmp.Compare)
	return wrong
}

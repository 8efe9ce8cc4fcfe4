package sim

import (
	"embed"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// The standard cases are put to every algorithm, so that each can be set beside
// the others. In their files the algorithm is written as ALGORITHM, and its flow
// is called "tested".
//
//go:embed standard/*.txt
var standardFiles embed.FS

const (
	standardPlace  = "ALGORITHM"
	standardTested = "tested"
	standardHints  = 10 * time.Millisecond
)

// standardNames are the files in the order in which tables have them: alone on
// ever harder links, then with company.
var standardNames = []string{"fixed", "lte", "steps", "loss", "beside-cubic", "two"}

// StandardCase is one of the standard cases, the algorithm left open.
type StandardCase struct {
	Name  string
	About string // one sentence
	text  string
}

// Standard returns the standard cases.
func Standard() []StandardCase {
	var all []StandardCase
	for _, name := range standardNames {
		text, err := standardFiles.ReadFile("standard/" + name + ".txt")
		if err != nil {
			panic("sim: standard case: " + err.Error()) // the files are part of the program
		}
		about, _, _ := strings.Cut(string(text), "\n")
		all = append(all, StandardCase{Name: name, About: strings.TrimPrefix(about, "# "), text: string(text)})
	}
	return all
}

// Case returns the case for an algorithm, with settings as cc.Parse reads them.
// One that needs hints is given them.
func (s StandardCase) Case(algorithm string) (Case, error) {
	name, _, err := cc.Parse(algorithm)
	if err != nil {
		return Case{}, fmt.Errorf("sim: standard case %s: %w", s.Name, err)
	}
	c, err := ReadCase(s.Name, strings.NewReader(strings.ReplaceAll(s.text, standardPlace, algorithm)), nil)
	if spec, _ := cc.Lookup(name); slices.Contains(spec.Needs, cc.NeedsHints) {
		c.Hints = standardHints
	}
	return c, err
}

// Tested returns what came of the algorithm that the case was for: of the first
// of its flows where it has several.
func (s StandardCase) Tested(r Result) FlowResult {
	i := slices.IndexFunc(r.Flows, func(f FlowResult) bool { return f.Name == standardTested })
	return r.Flows[i]
}

// Algorithms returns those that a simulated flow can run, sorted by name: all
// but none, whose window is that of a kernel.
func Algorithms() []cc.Spec {
	return slices.DeleteFunc(cc.Specs(), func(s cc.Spec) bool {
		return FlowConfig{Algorithm: s.Name}.check() != nil
	})
}

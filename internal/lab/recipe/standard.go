package recipe

import (
	"embed"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/lab/agents"
)

// The standard cases are put to every algorithm, so that each can be set beside the
// others. In their files the algorithm is $(algorithm), and its flow is called "tested".
//
//go:embed standard
var standardFiles embed.FS

// Tested is the name of the flow that a standard case is for.
const Tested = "tested"

// standardNames are the files in the order in which tables have them: alone on ever harder
// links, then with company.
var standardNames = []string{"fixed", "lte", "steps", "loss", "beside-cubic", "two"}

// StandardCase is one of the standard cases, the algorithm left open.
type StandardCase struct {
	Name  string
	About string // one sentence
	text  string
}

// Standard returns the standard cases.
func Standard() (all []StandardCase) {
	for _, name := range standardNames {
		c := StandardCase{Name: name, text: string(mustHave(standardFiles.ReadFile("standard/" + name + ".yaml")))}
		c.About = mustHave(c.Recipe(cc.Default, nil)).About
		all = append(all, c)
	}
	return all
}

// Recipe returns the case for an algorithm, with settings as cc.Parse reads them; the agents
// are as for All. One that needs hints is given them.
func (s StandardCase) Recipe(algorithm string, there agents.Agents) (Recipe, error) {
	name, _, err := cc.Parse(algorithm)
	if err != nil {
		return Recipe{}, fmt.Errorf("recipe: standard case %s: %w", s.Name, err)
	}
	if name == "none" {
		return Recipe{}, fmt.Errorf("recipe: standard case %s: none leaves the window to the transport below, and a "+
			"simulated one has none; try cubic or reno", s.Name)
	}
	text := fmt.Sprintf("name: %q\n", algorithm) + strings.ReplaceAll(s.text, "$(algorithm)", algorithm)
	if spec, _ := cc.Lookup(name); slices.Contains(spec.Needs, cc.NeedsHints) {
		text += "hints: 10ms\n"
	}
	return readText(s.Name, s.Name, []byte(text), loader{Agents: there})
}

// Demo returns an upload beside a download and requests, over what link carries, for a time: its window left alone,
// and held by the edge.
func Demo(link string, duration time.Duration) (Recipe, error) {
	text := strings.NewReplacer("$(link)", link, "$(duration)", duration.String()).Replace(
		string(mustHave(standardFiles.ReadFile("standard/demo.yaml"))))
	return readText("demo uploads", "demo.yaml", []byte(text), files("", nil))
}

// Package recipe reads experiments from files of one form (see Format), has a stage play
// each of their runs, and judges what came of them. Published ones are its
// library: the paper's setup, our assertions, and the figures that the paper printed
// beside ours.
package recipe

import (
	"embed"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/linktrace"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// Recipe is one experiment, as its file says it.
type Recipe struct {
	Name   string // on the command line: "janus-c2"
	About  string // one line: what is played, and what for
	Source string // paper and section

	file  string // where it is, for mistakes
	text  []byte
	load  loader
	runs  []Experiment    // that flags made; nil: the text has them
	all   map[string]bool // names of the runs of the full form
	flows map[string]bool // names of the flows of all runs
	musts []must

	missed []missedBound
}

// missedBound names findings that are known to be outside their bounds, and the reason.
type missedBound struct{ what, why string }

// matches reports whether the finding is one of them: what is its name, or before a final * the name's beginning.
func (m missedBound) matches(finding string) bool {
	prefix, ok := strings.CutSuffix(m.what, "*")
	return finding == m.what || ok && strings.HasPrefix(finding, prefix)
}

// missedReason returns why a finding is outside its bound; empty: it is not known to be.
func (r *Recipe) missedReason(finding string) string {
	for _, m := range r.missed {
		if m.matches(finding) {
			return m.why
		}
	}
	return ""
}

// Asserts reports whether anything must hold of it.
func (r Recipe) Asserts() bool { return len(r.musts) > 0 }

// TimeOf is how long stages over real sockets take, without the second or two that each needs to start.
func TimeOf(stages []stage.Stage) (d time.Duration) {
	for _, s := range stages {
		if !s.Virtual {
			d += s.Duration
		}
	}
	return d
}

// Scale is how much of an experiment is played.
type Scale string

// The scales.
const (
	Full  Scale = "full"  // what the paper did, as far as it says
	Short Scale = "short" // less of it, for tests

	// Control is the short form with what the key control says laid over its runs. At least one bound that the
	// short form holds must fail in it, or the bounds cannot tell the paper's algorithm from another.
	Control Scale = "control"
)

// Run is a stage and what came of it.
type Run struct {
	Stage  stage.Stage
	Record stage.Record
}

//go:embed recipes
var library embed.FS

// mustHave returns a value that was read from a file of the program. A mistake there is one of ours, so it panics.
func mustHave[T any](v T, err error) T {
	if err != nil {
		panic("recipe: " + err.Error())
	}
	return v
}

// paths returns the files of the library, by family, which is the folder.
func paths() []string { return mustHave(fs.Glob(library, "recipes/*/*.yaml")) }

// published returns the recipe of a file of the library.
func published(file string, there agents.Agents) Recipe {
	name := strings.TrimSuffix(path.Base(file), ".yaml")
	return mustHave(readText(name, name, mustHave(library.ReadFile(file)), loader{Agents: there}))
}

// All returns every recipe of the library, by family. The agents are those that are there
// already; they take the places of agents that recipes start.
func All(there agents.Agents) (all []Recipe) {
	for _, file := range paths() {
		all = append(all, published(file, there))
	}
	return all
}

// Select returns the named recipes in the order in which they are named; "all" is every
// one of the library, and what ends in .yaml or .yml is a file, with its traces
// beside it.
func Select(names []string, there agents.Agents) ([]Recipe, error) {
	if slices.Contains(names, "all") {
		if len(names) > 1 {
			return nil, fmt.Errorf("recipe: all goes without other names")
		}
		return All(there), nil
	}
	known := paths()
	var out []Recipe
	taken := map[string]bool{}
	for _, name := range names {
		called := strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))
		if taken[called] {
			return nil, fmt.Errorf("recipe: two are called %s, and their records could not be told apart: play one", called)
		}
		taken[called] = true
		if strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml") {
			r, err := Open(name, there)
			if err != nil {
				return nil, err
			}
			out = append(out, r)
			continue
		}
		i := slices.IndexFunc(known, func(file string) bool { return path.Base(file) == name+".yaml" })
		if i < 0 {
			return nil, fmt.Errorf("recipe: there is no %q; penstock-lab bench recipe list has them all, and a file "+
				"of your own ends in .yaml", name)
		}
		out = append(out, published(known[i], there))
	}
	return out, nil
}

// Open reads the file of an experiment; its traces are found beside it.
func Open(file string, there agents.Agents) (Recipe, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return Recipe{}, err
	}
	name := strings.TrimSuffix(filepath.Base(file), filepath.Ext(file))
	return readText(name, file, text, files(filepath.Dir(file), there))
}

// Of makes a recipe of runs that flags describe; their traces are found from here.
func Of(name string, runs []Experiment, there agents.Agents) (Recipe, error) {
	r := Recipe{Name: name, runs: runs, load: files("", there)}
	stages, err := r.Stages(Full, 1)
	if err == nil {
		err = r.distinct(Full, stages, false)
	}
	return r, err
}

// files finds what an experiment names in a folder.
func files(folder string, there agents.Agents) loader {
	place := func(file string) string {
		if filepath.IsAbs(file) {
			return file
		}
		return filepath.Join(folder, file)
	}
	return loader{Agents: there, Trace: once(place, linktrace.Read), Delays: once(place, linktrace.ReadDelays)}
}

// once opens each file one time, however many runs name it.
func once[T any](place func(string) string, read func(string, io.Reader) (*T, error)) func(string) (*T, error) {
	files := map[string]*T{}
	return func(name string) (v *T, err error) {
		if files[name] == nil {
			files[name], err = linktrace.OpenTrace(place(name), read)
		}
		return files[name], err
	}
}

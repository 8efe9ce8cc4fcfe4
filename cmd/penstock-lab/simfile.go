package main

import (
	"fmt"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// experiment is one that a file describes, whose assertions are about all of its runs.
type experiment struct {
	recipe.Recipe
	runs int
	over []recipe.Run
}

// experimentTrials are the runs of an experiment.
func (f *simFlags) experimentTrials(r recipe.Recipe) (trials []trial, err error) {
	stages, err := r.Stages(recipe.Full, 1)
	if err != nil {
		return nil, err
	}
	of := &experiment{Recipe: r, runs: len(stages)}
	for _, s := range stages {
		t := trial{name: s.Name, who: s.Agents, of: of, Run: recipe.Run{Stage: s}}
		if t.Scenario, t.record, err = stage.Scenario(s); err != nil {
			return nil, err
		}
		if f.traceOut != "" { // and those that the record needs
			for t.Sample = f.sampled; stage.Step%t.Sample != 0; {
				t.Sample = stage.Step % t.Sample
			}
		}
		trials = append(trials, t)
	}
	return trials, nil
}

// unmet is what must hold of the experiment and does not, once all of its runs are over.
func (t *trial) unmet(r sim.Result) (failures []error) {
	if t.of == nil {
		return nil
	}
	t.Record = t.record(r)
	t.of.over = append(t.of.over, t.Run)
	if len(t.of.over) < t.of.runs {
		return nil
	}
	findings, err := t.of.Judge(recipe.Outcome{Scale: recipe.Full, Runs: t.of.over})
	if err != nil {
		return []error{err}
	}
	name := t.of.Name
	if t.link != "" {
		name = t.name + " in " + t.link
	}
	for _, f := range findings {
		if !f.OK {
			failures = append(failures, fmt.Errorf("%s: %s is %s, but must be %s", name, f.What, f.Got, f.Bound))
		}
	}
	return failures
}

// fromFile reads an experiment; its traces are found beside it.
func (f *simFlags) fromFile(name string) ([]trial, error) {
	r, err := recipe.Open(name, f.deciders)
	if err != nil {
		return nil, err
	}
	trials, err := f.experimentTrials(r)
	for i := range trials {
		if len(trials) == 1 {
			trials[i].name = r.Name
		} else {
			trials[i].name = r.Name + ": " + trials[i].name
		}
	}
	return trials, err
}

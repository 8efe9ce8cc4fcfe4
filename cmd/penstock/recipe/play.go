package recipe

import (
	"context"
	"fmt"

	"github.com/penstock-net/penstock/cmd/penstock/stage"
)

// Player plays a stage, over real sockets or in virtual time.
type Player func(context.Context, stage.Stage) (stage.Record, error)

// Virtual plays in virtual time.
func Virtual(_ context.Context, s stage.Stage) (stage.Record, error) { return stage.PlayVirtual(s) }

// Result is one run of a recipe.
type Result struct {
	Recipe
	Outcome
	Seed     uint64
	Findings []Finding
}

// Failed counts the findings that do not hold.
func (r Result) Failed() (n int) {
	for _, f := range r.Findings {
		if !f.OK {
			n++
		}
	}
	return n
}

// Play plays the recipe's stages one after the other and judges what came of
// them. The seed is added to those of the stages.
func (r Recipe) Play(ctx context.Context, scale Scale, seed uint64, play Player) (Result, error) {
	out := Result{Recipe: r, Outcome: Outcome{Scale: scale}, Seed: seed}
	for _, s := range r.Stages(scale) {
		if err := ctx.Err(); err != nil {
			return out, err
		}
		s.Seed += seed
		record, err := play(ctx, s)
		if err != nil {
			return out, fmt.Errorf("recipe: %s: %w", r.Name, err)
		}
		out.Runs = append(out.Runs, Run{Stage: s, Record: record})
	}
	out.Findings = r.Judge(out.Outcome)
	return out, nil
}

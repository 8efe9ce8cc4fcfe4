package recipe

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// Player plays a stage, over real sockets or in virtual time, and may tell how far
// it is.
type Player func(ctx context.Context, s stage.Stage, progress func(elapsed time.Duration)) (stage.Record, error)

// Virtual plays in virtual time.
func Virtual(ctx context.Context, s stage.Stage, _ func(time.Duration)) (stage.Record, error) {
	return stage.PlayVirtual(ctx, s, nil)
}

// Retry plays a stage again, up to again times, while the machine disturbed it or its record does not
// count, and returns the record with the least lateness. One that cannot be played again keeps its record.
func Retry(play Player, again int) Player {
	return func(ctx context.Context, s stage.Stage, progress func(time.Duration)) (stage.Record, error) {
		best, err := play(ctx, s, progress)
		for range again {
			if err != nil || !best.Disturbed() && best.Discarded == "" {
				break
			}
			next, failed := play(ctx, s, progress)
			if failed != nil {
				return best, context.Cause(ctx)
			}
			better := best.Discarded != "" || next.Lateness <= best.Lateness
			if next.Discarded == "" && better {
				best, best.Attempt = next, 2
			}
		}
		return best, err
	}
}

// Progress is reported before a stage is played, as it plays, and when it is over.
type Progress struct {
	Recipe  string
	Stage   string
	Number  int // of the stage in its recipe, from 1
	Of      int
	Elapsed time.Duration
	Over    bool
	Record  stage.Record // once it is over
}

// Result is what came of playing a recipe once.
type Result struct {
	Recipe
	Runs     []Run // in the order of the stages
	Findings []record.Finding
}

// Play plays the recipe's stages one after the other and judges what came of
// them, with the seed that Stages takes.
func (r Recipe) Play(ctx context.Context, scale Scale, seed uint64, play Player, progress func(Progress)) (out Result,
	err error,
) {
	out.Recipe = r
	stages, err := r.Stages(scale, seed)
	if err != nil {
		return out, err
	}
	for i, s := range stages {
		if err := context.Cause(ctx); err != nil {
			return out, err
		}
		at := Progress{Recipe: r.Name, Stage: s.Name, Number: i + 1, Of: len(stages)}
		progress(at)
		record, err := play(ctx, s, func(elapsed time.Duration) {
			at.Elapsed = elapsed
			progress(at)
		})
		if err != nil {
			return out, fmt.Errorf("recipe: %s: %w", r.Name, err)
		}
		out.Runs = append(out.Runs, Run{Stage: s, Record: record})
		at.Elapsed, at.Over, at.Record = s.Duration, true, record
		progress(at)
	}
	out.Findings = r.judge(out.Runs)
	return out, nil
}

// String is the line that a person sees.
func (p Progress) String() string {
	if p.Over {
		return fmt.Sprintf("%s %d/%d: %s: %.2f Mbit/s, queueing p50 %s ms, p95 %s ms", p.Recipe, p.Number, p.Of, p.Stage,
			p.Record.Throughput.Mbps(), figures.Number(record.Millis(p.Record.Queueing.P50)),
			figures.Number(record.Millis(p.Record.Queueing.P95)))
	}
	return fmt.Sprintf("%s %d/%d: %s: %.0f s", p.Recipe, p.Number, p.Of, p.Stage, p.Elapsed.Seconds())
}

package recipe

import (
	"context"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/need"
)

// playOnce is a Player in virtual time that plays equal stages once.
type playOnce []Run

func (o *playOnce) play(ctx context.Context, s stage.Stage, progress func(time.Duration)) (stage.Record, error) {
	for _, r := range *o {
		if reflect.DeepEqual(r.Stage, s) {
			return r.Record, nil
		}
	}
	rec, err := Virtual(ctx, s, progress)
	*o = append(*o, Run{s, rec})
	return rec, err
}

// isOfShortForm reports whether a missed bound is missed in the short form in virtual time.
func (m missedBound) isOfShortForm() bool {
	return !strings.HasPrefix(m.why, "over real sockets") && !strings.HasPrefix(m.why, "in the full form")
}

// The bounds of each short form hold in virtual time, or are named as missed. The control fails one that holds.
func TestRecipesHoldAndTheirControlsFail(t *testing.T) {
	need.OneGoroutine(t) // for each recipe
	if testing.Short() {
		t.Skip("plays every recipe")
	}
	labtest.Agents(t)
	for _, r := range All(nil) {
		t.Run(r.Name, func(t *testing.T) {
			t.Parallel()
			var once playOnce
			short, err := r.Play(t.Context(), Short, 1, once.play, func(Progress) {})
			require.NoError(t, err)
			require.NotEmpty(t, short.Findings)
			holding := map[string]bool{}
			for _, f := range short.Findings {
				assert.True(t, f.OK || f.Why != "", "%s: %s, but must be %s", f.What, f.Got, f.Bound)
				holding[f.What] = f.OK && f.Bound != comparing
			}
			for _, m := range r.missed {
				assert.True(t, !m.isOfShortForm() || slices.ContainsFunc(short.Findings, func(f record.Finding) bool {
					return m.matches(f.What) && !f.OK
				}), "%s: no such bound is missed: take it off", m.what)
			}
			control, err := r.Play(t.Context(), Control, 1, once.play, func(Progress) {})
			require.NoError(t, err)
			var failed []string
			for _, f := range control.Findings {
				if holding[f.What] && !f.OK {
					failed = append(failed, f.What+": "+f.Got)
				}
			}
			assert.NotEmpty(t, failed, "the bounds hold under the control, too")
			t.Logf("the control fails %d: %q", len(failed), failed)
		})
	}
}

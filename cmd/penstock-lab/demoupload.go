package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// leastUpload is what an upload of the demo takes at least: its first two seconds do not
// count.
const leastUpload = 4 * time.Second

// showUpload has a client upload beside a download and a ping-pong over the demo's link,
// and prints what came of it.
func showUpload(cmd *cobra.Command, link string, d time.Duration) error {
	rate, trace, err := recipe.Carries(link, 1)
	if err != nil {
		return err
	}
	exe, _, err := proxyOf(cmd)
	if err != nil {
		return err
	}
	ctx, stop := interruptible(cmd)
	defer stop()
	printer := bench.NewPrinter(cmd.ErrOrStderr())
	defer printer.Break()
	table := figures.Table{
		{"", "Mbit/s", figures.Spans, "uplink's queue, ms", figures.Spans, "request, ms"},
		{"upload's window", "up", "down", "p50", "p95", "p95"},
	}
	var p95 []float64
	stages, err := besides()
	if err != nil {
		return err
	}
	for i, s := range stages {
		s.Down.Rate, s.Down.Trace, s.Duration = rate, trace, max(d, leastUpload)
		s.Up = s.Down
		show := func(at time.Duration) { printer.Line(fmt.Sprintf("upload, %s: %.0f s", s.Name, at.Seconds()), false) }
		rec, err := stage.Play(ctx, stage.Env{Executable: exe}, s, show)
		if err != nil {
			return err
		}
		printer.Line("upload, "+s.Name, true)
		up, down := rec.Actors[0], rec.Actors[1]
		if wrong := up.Corrupt + up.Error + down.Corrupt + down.Error; wrong != "" {
			return errors.New(wrong)
		}
		request := recipe.Run{Stage: s, Record: rec}.RequestsP95(rec.Actors[2].Name)
		p95 = append(p95, request)
		mbit := func(a stage.ActorRecord) string { return figures.Number(a.Rate(s.Warmup, s.Duration).Mbps()) }
		ms := func(d time.Duration) string { return figures.Number(record.Millis(d)) }
		table = append(table, []string{
			[]string{"left alone", "held"}[i], mbit(up), mbit(down), ms(up.Queueing.P50), ms(up.Queueing.P95),
			figures.Number(request),
		})
	}
	var b strings.Builder
	b.WriteString("\nAn upload under the client's own Cubic, beside a download and a request every 100 ms:\n\n")
	table.Write(&b)
	fmt.Fprintf(&b, "\nWith the upload's window held, 19 of 20 requests take less than %s ms instead of %s ms (%s).\n",
		figures.Number(p95[1]), figures.Number(p95[0]), figures.Ratio(p95[1], p95[0]))
	_, err = fmt.Fprint(cmd.OutOrStdout(), b.String())
	return err
}

// besides are the runs of the recipe in which an upload, a download and a ping-pong share
// the link, the upload's window left alone and held.
func besides() ([]stage.Stage, error) {
	r, err := recipe.Select([]string{"uploads-beside"}, nil)
	if err != nil {
		return nil, err
	}
	all, err := r[0].Stages(recipe.Full, 1)
	return slices.DeleteFunc(all, func(s stage.Stage) bool { return len(s.Actors) < 3 }), err
}

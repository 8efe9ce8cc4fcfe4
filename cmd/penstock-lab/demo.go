package main

import (
	"errors"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// demoLink is the link of the demo: a seeded model, so that no recorded trace
// is needed.
const demoLink = "generate:lte:1"

// leastUpload is the shortest run of the uploads: their first two seconds do not count.
const leastUpload = 4 * time.Second

func demoCommand() *cobra.Command {
	f := benchFlags{
		Matrix: bench.Matrix{
			Name: "demo", Up: record.Same, Buffers: []string{"2MB"}, Delay: 10 * time.Millisecond, Losses: []float64{0},
			AQM: sim.DropTail.String(),
		},
		firstSeeds: []uint{1}, session: session{env: stage.Env{Blind: true}},
	}
	var trace string
	algorithms := []string{cc.Default}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show what Penstock does for downloads and uploads over a cellular link",
		Long: `Demo downloads over an emulated cellular link: first with the kernel's Cubic and
BBR at the server, then with Penstock's own algorithm at the edge, and compares. The
link's queue holds 2 MB and its propagation delay is 10 ms each way. Without
--trace its capacity is generated, the same each time.

Then the client uploads as well, under its own Cubic, beside a download and a
request every 100 ms: with its window left alone, and held by the edge.

It is a preset of "penstock-lab bench", which has all the choices. Run it as root,
or as a user where user namespaces are allowed.`,
		Example: `  penstock-lab demo
  penstock-lab demo --trace Verizon-LTE-short.down --plot demo.png
  penstock-lab demo --algorithm copa,copa:delta=0.5 --duration 10s`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			f.Links = []string{demoLink}
			if trace != "" {
				f.Links = []string{trace}
			}
			experiments, err := f.readExperiments(cmd, nil, func() (err error) {
				f.Senders, err = bench.ParseSenders(append([]string{"cubic", "bbr"}, algorithms...), nil)
				return err
			})
			var uploads recipe.Recipe
			if err == nil {
				uploads, err = recipe.Demo(f.Links[0], max(f.Duration*3/8, leastUpload))
			}
			if err != nil {
				// The preset's own flags go by other names here.
				return cli.BadInput(errors.New(strings.NewReplacer("--link:", "--trace:", "--sender ",
					"--algorithm ").Replace(err.Error())))
			}
			return f.playAndShow(cmd, append(experiments, uploads))
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&trace, "trace", "", "play this recorded trace, in Mahimahi's format, in both directions")
	flags.Var(&names{list: &algorithms}, "algorithm", "`ALGORITHMS` of Penstock's to show, separated by commas")
	flags.DurationVar(&f.Duration, "duration", 24*time.Second, "length of each download; uploads take 3/8 of it")
	flags.IntVar(&f.runs, "runs", 1, "downloads for each sender, from different moments of the link's course")
	flags.BoolVar(&f.retryNoisy, "retry-noisy", false, "repeat a download once when the machine disturbed it")
	f.outputs.register(cmd)
	return cmd
}

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/bench"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/stage"
	"github.com/penstock-net/penstock/internal/netlab"
)

func recipeListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the recipes",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return recipe.WriteList(cmd.OutOrStdout(), recipe.All(nil))
		},
	}
}

func recipeTableCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "table FILE...",
		Short:   "Make a table of what --json wrote: the paper's figures, in virtual time and over real sockets",
		Example: "  penstock-lab bench recipe table docs/measurements/recipes.jsonl",
		Args:    cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, names []string) error {
			var all []recipe.Line
			for _, name := range names {
				lines, err := linesOf(name)
				if err != nil {
					return cli.BadInput(err)
				}
				all = append(all, lines...)
			}
			return recipe.WriteMarkdown(cmd.OutOrStdout(), all)
		},
	}
}

// linesOf reads what --json wrote.
func linesOf(name string) ([]recipe.Line, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return recipe.ReadJSON(name, f)
}

// recipeFlags are the flags of bench recipe as written.
type recipeFlags struct {
	virtual, short bool
	json, plot     string
	seed           uint64
	runs, retry    int
	agents         []string
	resume         bool
}

func recipeCommand() *cobra.Command {
	var f recipeFlags
	cmd := &cobra.Command{
		Use:   "recipe NAME|FILE...",
		Short: "Replay published experiments, and your own",
		Long: `A recipe is an experiment that somebody published: its setup, what we assert of
it, and the figures that the paper printed, beside which ours are put. Each is a
file of one form, and a FILE of your own, which ends in .yaml, plays the same way:
bench recipe list names what there is, penstock-lab sim --help shows every key.

Each run of a recipe is played, its figures are printed, and then each finding:
what the paper reports of it, what is asserted, what was measured, and whether
that holds. "all" is every recipe. The exit status is 1 when a finding fails.

Runs are played between network namespaces over real sockets, with a real proxy
process at the edge, which needs root or user namespaces, and takes as long as the
experiment; or with --virtual in virtual time, on any machine and much faster, by
the same configuration but without a proxy whose time or memory could matter.
--short plays less: shorter, with fewer flows.

With several --runs, which have seeds of their own, a finding must hold in each.`,
		Example: `  penstock-lab bench recipe hosts --virtual
  penstock-lab bench recipe my.yaml --virtual
  penstock-lab bench recipe janus-c1 janus-c2 --virtual --short
  sudo penstock-lab bench recipe live-switch --plot switch.png
  sudo penstock-lab bench recipe all --runs 3 --json runs.jsonl`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, names []string) error { return f.run(cmd, names) },
	}
	cmd.AddCommand(recipeListCommand(), recipeTableCommand())
	flags := cmd.Flags()
	flags.BoolVar(&f.virtual, "virtual", false, "in virtual time")
	flags.BoolVar(&f.short, "short", false, "the short form")
	flags.StringVar(&f.json, "json", "", "append one JSON line for each run of a recipe to this file")
	flags.BoolVar(&f.resume, "resume", false, "leave out what the file of --json has of this build, seed and form")
	flags.StringVar(&f.plot, "plot", "", "draw throughput over time, and the window where the configuration "+
		"changes: a .png file for each stage, named after this one")
	flags.Uint64Var(&f.seed, "seed", 1, "of random loss, generated traces and random times")
	flags.IntVar(&f.retry, "retry-noisy", 1, "play a stage that the machine disturbed again, up to so many times, "+
		"and keep the calmest")
	flags.StringArrayVar(&f.agents, agents.Flag, nil, agents.Usage+"; without it a recipe starts its own")
	flags.IntVar(&f.runs, "runs", 1, "runs of each recipe, each with the next seed")
	return cmd
}

func (f *recipeFlags) run(cmd *cobra.Command, names []string) (err error) {
	there, err := agents.Parse(f.agents)
	if err != nil {
		return cli.BadInput(err)
	}
	recipes, err := recipe.Select(names, there)
	switch {
	case err != nil:
		return cli.BadInput(err)
	case f.runs < 1:
		return cli.BadInput(fmt.Errorf("--runs %d: at least one", f.runs))
	case f.retry < 0:
		return cli.BadInput(fmt.Errorf("--retry-noisy %d: not below 0", f.retry))
	case f.resume && f.json == "":
		return cli.BadInput(errors.New("--resume needs --json, the file that says what is there"))
	case f.plot != "" && !strings.HasSuffix(f.plot, ".png"):
		return cli.BadInput(fmt.Errorf("--plot %s: the name must end in .png", f.plot))
	}
	player, err := f.player(cmd)
	if err != nil {
		return err
	}
	var done []recipe.Line
	if f.resume {
		if done, err = linesOf(f.json); err != nil && !errors.Is(err, os.ErrNotExist) {
			return cli.BadInput(fmt.Errorf("--json: %w", err))
		}
	}
	record, end, err := (&benchOutputs{json: f.json, plot: f.plot}).open()
	if err != nil {
		return cli.BadInput(err)
	}
	defer func() { err = errors.Join(err, end()) }()
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	failed, findings := 0, 0
	for i, r := range recipes {
		if i > 0 {
			fmt.Fprintln(cmd.OutOrStdout())
		}
		results, err := f.play(ctx, cmd, r, player, record, done)
		if err != nil {
			return err
		}
		if len(results) == 0 {
			fmt.Fprintf(cmd.OutOrStdout(), "%s: it is there\n", r.Name)
			continue
		}
		if err := recipe.WriteResults(cmd.OutOrStdout(), results); err != nil {
			return err
		}
		for _, result := range results {
			failed += result.Failed()
			findings += len(result.Findings)
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d findings do not hold", failed, findings)
	}
	return nil
}

// play makes a recipe's runs.
func (f *recipeFlags) play(ctx context.Context, cmd *cobra.Command, r recipe.Recipe, player recipe.Player,
	record io.Writer, done []recipe.Line,
) ([]recipe.Result, error) {
	printer := bench.NewPrinter(cmd.ErrOrStderr())
	defer printer.Break()
	scale := recipe.Full
	if f.short {
		scale = recipe.Short
	}
	var results []recipe.Result
	for n := range f.runs {
		if slices.ContainsFunc(done, func(l recipe.Line) bool {
			return l.Recipe == r.Name && l.Scale == scale && l.Virtual == f.virtual && l.Seed == f.seed+uint64(n) &&
				l.Version == cli.ReadBuild().String()
		}) {
			continue
		}
		result, err := r.Play(ctx, scale, f.seed+uint64(n), player,
			func(p recipe.Progress) { printer.Line(p.String(), p.Over) })
		if err != nil {
			return nil, err
		}
		results = append(results, result)
		if err := recipe.WriteJSON(record, result, f.virtual, cli.ReadBuild().String()); err != nil {
			return nil, err
		}
	}
	if f.plot == "" || len(results) == 0 {
		return results, nil
	}
	names, err := recipe.WritePlots(f.plot, results[0])
	for _, name := range names {
		fmt.Fprintf(cmd.ErrOrStderr(), "drawn: %s\n", name)
	}
	return results, err
}

// player is what plays the stages. Without the rights for network namespaces this
// runs the whole program again inside a user namespace; that run has printed
// everything by then.
func (f *recipeFlags) player(cmd *cobra.Command) (recipe.Player, error) {
	if f.virtual {
		return recipe.Virtual, nil
	}
	code, ran, err := netlab.Enter()
	if err != nil {
		return nil, err
	}
	if ran {
		os.Exit(code)
	}
	exe, err := proxyOf(cmd)
	if err != nil {
		return nil, err
	}
	env := stage.Env{Executable: exe}
	for _, file := range cli.Models(cmd) {
		env.Args = append(env.Args, "--mdi-model", file)
	}
	return recipe.Retry(func(ctx context.Context, s stage.Stage, progress func(time.Duration)) (stage.Record, error) {
		return stage.Play(ctx, env, s, progress)
	}, f.retry), nil
}

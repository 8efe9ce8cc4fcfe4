package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/recipe"
	"github.com/penstock-net/penstock/internal/lab/record"
)

func recipeListCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the recipes, and how long each takes over real sockets",
		Args:  cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return recipe.WriteList(cmd.OutOrStdout(), recipe.All(nil))
		},
	}
}

func recipeTableCommand() *cobra.Command {
	var figures bool
	var earlier string
	cmd := &cobra.Command{
		Use:   "table FILE...",
		Short: "Make a table of what --json wrote: what holds in virtual time and over real sockets",
		Example: `  penstock-lab bench recipe table virtual.jsonl real.jsonl
  penstock-lab bench recipe table --earlier table.md real.jsonl >new.md`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, names []string) error {
			files, err := readRecords(names)
			if err != nil {
				return cli.BadInput(err)
			}
			var all []record.Run
			for _, f := range files {
				all = append(all, f.Runs...)
			}
			if figures {
				return recipe.WriteFigures(cmd.OutOrStdout(), all)
			}
			var there recipe.Sockets
			if earlier != "" {
				page, err := os.ReadFile(earlier)
				if err != nil {
					return cli.BadInput(fmt.Errorf("--earlier: %w", err))
				}
				if there, err = recipe.ReadSockets(string(page)); err != nil {
					return cli.BadInput(fmt.Errorf("--earlier: %s: %w", earlier, err))
				}
			}
			return recipe.WriteMarkdown(cmd.OutOrStdout(), all, there)
		},
	}
	cmd.Flags().BoolVar(&figures, "figures", false, "each figure beside the paper's and its bound")
	cmd.Flags().StringVar(&earlier, "earlier", "", "a page with such a table: what the records lack over real sockets "+
		"is taken from it, with the build it is of")
	cmd.MarkFlagsMutuallyExclusive("figures", "earlier")
	return cmd
}

// recipeFlags are the flags of bench recipe as written.
type recipeFlags struct {
	session
	short, control bool
	seed           uint64
	runs           int
	agents         []string
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
--short plays less: shorter, with fewer flows. --control plays that with what the
recipe names as its control, such as another algorithm: a finding must fail, and the
exit status is 1 when none of a recipe does.

With several --runs, which have seeds of their own, a finding must hold in each.`,
		Example: `  penstock-lab bench recipe hosts --virtual
  penstock-lab bench recipe my.yaml --virtual
  penstock-lab bench recipe janus-c1 janus-c2 --virtual --short
  sudo penstock-lab bench recipe live-switch --plot switch.png
  sudo penstock-lab bench recipe all --runs 3 --json runs.jsonl`,
		Args: cobra.MinimumNArgs(1),
		RunE: f.run,
	}
	cmd.AddCommand(recipeListCommand(), recipeTableCommand())
	flags := cmd.Flags()
	flags.BoolVar(&f.virtual, "virtual", false, "in virtual time")
	flags.BoolVar(&f.short, "short", false, "the short form")
	flags.BoolVar(&f.control, "control", false, "the short form with the recipe's control, such as another algorithm: "+
		"a finding must fail")
	cmd.MarkFlagsMutuallyExclusive("short", "control")
	f.outputs.register(cmd)
	flags.Uint64Var(&f.seed, "seed", 1, "of random loss, generated traces and random times")
	flags.IntVar(&f.retry, "retry-noisy", 1, "play a stage that the machine disturbed again, up to so many times, "+
		"and keep the calmest")
	flags.DurationVar(&f.within, "within", 0, "leave out what would not be over by then; with --resume the next call "+
		"goes on; 0: all")
	flags.BoolVar(&f.replace, "replace", false, "what other builds say of the experiments that are played "+
		"leaves the file of --json")
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
	case f.within < 0:
		return cli.BadInput(fmt.Errorf("--within %v: not below 0", f.within))
	}
	if err := f.outputs.check(names...); err != nil {
		return cli.BadInput(err)
	}
	f.cmd, f.scale = cmd, recipe.Full
	switch {
	case f.short:
		f.scale = recipe.Short
	case f.control:
		f.scale = recipe.Control
	}
	for n := range f.runs {
		f.seeds = append(f.seeds, f.seed+uint64(n))
	}
	first := true
	err = f.play(recipes, func(r recipe.Recipe, runs []record.Run) error {
		if !first {
			fmt.Fprintln(cmd.OutOrStdout())
		}
		first = false
		if len(runs) == 0 {
			fmt.Fprintf(cmd.OutOrStdout(), "%s: left out: it would not be over within %v\n", r.Name, f.within)
			return nil
		}
		if err := recipe.WriteHead(cmd.OutOrStdout(), r, runs); err != nil {
			return err
		}
		return writeResults(cmd.OutOrStdout(), runs)
	})
	return errors.Join(err, f.draw(), failures(f.all))
}

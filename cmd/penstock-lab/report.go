package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/lab/report"
)

func reportCommand() *cobra.Command {
	var out, pictures, baseline string
	var width float64
	cmd := &cobra.Command{
		Use:   "report FILE...",
		Short: "Make a page of the records of runs",
		Long: `Report reads what --json wrote and makes one page of it that needs no network:
for each path a table with medians and confidence intervals, throughput against
queueing delay, both over time, and the distribution of the delay. Ratios to the
first sender, or the one that --baseline names, are over pairs of runs with the same
seed, with the interval of a bootstrap. Several files stand side by side, and so do
a sender's runs of several builds, over several transports, or in virtual time and
over real sockets. Of two files, such as from before a change and from after it, the
ratios are to the first one's, and a table of them is printed.

--figures draws each figure for a paper, as .pdf, .svg and .png: by default as wide as
a column, 85 mm, with text of 8 points.`,
		Example: `  penstock-lab bench --sender penstock@sim,copa@sim --link generate:lte --json runs.jsonl
  penstock-lab report runs.jsonl --output report.html
  penstock-lab report before.jsonl after.jsonl --figures figures`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, names []string) error {
			if !(width >= leastWidth && width <= mostWidth) { // not a number is neither
				return cli.BadInput(fmt.Errorf("--width %v: must be from %d to %d mm", width, leastWidth, mostWidth))
			}
			if err := output.Apart([]string{out}, names...); err != nil {
				return cli.BadInput(fmt.Errorf("--output: %w", err))
			}
			files, err := readRecords(names)
			if err != nil {
				return cli.BadInput(err)
			}
			if err := writeReport(cmd, out, files, baseline); err != nil {
				return fmt.Errorf("--output: %w", err)
			}
			if len(files) == 2 {
				if err := report.WriteComparison(cmd.OutOrStdout(), files); err != nil {
					return err
				}
			}
			if pictures == "" {
				return nil
			}
			drawn, err := report.WriteFigures(pictures, files, width)
			if tellDrawn(cmd, drawn); err != nil {
				return fmt.Errorf("--figures: %w", err)
			}
			return nil
		},
	}
	flags := cmd.Flags()
	flags.StringVarP(&out, "output", "o", "report.html", "the page")
	flags.StringVar(&pictures, "figures", "", "draw each figure into this folder as well, as .pdf, .svg and .png")
	flags.Float64Var(&width, "width", 85, "of these figures in mm; 178: both columns of a page")
	flags.StringVar(&baseline, "baseline", "", "the `SENDER` that the others are set against")
	return cmd
}

// Widths of figures in mm that have room for their axes, and fit a poster.
const leastWidth, mostWidth = 50, 1000

// writeReport makes the page.
func writeReport(cmd *cobra.Command, path string, files []report.File, baseline string) error {
	if err := output.Write(path, func(w io.Writer) error { return report.Write(w, files, baseline) }); err != nil {
		return err
	}
	fmt.Fprintf(cmd.ErrOrStderr(), "written: %s\n", path)
	return nil
}

// readRecords reads files of records, and refuses one without any and one that is named twice. A file is called by
// its name without the folder, unless another one has that name too.
func readRecords(names []string) (files []report.File, err error) {
	bases := map[string]int{}
	for _, name := range names {
		bases[filepath.Base(name)]++
	}
	var read []os.FileInfo
	for _, name := range names {
		info, err := os.Stat(name)
		if err != nil {
			return nil, err
		}
		if i := slices.IndexFunc(read, func(o os.FileInfo) bool { return os.SameFile(info, o) }); i >= 0 {
			return nil, fmt.Errorf("%s and %s are one file: name it once", names[i], name)
		}
		read = append(read, info)
		runs, err := record.Open(name)
		if err != nil {
			return nil, fmt.Errorf("%w; give what --json wrote", err)
		}
		if len(runs) == 0 {
			return nil, fmt.Errorf("%s has no runs", name)
		}
		shown := filepath.Base(name)
		if bases[shown] > 1 {
			shown = name
		}
		files = append(files, report.File{Name: shown, Runs: runs})
	}
	return files, nil
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// state is how a check came out.
type state string

const (
	stateOK      state = "ok"      // nothing to do
	stateWarn    state = "warn"    // it works, but worse than it could, or could not be tried
	stateMissing state = "missing" // something that Penstock offers cannot be had here
)

// check is one line of the report. Names and groups are for programs, too, and
// do not change.
type check struct {
	Name  string `json:"name"`
	Group string `json:"group"`
	State state  `json:"state"`
	Found string `json:"found"`
	Fix   string `json:"fix"` // what to do; empty where the state is ok
}

// report is what doctor found.
type report struct {
	Version  string  `json:"version"` // of Penstock
	Kernel   string  `json:"kernel"`  // its release
	Tier     string  `json:"tier"`    // of the datapath: ebpf or unprivileged; empty: there is none
	Envelope string  `json:"envelope"`
	Checks   []check `json:"checks"`

	verdict string
	fatal   error // why Penstock cannot run here; nil: it can
}

func doctorCommand() *cobra.Command {
	var asJSON, trials bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Tell what this machine and this process can do, and how to get the rest",
		Long: `Doctor tries what the proxy, its capture rules, the lab and the benchmarks need,
and says for each what it found and how to mend what is not there. It looks with
the rights it is run with: run it as the proxy will run.

Capture rules and TUN devices are tried for real in a network namespace that is
gone afterwards. Nothing is left behind but modules that the kernel loaded on
the way. The exit code is 0 unless Penstock cannot run here at all.`,
		Example: `  penstock doctor
  sudo -u penstock penstock doctor
  systemd-run --pty -p User=penstock -p AmbientCapabilities=CAP_NET_ADMIN penstock doctor
  penstock doctor --json | jq '.checks[] | select(.state != "ok")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if trials {
				return printTrials(cmd.Context(), cmd.OutOrStdout())
			}
			return diagnose(cmd.Context(), cmd.OutOrStdout(), asJSON)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	cmd.Flags().BoolVar(&trials, trialsFlag, false, "make the trials that need a namespace, right here")
	if err := cmd.Flags().MarkHidden(trialsFlag); err != nil {
		panic(err) // it was defined in the line before
	}
	return cmd
}

// diagnose looks, judges and prints.
func diagnose(ctx context.Context, w io.Writer, asJSON bool) error {
	r := judge(look(ctx))
	write := r.text
	if asJSON {
		write = r.json
	}
	return errors.Join(write(w), r.fatal)
}

func (r report) json(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// text is the report for people: a list under headings, and the verdict.
func (r report) text(w io.Writer) error {
	var b bytes.Buffer
	table := tabwriter.NewWriter(&b, 0, 8, 2, ' ', 0)
	for i, c := range r.Checks {
		if i == 0 || c.Group != r.Checks[i-1].Group {
			// Without a cell it would align only what is below it.
			fmt.Fprintf(table, "%s\t\t\n", c.Group)
		}
		fmt.Fprintf(table, "  %s\t%s\t%s\n", c.State, c.Name, c.Found)
		if c.Fix != "" {
			fmt.Fprintf(table, "\t\tfix: %s\n", c.Fix)
		}
	}
	_ = table.Flush() // into memory
	for line := range strings.Lines(b.String()) {
		if _, err := fmt.Fprintln(w, strings.TrimRight(line, " \n")); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w, "\n%s\n", r.verdict)
	return err
}

// Package doctor reports what this machine and this process can do for Penstock,
// and how to get what is missing: facts are gathered once, and then judged.
//
//	gatherFacts ─▶ facts ─▶ judgeFacts ─▶ Report
//	     └─ trials: rules and devices in a network namespace, here or in a child
package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
)

// State is the result of a check.
type State string

// The states.
const (
	// OK needs no action.
	OK State = "ok"
	// Warn works, but worse than it could, or could not be tried.
	Warn State = "warn"
	// Missing is something that Penstock offers and that cannot be had here.
	Missing State = "missing"
)

// Check is one line of the report. Names and groups are for programs, too, and do not change.
type Check struct {
	Name string `json:"name"`
	// Group is one of kernel, datapath, capture, hints, tunnels, lab, limits, process and configuration.
	Group string `json:"group"`
	State State  `json:"state"`
	// Found describes the state of the machine, in words.
	Found string `json:"found"`
	// Fix is what to do; empty where the state is ok.
	Fix string `json:"fix"`
}

// Report has the findings of doctor.
type Report struct {
	Version string `json:"version"` // of Penstock
	// Kernel is the kernel's release.
	Kernel string `json:"kernel"`
	// Tier is that of the datapath: ebpf or unprivileged; empty: there is none.
	Tier string `json:"tier"`
	// Envelope is what auto comes to: ebpf, or a congestion control of the kernel.
	Envelope string `json:"envelope"`
	// Checks are ordered by group.
	Checks []Check `json:"checks"`

	// Verdict is a sentence for people.
	Verdict string `json:"-"`
	// Fatal is why Penstock cannot run here, or not with the configuration; nil: it can.
	Fatal error `json:"-"`
}

// Program describes the program that doctor is a part of.
type Program struct {
	// Version is that of Penstock.
	Version string
	// Clock is that of the datapath.
	Clock func() cc.Time
	// Trials are the arguments with which the program calls PrintTrials.
	Trials []string
	// Config is what the machine is judged for; nil: for everything that Penstock offers.
	Config *config.Config
}

// Diagnose looks at this machine, with the rights of this process, and judges what it finds.
func Diagnose(ctx context.Context, p Program) Report { return judgeFacts(gatherFacts(ctx, p)) }

// JSON writes the report for programs.
func (r Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}

// Text writes the report for people: a list under headings, and the verdict.
func (r Report) Text(w io.Writer) error {
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
	_, err := fmt.Fprintf(w, "\n%s\n", r.Verdict)
	return err
}

package record

import (
	"cmp"
	"fmt"
	"reflect"
	"strings"

	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/figures"
	"github.com/penstock-net/penstock/internal/lab/stage"
)

// Same is a Run's Up when the link carries the same in both directions, None a Buffer
// without a limit, and Free a link that carries all at once.
const (
	Same = "same"
	None = "none"
	Free = "unlimited"
)

// describePath notes what the run's packets pass.
func (r *Run) describePath(s stage.Stage) {
	down, up := s.Down, s.Up
	r.Link, r.Up, r.Buffer = describeLink(down), describeLink(up), describeBuffer(down)
	if r.Up == r.Link && reflect.DeepEqual(down.Trace, up.Trace) { // which may be called the same
		r.Up = Same
	}
	if b := describeBuffer(up); r.Up != Free && b != r.Buffer {
		r.UpBuffer = b
	}
	r.UpLoss = up.Loss
	r.Delay, r.Loss, r.Reorder, r.ReorderBy = Millis(down.Delay), down.Loss, down.Reorder, Millis(down.ReorderBy)
	if down.Delays != nil {
		r.Delays = down.Delays.Name
	}
	if down.AQM != sim.DropTail {
		r.AQM = down.AQM.String()
	}
	if c := s.Cell; c != nil {
		r.UpBuffer = ""
		r.Link, r.Buffer, r.Delay = fmt.Sprintf("a cell of %d hosts", len(c.Hosts)), "of its own for each", Millis(c.Delay)
	}
}

// describeLink returns the rate of a link, or the name of its trace.
func describeLink(c sim.LinkConfig) string {
	switch {
	case c.Trace != nil:
		return c.Trace.Name
	case c.Rate == 0:
		return Free
	case c.Rate%1e6 != 0 && c.Rate > 1e6:
		return figures.Exact(c.Rate.Mbps()) + "mbit"
	}
	return c.Rate.String()
}

func describeBuffer(c sim.LinkConfig) string {
	switch b := c.QueueBytes; {
	case c.QueuePackets > 0:
		return fmt.Sprintf("%dpkt", c.QueuePackets)
	case b == 0:
		return None
	case b%1e6 == 0:
		return fmt.Sprintf("%dMB", b/1e6)
	case b%1e3 == 0:
		return fmt.Sprintf("%dkB", b/1e3)
	default:
		return b.String()
	}
}

// PathOf is the Path of a stage's runs.
func PathOf(s stage.Stage) string {
	r := Run{Duration: s.Duration.Seconds()}
	r.describePath(s)
	return r.Path()
}

// Path says in words what the run's packets went through, and how long it took. Runs
// of one path can be compared.
func (r Run) Path() string { return r.Way(true) }

// Way is Path, with random loss or without. Runs of one way stand in one table, where
// random loss may differ.
func (r Run) Way(withLoss bool) string {
	rates, delay, buffer := r.Link+" down, "+r.Up+" up", figures.Exact(r.Delay)+" ms", "buffer "+r.Buffer
	if r.Up == Same {
		rates = r.Link + " both ways"
	}
	switch {
	case r.Delays == "":
	case r.Delay == 0:
		delay = "delays of " + r.Delays
	default:
		delay += " and delays of " + r.Delays
	}
	switch {
	case r.UpBuffer != "":
		buffer += " down and " + r.UpBuffer + " up"
	case r.Buffer == None:
		buffer = "no buffer limit"
	}
	parts := []string{rates, delay + " each way", buffer}
	if r.AQM != "" {
		parts = append(parts, r.AQM)
	}
	if withLoss && r.Loss > 0 {
		parts = append(parts, figures.Exact(r.Loss*100)+" % random loss")
	}
	if r.UpLoss > 0 {
		parts = append(parts, figures.Exact(r.UpLoss*100)+" % lost on the way back")
	}
	if r.Reorder > 0 {
		parts = append(parts, figures.Exact(r.Reorder*100)+" % reordered by "+figures.Exact(r.ReorderBy)+" ms")
	}
	return strings.Join(append(parts, cmp.Or(r.Program, figures.Exact(r.Duration)+" s")), ", ")
}

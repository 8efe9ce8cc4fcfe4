package bench

import (
	"fmt"
	"io"
	"os"

	"golang.org/x/term"
)

// Printer shows progress to a person: on a terminal one line that keeps
// changing, elsewhere a line for each run that is over.
type Printer struct {
	w       io.Writer
	columns func() int // the terminal's width; nil: w is none
	open    bool       // a line stands there unfinished
}

// NewPrinter prints to w.
func NewPrinter(w io.Writer) *Printer {
	p := &Printer{w: w}
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		p.columns = func() int {
			width, _, _ := term.GetSize(int(f.Fd())) // 0: unknown
			return width
		}
	}
	return p
}

// Line prints one step, which over says is the last of a run.
func (p *Printer) Line(step string, over bool) {
	switch {
	case p.columns != nil:
		fmt.Fprintf(p.w, "\r\x1b[K%s", fit(step, p.columns()))
		p.open = true
		if over {
			p.Break()
		}
	case over:
		fmt.Fprintln(p.w, step)
	}
}

// fit cuts a line that would break, as a broken one cannot be written over.
// What changes stands at its end, so the middle goes.
func fit(line string, columns int) string {
	r := []rune(line)
	if columns <= 0 || len(r) < columns {
		return line
	}
	keep := max(0, columns-2)
	tail := min(keep, len(" 10 of 30 s, 10.00 Mbit/s, queueing 1000 ms"))
	return string(r[:keep-tail]) + "…" + string(r[len(r)-tail:])
}

// Break ends a line that stands unfinished.
func (p *Printer) Break() {
	if p.open {
		fmt.Fprintln(p.w)
		p.open = false
	}
}

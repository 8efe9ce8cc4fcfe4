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
	w        io.Writer
	terminal bool
	open     bool // a line stands there unfinished
}

// NewPrinter prints to w.
func NewPrinter(w io.Writer) *Printer {
	f, ok := w.(*os.File)
	return &Printer{w: w, terminal: ok && term.IsTerminal(int(f.Fd()))}
}

// Line prints one step, which over says is the last of a run.
func (p *Printer) Line(step string, over bool) {
	switch {
	case p.terminal:
		fmt.Fprintf(p.w, "\r\x1b[K%s", fit(step, p.columns()))
		p.open = true
		if over {
			p.Break()
		}
	case over:
		fmt.Fprintln(p.w, step)
	}
}

// columns is the terminal's width; 0: unknown.
func (p *Printer) columns() int {
	f, ok := p.w.(*os.File)
	if !ok {
		return 0
	}
	width, _, err := term.GetSize(int(f.Fd()))
	if err != nil {
		return 0
	}
	return width
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

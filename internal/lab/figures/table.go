// Package figures sets measurements as tables and plots.
package figures

import (
	"strings"
	"unicode/utf8"
)

// Table is a table of cells; the first two lines are its head.
type Table [][]string

// Spans is a cell of the first line over which the one before it reaches.
const Spans = "<"

// Write aligns the first column left, the others right, and what spans several
// in their middle.
func (t Table) Write(b *strings.Builder) {
	widths := make([]int, len(t[0]))
	for n, line := range t {
		for i, c := range line {
			if n > 0 || t.columnsOf(i) == 1 && c != Spans {
				widths[i] = max(widths[i], utf8.RuneCountInString(c))
			}
		}
	}
	for n, line := range t {
		var out strings.Builder
		for i := 0; i < len(line); i++ {
			width, first := widths[i], i
			if n == 0 {
				for range t.columnsOf(first) - 1 {
					i++
					width += len(gap) + widths[i]
				}
			}
			pad := max(0, width-utf8.RuneCountInString(line[first]))
			left := pad
			switch {
			case first == 0:
				left = 0
			case i > first:
				left = pad / 2
			}
			if first > 0 {
				out.WriteString(gap)
			}
			out.WriteString(strings.Repeat(" ", left) + line[first] + strings.Repeat(" ", pad-left))
		}
		b.WriteString(strings.TrimRight(out.String(), " ") + "\n")
	}
}

const gap = "  "

// columnsOf is how many columns the first line's cell i covers.
func (t Table) columnsOf(i int) int {
	n := 1
	for i+n < len(t[0]) && t[0][i+n] == Spans {
		n++
	}
	return n
}

package recipe

import (
	"fmt"
	"io"
	"strings"

	"github.com/penstock-net/penstock/internal/lab/record"
)

// WriteMarkdown writes a table of findings: the last of each recipe in virtual time beside the
// last over real sockets, and whether they hold.
func WriteMarkdown(w io.Writer, runs []record.Run) error {
	var names []string
	last := map[string]map[bool]record.Run{}
	for _, r := range runs {
		if len(r.Findings) == 0 { // they are with an experiment's last run
			continue
		}
		if last[r.Experiment] == nil {
			names = append(names, r.Experiment)
			last[r.Experiment] = map[bool]record.Run{}
		}
		last[r.Experiment][r.Virtual] = r
	}
	var b strings.Builder
	b.WriteString("| recipe | finding | paper | bound | virtual | real | verdict |\n|---|---|---|---|---|---|---|\n")
	cell := func(s string) string { return strings.ReplaceAll(orElse(s, "-"), "|", "\\|") }
	held, of := 0, 0
	for _, name := range names {
		virtual, sockets := last[name][true], last[name][false]
		title := "`" + name + "`"
		findings := virtual.Findings
		if findings == nil {
			findings = sockets.Findings
		}
		for _, f := range findings {
			v, isVirtual := finding(virtual, f.What)
			r, isReal := finding(sockets, f.What)
			verdict := ""
			if f.Bound != comparing {
				verdict = "ok"
				if isVirtual && !v.OK || isReal && !r.OK {
					verdict = "**no**"
				}
				for _, one := range []struct{ is, ok bool }{{isVirtual, v.OK}, {isReal, r.OK}} {
					if one.is {
						of++
					}
					if one.is && one.ok {
						held++
					}
				}
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s | %s |\n", title, cell(f.What), cell(f.Paper), cell(f.Bound),
				cell(v.Got), cell(r.Got), verdict)
			title = ""
		}
	}
	fmt.Fprintf(&b, "\n%d of %d bounds hold.\n", held, of)
	_, err := io.WriteString(w, b.String())
	return err
}

func finding(r record.Run, what string) (record.Finding, bool) {
	for _, f := range r.Findings {
		if f.What == what {
			return f, true
		}
	}
	return record.Finding{}, false
}

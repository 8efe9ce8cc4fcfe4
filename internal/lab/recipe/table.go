package recipe

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// ReadJSON reads what WriteJSON wrote; an error tells the record.
func ReadJSON(name string, r io.Reader) (all []Line, err error) {
	d := json.NewDecoder(r)
	for {
		var l Line
		if err := d.Decode(&l); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: record %d: %w", name, len(all)+1, err)
		}
		all = append(all, l)
	}
}

// WriteMarkdown writes a table of findings: the last of each recipe in virtual time beside the
// last over real sockets, and whether they hold.
func WriteMarkdown(w io.Writer, lines []Line) error {
	var names []string
	last := map[string]map[bool]Line{}
	for _, l := range lines {
		if last[l.Recipe] == nil {
			names = append(names, l.Recipe)
			last[l.Recipe] = map[bool]Line{}
		}
		last[l.Recipe][l.Virtual] = l
	}
	var b strings.Builder
	b.WriteString("| recipe | finding | paper | bound | virtual | real | |\n|---|---|---|---|---|---|---|\n")
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
			v, isVirtual := virtual.finding(f.What)
			r, isReal := sockets.finding(f.What)
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

func (l Line) finding(what string) (Finding, bool) {
	for _, f := range l.Findings {
		if f.What == what {
			return f, true
		}
	}
	return Finding{}, false
}

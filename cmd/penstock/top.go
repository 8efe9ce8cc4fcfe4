package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry/page"
)

// topPoll is how often the proxy is asked, unless it says that this shows nothing new.
const topPoll = 2 * time.Second

func topCommand() *cobra.Command {
	var path, at, search string
	var once bool
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show what a running proxy does, live",
		Long: `Top shows the flows, hosts and peers of a running proxy with what limits each, as the
page at its telemetry address does. Keys:

  Tab        flows, hosts, peers
  s, S       sort by the next column, by the one before
  r          the other way round
  /          search; Enter takes it, Escape drops it
  p          pause
  arrows     move; PgUp, PgDn, Home and End as well
  q          end

The proxy is asked at the telemetry.address of the configuration file. For one elsewhere give
--telemetry. Without a terminal, or with --once, it prints what there is and ends.`,
		Example: `  penstock top
  penstock top --telemetry 192.168.1.1:9464
  penstock top --once --search cwnd`,
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if at == "" {
				cfg, err := runningConfig(cmd, path)
				if err != nil {
					return err
				}
				at = cfg.Telemetry.Address
			}
			t := newTop(at, search)
			if out, ok := cmd.OutOrStdout().(*os.File); once || !ok || !isTerminal(out) {
				return t.printOnce(cmd.Context(), cmd.OutOrStdout())
			}
			return t.runScreen(cmd.Context())
		},
	}
	cmd.Flags().StringVarP(&path, "config", "c", defaultConfig, "configuration `FILE` of the running proxy")
	cmd.Flags().StringVar(&at, "telemetry", "", "`host:port` where the running proxy answers, if that is not the "+
		"file's telemetry.address")
	cmd.Flags().StringVar(&search, "search", "", "show only what contains `TEXT`")
	cmd.Flags().BoolVar(&once, "once", false, "print what there is and end")
	return cmd
}

// runningConfig is the configuration of the proxy that runs; the defaults where nobody said which
// file has it, and the usual one cannot be read.
func runningConfig(cmd *cobra.Command, path string) (config.Config, error) {
	cfg, err := config.Load(path)
	switch {
	case err == nil:
		return cfg, nil
	case cmd.Flags().Changed("config"):
		return cfg, badConfig(cmd.ErrOrStderr(), err)
	}
	return config.Default(), nil
}

// topColumn is a column of a table: what the proxy sorts it by, and its words.
type topColumn[T any] struct {
	sort, name string
	words      func(T) string
}

// topTable is a list that top shows; sort are the keys of its columns.
type topTable struct {
	name  string
	sort  []string
	heads []string
	cells func(page.View) [][]string
}

func tableOf[T any](name string, rows func(page.View) []T, columns ...topColumn[T]) topTable {
	t := topTable{name: name}
	for _, c := range columns {
		t.sort, t.heads = append(t.sort, c.sort), append(t.heads, c.name)
	}
	t.cells = func(v page.View) (out [][]string) {
		for _, r := range rows(v) {
			var line []string
			for _, c := range columns {
				line = append(line, config.Printable(c.words(r)))
			}
			out = append(out, line)
		}
		return out
	}
	return t
}

// topTables are the lists, in the order of the Tab key.
var topTables = []topTable{
	tableOf("flows", func(v page.View) []page.Flow { return v.Flows },
		topColumn[page.Flow]{"client", "CLIENT", func(f page.Flow) string {
			return strings.TrimSpace(f.Client + " " + f.Peer)
		}},
		topColumn[page.Flow]{"server", "SERVER", func(f page.Flow) string {
			return cmp.Or(f.Host, f.ServerName, f.Target, "-")
		}},
		topColumn[page.Flow]{"down", "DOWN", func(f page.Flow) string { return rateWords(f.Down.Rate) }},
		topColumn[page.Flow]{"up", "UP", func(f page.Flow) string { return rateWords(f.Up.Rate) }},
		topColumn[page.Flow]{"queue", "QUEUE", func(f page.Flow) string { return delayWords(mainSide(f).Queue) }},
		topColumn[page.Flow]{"window", "WINDOW", func(f page.Flow) string {
			return windowWords(mainSide(f).Window)
		}},
		topColumn[page.Flow]{"limited", "LIMITED BY", func(f page.Flow) string {
			s := mainSide(f)
			if s.LimitedBy == "" {
				return f.State
			}
			return s.LimitedBy + " " + ageWords(s.Limited)
		}},
		topColumn[page.Flow]{"algorithm", "ALGORITHM", func(f page.Flow) string {
			return cmp.Or(mainSide(f).Algorithm, "-")
		}},
		topColumn[page.Flow]{"age", "AGE", func(f page.Flow) string { return ageWords(f.Age) }},
	),
	tableOf("hosts", func(v page.View) []page.Host { return v.Hosts },
		topColumn[page.Host]{"name", "GROUP", func(h page.Host) string { return cmp.Or(h.Label, h.Name) }},
		topColumn[page.Host]{"rate", "RATE", func(h page.Host) string { return rateWords(h.Rate) }},
		topColumn[page.Host]{"queue", "QUEUE", func(h page.Host) string {
			if h.Active == 0 { // it was measured when something was sent
				return "-"
			}
			return delayWords(h.Queue)
		}},
		topColumn[page.Host]{"window", "WINDOW", func(h page.Host) string { return windowWords(h.Window) }},
		topColumn[page.Host]{"members", "FLOWS", func(h page.Host) string {
			return fmt.Sprintf("%d of "+
				"%d", h.Active, h.Members)
		}},
		topColumn[page.Host]{"limited", "LIMITED BY", func(h page.Host) string {
			if h.Active == 0 {
				return "-"
			}
			return h.LimitedBy
		}},
		topColumn[page.Host]{"algorithm", "ALGORITHM", func(h page.Host) string { return h.Algorithm }},
	),
	tableOf("peers", func(v page.View) []page.Peer { return v.Peers },
		topColumn[page.Peer]{"name", "PEER", func(p page.Peer) string { return p.Name }},
		topColumn[page.Peer]{"listener", "LISTENER", func(p page.Peer) string { return p.Listener }},
		topColumn[page.Peer]{"endpoint", "ENDPOINT", func(p page.Peer) string {
			return cmp.Or(p.Endpoint, "never "+
				"heard from")
		}},
		topColumn[page.Peer]{"handshake", "HANDSHAKE", func(p page.Peer) string {
			if p.Handshake == nil {
				return "-"
			}
			return ageWords(*p.Handshake) + " ago"
		}},
		topColumn[page.Peer]{"down", "DOWN", func(p page.Peer) string { return rateWords(p.Down) }},
		topColumn[page.Peer]{"up", "UP", func(p page.Peer) string { return rateWords(p.Up) }},
	),
}

func mainSide(f page.Flow) page.Side {
	if f.Main == "up" {
		return f.Up
	}
	return f.Down
}

func rateWords[R ~int64](r *R) string {
	if r == nil {
		return "-"
	}
	return sizeWords(float64(*r), "bit/s")
}

func delayWords(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f ms", *seconds*1e3)
}

func windowWords(b cc.Bytes) string {
	if b == 0 { // the kernel decides alone
		return "-"
	}
	return sizeWords(float64(b), "B")
}

func sizeWords(v float64, unit string) string {
	prefix := ""
	for _, p := range []string{"k", "M", "G", "T"} {
		if v < 1000 {
			break
		}
		v, prefix = v/1000, p
	}
	if prefix == "" {
		return fmt.Sprintf("%.0f %s", v, unit)
	}
	return fmt.Sprintf("%.1f %s%s", v, prefix, unit)
}

func ageWords(seconds float64) string {
	switch {
	case seconds < 60:
		return fmt.Sprintf("%.0f s", seconds)
	case seconds < 3600:
		return fmt.Sprintf("%.0f min", seconds/60)
	case seconds < 86400:
		return fmt.Sprintf("%.1f h", seconds/3600)
	}
	return fmt.Sprintf("%.1f d", seconds/86400)
}

// top is what the command shows and has asked for. One goroutine draws, another asks the
// proxy.
type top struct {
	at   string
	news chan struct{} // ask now

	mu      sync.Mutex
	table   int
	sort    int // column
	down    bool
	search  string
	paused  bool
	typing  bool
	typed   string // to search for
	offset  int    // of the first row in sight
	height  int
	view    page.View
	cells   [][]string // of view, from row view.Offset on
	trouble error
}

func newTop(at, search string) *top {
	return &top{at: at, search: search, news: make(chan struct{}, 1), sort: 2, down: true, height: 50}
}

// fetchRows gets the rows in sight.
func (t *top) fetchRows(ctx context.Context) error {
	t.mu.Lock()
	table := topTables[t.table]
	q := url.Values{"table": {table.name}, "sort": {table.sort[t.sort]}, "q": {t.search}, "events": {"0"}}
	if t.down {
		q.Set("sort", "-"+q.Get("sort"))
	}
	q.Set("offset", strconv.Itoa(max(0, t.offset-t.height)))
	q.Set("rows", strconv.Itoa(min(3*t.height, 500)))
	q.Set("since", "1e12") // no history
	t.mu.Unlock()
	status, body, err := askProxy(ctx, t.at, http.MethodGet, "/v1/view?"+q.Encode())
	var v page.View
	switch {
	case err != nil:
	case status == http.StatusNotFound:
		err = fmt.Errorf("what answers at %s has no /v1/view: it is no proxy, or an older one", t.at)
	case status != http.StatusOK:
		err = errors.New(strings.TrimSpace(string(body)))
	default:
		err = json.Unmarshal(body, &v)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.trouble = err; err == nil && v.Table == topTables[t.table].name {
		t.view, t.cells = v, topTables[t.table].cells(v)
		if t.offset > max(0, v.Matches-t.height) { // there were more rows
			t.askSoon()
		}
	}
	return err
}

// printOnce prints the rows once; rates take two looks.
func (t *top) printOnce(ctx context.Context, w io.Writer) error {
	t.height = 500
	if err := t.fetchRows(ctx); err != nil {
		return err
	}
	select {
	case <-time.After(time.Duration(t.view.Fresh * float64(time.Second))):
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := t.fetchRows(ctx); err != nil {
		return err
	}
	fmt.Fprintln(w, t.summaryLine())
	for _, line := range t.tableLines(topTables[t.table].heads) {
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	if n := len(t.cells); n < t.view.Matches {
		fmt.Fprintf(w, "%d of %d\n", n, t.view.Matches)
	}
	return nil
}

// widest is how much of a cell is shown.
const widest = 44

// tableLines are the heads and the rows that the proxy told, in columns. Callers hold mu or are alone.
func (t *top) tableLines(heads []string) (lines []string) {
	widths := make([]int, len(heads))
	rows := append([][]string{heads}, t.cells...)
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], min(widest, utf8.RuneCountInString(c)))
		}
	}
	for _, row := range rows {
		var b strings.Builder
		for i, c := range row {
			fmt.Fprintf(&b, "%-*.*s  ", widths[i], widths[i], c)
		}
		lines = append(lines, strings.TrimRight(b.String(), " "))
	}
	return lines
}

// summaryLine is the first line. Callers hold mu or are alone.
func (t *top) summaryLine() string {
	if t.trouble != nil {
		return "no answer: " + config.Printable(t.trouble.Error())
	}
	v := t.view
	state := v.State
	if n := len(v.Changed); n > 0 {
		state += fmt.Sprintf(", %d rules differ from the file", n)
	}
	if t.paused {
		state += ", paused"
	}
	return fmt.Sprintf("penstock %s  %s  up %s   down %s  up %s  %d connections  queue %s / %s",
		config.Printable(v.Version), config.Printable(state),
		ageWords(v.Now-v.Start), rateWords(&v.Totals.Down), rateWords(&v.Totals.Up), v.Totals.Connections,
		delayWords(v.Totals.Queue50), delayWords(v.Totals.Queue95))
}

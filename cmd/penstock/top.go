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
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry/page"
)

// topPoll is the time between two requests, unless the proxy says that its rows stay the same for longer
// (page.View.Fresh).
const topPoll = 2 * time.Second

// topCommand shows what /v1/view has: live on a terminal, and once elsewhere.
func topCommand() *cobra.Command {
	var from proxyAddress
	var search string
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
			at, err := from.telemetryAddress(cmd)
			if err != nil {
				return err
			}
			t := newTop(cmd.Context(), at, search)
			out, ok := cmd.OutOrStdout().(*os.File)
			if once || !ok || !isTerminal(out) {
				return t.printOnce(cmd.OutOrStdout())
			}
			return t.runScreen(out)
		},
	}
	from.registerFlags(cmd)
	cmd.Flags().StringVar(&search, "search", "", "show only what contains `TEXT`")
	cmd.Flags().BoolVar(&once, "once", false, "print what there is and end")
	return cmd
}

// topColumn is a column of a table: what the proxy sorts it by, and its words.
type topColumn[T any] struct {
	sort  string // the proxy's name for the order by this column
	name  string
	words func(T) string // the cell of a row
	room
}

// room says how a column gives way in a narrow terminal.
type room struct {
	rank  int // the columns with the highest are left out first; 0: never
	least int // characters that are enough; 0: the column needs its full width
}

// topTable is a list that top shows.
type topTable struct {
	name  string                     // of the proxy's table
	sort  []string                   // what the proxy sorts each column by
	heads []string                   // of the columns
	rooms []room                     // of the columns
	cells func(page.View) [][]string // rows of an answer, fit to print
}

// tableOf returns a table. rows takes its rows out of an answer.
func tableOf[T any](name string, rows func(page.View) []T, columns ...topColumn[T]) topTable {
	t := topTable{name: name}
	for _, c := range columns {
		t.sort, t.heads, t.rooms = append(t.sort, c.sort), append(t.heads, c.name), append(t.rooms, c.room)
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

// topTables are the lists, in the order of the Tab key. The proxy sorts and searches, so that only the rows on the
// screen are sent. A dash stands for what is not known, or does not apply.
var topTables = []topTable{
	// A line shows rates of both directions of a flow, and the rest of its main direction.
	tableOf("flows", func(v page.View) []page.Flow { return v.Flows },
		topColumn[page.Flow]{"client", "CLIENT", func(f page.Flow) string {
			return strings.TrimSpace(f.Client + " " + f.Peer)
		}, room{least: 21}},
		topColumn[page.Flow]{"server", "SERVER", func(f page.Flow) string {
			return cmp.Or(f.Host, f.ServerName, f.Target, "-")
		}, room{least: 14}},
		topColumn[page.Flow]{"down", "DOWN", func(f page.Flow) string {
			return rateWords(f.Down.Rate)
		}, room{rank: 2}},
		topColumn[page.Flow]{"up", "UP", func(f page.Flow) string { return rateWords(f.Up.Rate) }, room{rank: 4}},
		topColumn[page.Flow]{"queue", "QUEUE", func(f page.Flow) string {
			return delayWords(mainSide(f).Queue)
		}, room{rank: 1}},
		topColumn[page.Flow]{"window", "WINDOW", func(f page.Flow) string {
			return windowWords(mainSide(f).Window)
		}, room{rank: 5}},
		topColumn[page.Flow]{"limited", "HELD BACK BY", func(f page.Flow) string {
			return cmp.Or(mainSide(f).Reason, f.State)
		}, room{}},
		topColumn[page.Flow]{"algorithm", "ALGORITHM", func(f page.Flow) string {
			return cmp.Or(mainSide(f).Algorithm, "-")
		}, room{rank: 6}},
		topColumn[page.Flow]{"age", "AGE", func(f page.Flow) string { return ageWords(f.Age) }, room{rank: 3}},
	),
	// The queueing delay of a group is old unless one of its flows is active.
	tableOf("hosts", func(v page.View) []page.Host { return v.Hosts },
		topColumn[page.Host]{"name", "HOST", func(h page.Host) string {
			return cmp.Or(h.Label, h.Name)
		}, room{least: 21}},
		topColumn[page.Host]{"trouble", "HOW IT DOES", func(h page.Host) string { return h.Reason }, room{least: 35}},
		topColumn[page.Host]{"rate", "RATE", func(h page.Host) string { return rateWords(h.Rate) }, room{rank: 1}},
		topColumn[page.Host]{"queue", "QUEUE", func(h page.Host) string {
			if h.Active == 0 {
				return "-"
			}
			return delayWords(h.Queue)
		}, room{rank: 1}},
		topColumn[page.Host]{"members", "FLOWS", func(h page.Host) string {
			return fmt.Sprintf("%d of %d", h.Active, h.Members)
		}, room{rank: 2}},
		topColumn[page.Host]{"window", "WINDOW", func(h page.Host) string {
			return windowWords(h.Window)
		}, room{rank: 3}},
		topColumn[page.Host]{"udp", "UDP", func(h page.Host) string {
			if h.UDP == nil {
				return "-"
			}
			return rateWords(h.UDP.Rate) + ", " + h.UDP.AcknowledgedBy
		}, room{rank: 4}},
		topColumn[page.Host]{"algorithm", "ALGORITHM", func(h page.Host) string { return h.Algorithm }, room{rank: 5}},
	),
	// MASQUE clients have no handshake to show.
	tableOf("peers", func(v page.View) []page.Peer { return v.Peers },
		topColumn[page.Peer]{"name", "PEER", func(p page.Peer) string { return p.Name }, room{least: 16}},
		topColumn[page.Peer]{"listener", "LISTENER", func(p page.Peer) string { return p.Listener }, room{rank: 3}},
		topColumn[page.Peer]{"endpoint", "ENDPOINT", func(p page.Peer) string {
			return cmp.Or(p.Endpoint, "never heard from")
		}, room{rank: 2, least: 21}},
		topColumn[page.Peer]{"handshake", "HANDSHAKE", func(p page.Peer) string {
			if p.Handshake == nil {
				return "-"
			}
			return ageWords(*p.Handshake) + " ago"
		}, room{rank: 1}},
		topColumn[page.Peer]{"down", "DOWN", func(p page.Peer) string { return rateWords(p.Down) }, room{}},
		topColumn[page.Peer]{"up", "UP", func(p page.Peer) string { return rateWords(p.Up) }, room{}},
	),
}

// mainSide returns the direction that a flow's line shows: the one that moves more.
func mainSide(f page.Flow) page.Side {
	if f.Main == "up" {
		return f.Up
	}
	return f.Down
}

// rateWords writes a rate in bits per second; nil, which is not known yet, is a dash.
func rateWords[R ~int64](r *R) string {
	if r == nil {
		return "-"
	}
	return sizeWords(float64(*r), "bit/s")
}

// delayWords writes a delay in milliseconds; nil, which is not known, is a dash.
func delayWords(seconds *float64) string {
	if seconds == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f ms", *seconds*1e3)
}

// windowWords writes a window; 0, where no control of ours decides, is a dash.
func windowWords(b cc.Bytes) string {
	if b == 0 {
		return "-"
	}
	return sizeWords(float64(b), "B")
}

// sizeWords writes v with a decimal prefix and one digit behind the point.
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

// ageWords writes a time in the unit that leaves a short number.
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

// top is what the command shows. It implements tea.Model: one goroutine calls Update and View, and answers of the
// proxy come to it as messages.
//
//	a key, a new size ─▶ fetchSoon ─▶ fetch (in the background) ─▶ answer ─▶ takeAnswer ─▶ poll, after a while
//	                        ▲                                                               │
//	                        └───────────────────────────────────────────────────────────────┘
type top struct {
	ctx context.Context // ends requests
	at  string          // host:port of the proxy

	table      int    // of topTables
	sort       int    // column
	descending bool   // the greatest value first
	search     string // empty: all rows
	paused     bool
	typing     bool   // keys go to typed
	typed      string // what to search for
	offset     int    // of the first row in sight
	height     int    // rows in sight
	width      int    // characters of a line; 0: any number

	view  page.View  // the newest answer
	cells [][]string // of view, from row view.Offset on
	err   error      // of the newest answer; nil: none

	fetching bool // a request is out
	changed  bool // the rows in sight are others than that request asks for
	polls    int  // answers so far; Update ignores a poll from before the newest answer
}

// viewAnswer is the answer to one request, or its error. It has the table that was asked for, because Tab may have
// been pressed since.
type viewAnswer struct {
	table int
	view  page.View
	err   error
}

// poll is the message that the time for the next request has come. It has the value of top.polls when it was
// scheduled.
type poll int

// newTop returns a screen of flows with the greatest download rates first, and 50 rows until the terminal's size is
// known.
func newTop(ctx context.Context, at, search string) *top {
	return &top{ctx: ctx, at: at, search: search, sort: 2, descending: true, height: 50}
}

// fetch returns a request for the rows in sight, a screen before and a screen after. The request does not use t, so
// that it may run in the background.
func (t *top) fetch() tea.Cmd {
	ctx, at, table := t.ctx, t.at, t.table
	q := url.Values{
		"table": {topTables[table].name}, "sort": {topTables[table].sort[t.sort]}, "q": {t.search},
		"offset": {strconv.Itoa(max(0, t.offset-t.height))}, "rows": {strconv.Itoa(min(3*t.height, 500))},
		"events": {"0"}, "since": {"1e12"}, // neither events nor history
	}
	if t.descending {
		q.Set("sort", "-"+q.Get("sort"))
	}
	return func() tea.Msg {
		status, body, err := askProxy(ctx, at, http.MethodGet, "/v1/view?"+q.Encode())
		a := viewAnswer{table: table, err: err}
		switch {
		case err != nil:
		case status == http.StatusNotFound:
			a.err = fmt.Errorf("what answers at %s has no /v1/view: it is no proxy, or an older one", at)
		case status != http.StatusOK:
			a.err = errors.New(strings.TrimSpace(string(body)))
		default:
			a.err = json.Unmarshal(body, &a.view)
		}
		return a
	}
}

// fetchSoon keeps the rows in sight within those that there are, and returns the request for them. nil: another
// request is out, and takeAnswer returns this one after its answer.
func (t *top) fetchSoon() tea.Cmd {
	t.offset = max(0, min(t.offset, t.view.Matches-t.height))
	if t.fetching {
		t.changed = true
		return nil
	}
	t.fetching, t.changed = true, false
	return t.fetch()
}

// takeAnswer shows an answer, unless another table is shown by now. It returns the next request, or a poll.
func (t *top) takeAnswer(a viewAnswer) tea.Cmd {
	t.fetching = false
	t.polls++
	if t.err = a.err; a.err == nil && a.table == t.table {
		t.view, t.cells = a.view, topTables[t.table].cells(a.view)
		// If rows in sight have gone, the last rows come into sight.
		t.changed = t.changed || t.offset > max(0, t.view.Matches-t.height)
	}
	switch {
	case t.changed:
		return t.fetchSoon()
	case t.paused:
		return nil
	}
	next := poll(t.polls)
	wait := max(topPoll, time.Duration(t.view.Fresh*float64(time.Second)))
	return tea.Tick(wait, func(time.Time) tea.Msg { return next })
}

// Init implements tea.Model.
func (t *top) Init() tea.Cmd { return t.fetchSoon() }

// Update implements tea.Model.
func (t *top) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case viewAnswer:
		return t, t.takeAnswer(msg)
	case poll:
		if int(msg) == t.polls && !t.paused {
			return t, t.fetchSoon()
		}
	case tea.WindowSizeMsg:
		t.width, t.height = msg.Width, max(1, msg.Height-3) // without the summary, the heads and the foot
		return t, t.fetchSoon()
	case tea.PasteMsg:
		if t.typing {
			t.typed += strings.Map(dropControl, msg.Content)
		}
	case tea.KeyPressMsg:
		if t.typing && msg.String() != "ctrl+c" {
			return t, t.typeSearch(msg)
		}
		return t, t.pressKey(msg.String())
	}
	return t, nil
}

// dropControl drops control characters, for strings.Map.
func dropControl(r rune) rune {
	if unicode.IsControl(r) {
		return -1
	}
	return r
}

// pressKey does what a key asks for. Every key that changes what is shown asks the proxy again at once.
func (t *top) pressKey(key string) tea.Cmd {
	columns := len(topTables[t.table].heads)
	switch key {
	case "q", "ctrl+c":
		return tea.Quit
	case "/":
		t.typing, t.typed = true, ""
		return nil
	case "p":
		t.paused = !t.paused
	case "r":
		t.descending = !t.descending
	case "s":
		t.sort = (t.sort + 1) % columns
	case "S":
		t.sort = (t.sort + columns - 1) % columns
	case "tab":
		t.showNextTable()
	case "up":
		t.offset--
	case "down":
		t.offset++
	case "pgup":
		t.offset -= t.height
	case "pgdown":
		t.offset += t.height
	case "home":
		t.offset = 0
	case "end":
		t.offset = t.view.Matches
	default:
		return nil
	}
	return t.fetchSoon()
}

// typeSearch edits the text to search for.
func (t *top) typeSearch(key tea.KeyPressMsg) tea.Cmd {
	switch key.String() {
	case "enter", "esc":
		if key.String() == "esc" {
			t.typed = ""
		}
		t.typing, t.search, t.offset = false, t.typed, 0
		return t.fetchSoon()
	case "backspace", "ctrl+h":
		_, size := utf8.DecodeLastRuneInString(t.typed)
		t.typed = t.typed[:len(t.typed)-size]
	default:
		t.typed += key.Text // empty for a key without a character
	}
	return nil
}

// showNextTable shows the next list, sorted by its usual column.
func (t *top) showNextTable() {
	t.table, t.search, t.offset, t.cells, t.view.Matches = (t.table+1)%len(topTables), "", 0, nil, 0
	t.sort = map[string]int{"flows": 2, "hosts": 1}[topTables[t.table].name]
	t.descending = topTables[t.table].name != "peers"
}

// View implements tea.Model.
func (t *top) View() tea.View {
	table := topTables[t.table]
	heads := slices.Clone(table.heads)
	heads[t.sort] += map[bool]string{true: " ▼", false: " ▲"}[t.descending]
	body := t.tableLines(heads)
	lines := append([]string{t.summaryLine(), "\x1b[1m" + body[0] + "\x1b[m"}, make([]string, t.height)...)
	for i := range t.height { // a row that is not known yet is empty
		if row := 1 + t.offset - t.view.Offset + i; row > 0 && row < len(body) {
			lines[2+i] = body[row]
		}
	}
	view := tea.NewView(strings.Join(append(lines, t.footLine()), "\n"))
	view.AltScreen = true
	return view
}

// footLine returns the last line: what is typed, or what is shown and the keys.
func (t *top) footLine() string {
	if t.typing {
		return "search: " + t.typed
	}
	foot := fmt.Sprintf("%s: %d of %d   ", topTables[t.table].name, t.view.Matches, t.view.Total)
	if t.search != "" {
		foot += "search: " + t.search + "  "
	}
	return foot + "Tab lists  s sort  r reverse  / search  p pause  q end"
}

// runScreen shows the screen on a terminal until the user ends it. After a signal it restores the terminal. Keys come
// from the terminal, wherever standard input comes from.
func (t *top) runScreen(out *os.File) error {
	var end context.CancelFunc
	t.ctx, end = signal.NotifyContext(t.ctx, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	defer end()
	screen := tea.NewProgram(t, tea.WithOutput(out), tea.WithoutSignalHandler())
	defer context.AfterFunc(t.ctx, screen.Quit)()
	if _, err := screen.Run(); err != nil {
		return fmt.Errorf("there is no screen, which --once does without: %w", err)
	}
	return nil
}

// printOnce prints the rows once. It asks twice, because a rate is the difference of two readings.
func (t *top) printOnce(w io.Writer) error {
	t.height = 500
	for i := range 2 {
		if i > 0 {
			select {
			case <-time.After(time.Duration(t.view.Fresh * float64(time.Second))):
			case <-t.ctx.Done():
				return t.ctx.Err()
			}
		}
		if t.takeAnswer(t.fetch()().(viewAnswer)); t.err != nil {
			return t.err
		}
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

// maxCellWidth bounds the characters of a cell, because a host's name may have 253 and would hide all other columns.
const maxCellWidth = 44

// tableLines returns the heads and the rows of the newest answer, in the columns that have room.
func (t *top) tableLines(heads []string) (lines []string) {
	widths := make([]int, len(heads))
	rows := append([][]string{heads}, t.cells...)
	for _, row := range rows {
		for i, c := range row {
			widths[i] = max(widths[i], min(maxCellWidth, utf8.RuneCountInString(c)))
		}
	}
	fitWidths(widths, topTables[t.table].rooms, t.width)
	for _, row := range rows {
		var b strings.Builder
		for i, c := range row {
			if widths[i] == 0 {
				continue
			}
			fmt.Fprintf(&b, "%-*.*s  ", widths[i], widths[i], c)
		}
		lines = append(lines, strings.TrimRight(b.String(), " "))
	}
	return lines
}

// fitWidths makes columns fit a line of total characters. It leaves out the columns of the highest rank, which get the
// width 0, and then narrows others down to what is enough for them. total 0: the line has any length.
func fitWidths(widths []int, rooms []room, total int) {
	lengthOf := func(width func(i int) int) (n int) {
		for i := range widths {
			if widths[i] > 0 {
				n += width(i) + 2
			}
		}
		return n - 2
	}
	enough := func(i int) int {
		if rooms[i].least > 0 {
			return min(widths[i], rooms[i].least)
		}
		return widths[i]
	}
	for total > 0 && lengthOf(enough) > total {
		last := 0
		for i := range widths {
			if widths[i] > 0 && rooms[i].rank > rooms[last].rank {
				last = i
			}
		}
		if rooms[last].rank == 0 {
			break
		}
		widths[last] = 0
	}
	for i := len(widths) - 1; i >= 0 && total > 0; i-- {
		over := lengthOf(func(i int) int { return widths[i] }) - total
		widths[i] -= max(0, min(over, widths[i]-enough(i)))
	}
}

// summaryLine returns the first line: the state of the proxy, or why it does not answer.
func (t *top) summaryLine() string {
	if t.err != nil {
		return "no answer: " + config.Printable(t.err.Error())
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

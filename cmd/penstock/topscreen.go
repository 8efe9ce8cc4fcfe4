package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/term"
)

// What terminals take since the VT100: another screen without a cursor, and the former one again.
const (
	openScreen  = "\x1b[?1049h\x1b[?25l"
	closeScreen = "\x1b[?25h\x1b[?1049l"
)

// runScreen shows the screen until it is left.
func (t *top) runScreen(ctx context.Context) error {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return fmt.Errorf("no terminal to read keys from, which --once does without: %w", err)
	}
	defer tty.Close()
	before, err := term.MakeRaw(int(tty.Fd()))
	if err != nil {
		return fmt.Errorf("the terminal cannot be set to tell single keys, which --once does without: %w", err)
	}
	defer func() { _ = term.Restore(int(tty.Fd()), before) }()
	fmt.Fprint(tty, openScreen)
	defer fmt.Fprint(tty, closeScreen)

	// A signal has the terminal put back before it ends the program.
	ctx, end := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGINT)
	defer end()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	keys, answers := make(chan string), make(chan struct{})
	go readKeys(ctx, tty, keys) // it is not waited for: it may be reading
	go t.pollLoop(ctx, answers)
	for {
		t.drawScreen(tty)
		select {
		case <-ctx.Done():
			return nil
		case <-resized:
		case <-answers:
		case key, more := <-keys:
			if !more || !t.handleKey(key) {
				return nil
			}
		}
	}
}

// readKeys sends what is pressed: a character, or what a terminal sends for a key without one.
func readKeys(ctx context.Context, tty *os.File, keys chan<- string) {
	defer close(keys)
	for buffer := make([]byte, 256); ; {
		n, err := tty.Read(buffer)
		if err != nil {
			return
		}
		for text := string(buffer[:n]); text != ""; {
			_, size := utf8.DecodeRuneInString(text)
			if strings.HasPrefix(text, "\x1b[") || strings.HasPrefix(text, "\x1bO") {
				ends := func(r rune) bool { return r >= '@' && r <= '~' }
				size = max(2, 3+strings.IndexFunc(text[2:], ends))
			}
			select {
			case keys <- text[:size]:
			case <-ctx.Done():
				return
			}
			text = text[size:]
		}
	}
}

// pollLoop asks until ctx is done, and sends after each answer.
func (t *top) pollLoop(ctx context.Context, answers chan<- struct{}) {
	for {
		_ = t.fetchRows(ctx) // which is shown
		t.mu.Lock()
		wait, paused := max(topPoll, time.Duration(t.view.Fresh*float64(time.Second))), t.paused
		t.mu.Unlock()
		select {
		case answers <- struct{}{}:
		case <-ctx.Done():
			return
		}
		var again <-chan time.Time
		if !paused {
			again = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return
		case <-again:
		case <-t.news:
		}
	}
}

// handleKey does what a key asks for, unless that is to end.
func (t *top) handleKey(key string) (goOn bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	columns := len(topTables[t.table].heads)
	switch {
	case key == "\x03": // Ctrl-C
		return false
	case t.typing:
		t.typeSearch(key)
		return true
	}
	switch key {
	case "q":
		return false
	case "/":
		t.typing, t.typed = true, ""
		return true
	case "p":
		t.paused = !t.paused
	case "r":
		t.down = !t.down
	case "s":
		t.sort = (t.sort + 1) % columns
	case "S":
		t.sort = (t.sort + columns - 1) % columns
	case "\t":
		t.nextTable()
	case "\x1b[A", "\x1bOA":
		t.offset--
	case "\x1b[B", "\x1bOB":
		t.offset++
	case "\x1b[5~":
		t.offset -= t.height
	case "\x1b[6~":
		t.offset += t.height
	case "\x1b[H", "\x1bOH", "\x1b[1~":
		t.offset = 0
	case "\x1b[F", "\x1bOF", "\x1b[4~":
		t.offset = t.view.Matches
	default:
		return true
	}
	t.askSoon()
	return true
}

// typeSearch edits what to search for. Callers hold mu.
func (t *top) typeSearch(key string) {
	switch {
	case key == "\r" || key == "\x1b":
		if key == "\x1b" {
			t.typed = ""
		}
		t.typing, t.search, t.offset = false, t.typed, 0
		t.askSoon()
	case key == "\x7f" || key == "\b":
		_, size := utf8.DecodeLastRuneInString(t.typed)
		t.typed = t.typed[:len(t.typed)-size]
	case key[0] >= ' ':
		t.typed += key
	}
}

// nextTable shows the next list. Callers hold mu.
func (t *top) nextTable() {
	t.table, t.search, t.offset, t.cells, t.view.Matches = (t.table+1)%len(topTables), "", 0, nil, 0
	t.sort = map[string]int{"flows": 2, "hosts": 1}[topTables[t.table].name]
	t.down = topTables[t.table].name != "peers"
}

// askSoon has the proxy asked once it has answered. Callers hold mu.
func (t *top) askSoon() {
	t.offset = max(0, min(t.offset, t.view.Matches-t.height))
	select {
	case t.news <- struct{}{}:
	default: // it will be asked anyway
	}
}

// drawScreen fills the screen.
func (t *top) drawScreen(tty *os.File) {
	width, height, err := term.GetSize(int(tty.Fd()))
	if err != nil {
		return
	}
	if width == 0 || height == 0 { // a serial line does not know
		width, height = 80, 24
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if rows := max(1, height-3); rows != t.height {
		t.height = rows
		t.askSoon()
	}
	table := topTables[t.table]
	heads := append([]string(nil), table.heads...)
	heads[t.sort] += map[bool]string{true: " ▼", false: " ▲"}[t.down]
	body := t.tableLines(heads)
	lines := append([]string{t.summaryLine(), body[0]}, make([]string, t.height)...)
	for i := range t.height { // a row that has not been told yet is empty
		if row := 1 + t.offset - t.view.Offset + i; row > 0 && row < len(body) {
			lines[2+i] = body[row]
		}
	}
	foot := "search: " + t.typed
	if !t.typing {
		foot = fmt.Sprintf("%s: %d of %d   ", table.name, t.view.Matches, t.view.Total)
		if t.search != "" {
			foot += "search: " + t.search + "  "
		}
		foot += "Tab lists  s sort  r reverse  / search  p pause  q end"
	}
	var screen strings.Builder
	for i, line := range append(lines, foot) {
		runes := []rune(line)
		bold := map[bool]string{true: "\x1b[1m"}[i == 1]
		fmt.Fprintf(&screen, "\x1b[%d;1H%s%s\x1b[0m\x1b[K", i+1, bold, string(runes[:min(len(runes), width)]))
	}
	fmt.Fprint(tty, screen.String())
}

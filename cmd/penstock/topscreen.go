package main

import (
	"context"
	"fmt"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/rivo/tview"
)

// GetRowCount implements tview.TableContent.
func (t *top) GetRowCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.view.Matches + 1
}

// GetColumnCount implements tview.TableContent.
func (t *top) GetColumnCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(topTables[t.table].heads)
}

// GetCell implements tview.TableContent: a row that has not been asked for yet is empty.
func (t *top) GetCell(row, column int) *tview.TableCell {
	t.mu.Lock()
	defer t.mu.Unlock()
	table := topTables[t.table]
	if column < 0 || column >= len(table.heads) {
		return tview.NewTableCell("")
	}
	if row == 0 {
		head := table.heads[column]
		if column == t.sort {
			head += map[bool]string{true: " ▼", false: " ▲"}[t.down]
		}
		return tview.NewTableCell(head).SetSelectable(false).SetAttributes(tcell.AttrBold).
			SetTextColor(tcell.ColorDefault)
	}
	cell := tview.NewTableCell("").SetTextColor(tcell.ColorDefault).SetMaxWidth(44)
	if i := row - 1 - t.view.Offset; i >= 0 && i < len(t.cells) {
		cell.SetText(tview.Escape(t.cells[i][column]))
	}
	if column < 2 {
		cell.SetExpansion(1)
	}
	return cell
}

// change has f change what is asked for, and asks. Callers do not hold mu.
func (t *top) change(f func()) {
	t.mu.Lock()
	f()
	t.mu.Unlock()
	select {
	case t.news <- struct{}{}:
	default: // it will be asked anyway
	}
}

// run shows the screen until it is left.
func (t *top) run(ctx context.Context) error {
	tview.Styles.PrimitiveBackgroundColor = tcell.ColorDefault
	tview.Styles.PrimaryTextColor = tcell.ColorDefault
	app := tview.NewApplication()
	head := tview.NewTextView().SetWrap(false)
	foot := tview.NewTextView().SetWrap(false)
	table := tview.NewTable().SetFixed(1, 0).SetSelectable(true, false).SetContent(&content{top: t})
	search := tview.NewInputField().SetLabel("search: ").SetFieldBackgroundColor(tcell.ColorDefault)
	below := tview.NewPages().AddPage("foot", foot, true, true).AddPage("search", search, true, false)
	screen := tview.NewFlex().SetDirection(tview.FlexRow).AddItem(head, 1, 0, false).AddItem(table, 0, 1,
		true).AddItem(below, 1, 0, false)

	search.SetDoneFunc(func(key tcell.Key) {
		if key == tcell.KeyEscape {
			search.SetText("")
		}
		t.change(func() { t.search, t.toTop = search.GetText(), true })
		below.SwitchToPage("foot")
		app.SetFocus(table)
	})
	keys := map[rune]func(){
		'q': app.Stop,
		'/': func() { below.SwitchToPage("search"); app.SetFocus(search) },
		'p': func() { t.change(func() { t.paused = !t.paused }) },
		'r': func() { t.change(func() { t.down = !t.down }) },
		's': func() { t.change(func() { t.sort = (t.sort + 1) % len(topTables[t.table].heads) }) },
		'S': func() {
			t.change(func() { t.sort = (t.sort + len(topTables[t.table].heads) - 1) % len(topTables[t.table].heads) })
		},
	}
	table.SetInputCapture(func(e *tcell.EventKey) *tcell.EventKey {
		if e.Key() == tcell.KeyTab {
			t.change(func() {
				t.table, t.search, t.toTop = (t.table+1)%len(topTables), "", true
				t.offset, t.cells, t.view.Matches = 0, nil, 0
				t.sort, t.down = map[string]int{
					"flows": 2,
					"hosts": 1,
				}[topTables[t.table].name], topTables[t.table].name != "peers"
			})
			search.SetText("")
			return nil
		}
		if act := keys[e.Rune()]; e.Key() == tcell.KeyRune && act != nil {
			act()
			return nil
		}
		return e
	})
	app.SetBeforeDrawFunc(func(tcell.Screen) bool {
		row, _ := table.GetOffset()
		_, _, _, height := table.GetInnerRect()
		t.mu.Lock()
		moved := row != t.offset || height != t.height
		t.offset, t.height = row, max(1, height)
		head.SetText(t.summary())
		foot.SetText(fmt.Sprintf("%s: %d of %d   %s Tab lists  s sort  r reverse  / search  p pause  q end",
			topTables[t.table].name, t.view.Matches, t.view.Total, map[bool]string{
				true:  "",
				false: "search: " + t.search + "  ",
			}[t.search == ""]))
		t.mu.Unlock()
		if moved {
			t.change(func() {})
		}
		return false
	})

	ctx, end := context.WithCancel(ctx)
	defer end()
	go t.poll(ctx, app, table) // it is not waited for: a drawing that it has asked for may never come
	return app.SetRoot(screen, true).EnableMouse(false).Run()
}

// poll asks until ctx is done, and stops app then.
func (t *top) poll(ctx context.Context, app *tview.Application, table *tview.Table) {
	defer app.Stop()
	for {
		err := t.ask(ctx) // which is shown
		t.mu.Lock()
		toTop := t.toTop && err == nil
		t.toTop = t.toTop && !toTop
		wait, paused := max(topPoll, time.Duration(t.view.Fresh*float64(time.Second))), t.paused
		t.mu.Unlock()
		app.QueueUpdateDraw(func() {
			if toTop {
				table.Select(1, 0).ScrollToBeginning()
			}
		})
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

// content is the table; tview may change nothing of it.
type content struct {
	tview.TableContentReadOnly
	*top
}

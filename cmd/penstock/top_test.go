package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	tea "charm.land/bubbletea/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/telemetry/page"
)

// Whoever looks at the last of many rows sees the few that are left, not an empty screen.
func TestTopFollowsAListThatShrinks(t *testing.T) {
	rows := 1000
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v := page.View{Table: "flows", Total: rows, Matches: rows}
		v.Offset, _ = strconv.Atoi(r.FormValue("offset"))
		v.Flows = make([]page.Flow, max(0, min(30, rows-v.Offset)))
		_ = json.NewEncoder(w).Encode(v)
	}))
	defer proxy.Close()
	s := newTop(t.Context(), strings.TrimPrefix(proxy.URL, "http://"), "")
	s.height = 10
	// update has the screen take a message, and then answers until nothing more is asked for at once.
	update := func(msg tea.Msg) {
		_, next := s.Update(msg)
		for s.fetching {
			_, next = s.Update(next())
		}
	}
	update(s.Init()())
	update(tea.KeyPressMsg{Code: tea.KeyEnd})
	require.Equal(t, 990, s.offset)
	require.Contains(t, s.View().Content, "flows: 1000 of 1000")

	rows = 5
	update(poll(s.polls))
	assert.Zero(t, s.offset)
	assert.Len(t, s.cells, rows)
}

func TestTopSearchesWhatIsTyped(t *testing.T) {
	for name, c := range map[string]struct {
		keys []tea.Msg
		want string
	}{
		"Enter takes it": {[]tea.Msg{
			tea.KeyPressMsg{Code: 'q', Text: "q"}, tea.KeyPressMsg{Code: tea.KeySpace, Text: " "}, tea.KeyPressMsg{Code: tea.KeyEnter},
		}, "q "},
		"Escape drops it": {[]tea.Msg{tea.KeyPressMsg{Code: 'q', Text: "q"}, tea.KeyPressMsg{Code: tea.KeyEscape}}, ""},
		"Backspace takes a character back": {[]tea.Msg{
			tea.KeyPressMsg{Code: 'é', Text: "é"},
			tea.KeyPressMsg{Code: 'x', Text: "x"},
			tea.KeyPressMsg{Code: tea.KeyBackspace},
			tea.KeyPressMsg{Code: tea.KeyEnter},
		}, "é"},
		"a pasted line is typed":  {[]tea.Msg{tea.PasteMsg{Content: "10.7.\n0.9"}, tea.KeyPressMsg{Code: tea.KeyEnter}}, "10.7.0.9"},
		"other keys type nothing": {[]tea.Msg{tea.KeyPressMsg{Code: tea.KeyF1}, tea.KeyPressMsg{Code: tea.KeyEnter}}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTop(t.Context(), "127.0.0.1:1", "before")
			s.Update(tea.KeyPressMsg{Code: '/', Text: "/"})
			for _, key := range c.keys {
				s.Update(key)
			}
			assert.Equal(t, c.want, s.search)
			assert.False(t, s.typing)
		})
	}
}

// TestTopFitsTheTerminal has columns that are left out by rank, and ones that become narrower.
func TestTopFitsTheTerminal(t *testing.T) {
	rooms := []room{{least: 21}, {least: 14}, {rank: 2}, {rank: 1}, {}, {rank: 3}}
	for total, want := range map[int][]int{
		0:   {21, 44, 11, 8, 18, 6},
		200: {21, 44, 11, 8, 18, 6},
		88:  {21, 14, 11, 8, 18, 6},
		81:  {21, 15, 11, 8, 18, 0},
		80:  {21, 14, 11, 8, 18, 0},
		79:  {21, 26, 0, 8, 18, 0},
		10:  {21, 14, 0, 0, 18, 0},
	} {
		widths := []int{21, 44, 11, 8, 18, 6}
		fitWidths(widths, rooms, total)
		assert.Equal(t, want, widths, "%d characters", total)
	}
}

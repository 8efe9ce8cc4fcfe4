package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

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
	s := newTop(strings.TrimPrefix(proxy.URL, "http://"), "")
	s.height = 10
	require.NoError(t, s.fetchRows(t.Context()))
	require.True(t, s.handleKey("\x1b[F")) // the end
	<-s.news
	require.NoError(t, s.fetchRows(t.Context()))
	require.Equal(t, 990, s.offset)

	rows = 5
	require.NoError(t, s.fetchRows(t.Context()))
	require.Len(t, s.news, 1, "it does not ask again")
	require.NoError(t, s.fetchRows(t.Context()))
	assert.Zero(t, s.offset)
	assert.Len(t, s.cells, rows)
}

package telemetry

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
)

// post sends a hint to the pages.
func post(p Pages, local bool, kind, body string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodPost, "/v1/hints", strings.NewReader(body))
	req.Host = "127.0.0.1"
	req.Header.Set("Content-Type", kind)
	rec := httptest.NewRecorder()
	p.Handler(local).ServeHTTP(rec, req)
	return rec
}

func TestHintsArePassedOn(t *testing.T) {
	var host netip.Prefix
	var got cc.Hint
	p := pages(busyProxy())
	p.Clock = func() cc.Time { return cc.Time(10 * time.Second) }
	p.Hint = func(h netip.Prefix, hint cc.Hint) int {
		host, got = h, hint
		return 2
	}
	rec := post(p, true, "application/json; charset=utf-8", `{"host": "192.0.2.7", "age_ms": 12.5,
		"capacity_bits_per_second": 12e6, "fair_share_bits_per_second": 6e6, "link_rate_bits_per_second": 24000000,
		"arrival_rate_bits_per_second": 1, "queue_room_bytes": 150000, "flows": 3, "radio_lost_bytes": 1448, "share": 0.25}`)
	require.Equal(t, http.StatusOK, rec.Code, rec.Body)
	assert.JSONEq(t, `{"groups": 2}`, rec.Body.String())
	assert.Equal(t, netip.MustParsePrefix("192.0.2.7/32"), host)
	assert.Equal(t, cc.Hint{
		At: cc.Time(10*time.Second - 12500*time.Microsecond), Capacity: 12e6, FairShare: 6e6, LinkRate: 24e6, ArrivalRate: 1,
		QueueRoom: 150_000, Flows: 3, RadioLost: 1448, Share: 0.25,
	}, got)
}

func TestHintsThatAreRefused(t *testing.T) {
	const kind = "application/json"
	for name, c := range map[string]struct {
		remote bool // not on loopback
		kind   string
		body   string
		code   int
		says   string
	}{
		"beyond this machine":               {remote: true, body: `{"host": "192.0.2.7"}`, code: 403, says: "loopback address only"},
		"as a browser would without asking": {kind: "text/plain", body: `{"host": "192.0.2.7"}`, code: 415, says: "application/json"},
		"without a kind":                    {kind: " ", body: `{}`, code: 415},
		"a name that is not known":          {body: `{"host": "192.0.2.7", "capacity": 1}`, code: 400, says: `unknown field "capacity"`},
		"no host":                           {body: `{}`, code: 400, says: `host is ""`},
		"a host by name":                    {body: `{"host": "phone.example"}`, code: 400, says: "must be an address"},
		"a rate below zero":                 {body: `{"host": "192.0.2.7", "capacity_bits_per_second": -1}`, code: 400, says: "capacity_bits_per_second is -1"},
		"a rate beyond measure":             {body: `{"host": "192.0.2.7", "link_rate_bits_per_second": 1e300}`, code: 400, says: "from 0 to"},
		"a share above all":                 {body: `{"host": "192.0.2.7", "share": 1.5}`, code: 400, says: "share is 1.5"},
		"from the future":                   {body: `{"host": "192.0.2.7", "age_ms": -5}`, code: 400, says: "age_ms is -5"},
		"from long ago":                     {body: `{"host": "192.0.2.7", "age_ms": 60001}`, code: 400, says: "age_ms"},
		"a word for a number":               {body: `{"host": "192.0.2.7", "flows": "many"}`, code: 400, says: "read the hint"},
		"no JSON":                           {body: `capacity=1`, code: 400, says: "read the hint"},
		"nothing":                           {body: ``, code: 400, says: "read the hint"},
		"two of them":                       {body: `{"host": "192.0.2.7"} {}`, code: 400, says: "something follows"},
		"too long":                          {body: `{"host": "` + strings.Repeat("x", maxHintBytes) + `"}`, code: 413, says: "at most 4096 bytes"},
		"too long, with white space after the end": {body: `{"host": "192.0.2.7"}` + strings.Repeat(" ", maxHintBytes), code: 413},
	} {
		t.Run(name, func(t *testing.T) {
			p := pages(busyProxy())
			p.Clock = func() cc.Time { return 1 }
			p.Hint = func(netip.Prefix, cc.Hint) int {
				assert.Fail(t, "it must not be passed on")
				return 0
			}
			if c.kind == "" {
				c.kind = kind
			}
			rec := post(p, !c.remote, c.kind, c.body)
			assert.Equal(t, c.code, rec.Code, rec.Body)
			assert.Contains(t, rec.Body.String(), c.says)
		})
	}
}

func TestWithoutATakerThereIsNoPageForHints(t *testing.T) {
	assert.NotEqual(t, http.StatusOK, post(pages(busyProxy()), true, "application/json", `{"host": "192.0.2.7"}`).Code)
}

// A hint goes in by HTTP and comes out in the window of a connection.
func TestAHintReachesTheAlgorithmsOfItsHost(t *testing.T) {
	p, clock, addr := startProxy(t, `defaults: {algorithm: "nacc"}`)
	site := pages(p)
	site.Hint, site.Clock = p.Hint, clock

	hint := func(host string) (groups int) {
		body := fmt.Sprintf(`{"host": %q, "link_rate_bits_per_second": 5e9, "flows": 1}`, host)
		rec := post(site, true, "application/json", body)
		require.Equal(t, http.StatusOK, rec.Code, rec.Body)
		var answer struct{ Groups int }
		require.NoError(t, json.Unmarshal(rec.Body.Bytes(), &answer))
		return answer.Groups
	}
	assert.Zero(t, hint("127.0.0.1"), "it has no connection")

	conn := tunnel(t, addr, echo(t))
	defer conn.Close()
	payload := bytes.Repeat([]byte("x"), 10_000)
	require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	for guided := false; !guided; {
		assert.Equal(t, 2, hint("127.0.0.1"), "the client, and the server beside it")
		_, err := conn.Write(payload)
		require.NoError(t, err)
		_, err = io.ReadFull(conn, payload)
		require.NoError(t, err)
		d := p.Flows()[0].Down.Flow
		guided = d.Phase == "guided" && d.Internals[0] == 10
	}
	assert.Zero(t, hint("127.0.0.9"), "somebody else's")
}

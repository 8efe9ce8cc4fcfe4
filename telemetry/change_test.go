package telemetry

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

const changeToken = "0123456789abcdef"

func TestAChangeIsAskedForAndAnswered(t *testing.T) {
	const good = `{"rule": "bulk", "direction": "down", "algorithm": "copa:delta=0.1"}`
	for name, c := range map[string]struct {
		method  string
		without bool // there is no token
		remote  bool // not on loopback
		body    string
		header  map[string]string // empty: not sent
		err     error
		code    int
		says    string
		taken   int
	}{
		"that works":      {code: 200, says: "changed: 3", taken: 1},
		"from afar":       {remote: true, code: 200, says: "changed: 3", taken: 1},
		"of the defaults": {body: `{"rule": "", "algorithm": "copa"}`, code: 200, taken: 1},
		"by our own page": {
			header: map[string]string{"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1"}, code: 200, taken: 1,
		},
		"by an older browser": {header: map[string]string{"Origin": "http://127.0.0.1"}, code: 200, taken: 1},
		"with another word for the same": {
			header: map[string]string{"Authorization": "bearer  " + changeToken}, code: 200, taken: 1,
		},
		"to what there is not": {
			err: errors.New(`algorithm: no algorithm "frob"`), code: 422, says: `no algorithm "frob"`, taken: 1,
		},
		"where there is no token": {without: true, code: 403, says: "give telemetry.change_token_file"},
		"with an empty token where there is none": {
			without: true, header: map[string]string{"Authorization": "Bearer "}, code: 403,
			says: "give telemetry.change_token_file",
		},
		"without the token": {
			header: map[string]string{"Authorization": ""}, code: 401,
			says: "need the token of telemetry.change_token_file",
		},
		"with another token": {
			header: map[string]string{"Authorization": "Bearer " + changeToken + "0"}, code: 401,
		},
		"with a beginning of the token": {
			header: map[string]string{"Authorization": "Bearer " + changeToken[:15]}, code: 401,
		},
		"by another scheme": {header: map[string]string{"Authorization": "Basic " + changeToken}, code: 401},
		"by reading":        {method: http.MethodGet, code: 405},
		"by another method": {method: http.MethodPut, code: 405},
		"by asking before":  {method: http.MethodOptions, code: 405},
		"by another page": {
			header: map[string]string{"Sec-Fetch-Site": "cross-site", "Origin": "http://evil.example"},
			code:   403, says: "other web pages",
		},
		"by a page at another port": {
			header: map[string]string{"Sec-Fetch-Site": "same-site"}, code: 403, says: "other web pages",
		},
		"by a page in an older browser": {
			header: map[string]string{"Origin": "http://evil.example"}, code: 403, says: "other web pages",
		},
		"by a page without a name": {header: map[string]string{"Origin": "null"}, code: 403, says: "other web pages"},
		"by a name of somebody's":  {header: map[string]string{"Host": "evil.example"}, code: 421},
		"as a form": {
			header: map[string]string{"Content-Type": "application/x-www-form-urlencoded"}, code: 415,
			says: "send Content-Type: application/json",
		},
		"without a kind": {header: map[string]string{"Content-Type": ""}, code: 415},
		"of no rule":     {body: `{"algorithm": "copa"}`, code: 400, says: "rule is missing"},
		"of nothing":     {body: `null`, code: 400, says: "rule is missing"},
		"with a word that is not known": {
			body: `{"rule": "bulk", "algorithms": "copa"}`, code: 400, says: `unknown field "algorithms"`,
		},
		"that is two": {body: good + good, code: 400, says: "something follows it"},
		"that is cut": {body: good[:20], code: 400, says: "read the change"},
		"that is long": {
			body: `{"rule": "` + strings.Repeat("x", maxChangeBytes) + `"}`, code: 413, says: "at most 4096 bytes",
		},
		"that goes on": {body: good + strings.Repeat(" ", maxChangeBytes), code: 413, says: "at most 4096 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			var taken []Change
			p := pages(busyProxy())
			p.Changes = &Changer{Change: func(asked Change, client string) (string, error) {
				taken = append(taken, asked)
				assert.Equal(t, "192.0.2.1:1234", client)
				return "changed: 3", c.err
			}}
			if !c.without {
				p.Changes.SetToken(changeToken)
			}
			assert.Equal(t, !c.without, p.Changes.TakesChanges())
			if c.method == "" {
				c.method = http.MethodPost
			}
			if c.body == "" {
				c.body = good
			}
			req := httptest.NewRequest(c.method, "/v1/algorithm", strings.NewReader(c.body))
			req.Host = "127.0.0.1"
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Authorization", "Bearer "+changeToken)
			for k, v := range c.header {
				switch {
				case k == "Host":
					req.Host = v
				case v == "":
					req.Header.Del(k)
				default:
					req.Header.Set(k, v)
				}
			}
			rec := httptest.NewRecorder()
			p.Handler(!c.remote).ServeHTTP(rec, req)
			assert.Equal(t, c.code, rec.Code, rec.Body)
			assert.Contains(t, rec.Body.String(), c.says)
			assert.NotContains(t, rec.Body.String(), changeToken)
			assert.Empty(t, rec.Header().Get("Access-Control-Allow-Origin"))
			assert.Equal(t, c.code == 401, rec.Header().Get("WWW-Authenticate") != "")
			assert.Equal(t, outcomeOf(c.code, c.without), p.Changes.Outcomes())
			require.Len(t, taken, c.taken)
			if c.taken > 0 && c.body == good {
				assert.Equal(t, Change{Rule: new("bulk"), Direction: "down", Algorithm: "copa:delta=0.1"}, taken[0])
			}
		})
	}
}

// outcomeOf counts one answer with a code, where there is a token or not; codes that do not
// come from the page count nowhere.
func outcomeOf(code int, without bool) map[ChangeOutcome]uint64 {
	want := new(Changer).Outcomes()
	outcome, counts := map[int]ChangeOutcome{
		200: ChangeMade, 401: ChangeRefused, 403: ChangeForeign,
		400: ChangeInvalid, 413: ChangeInvalid, 415: ChangeInvalid, 422: ChangeFailed,
	}[code]
	if code == 403 && without {
		outcome = ChangeDisabled
	}
	if counts {
		want[outcome] = 1
	}
	return want
}

func TestATokenThatIsTakenAwayEndsChanges(t *testing.T) {
	k := &Changer{Change: func(Change, string) (string, error) { return "", nil }}
	ask := func(secret string) int {
		req := httptest.NewRequest(http.MethodPost, "/v1/algorithm", strings.NewReader(`{"rule": ""}`))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+secret)
		rec := httptest.NewRecorder()
		Pages{Changes: k}.Handler(false).ServeHTTP(rec, req)
		return rec.Code
	}
	k.SetToken("first")
	assert.Equal(t, http.StatusOK, ask("first"))
	k.SetToken("second")
	assert.Equal(t, http.StatusUnauthorized, ask("first"))
	assert.Equal(t, http.StatusOK, ask("second"))
	k.SetToken("")
	assert.Equal(t, http.StatusForbidden, ask("second"))
	assert.False(t, k.TakesChanges())
}

func TestRulesAreShownToWhoAsks(t *testing.T) {
	p := pages(busyProxy())
	p.Changes = &Changer{Rules: func() (Rules, error) {
		return Rules{
			Rules:      []Rule{{Name: "guests", Refuse: "closed"}, {Down: "copa", Up: "none"}},
			Algorithms: []string{"copa", "none"},
		}, nil
	}}
	req := httptest.NewRequest(http.MethodGet, "/v1/rules", http.NoBody)
	rec := httptest.NewRecorder()
	p.Handler(false).ServeHTTP(rec, req)
	assert.Equal(t, http.StatusOK, rec.Code)
	assert.JSONEq(t, `{"rules": [{"rule": "guests", "refuse": "closed"}, {"rule": "", "down": "copa", "up": "none"}],
		"algorithms": ["copa", "none"]}`, rec.Body.String())
}

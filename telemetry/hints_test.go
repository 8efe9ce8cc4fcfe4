package telemetry

import (
	"bytes"
	"maps"
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

// recorder notes what is passed on, and says that n groups heard it.
type recorder struct {
	n     int
	about []netip.Prefix
	hints []cc.Hint
}

func (e *recorder) pass(p netip.Prefix, h cc.Hint) int {
	e.about, e.hints = append(e.about, p), append(e.hints, h)
	return e.n
}

// hintPages returns pages with a receiver that passes on to e, ten seconds after the start.
func hintPages(e *recorder) (Pages, *handClock) {
	clock := &handClock{t: cc.Time(10 * time.Second)}
	p := pages(busyProxy())
	p.Hints = &HintReceiver{Pass: e.pass, Clock: clock.now}
	return p, clock
}

// post sends hints to the pages.
func post(p Pages, local bool, header map[string]string, body string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodPost, "/v1/hints", strings.NewReader(body))
	req.Host = "127.0.0.1"
	req = arriving(req, "127.0.0.1:4000", "127.0.0.1:9464")
	req.Header.Set("Content-Type", "application/json")
	for k, v := range header {
		req.Header.Set(k, v)
	}
	rec := httptest.NewRecorder()
	p.Handler(local).ServeHTTP(rec, req)
	return rec
}

func TestHintsArePassedOn(t *testing.T) {
	e := &recorder{n: 2}
	p, _ := hintPages(e)
	rec := post(p, true, map[string]string{"Content-Type": "application/json; charset=utf-8"}, `{"host": "192.0.2.7", "age_ms": 12.5,
		"capacity_bits_per_second": 12e6, "fair_share_bits_per_second": 6e6, "link_rate_bits_per_second": 24000000,
		"arrival_rate_bits_per_second": 1, "queue_room_bytes": 150000, "flows": 3, "radio_lost_bytes": 1448, "share": 0.25}`)
	require.Equal(t, http.StatusOK, rec.Code, rec.Body)
	assert.JSONEq(t, `{"groups": 2}`, rec.Body.String())
	assert.Equal(t, []netip.Prefix{netip.MustParsePrefix("192.0.2.7/32")}, e.about)
	assert.Equal(t, []cc.Hint{{
		At: cc.Time(10*time.Second - 12500*time.Microsecond), Capacity: 12e6, FairShare: 6e6, LinkRate: 24e6, ArrivalRate: 1,
		QueueRoom: 150_000, Flows: 3, RadioLost: 1448, Share: 0.25,
	}}, e.hints)
}

func TestHintsMayComeTogether(t *testing.T) {
	e := &recorder{n: 1}
	p, _ := hintPages(e)
	rec := post(p, true, nil, ` [{"host": "::ffff:192.0.2.7", "flows": 1}, {"prefix": "2001:db8:7::1/48", "flows": 2},
		{"host": "fe80::1%lan0"}, {"prefix": "10.0.0.0/8"}] `)
	require.Equal(t, http.StatusOK, rec.Code, rec.Body)
	assert.JSONEq(t, `{"groups": 4}`, rec.Body.String())
	assert.Equal(t, []netip.Prefix{
		netip.MustParsePrefix("192.0.2.7/32"), netip.MustParsePrefix("2001:db8:7::/48"),
		netip.MustParsePrefix("fe80::1/128"), netip.MustParsePrefix("10.0.0.0/8"),
	}, e.about)
	assert.Equal(t, 2, e.hints[1].Flows)
	e.n = 0
	assert.JSONEq(t, `{"groups": 0}`, post(p, true, nil, `[]`).Body.String())
	assert.JSONEq(t, `{"groups": 0}`, post(p, true, nil, `{"host": "192.0.2.8"}`).Body.String())
	assert.Equal(t, map[HintOutcome]uint64{
		HintHeard: 4, HintUnheard: 1, HintInvalid: 0, HintRefused: 0,
		HintTooOften: 0,
	}, p.Hints.Outcomes())
}

func TestHintsThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		remote bool // not on loopback
		kind   string
		body   string
		code   int
		says   string
	}{
		"beyond this machine": {
			remote: true, body: `{"host": "192.0.2.7"}`, code: 403,
			says: "without telemetry.hints.token_file hints are taken on a loopback address only",
		},
		"as a browser would without asking": {
			kind: "text/plain", body: `{"host": "192.0.2.7"}`, code: 415,
			says: "application/json",
		},
		"without a kind": {kind: " ", body: `{}`, code: 415},
		"a name that is not known": {
			body: `{"host": "192.0.2.7", "capacity": 1}`, code: 400,
			says: `unknown field "capacity"`,
		},
		"one among others": {
			body: `[{"host": "192.0.2.7"}, {"host": "192.0.2.7", "capacity": 1}]`,
			code: 400, says: `unknown field "capacity"`,
		},
		"no host":                     {body: `{}`, code: 400, says: `host is ""`},
		"nothing at all":              {body: `null`, code: 400, says: `host is ""`},
		"a host by name":              {body: `{"host": "phone.example"}`, code: 400, says: "must be an address"},
		"a prefix without its length": {body: `{"prefix": "192.0.2.7"}`, code: 400, says: "prefix is"},
		"both": {
			body: `{"host": "192.0.2.7", "prefix": "192.0.2.0/24"}`, code: 400,
			says: "not both",
		},
		"a rate below zero": {
			body: `{"host": "192.0.2.7", "capacity_bits_per_second": -1}`,
			code: 400, says: "capacity_bits_per_second is -1",
		},
		"the second of two": {
			body: `[{"host": "192.0.2.7"}, {"host": "192.0.2.7", "flows": -1}]`,
			code: 400, says: "hint 2 of 2: flows is -1",
		},
		"a rate beyond measure": {
			body: `{"host": "192.0.2.7", "link_rate_bits_per_second": 1e300}`,
			code: 400, says: "from 0 to",
		},
		"a share above all": {
			body: `{"host": "192.0.2.7", "share": 1.5}`, code: 400,
			says: "share is 1.5",
		},
		"from the future": {
			body: `{"host": "192.0.2.7", "age_ms": -5}`, code: 400,
			says: "age_ms is -5",
		},
		"from long ago": {
			body: `{"host": "192.0.2.7", "age_ms": 60001}`, code: 400,
			says: "age_ms",
		},
		"a word for a number": {
			body: `{"host": "192.0.2.7", "flows": "many"}`, code: 400,
			says: "read the hint",
		},
		"no JSON":          {body: `capacity=1`, code: 400, says: "read the hint"},
		"nothing":          {body: ``, code: 400, says: "read the hint"},
		"two of them":      {body: `{"host": "192.0.2.7"} {}`, code: 400, says: "something follows"},
		"two lists":        {body: `[] []`, code: 400, says: "something follows"},
		"half a list":      {body: `[{"host": "192.0.2.7"}`, code: 400, says: "read the hint"},
		"a list in a list": {body: `[[{"host": "192.0.2.7"}]]`, code: 400, says: "read the hint"},
		"too many": {body: "[" + strings.Repeat(`{"host":"::1"},`,
			maxHints) + `{"host":"::1"}]`, code: 413, says: "at most 256 hints"},
		"too long": {
			body: `{"host": "` + strings.Repeat("x", maxHintBytes) + `"}`,
			code: 413, says: "at most 65536 bytes",
		},
		"too long, with white space after the end": {body: `{"host": "192.0.2.7"}` + strings.Repeat(" ",
			maxHintBytes), code: 413},
		"too long, with white space before the start": {body: strings.Repeat(" ",
			maxHintBytes) + `{"host": "192.0.2.7"}`, code: 413},
	} {
		t.Run(name, func(t *testing.T) {
			e := &recorder{}
			p, _ := hintPages(e)
			header := map[string]string{}
			if c.kind != "" {
				header["Content-Type"] = c.kind
			}
			rec := post(p, !c.remote, header, c.body)
			assert.Equal(t, c.code, rec.Code, rec.Body)
			assert.Contains(t, rec.Body.String(), c.says)
			assert.Empty(t, e.about, "none of it is passed on")
			want := HintInvalid
			if c.remote {
				want = HintRefused
			}
			assert.EqualValues(t, 1, p.Hints.Outcomes()[want])
		})
	}
}

func TestHintsAreNotTakenFromWebPages(t *testing.T) {
	const token = "0123456789abcdef"
	for name, c := range map[string]struct {
		header map[string]string
		code   int
	}{
		"another page":                   {map[string]string{"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"}, 403},
		"another page, in old browsers":  {map[string]string{"Origin": "http://evil.example"}, 403},
		"a page without a name":          {map[string]string{"Origin": "null"}, 403},
		"one of the same site":           {map[string]string{"Sec-Fetch-Site": "same-site"}, 403},
		"our own, which has none to say": {map[string]string{"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "same-origin"}, 403},
		"no page":                        {map[string]string{}, 200},
		"a person in the address bar":    {map[string]string{"Sec-Fetch-Site": "none"}, 200},
	} {
		for _, secret := range []string{"", token} {
			e := &recorder{n: 1}
			p, _ := hintPages(e)
			p.Hints.SetToken(secret)
			header := map[string]string{"Authorization": "Bearer " + secret}
			maps.Copy(header, c.header)
			rec := post(p, true, header, `{"host": "192.0.2.7"}`)
			assert.Equal(t, c.code, rec.Code, "%s, with the token %q", name, secret)
			assert.Equal(t, c.code == 200, len(e.about) == 1, name)
			if c.code == 403 {
				assert.EqualValues(t, 1, p.Hints.Outcomes()[HintRefused])
			}
		}
	}
}

func TestATokenIsWantedOverTCP(t *testing.T) {
	const token = "0123456789abcdef"
	for name, c := range map[string]struct {
		header string
		code   int
	}{
		"the token":               {"Bearer " + token, 200},
		"the scheme as one likes": {"bearer  " + token, 200},
		"none":                    {"", 401},
		"another":                 {"Bearer 0123456789abcdeF", 401},
		"the beginning":           {"Bearer 0123456789abcde", 401},
		"more than that":          {"Bearer " + token + "0", 401},
		"an empty one":            {"Bearer ", 401},
		"as a password":           {"Basic " + token, 401},
		"the token alone":         {token, 401},
	} {
		for _, local := range []bool{true, false} {
			e := &recorder{n: 1}
			p, _ := hintPages(e)
			p.Hints.SetToken(token)
			rec := post(p, local, map[string]string{"Authorization": c.header}, `{"host": "192.0.2.7"}`)
			assert.Equal(t, c.code, rec.Code, "%s, local %v", name, local)
			assert.Equal(t, c.code == 200, len(e.about) == 1)
			if c.code == 401 {
				assert.Equal(t, "Bearer", rec.Header().Get("WWW-Authenticate"))
				assert.NotContains(t, rec.Body.String(), token)
				assert.EqualValues(t, 1, p.Hints.Outcomes()[HintRefused])
			}
		}
	}
}

func TestAnotherTokenHoldsAtOnce(t *testing.T) {
	p, _ := hintPages(&recorder{})
	try := func(token string) int {
		return post(p, true, map[string]string{"Authorization": "Bearer " + token}, `{"host": "192.0.2.7"}`).Code
	}
	p.Hints.SetToken("first-0123456789")
	assert.Equal(t, 200, try("first-0123456789"))
	p.Hints.SetToken("second-0123456789")
	assert.Equal(t, 401, try("first-0123456789"))
	assert.Equal(t, 200, try("second-0123456789"))
	p.Hints.SetToken("")
	assert.Equal(t, 200, try(""), "none is wanted any more on loopback")
	assert.Equal(t, 403, post(p, false, nil, `{"host": "192.0.2.7"}`).Code)
}

func TestHintsAreTakenAtABoundedRate(t *testing.T) {
	e := &recorder{n: 1}
	p, clock := hintPages(e)
	hints := func(n int) *httptest.ResponseRecorder {
		return post(p, true, nil, "["+strings.TrimSuffix(strings.Repeat(`{"host":"::1"},`, n), ",")+"]")
	}
	for range 3 {
		require.Equal(t, 200, hints(250).Code)
	}
	require.Equal(t, 200, hints(249).Code)
	rec := hints(2)
	require.Equal(t, 429, rec.Code, "all of a request or none")
	assert.Equal(t, "1", rec.Header().Get("Retry-After"))
	assert.Contains(t, rec.Body.String(), "at most 1000 hints a second")
	require.Equal(t, 200, hints(1).Code)
	clock.t = clock.t.Add(100 * time.Millisecond)
	assert.Equal(t, 429, hints(101).Code)
	assert.Equal(t, 200, hints(100).Code)
	clock.t = clock.t.Add(time.Hour)
	for range 4 {
		require.Equal(t, 200, hints(250).Code)
	}
	assert.Equal(t, 429, hints(1).Code, "an hour of silence saves up no more than a second of silence")
	assert.Len(t, e.about, 2100)
	assert.EqualValues(t, 2100, p.Hints.Outcomes()[HintHeard])
	assert.EqualValues(t, 2+101+1, p.Hints.Outcomes()[HintTooOften])
}

func TestWithoutATakerThereIsNoPageForHints(t *testing.T) {
	assert.NotEqual(t, http.StatusOK, post(pages(busyProxy()), true, nil, `{"host": "192.0.2.7"}`).Code)
}

// Whatever is sent: hints within their bounds, or one line that says what is wrong.
func FuzzReadHints(f *testing.F) {
	f.Add([]byte(`{"host": "192.0.2.7", "age_ms": 3, "capacity_bits_per_second": 12e6}`))
	f.Add([]byte(` [{"prefix": "2001:db8::/32", "share": 0.5}, {"host": "::1", "flows": 2}]`))
	f.Add([]byte(`[[]]`))
	f.Fuzz(func(t *testing.T, body []byte) {
		hints, err := readHints(bytes.NewReader(body))
		if err != nil {
			assert.Empty(t, hints)
			return
		}
		assert.LessOrEqual(t, len(hints), maxHints)
		const now = cc.Time(time.Hour)
		for _, h := range hints {
			about, err := h.checkHint()
			if err != nil {
				assert.NotContains(t, err.Error(), "\n")
				continue
			}
			assert.True(t, about.IsValid() && about == about.Masked() && !about.Addr().Is4In6() &&
				about.Addr().Zone() == "", "%v", about)
			got := h.hintAt(now)
			assert.True(t, got.At <= now && got.At >= now.Add(-maxHintAge), "%v", got.At)
			assert.True(t, min(got.Capacity, got.FairShare, got.LinkRate, got.ArrivalRate) >= 0 &&
				min(got.QueueRoom, got.RadioLost) >= 0 && got.Flows >= 0, "%+v", got)
			assert.True(t, got.Share >= 0 && got.Share <= 1)
		}
	})
}

package telemetry

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
)

func TestAReloadIsAskedForAndAnswered(t *testing.T) {
	for name, c := range map[string]struct {
		method string
		remote bool // not on loopback
		header map[string]string
		err    error
		code   int
		says   string
		asked  int
	}{
		"that works": {code: 200, says: "reloaded: 3", asked: 1},
		"with a mistake in the file": {
			err: errors.New("penstock.yaml:3:1: frob"), code: 422,
			says: "penstock.yaml:3:1: frob", asked: 1,
		},
		"without a file":           {err: ErrNoFile, code: 400, says: "without --config", asked: 1},
		"by reading":               {method: http.MethodGet, code: 405},
		"from beyond this machine": {remote: true, code: 403, says: "from this machine only"},
		"by a page in a browser": {
			header: map[string]string{"Origin": "http://evil.example"}, code: 403,
			says: "web pages",
		},
		"by a page that hides its name": {
			header: map[string]string{"Sec-Fetch-Site": "cross-site"}, code: 403,
			says: "web pages",
		},
		"by a person in the address bar": {header: map[string]string{"Sec-Fetch-Site": "none"}, code: 200, asked: 1},
	} {
		t.Run(name, func(t *testing.T) {
			asked := 0
			p := pages(busyProxy())
			p.Reload = func() (string, error) {
				asked++
				return "reloaded: 3", c.err
			}
			if c.method == "" {
				c.method = http.MethodPost
			}
			req := httptest.NewRequest(c.method, "/-/reload", nil)
			req.Host = "127.0.0.1"
			if !c.remote {
				req = arriving(req, "127.0.0.1:4000", "127.0.0.1:9464")
			}
			for k, v := range c.header {
				req.Header.Set(k, v)
			}
			rec := httptest.NewRecorder()
			p.Handler(false).ServeHTTP(rec, req)
			assert.Equal(t, c.code, rec.Code, rec.Body)
			assert.Contains(t, rec.Body.String(), c.says)
			assert.Equal(t, c.asked, asked)
		})
	}
}

// arriving is req as it comes from one address to another.
func arriving(req *http.Request, from, to string) *http.Request {
	req.RemoteAddr = from
	own := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(to))
	return req.WithContext(context.WithValue(req.Context(), http.LocalAddrContextKey, own))
}

// A client that the proxy relays to its own pages comes from an address of this machine.
func TestAClientOfTheProxyIsNotThisMachine(t *testing.T) {
	e := &recorder{}
	p, _ := hintPages(e)
	p.Reload = func() (string, error) { return "reloaded", nil }
	relayed := netip.MustParseAddrPort("127.0.0.1:4001")
	p.Dialled = func(from, to netip.AddrPort) bool {
		return from == relayed && to == netip.MustParseAddrPort("127.0.0.1:9464")
	}
	for from, code := range map[string]int{"127.0.0.1:4000": 200, relayed.String(): 403} {
		for path, body := range map[string]string{"/-/reload": "", "/v1/hints": `{"host": "192.0.2.7"}`} {
			req := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
			req.Host = "127.0.0.1:9464"
			req.Header.Set("Content-Type", "application/json")
			rec := httptest.NewRecorder()
			p.Handler(true).ServeHTTP(rec, arriving(req, from, "127.0.0.1:9464"))
			assert.Equal(t, code, rec.Code, "%s from %s: %s", path, from, rec.Body)
		}
	}
	assert.Len(t, e.hints, 1)
}

// A listener that everybody reaches takes reloads from this machine alone.
func TestAReloadIsTakenFromThisMachine(t *testing.T) {
	for name, c := range map[string]struct {
		from, own, host string
		code            int
	}{
		"from loopback":             {"127.0.0.1:4000", "127.0.0.1:9464", "127.0.0.1:9464", 200},
		"from loopback by IPv6":     {"[::1]:4000", "[::1]:9464", "localhost:9464", 200},
		"from our own address":      {"192.0.2.1:4000", "192.0.2.1:9464", "192.0.2.1:9464", 200},
		"from another machine":      {"192.0.2.7:4000", "192.0.2.1:9464", "192.0.2.1:9464", 403},
		"by a name of somebody's":   {"127.0.0.1:4000", "127.0.0.1:9464", "evil.example:9464", 403},
		"from who does not say who": {"", "192.0.2.1:9464", "192.0.2.1:9464", 403},
	} {
		t.Run(name, func(t *testing.T) {
			p := pages(busyProxy())
			p.Reload = func() (string, error) { return "reloaded", nil }
			req := httptest.NewRequest(http.MethodPost, "/-/reload", nil)
			req.Host = c.host
			req = arriving(req, c.from, c.own)
			rec := httptest.NewRecorder()
			p.Handler(false).ServeHTTP(rec, req)
			assert.Equal(t, c.code, rec.Code, rec.Body)
		})
	}
}

package telemetry

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
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
			for k, v := range c.header {
				req.Header.Set(k, v)
			}
			rec := httptest.NewRecorder()
			p.Handler(!c.remote).ServeHTTP(rec, req)
			assert.Equal(t, c.code, rec.Code, rec.Body)
			assert.Contains(t, rec.Body.String(), c.says)
			assert.Equal(t, c.asked, asked)
		})
	}
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
			req.Host, req.RemoteAddr = c.host, c.from
			own := net.TCPAddrFromAddrPort(netip.MustParseAddrPort(c.own))
			req = req.WithContext(context.WithValue(req.Context(), http.LocalAddrContextKey, own))
			rec := httptest.NewRecorder()
			p.Handler(false).ServeHTTP(rec, req)
			assert.Equal(t, c.code, rec.Code, rec.Body)
		})
	}
}

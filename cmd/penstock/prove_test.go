package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/internal/cli"
)

// A proof that saw nothing names where to look for the host, whose address may be misspelt.
func TestAProofOfAHostThatIsNotThereSaysSo(t *testing.T) {
	for busy, noted := range map[string]bool{"0": true, "3": false} {
		proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `{"host": "phnoe", "ended": true, "result": {"first": {"busy_seconds": `+busy+`}}}`)
		}))
		at := strings.TrimPrefix(proxy.URL, "http://")
		code, _, stderr := run(t, "prove", "--host", "phnoe", "--telemetry", at)
		proxy.Close()
		assert.Equal(t, cli.ExitOK, code, stderr)
		assert.Equal(t, noted, strings.Contains(stderr, "no new connection of phnoe was busy; penstock top shows"), stderr)
	}
}

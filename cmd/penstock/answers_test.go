package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
)

// Whoever has the port of a proxy that does not run may answer in its place.
func TestAnswersOfOthersDoNothingToATerminal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(path, []byte(runConfig), 0o600))
	answer := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("\x1b[2Jready")) })
	other := httptest.NewServer(answer)
	defer other.Close()
	at := strings.TrimPrefix(other.URL, "http://")
	for _, command := range []string{"ready", "reload"} {
		code, out, _ := run(t, command, "--config", path, "--telemetry", at)
		assert.Equal(t, cli.ExitOK, code)
		assert.Equal(t, `\x1b[2Jready`+"\n", out, command)
	}
}

func TestAListOfPeersDoesNothingToATerminalEither(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	for name, other := range map[string]http.HandlerFunc{
		"a peer": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `[{"listener": "vpn", "name": "tablet", "endpoint": "\u001b[2Jhere"}]`)
		},
		"a refusal": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "\x1b[2Jhere", http.StatusTeapot) },
	} {
		t.Run(name, func(t *testing.T) {
			proxy := httptest.NewServer(other)
			defer proxy.Close()
			_, out, notes := run(t, "gateway", "peer", "list", "--config", path, "--telemetry",
				strings.TrimPrefix(proxy.URL, "http://"))
			assert.Contains(t, out+notes, `\x1b[2Jhere`)
			assert.NotContains(t, out+notes, "\x1b")
		})
	}
}

func TestAnAnswerThatBreaksOffSaysWhose(t *testing.T) {
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "100")
	}))
	defer other.Close()
	at := strings.TrimPrefix(other.URL, "http://")
	code, _, complaint := run(t, "ready", "--telemetry", at)
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, complaint, "read what "+at+" answers: unexpected EOF")
}

// A script whose variable is not set does not mean the built-in configuration.
func TestTheNameOfAFileIsNotEmpty(t *testing.T) {
	for _, args := range [][]string{{"check", ""}, {"run", "--config", ""}} {
		code, _, complaint := run(t, args...)
		assert.Equal(t, cli.ExitInput, code, args)
		assert.Contains(t, complaint, "the name of the configuration file is empty", args)
	}
}

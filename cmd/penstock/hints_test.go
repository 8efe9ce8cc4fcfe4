package main

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/logqueue"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

// hint posts a hint, to the socket at path or, where that is empty, to the pages.
func (in *instance) hint(socket, token string) int {
	in.t.Helper()
	metrics, ok := in.log.line(in.t, "telemetry")["metrics"].(string)
	require.True(in.t, ok)
	transport := &http.Transport{DisableKeepAlives: true}
	if socket != "" {
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}
	}
	req, err := http.NewRequestWithContext(in.t.Context(), http.MethodPost,
		strings.TrimSuffix(metrics, "/metrics")+"/v1/hints",
		strings.NewReader(`[{"host": "127.0.0.1", "link_rate_bits_per_second": 5e9}]`))
	require.NoError(in.t, err)
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := (&http.Client{Transport: transport}).Do(req)
	require.NoError(in.t, err)
	require.NoError(in.t, resp.Body.Close())
	return resp.StatusCode
}

func TestHintsComeWithATokenOrThroughTheSocket(t *testing.T) {
	dir := t.TempDir()
	token, socket := filepath.Join(dir, "token"), filepath.Join(dir, "hints.sock")
	write := func(text string) { require.NoError(t, os.WriteFile(token, []byte(text+"\n"), 0o600)) }
	write("first-0123456789")
	in := startRun(t, strings.Replace(runConfig, `address: "127.0.0.1:0"}`+"\n",
		`address: "127.0.0.1:0", hints: {socket: `+socket+`, token_file: `+token+"}}\n", 1)+
		"defaults: {algorithm: nacc}\n")
	assert.Equal(t, socket, in.log.line(t, "taking hints")["socket"])
	conn := in.connect()
	echoes(t, conn)

	assert.Equal(t, http.StatusUnauthorized, in.hint("", ""))
	assert.Equal(t, http.StatusOK, in.hint("", "first-0123456789"))
	assert.Equal(t, http.StatusOK, in.hint(socket, ""), "its mode decides")
	_, hosts := in.get("/hosts")
	assert.Contains(t, hosts, `"hosts":["127.0.0.1"]`)
	assert.Contains(t, hosts, `"link_rate_bits_per_second":5000000000`)
	_, metrics := in.get("/metrics")
	for _, line := range []string{
		`penstock_hints_total{result="heard"} 2`,
		`penstock_hints_total{result="unauthorized"} 1`,
		`penstock_groups{algorithm="nacc",state="used"} 2`,
	} {
		assert.Contains(t, metrics, line)
	}

	write("second-0123456789")
	code, body := in.post("/-/reload")
	require.Equal(t, http.StatusOK, code, body)
	assert.Equal(t, http.StatusUnauthorized, in.hint("", "first-0123456789"))
	assert.Equal(t, http.StatusOK, in.hint("", "second-0123456789"))
	write("short")
	code, body = in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, body, "telemetry.hints.token_file: a token is 16 to 255")
	assert.Equal(t, http.StatusOK, in.hint("", "second-0123456789"), "the one before is in force")
	assert.NotContains(t, in.log.String(), "0123456789", "a secret is not logged")

	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
	assert.NoFileExists(t, socket)
}

// What a driver and the neighbour table print, of a station that is this machine.
const (
	ipNeigh = `127.0.0.1 lladdr 02:00:00:00:00:07 REACHABLE
192.0.2.9  FAILED
192.0.2.8 lladdr 02:00:00:00:00:08 router STALE
`
	iwStations = `Station 02:00:00:00:00:07 (on wlan0)
	inactive time:	304 ms
	tx bitrate:	866.7 MBit/s VHT-MCS 9 80MHz short GI VHT-NSS 2
	expected throughput:	4321.5Mbps
Station 02:00:00:00:00:08 (on wlan0)
	expected throughput:	32.0Mbps
`
)

func TestTheAgentOfTheHintsPageWorks(t *testing.T) {
	need.Programs(t, "sh", "awk", "curl", "sleep")
	block := regexp.MustCompile("(?s)```sh\n(.*?)```").FindStringSubmatch(clitest.Doc(t, "hints.md"))
	require.NotNil(t, block)
	dir := t.TempDir()
	for name, prints := range map[string]string{"ip": ipNeigh, "iw": iwStations} {
		script := "#!/bin/sh\ncat <<'END'\n" + prints + "END\n"
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
	}
	socket := filepath.Join(dir, "hints.sock")
	in := startRun(t, strings.Replace(runConfig, `"127.0.0.1:0"}`+"\n",
		`"127.0.0.1:0", hints: {socket: `+socket+"}}\n", 1)+"defaults: {algorithm: cubic}\n")
	conn := in.connect()
	echoesMuch(t, conn)

	agent := exec.Command("sh", "-c", block[1], "hints.sh", "wlan0", "--unix-socket", socket,
		"http://penstock/v1/hints")
	agent.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	agent.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, agent.Start())
	assert.Eventually(t, func() bool {
		_, hosts := in.get("/hosts")
		return strings.Count(hosts, `"capacity_bits_per_second":4321500000`) == 2 // down and up
	}, 30*time.Second, 20*time.Millisecond)
	require.NoError(t, syscall.Kill(-agent.Process.Pid, syscall.SIGKILL)) // and what it waits for
	assert.Error(t, agent.Wait())
	_, metrics := in.get("/metrics")
	assert.Contains(t, metrics, `penstock_hints_total{result="invalid"} 0`)

	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}

func TestTheExamplesOfTheHintsPageAreUnderstood(t *testing.T) {
	page := clitest.Doc(t, "hints.md")
	example := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(page)
	require.NotNil(t, example)
	_, err := config.Parse([]byte(example[1]))
	assert.NoError(t, err)

	receiver := &telemetry.HintReceiver{Pass: func(netip.Prefix, cc.Hint) int { return 1 }, Clock: monotonicTime}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- receiver.Serve(ctx, ln) }()
	bodies := regexp.MustCompile(`(?s) -d '(.*?)'`).FindAllStringSubmatch(page, -1)
	require.Len(t, bodies, 3)
	for _, body := range bodies {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Post("http://"+ln.Addr().String()+"/v1/hints", "application/json",
			strings.NewReader(body[1]))
		require.NoError(t, err)
		assert.Equal(t, http.StatusOK, resp.StatusCode, body[1])
		require.NoError(t, resp.Body.Close())
	}
	cancel()
	assert.NoError(t, <-served)
}

func TestASocketThatCannotBeMadeIsNamed(t *testing.T) {
	var log journal
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	socket := filepath.Join(t.TempDir(), "absent", "hints.sock")
	require.NoError(t, os.WriteFile(path, []byte(strings.Replace(runConfig, `address: "127.0.0.1:0"}`+"\n",
		`address: "127.0.0.1:0", hints: {socket: `+socket+"}}\n", 1)), 0o600))
	code := runCommandLine(t.Context(), []string{"run", "--keep-privileges", "--config", path}, &log, &log)
	assert.Equal(t, cli.ExitFail, code)
	assert.Contains(t, log.String(), "telemetry.hints.socket: telemetry: there is no directory "+filepath.Dir(socket))
}

func TestReportsDoNotWaitForWhoReadsTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nobody, end := io.Pipe()
		h := &service{log: newLogger(&logqueue.Writer{To: end}, "json", slog.LevelInfo)}
		h.hintNews(flow.HintNews{Doubt: flow.HintTooLow})
		assert.NoError(t, nobody.Close())
	})
}

package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/need"
)

// vacantPort returns an address of this machine that nothing listens at.
func vacantPort(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

// echoServer answers with what it gets.
func echoServer(t *testing.T) (address string) {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	need.Serve(t, ln, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })
	return ln.Addr().String()
}

// exchange sends words to an echo server and reads them again.
func exchange(conn net.Conn, words string) error {
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(conn, words); err != nil {
		return err
	}
	got := make([]byte, len(words))
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if string(got) != words {
		return fmt.Errorf("%q came back for %q", got, words)
	}
	return nil
}

// TestUpgradesRefuseNobody has each process take over from the one before it, while clients connect. One connection
// moves along.
func TestUpgradesRefuseNobody(t *testing.T) {
	const upgrades = 10
	at, pages, hints := vacantPort(t), vacantPort(t), filepath.Join(t.TempDir(), "hints")
	config := fmt.Sprintf("listeners: [{name: local, mode: forward, target: %q, address: %q}]\n"+
		"telemetry: {address: %q, hints: {socket: %q}}\nshutdown: {drain: 0s}\n", echoServer(t), at, pages, hints)
	state := t.TempDir()
	all := []*instance{startRun(t, config, "--state-directory", state, "--takeover")}
	all[0].log.has(t, "no proxy runs that could be taken over")
	defer func() {
		for i, in := range all {
			if t.Failed() {
				t.Logf("process %d: %s", i, &in.log)
			}
		}
	}()
	held, err := net.Dial("tcp4", at)
	require.NoError(t, err)
	require.NoError(t, exchange(held, "before"))

	var made atomic.Int64
	over := make(chan struct{})
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
				}
				conn, err := net.Dial("tcp4", at)
				if assert.NoError(t, err) {
					assert.NoError(t, exchange(conn, fmt.Sprintf("%d of client %d", made.Add(1), i)))
					_ = conn.Close()
				}
			}
		})
	}
	for i := range upgrades {
		before := made.Load()
		all = append(all, startRun(t, config, "--state-directory", state, "--takeover"))
		all[i].log.has(t, "another process has taken over")
		require.Equal(t, cli.ExitOK, all[i].ends(), "its last connection has moved or ended: %s", &all[i].log)
		require.NoError(t, exchange(held, fmt.Sprintf("process %d", i+1)))
		require.Eventually(t, func() bool { return made.Load() > before+50 }, time.Minute, time.Millisecond)
	}
	close(over)
	clients.Wait()
	t.Logf("%d connections over %d upgrades", made.Load(), upgrades)

	metrics := scrape(t, "http://"+pages+"/metrics")
	assert.Contains(t, metrics, "penstock_predecessor_connections 0\n")
	assert.Regexp(t, `penstock_connections_taken_over_total [1-9]`, metrics)
	sender, err := net.Dial("unix", hints)
	require.NoError(t, err, "the last process listens for hints")
	require.NoError(t, sender.Close())
	require.NoError(t, held.Close())
	all[upgrades].signal()
	assert.Equal(t, cli.ExitOK, all[upgrades].ends())
}

// TestWhatDrainsIsShown has the old process keep a client that does not say where it wants to go, until its drain
// ends.
func TestWhatDrainsIsShown(t *testing.T) {
	at, waits, pages := vacantPort(t), vacantPort(t), vacantPort(t)
	config := fmt.Sprintf("listeners: [{name: local, mode: forward, target: %q, address: %q}, "+
		"{name: waits, mode: socks5, address: %q}]\ntelemetry: {address: %q}\nlimits: {handshake_timeout: 1m}\n"+
		"shutdown: {drain: 4s}\n", echoServer(t), at, waits, pages)
	state := t.TempDir()
	old := startRun(t, config, "--state-directory", state)
	moving, err := net.Dial("tcp4", at)
	require.NoError(t, err)
	defer moving.Close()
	require.NoError(t, exchange(moving, "before"))
	waiting, err := net.Dial("tcp4", waits)
	require.NoError(t, err)
	defer waiting.Close()

	next := startRun(t, config, "--state-directory", state, "--takeover")
	assert.Equal(t, "4s", old.log.line(t, "draining: no new connections")["for_at_most"])
	moved := old.log.line(t, "connections have moved to the process that has taken over")
	assert.EqualValues(t, 1, moved["moved"])
	assert.EqualValues(t, 1, moved["stay_in_setup"])
	assert.Eventually(t, func() bool {
		metrics := scrape(t, "http://"+pages+"/metrics")
		return regexp.MustCompile(`penstock_predecessor_drain_seconds ([123]\.\d|0\.\d)`).MatchString(metrics) &&
			strings.Contains(metrics, "penstock_predecessor_connections 1\n") &&
			strings.Contains(metrics, "penstock_connections_taken_over_total 1\n")
	}, 3*time.Second, 10*time.Millisecond, "metrics say it")
	assert.Regexp(t, `"drain":"process \d+, which this one took over from, drains 1 connection for [1-4]s at most"`,
		scrape(t, "http://"+pages+"/v1/view"))
	old.log.has(t, "drain is over: resetting what is left")
	assert.Equal(t, cli.ExitOK, old.ends())
	assert.Eventually(t, func() bool {
		return !strings.Contains(scrape(t, "http://"+pages+"/v1/view"), "took over from")
	}, 10*time.Second, 100*time.Millisecond, "the page forgets it")
	require.NoError(t, exchange(moving, "after"))
	require.NoError(t, moving.Close())
	next.signal()
	assert.Equal(t, cli.ExitOK, next.ends())
}

// scrape returns what an address answers.
func scrape(t *testing.T, url string) string {
	t.Helper()
	answer, err := http.Get(url) //nolint:gosec,noctx // of this test's own proxy
	require.NoError(t, err)
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	return string(text)
}

// TestATakeoverThatFailsChangesNothing has the new process fail once it has the sockets.
func TestATakeoverThatFailsChangesNothing(t *testing.T) {
	at, state := vacantPort(t), t.TempDir()
	config := fmt.Sprintf("listeners: [{name: local, mode: forward, target: %q, address: %q}]\n"+
		"telemetry: {address: \"off\"}\nshutdown: {drain: 0s}\n", echoServer(t), at)
	old := startRun(t, config, "--state-directory", state)
	taken, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	next := fmt.Sprintf("listeners: [{name: local, mode: forward, target: \"127.0.0.1:1\", address: %q},"+
		"{name: more, mode: connect, address: %q}]\ntelemetry: {address: \"off\"}\n", at, taken.Addr())
	file := filepath.Join(state, "next.yaml")
	require.NoError(t, os.WriteFile(file, []byte(next), 0o600))
	code, _, words := run(t, "run", "--keep-privileges", "--config", file, "--state-directory", state, "--takeover")
	assert.Equal(t, cli.ExitFail, code, words)
	assert.Contains(t, words, "is in use")
	old.log.has(t, "a process asked to take over and did not; this one goes on")
	conn, err := net.Dial("tcp4", at)
	require.NoError(t, err)
	require.NoError(t, exchange(conn, "as before"))
	require.NoError(t, conn.Close())

	code, _, words = run(t, "run", "--keep-privileges", "--config", file, "--takeover")
	assert.Equal(t, cli.ExitInput, code, words)
	assert.Contains(t, words, "--takeover needs --state-directory")
	old.signal()
	assert.Equal(t, cli.ExitOK, old.ends())
}

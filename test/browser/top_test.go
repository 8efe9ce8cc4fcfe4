//go:build linux

package browser

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// terminal is tmux with one window.
type terminal struct {
	t      *testing.T
	socket string
}

// openTerminal runs a command in a terminal of its own.
func openTerminal(t *testing.T, command string) *terminal {
	t.Helper()
	need.Programs(t, "tmux")
	s := &terminal{t, filepath.Join(t.TempDir(), "tmux")}
	s.run("-f", "/dev/null", "new-session", "-d", "-x", "150", "-y", "20", command+`; echo "ended with $?"; cat`)
	t.Cleanup(func() { _ = exec.Command("tmux", "-S", s.socket, "kill-server").Run() })
	return s
}

func (s *terminal) run(args ...string) string {
	s.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-S", s.socket}, args...)...).CombinedOutput()
	require.NoError(s.t, err, "%s", out)
	return string(out)
}

func (s *terminal) keys(keys ...string) {
	s.t.Helper()
	s.run(append([]string{"send-keys"}, keys...)...)
}

// until waits until the screen is so, and returns it.
func (s *terminal) until(what string, is func(screen string) bool) string {
	s.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		screen := s.run("capture-pane", "-p")
		if is(screen) {
			return screen
		}
		if time.Now().After(deadline) {
			require.Fail(s.t, "the screen never shows "+what, "%s", screen)
		}
	}
}

func has(words ...string) func(string) bool {
	return func(screen string) bool {
		for _, w := range words {
			if !strings.Contains(screen, w) {
				return false
			}
		}
		return true
	}
}

func TestTop(t *testing.T) {
	program := build(t)
	at, _ := serve(t, &busy{n: many}, nil)
	at = strings.TrimPrefix(at, "http://")

	out, err := exec.Command(program, "top", "--once", "--telemetry", at, "--search", "10.7.0.9:").Output()
	require.NoError(t, err)
	assert.Equal(t, 3, strings.Count(string(out), "\n"), "a summary, a head and one flow:\n%s", out)
	assert.Contains(t, string(out), "server8.example:443")

	s := openTerminal(t, fmt.Sprintf("%s top --telemetry %s", program, at))
	s.until("the flows", has("penstock v1.2.3", "10000 connections", "flows: 10000 of 10000", "DOWN ▼", "HELD BACK BY"))
	s.until("rates", func(screen string) bool { return strings.Contains(strings.Split(screen, "\n")[2], "Mbit/s") })
	s.keys("s", "s", "r") // by queue, the least first
	s.until("them by queue", func(screen string) bool {
		return strings.Contains(screen, "QUEUE ▲") && strings.Contains(strings.Split(screen, "\n")[2], " 5.0 ms")
	})
	s.keys("End")
	s.until("the last rows", func(screen string) bool { return strings.Count(screen, "64.0 ms") > 10 })
	s.keys("/")
	s.until("the search", has("search:"))
	s.keys("-l", "<img")
	s.keys("Enter")
	s.until("what was searched", has("flows: 1 of 10000", "<img src=x"))
	s.keys("Tab")
	s.until("hosts", has("hosts: 250 of 250", "\n10.7.0.40 ", "HOW IT DOES ▼"))
	s.run("resize-window", "-x", "80", "-y", "20")
	s.until("the reason in 80 columns", func(screen string) bool {
		line := strings.TrimRight(strings.Split(screen, "\n")[2], " ")
		return has("fills its link", "bit/s", "44.0 ms")(line) && len(line) <= 80 && !strings.Contains(screen, "ALGORITHM")
	})
	s.run("resize-window", "-x", "150", "-y", "20")
	s.keys("Tab")
	s.until("peers", has("peers: 2 of 2", "phone", "198.51.100.9:4000", "tablet", "never heard from"))
	s.keys("p")
	s.until("that it pauses", has("paused"))
	s.keys("q")
	s.until("its end", has("ended with 0"))
}

func TestTopOfAProxyThatComesLater(t *testing.T) {
	dir := t.TempDir()
	program := build(t)
	at := need.Host() + ":7483"
	out, err := exec.Command(program, "top", "--once", "--telemetry", at).CombinedOutput()
	assert.Error(t, err)
	assert.Contains(t, string(out), "no proxy answers at "+at)

	config := filepath.Join(dir, "penstock.yaml")
	require.NoError(t, os.WriteFile(config, []byte("listeners: [{name: front, mode: mixed, address: '"+need.Host()+
		":7484'}]\ntelemetry: {address: '"+at+"'}\n"), 0o600))
	s := openTerminal(t, fmt.Sprintf("%s top --config %s", program, config))
	s.until("why there is nothing", has("no proxy answers at"))
	startAt(t, program, config, at)
	s.until("the proxy", has("serving", "0 connections", "flows: 0 of 0"))
	s.keys("q")
	s.until("its end", has("ended with 0"))
}

// Whatever ends it, the shell has its terminal back as it was.
func TestTopLeavesTheTerminalAsItWas(t *testing.T) {
	program := build(t)
	at, _ := serve(t, &busy{n: 1}, nil)
	pid := filepath.Join(t.TempDir(), "pid")
	s := openTerminal(t, fmt.Sprintf("echo before; sh -c 'echo $$ >%s; exec %s top --telemetry %s'; stty -a", pid,
		program, strings.TrimPrefix(at, "http://")))
	s.until("the flows", has("flows: 1 of 1"))
	text, err := os.ReadFile(pid)
	require.NoError(t, err)
	top, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(top, syscall.SIGTERM))
	s.until("the shell's screen, with lines and echo", func(screen string) bool {
		return has("before", " icanon ", " echo ")(screen) && !has("flows: 1 of 1")(screen)
	})
}

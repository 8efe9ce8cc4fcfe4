//go:build linux

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/lab/record"
	"github.com/penstock-net/penstock/internal/need"
)

// shellProxy builds the proxy in shellPlace, which is removed after the tests.
var shellProxy = sync.OnceValues(func() (string, error) {
	var err error
	if shellPlace, err = os.MkdirTemp("", "penstock-shell-"); err != nil {
		return "", err
	}
	if err := os.Chmod(shellPlace, 0o755); err != nil { //nolint:gosec // run by another user
		return "", err
	}
	return labtest.Build(shellPlace)
})

var shellPlace string

// shell is a command line of shell over 12 Mbit/s, which runs in a session of its own: no terminal's keys reach it.
func shell(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root, or a user who may make user namespaces and open /dev/net/tun")
	}
	need.OverLink(t)
	need.TUN(t)
	proxy, err := shellProxy()
	require.NoError(t, err)
	cmd := clitest.Program(t.Context(), append([]string{"shell", "--penstock", proxy, "--link", "12mbit"}, args...)...)
	cmd.Dir = t.TempDir()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return cmd
}

// serveFile serves a file of 4 MB, and a page that shows it, at the machine's loopback.
func serveFile(t *testing.T) (content []byte, port string) {
	t.Helper()
	content = bytes.Repeat([]byte("penstock"), 4<<20/8)
	mux := http.NewServeMux()
	mux.HandleFunc("/file", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(content) })
	mux.HandleFunc("/page", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `<!DOCTYPE html><title>old</title><script>
			fetch("/file").then(r => r.text()).then(t => { document.title = "read " + t.length })</script>`)
	})
	s := httptest.NewUnstartedServer(mux)
	ln, err := net.Listen("tcp", "[::]:0")
	require.NoError(t, err)
	s.Listener = ln
	s.Start()
	t.Cleanup(s.Close)
	_, port, err = net.SplitHostPort(ln.Addr().String())
	require.NoError(t, err)
	return content, port
}

func TestAProgramDownloadsBehindTheLink(t *testing.T) {
	need.Programs(t, "curl")
	content, port := serveFile(t)
	for family, host := range map[string]string{"IPv4": "10.77.2.2", "IPv6": "[fd77:2::2]"} {
		t.Run(family, func(t *testing.T) {
			cmd := shell(t, "--edge", "none,penstock", "--record", "runs.jsonl", "--plot", "runs.png", "--pcap",
				"runs.pcap",
				"--", "curl", "-sg", "http://"+host+":"+port+"/file")
			var said bytes.Buffer
			cmd.Stderr = &said
			out, err := cmd.Output()
			require.NoError(t, err, said.String())
			assert.True(t, bytes.Equal(out, append(bytes.Clone(content), content...)),
				"the program's output, and no more")

			runs, err := record.Open(filepath.Join(cmd.Dir, "runs.jsonl"))
			require.NoError(t, err)
			require.Len(t, runs, 2)
			for i, name := range []string{"none", "penstock"} {
				r := runs[i]
				assert.Equal(t, [2]string{name, "curl"}, [2]string{r.Name, r.Program})
				assert.Contains(t, r.Path(), "12mbit both ways, 10 ms each way, buffer 2MB, curl")
				assert.InDelta(t, 4.2*8/12, r.Duration, 2, "seconds that 4 MB take on this link")
				rate := `1[01]\.`
				if r.Noisy { // a machine with other work hands packets over late
					rate = `\d`
				}
				assert.Regexp(t, `(?m)^`+name+` +1\*? +`+rate, said.String(), "a row of the summary")
				pcap, err := os.ReadFile(filepath.Join(cmd.Dir, "runs-"+name+".pcap"))
				require.NoError(t, err)
				assert.GreaterOrEqual(t, payloadOf(t, pcap), len(content))
			}
			assert.Less(t, runs[1].Queueing.P95, runs[0].Queueing.P95/2)
			assert.FileExists(t, filepath.Join(cmd.Dir, "runs.png"))
		})
	}
}

// payloadOf is how many bytes the packets of a file in the format pcap carry, less headers of 40 to 60 bytes.
func payloadOf(t *testing.T, pcap []byte) (sum int) {
	t.Helper()
	require.Equal(t, uint32(0xa1b23c4d), binary.NativeEndian.Uint32(pcap))
	for pcap = pcap[24:]; len(pcap) > 0; {
		kept, whole := binary.NativeEndian.Uint32(pcap[8:]), binary.NativeEndian.Uint32(pcap[12:])
		assert.Contains(t, []byte{4, 6}, pcap[16]>>4, "a packet begins with its IP header")
		sum += int(whole) - 40
		pcap = pcap[16+kept:]
	}
	return sum
}

func TestIPerf3BehindTheLink(t *testing.T) {
	need.Programs(t, "iperf3")
	port := fmt.Sprint(20000 + os.Getpid()%10000)
	server := exec.CommandContext(t.Context(), "iperf3", "-s", "-p", port)
	require.NoError(t, server.Start())
	t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	require.Eventually(t, func() bool {
		conn, err := net.Dial("tcp", "127.0.0.1:"+port)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}, 20*time.Second, 10*time.Millisecond)
	for name, row := range map[string]struct {
		edge string
		args []string
		rate float64 // Mbit/s, least
	}{
		"a download": {"penstock", []string{"-R"}, 10},
		"an upload":  {"none", nil, 10},
		"UDP down":   {"penstock", []string{"-R", "-u", "-b", "6M"}, 5.5},
		"UDP up":     {"none", []string{"-u", "-b", "6M"}, 5.5},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := shell(t, append([]string{
				"--edge", row.edge, "--record", "run.jsonl", "iperf3", "-c", "10.77.2.2", "-p", port, "-t", "4",
			}, row.args...)...)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			assert.Contains(t, string(out), "iperf Done.")
			runs, err := record.Open(filepath.Join(cmd.Dir, "run.jsonl"))
			require.NoError(t, err)
			if runs[0].Noisy { // a machine with other work hands packets over late
				row.rate = 0
			}
			assert.Greater(t, runs[0].Throughput, row.rate, "%s", out)
		})
	}
}

func TestABrowserBehindTheLink(t *testing.T) {
	need.Programs(t, "chromium")
	content, port := serveFile(t)
	cmd := shell(t, "--edge", "penstock", "--", "chromium", "--headless", "--no-sandbox", "--disable-gpu",
		"--user-data-dir="+t.TempDir(), "--virtual-time-budget=60000", "--dump-dom", "http://10.77.2.2:"+port+"/page")
	out, err := cmd.Output()
	require.NoError(t, err)
	assert.Contains(t, string(out), fmt.Sprintf("<title>read %d</title>", len(content)))
}

func TestAProgramsEndIsTheShells(t *testing.T) {
	for name, row := range map[string]struct {
		command []string
		signal  syscall.Signal // sent once the program has said something; 0: none
		code    int
		says    string
	}{
		"success":         {[]string{"true"}, 0, 0, "this machine's own servers: 10.77.2.2, [fd77:2::2]"},
		"an exit code":    {[]string{"sh", "-c", "exit 7"}, 0, 7, "12mbit both ways"},
		"by a signal":     {[]string{"sh", "-c", "kill -KILL $$"}, 0, 137, "12mbit both ways"},
		"no such program": {[]string{"/nosuch"}, 0, 1, "/nosuch: no such file"},
		"ended from beside": {
			[]string{"sh", "-c", "echo ready; exec sleep 60"}, syscall.SIGTERM, 143, "12mbit both ways",
		},
		"which it handles": {
			[]string{"sh", "-c", "trap 'exit 5' HUP; echo ready; while :; do sleep .1; done"},
			syscall.SIGHUP, 5,
			"12mbit",
		},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := shell(t, append([]string{"--"}, row.command...)...)
			var said bytes.Buffer
			cmd.Stderr = &said
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			if row.signal != 0 {
				_, err := out.Read(make([]byte, 1))
				require.NoError(t, err)
				require.NoError(t, cmd.Process.Signal(row.signal))
			}
			_, _ = io.Copy(io.Discard, out) // its end shows in the code
			_ = cmd.Wait()
			assert.Equal(t, row.code, cmd.ProcessState.ExitCode(), said.String())
			assert.Contains(t, said.String(), row.says)
		})
	}
}

// The terminal's Ctrl-C is the program's, and the terminal shows what passes.
func TestATerminalShowsWhatPasses(t *testing.T) {
	master, terminal := openTerminal(t)
	cmd := shell(t, "--edge", "penstock", "--", "sh", "-c",
		"trap 'echo interrupted; exit 5' INT; while :; do sleep .1; done")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, terminal, terminal
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	require.NoError(t, cmd.Start())
	require.NoError(t, terminal.Close())
	var shown bytes.Buffer
	sent := false
	buffer := make([]byte, 4096)
	for {
		n, err := master.Read(buffer)
		if err != nil { // the last process has closed its side
			break
		}
		shown.Write(buffer[:n])
		if !sent && strings.Contains(shown.String(), "penstock 2 s: down 0.00 Mbit/s, queueing 0/0 ms, up") {
			sent = true
			_, err := master.WriteString("\x03")
			require.NoError(t, err)
		}
	}
	_ = cmd.Wait()
	assert.Equal(t, 5, cmd.ProcessState.ExitCode(), shown.String())
	assert.Equal(t, 1, strings.Count(shown.String(), "interrupted\r\n"), shown.String())
}

// openTerminal returns both sides of a pseudo-terminal.
func openTerminal(t *testing.T) (master, terminal *os.File) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = master.Close() })
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	require.NoError(t, err)
	return master, terminal
}

// A user without rights gets the same where user namespaces are allowed, and the program runs as that user.
func TestAUserWithoutRightsHasAShell(t *testing.T) {
	need.Programs(t, "curl", "unshare", "setpriv")
	content, port := serveFile(t)
	cmd := shell(t, "--edge", "penstock", "--", "sh", "-c", "id -u; curl -s http://10.77.2.2:"+port+"/file")
	dir, err := os.MkdirTemp("", "penstock-user-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755)) //nolint:gosec // run by another user
	program, tun := filepath.Join(dir, "penstock-lab"), filepath.Join(dir, "tun")
	own, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, own, 0o755)) //nolint:gosec // run by another user
	require.NoError(t, unix.Mknod(tun, unix.S_IFCHR, int(unix.Mkdev(10, 200))))
	require.NoError(t, os.Chmod(tun, 0o666)) //nolint:gosec // as it is on most machines
	const asNobody = `mount --bind "$1" /dev/net/tun && shift &&
		exec setpriv --reuid 65534 --regid 65534 --clear-groups -- "$@"`
	args := append([]string{"-m", "sh", "-c", asNobody, "sh", tun, program}, cmd.Args[1:]...)
	user := exec.CommandContext(t.Context(), "unshare", args...)
	user.Env, user.Dir, user.SysProcAttr = cmd.Env, "/", cmd.SysProcAttr
	var said bytes.Buffer
	user.Stderr = &said
	out, err := user.Output()
	if err != nil && strings.Contains(said.String(), "a user namespace is needed") {
		t.Skip("users without rights get no namespaces here: ", said.String())
	}
	require.NoError(t, err, said.String())
	assert.True(t, bytes.Equal(append([]byte("65534\n"), content...), out), said.String())
}

func TestMistakesOfShell(t *testing.T) {
	assertRefused(t, "shell", map[string]string{
		"--edge copa@sim true":     "--edge copa@sim: a program needs an edge",
		"--edge nosuch true":       "--edge:",
		"--link fast true":         `--link: "fast"`,
		"--hold true":              "--hold: cubic has no proxy",
		"--record a --pcap a true": "a would be overwritten",
	})
}

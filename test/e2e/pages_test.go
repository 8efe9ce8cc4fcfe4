//go:build linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// leftOut are the commands of the pages that this test does not run, and why.
var leftOut = []struct {
	command *regexp.Regexp
	why     string
}{
	{regexp.MustCompile(`^make `), "it builds, or plays for minutes; the programs of this tree are in $PATH already"},
	{regexp.MustCompile(`^sudo install bin`), "it changes this machine"},
	{regexp.MustCompile(`^go mod init|^gomobile `), "it needs the SDK of a phone"},
	{regexp.MustCompile(`^penstock-relay `), "it needs a certificate and serves until it is ended"},
}

// blocks are those of a page, with the paragraph in front of each.
var blocks = regexp.MustCompile("(?ms)([^\n]*(?:\n[^\n]+)*\n\n)?^```(sh|text|python)\n(.*?)^```")

// savedAs is the name under which a paragraph tells readers to save the block behind it.
var savedAs = regexp.MustCompile("ave it as `([\\w.]+)`")

// script returns what a reader of the page enters, and the outputs that the page shows. Files that a reader saves are
// written into dir.
func script(t *testing.T, page, dir string) (commands string, outputs []string) {
	t.Helper()
	for _, block := range blocks.FindAllStringSubmatch(page, -1) {
		switch before, language, text := block[1], block[2], block[3]; language {
		case "text":
			outputs = append(outputs, text)
		case "python":
			name := savedAs.FindStringSubmatch(before)
			require.NotNil(t, name, "a program without a name:\n%s", text)
			require.NoError(t, os.WriteFile(filepath.Join(dir, name[1]), []byte(text), 0o600))
		default:
			commands += runnable(t, text)
		}
	}
	return commands, outputs
}

// runnable returns the commands of a block but for those left out, which are logged. A proxy that the block ends is
// waited for, for how it ended.
func runnable(t *testing.T, block string) (commands string) {
	t.Helper()
next:
	for _, command := range regexp.MustCompile(`(?m)^(?:.*\\\n)*.*\n`).FindAllString(block, -1) {
		for _, rule := range leftOut {
			if rule.command.MatchString(command) {
				t.Logf("left out, since %s: %s", rule.why, command)
				continue next
			}
		}
		commands += command
		if regexp.MustCompile(`^(sudo )?kill \$!`).MatchString(command) {
			commands += "wait $!\n"
		}
	}
	return commands
}

// installPrograms puts into dir what the pages' commands find in $PATH.
func installPrograms(t *testing.T, repository, dir string) {
	t.Helper()
	require.NoError(t, os.Mkdir(dir, 0o700))
	require.NoError(t, os.Symlink(released, filepath.Join(dir, "penstock")))
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "penstock-lab"), "./cmd/penstock-lab")
	build.Dir = repository
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	// sudo has nothing to do for root. A pause lasts until what was started beside it serves, on any machine: the
	// agent of the page python-controller, which has no proxy then, or a proxy.
	for name, text := range map[string]string{
		"sudo": `exec "$@"`,
		"sleep": `serves() {
	if [ -f mine.py ] && [ ! -f penstock.yaml ]; then [ -S /tmp/mine.sock ]; else penstock ready 2>/dev/null; fi
}
n=0; until serves; do n=$((n+1)); [ $n -lt 300 ]; /bin/sleep 0.1; done`,
	} {
		script := []byte("#!/bin/sh -e\n" + text + "\n")
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), script, 0o700)) //nolint:gosec // a program
	}
}

// example is where example.com is for the commands of a page.
var example = netip.MustParseAddr("203.0.113.9")

// serveExample has the server answer for example.com.
func serveExample(t *testing.T, s *scene) {
	t.Helper()
	require.NoError(t, s.Server.Address(netlab.FarDevice, netip.PrefixFrom(example, 32)))
	require.NoError(t, s.Edge.Route(netip.PrefixFrom(example, 32), s.ServerAddr.V4))
	require.NoError(t, s.Edge.Cover("/etc/hosts", fmt.Sprintf("127.0.0.1 localhost\n%v example.com\n", example)))
	server := &http.Server{
		ReadHeaderTimeout: patience,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, strings.Repeat("example ", 1<<16))
		}),
	}
	ln := s.listen(netip.AddrPortFrom(example, 80))
	go func() { _ = server.Serve(ln) }()
	t.Cleanup(func() { _ = server.Close() })
}

// TestThePagesCommandsWorkAsWritten plays each page as a reader does who enters all its commands, in order, in one
// shell. example.com is the server of the scene.
func TestThePagesCommandsWorkAsWritten(t *testing.T) {
	need.Programs(t, "curl", "go", "ip", "python3", "sysctl")
	need.TUN(t)
	repository, err := filepath.Abs("../..")
	require.NoError(t, err)
	_ = os.Remove("/tmp/mine.sock") // of the page python-controller
	bin := filepath.Join(t.TempDir(), "bin")
	installPrograms(t, repository, bin)
	for _, page := range []string{
		"README", "laptop", "router", "gateway", "laboratory", "python-controller", "library", "udp",
	} {
		t.Run(page, func(t *testing.T) {
			path := filepath.Join(repository, "docs", page+".md")
			if page == "README" {
				path = filepath.Join(repository, "README.md")
			}
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			dir := t.TempDir()
			for _, name := range []string{"deploy", "agents"} {
				require.NoError(t, os.Symlink(filepath.Join(repository, name), filepath.Join(dir, name)))
			}
			commands, outputs := script(t, string(text), dir)
			s := newScene(t)
			serveExample(t, s)
			prepareDevices(t, s)
			if strings.Contains(commands, "rules apply") {
				keepAsking(t, s)
			}

			said, err := os.Create(filepath.Join(dir, "said.txt"))
			require.NoError(t, err)
			defer said.Close()
			cmd := s.Edge.Command(context.Background(), "sh", "-e", "-c", commands)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+dir)
			cmd.Stdout, cmd.Stderr = said, said // a file: what goes on in the background does not hold up the end
			cmd.SysProcAttr.Setpgid = true
			require.NoError(t, cmd.Start())
			err = cmd.Wait()
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what the page leaves running
			out, readErr := os.ReadFile(said.Name())
			require.NoError(t, readErr)
			require.NoError(t, err, "%s\n%s", commands, out)
			assert.NotContains(t, string(out), "ERROR")
			for _, output := range outputs {
				assert.Contains(t, string(out), output)
			}
			if strings.Contains(commands, "--proxy") || strings.Contains(commands, "rules apply") {
				assert.Contains(t, string(out), "flow closed", "a connection went through the proxy")
			}
		})
	}
}

// prepareDevices gives the edge the devices that the pages name: lan0, where clients come in, and tun0.
func prepareDevices(t *testing.T, s *scene) {
	t.Helper()
	err := s.Edge.Do(func() error {
		near, err := netlink.LinkByName(netlab.NearDevice)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetName(near, "lan0"); err != nil {
			return err
		}
		tun := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "tun0"}, PeerName: "tun1"}
		if err := netlink.LinkAdd(tun); err != nil {
			return err
		}
		return netlink.LinkSetUp(tun)
	})
	if errors.Is(err, unix.EBUSY) {
		t.Skip("needs a kernel that renames devices which are up (6.2)")
	}
	require.NoError(t, err)
}

// keepAsking has the client ask example.com again and again, past the proxy or through it.
func keepAsking(t *testing.T, s *scene) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	client := &http.Client{
		Transport: &http.Transport{DialContext: s.Client.DialContext, DisableKeepAlives: true}, Timeout: patience,
	}
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			r, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+example.String()+"/", http.NoBody)
			if answer, err := client.Do(r); err == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
				_ = answer.Body.Close()
			}
			time.Sleep(10 * time.Millisecond) // leaves the machine to the page's commands
		}
	}()
}

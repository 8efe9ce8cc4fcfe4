//go:build linux

package browser

import (
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/labtest"
	"github.com/penstock-net/penstock/internal/need"
)

// Where the proxy of the test is: at an address of this process's own.
const (
	proxyPort = ":7481"
	pagePort  = ":7482"
)

// built is the program, in a directory that goes when all tests are over.
var built = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "penstock-browser-")
	if err != nil {
		return "", err
	}
	ends = append(ends, func() { _ = os.RemoveAll(dir) })
	return labtest.Build(dir)
})

func build(t *testing.T) string {
	t.Helper()
	program, err := built()
	require.NoError(t, err)
	return program
}

// startAt runs the real program, until the test ends at the latest; at is where its
// telemetry is.
func startAt(t *testing.T, program, config, at string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(program, "run", "--config", config)
	var said bytes.Buffer
	cmd.Stderr = &said
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it has ended unless the test failed
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the proxy said:\n%s", said.String())
		}
	})
	require.Eventually(t, func() bool {
		resp, err := http.Get("http://" + at + "/readyz")
		if err != nil {
			return false
		}
		return resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	}, patience, 20*time.Millisecond, "the proxy does not start")
	return cmd
}

// download opens a connection through the proxy that sends until the test ends or it is reset.
func download(t *testing.T) {
	t.Helper()
	conn, err := net.Dial("tcp", need.Host()+proxyPort)
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = io.Copy(io.Discard, conn)
	}()
	t.Cleanup(func() {
		_ = conn.Close()
		<-ended
	})
}

// endless sends to whoever connects until the other end is gone.
func endless(t *testing.T) net.Listener {
	t.Helper()
	sender, err := net.Listen("tcp", need.Host()+":0")
	require.NoError(t, err)
	need.Serve(t, sender, func(conn net.Conn) {
		for chunk := make([]byte, 4096); ; time.Sleep(10 * time.Millisecond) {
			if _, err := conn.Write(chunk); err != nil {
				return
			}
		}
	})
	return sender
}

func TestARestartOfTheRealProxy(t *testing.T) {
	dir := t.TempDir()
	program := build(t)
	sender := endless(t)
	config := filepath.Join(dir, "penstock.yaml")
	write := func(more string) {
		require.NoError(t, os.WriteFile(config, []byte("listeners:\n  - name: front\n    mode: forward\n    "+
			"address: "+need.Host()+proxyPort+
			"\n    target: "+sender.Addr().String()+"\ntelemetry:\n  address: "+
			""+need.Host()+pagePort+"\nshutdown:\n  drain: 1s\n"+more), 0o600))
	}
	write("")
	cmd := startAt(t, program, config, need.Host()+pagePort)
	download(t)

	b := open(t, 1280, 800)
	b.do(chromedp.Navigate("http://" + need.Host() + pagePort + "/#tab=flows"))
	b.until(`document.querySelector("#state").textContent === "serving"`)
	b.until(`document.querySelector("#table tbody").textContent.includes("` + sender.Addr().String() + `")`)
	b.until(`/\d.*[kM]bit.s/.test(document.querySelector("#table tbody tr:not(.gap)").cells[3].textContent)`)

	// A mistake in the file is an event that tells the place.
	write("nonsense: 1\n")
	require.NoError(t, cmd.Process.Signal(syscall.SIGHUP))
	b.do(chromedp.Click("#tab-events"))
	b.until(`document.querySelector("#table").textContent.includes("configuration not reloaded") &&
		document.querySelector("#table").textContent.includes("nonsense")`)
	b.do(chromedp.Click("#tab-flows"))
	b.quiet()

	// What the browser itself says of a connection that fails is no complaint of the page.
	write("")
	require.NoError(t, cmd.Process.Kill())
	_ = cmd.Wait()
	b.until(`document.querySelector("#state").textContent.startsWith("no answer since")`)
	startAt(t, program, config, need.Host()+pagePort)
	download(t)
	b.until(`document.querySelector("#state").textContent === "serving"`)
	b.until(`document.querySelector("#matches").textContent === "1 row"`)
	b.do(chromedp.Click("#tab-events"))
	b.until(`document.querySelector("#table").textContent.includes("penstock starts") &&
		!document.querySelector("#table").textContent.includes("not reloaded")`)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.complaints {
		assert.Contains(t, c, "Failed to load resource: net::ERR_")
	}
}

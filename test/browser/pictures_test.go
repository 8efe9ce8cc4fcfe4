//go:build linux

package browser

import (
	"context"
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// pictureConfig manages all hosts but one, which a rule gives Cubic.
const pictureConfig = `
listeners:
  - {name: lan, mode: forward, address: "10.77.1.1:7000", target: "SERVER:80"}
rules:
  - {name: old-tv, match: {source: [10.77.1.7]}, algorithm: cubic}
telemetry: {address: "127.0.0.1:9464"}
`

// TestPictures draws those of the documents, of ten hosts that download over an emulated cell of 25 Mbit/s. make
// pictures runs it. It takes three minutes.
func TestPictures(t *testing.T) {
	dir := os.Getenv("PENSTOCK_PICTURES")
	if dir == "" {
		t.Skip("draws pictures where PENSTOCK_PICTURES names a directory: make pictures")
	}
	need.TUN(t)
	lab, err := netlab.NewCellular(netlab.CellularConfig{
		Cell: &sim.CellConfig{
			Delay: 20 * time.Millisecond, Hosts: []sim.CellHost{{BitsPerBlock: 250, QueueBytes: 2_000_000}},
		},
		Up: sim.LinkConfig{Delay: 20 * time.Millisecond}, Hosts: 10,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lab.Close()) })
	lab.Path.Start()
	config := filepath.Join(t.TempDir(), "penstock.yaml")
	text := strings.ReplaceAll(pictureConfig, "SERVER", lab.ServerAddr.V4.String())
	require.NoError(t, os.WriteFile(config, []byte(text), 0o600))
	ctx, end := context.WithTimeout(t.Context(), 260*time.Second)
	defer end()
	proxy := lab.Edge.Command(ctx, build(t), "run", "--config", config)
	require.NoError(t, proxy.Start())
	defer func() { end(); _ = proxy.Wait() }()
	sender, err := lab.Server.Listen("tcp4", ":80")
	require.NoError(t, err)
	need.Serve(t, sender, sendAsked)

	at, err := url.Parse("http://127.0.0.1:9464/")
	require.NoError(t, err)
	there := &http.Transport{DialContext: lab.Edge.DialContext}
	pages := httputil.NewSingleHostReverseProxy(at)
	pages.Transport = there
	srv := httptest.NewServer(pages)
	defer srv.Close()
	client := http.Client{Transport: there}
	require.Eventually(t, func() bool {
		resp, err := client.Get(at.String() + "readyz")
		return err == nil && resp.Body.Close() == nil && resp.StatusCode == http.StatusOK
	}, patience, 50*time.Millisecond)
	for i, host := range lab.Hosts {
		dialer := &net.Dialer{LocalAddr: &net.TCPAddr{IP: host.V4.AsSlice()}}
		most := cc.Bytes(20_000_000)
		if i == 3 { // downloads of the proof begin anew within its turns
			most = 500_000
		}
		go downloadInTurns(ctx, most, rand.New(rand.NewPCG(1, uint64(i))), func() (net.Conn, error) {
			return lab.Client.DialWith(ctx, dialer, "tcp4", lab.EdgeNear.V4.String()+":7000")
		})
	}
	proof := url.Values{"host": {lab.Hosts[3].V4.String()}, "for": {"150s"}}
	resp, err := client.PostForm(at.String()+"v1/proof", proof)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	require.Equal(t, http.StatusOK, resp.StatusCode)

	time.Sleep(175 * time.Second)
	for name, size := range map[string][2]int64{"desktop": {1100, 760}, "phone": {390, 844}} {
		for _, scheme := range []string{"light", "dark"} {
			b := open(t, size[0], size[1])
			b.dark(scheme == "dark")
			b.do(chromedp.Navigate(srv.URL))
			b.until(`!document.querySelector("#gains").hidden`)
			b.until(`document.querySelectorAll("#table tbody tr:not(.gap)").length > 5`)
			b.do(chromedp.Click(`#spans [data-span="300"]`))
			b.until(`document.querySelector("#delays").parentNode.querySelector("span.x").textContent === "−5 min"`)
			assert.Empty(t, b.text(cut))
			png, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(dir, "page-"+name+"-"+scheme+".png"), png, 0o644))
		}
	}
}

// sendAsked sends as many bytes as it is asked for.
func sendAsked(conn net.Conn) {
	var n uint32
	if binary.Read(conn, binary.BigEndian, &n) == nil {
		_, _ = io.CopyN(conn, zeros{}, int64(n))
	}
}

// zeros is endless.
type zeros struct{}

// Read implements io.Reader.
func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// downloadInTurns downloads at least the lesser of 1 MB and the most, again and again, with pauses of up to two
// seconds, until ctx ends.
func downloadInTurns(ctx context.Context, most cc.Bytes, random *rand.Rand, dial func() (net.Conn, error)) {
	for ctx.Err() == nil {
		conn, err := dial()
		if err == nil {
			size := min(most, cc.Bytes(1_000_000/random.Float64()))
			_ = binary.Write(conn, binary.BigEndian, uint32(size)) //nolint:gosec // at most 20 MB
			_, _ = io.Copy(io.Discard, conn)
			_ = conn.Close()
		}
		time.Sleep(time.Duration(random.Float64() * 2e9))
	}
}

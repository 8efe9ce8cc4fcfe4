//go:build linux

package e2e

import (
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rewrite changes the program's configuration file, which only a reload reads.
func (p *program) rewrite(config string) {
	p.t.Helper()
	path := p.cmd.Args[len(p.cmd.Args)-1]
	require.NoError(p.t, os.WriteFile(path, []byte(present.configure(config)), 0o640)) //nolint:gosec // which keeps the group
}

// reloaded waits until the program has reread its configuration so often.
func (p *program) reloaded(times float64) {
	p.t.Helper()
	p.awaitMetric(times, "penstock_config_reloads_total", `result="success"`)
}

// TestARunningTransferIsSwitchedToAnotherAlgorithm has Cubic fill a queue, Copa
// take over and empty it, and Cubic come back.
func TestARunningTransferIsSwitchedToAnotherAlgorithm(t *testing.T) {
	const size = 6 * megabyte
	w := present.way()
	s, path := newCellular(t, slow(100))
	under := func(algorithm string) string { return w.yaml("defaults: {algorithm: \"" + algorithm + "\"}\n") }
	p := s.start(under("cubic"))
	s.capture(w)
	path.StartOnData()
	d := w.download(s, 1, size)
	d.reaches(size / 4)
	down := func() map[string]any { return p.relaying(1)[0]["down"].(map[string]any) }
	require.Equal(t, "cubic", down()["algorithm"])

	p.rewrite(under("copa:paper"))
	toCopa := path.Elapsed()
	p.signal(syscall.SIGHUP)
	p.reloaded(1)
	assert.Equal(t, "copa", down()["algorithm"])
	control := down()["control"].(map[string]any)
	assert.Equal(t, 1.0, control["members"])
	assert.Positive(t, control["min_rtt_seconds"])
	d.reaches(size * 3 / 5)

	p.rewrite(under("cubic"))
	toCubic := path.Elapsed()
	resp, err := p.client.Post("http://"+p.pages+"/-/reload", "", nil)
	require.NoError(t, err)
	resp.Body.Close()
	assert.Equal(t, http.StatusOK, resp.StatusCode)
	p.reloaded(2)
	assert.Equal(t, "cubic", down()["algorithm"])
	d.arrives()
	for _, name := range []string{"cubic", "copa"} {
		assert.Positive(t, p.metric("penstock_cc_limited_seconds_total", `direction="down"`, `algorithm="`+name+`"`),
			name)
	}

	// A round trip takes 20 ms without a queue, and six times that with a full one.
	const stretch = 6 * linkDelay
	t.Logf("queueing, median: Cubic %v, Copa %v", path.Report(0, toCopa).Down.DataQueueing.P50,
		path.Report(toCopa+5*stretch, toCubic).Down.DataQueueing.P50)
	for name, at := range map[string]time.Duration{"to Copa": toCopa, "to Cubic": toCubic} {
		least := path.Report(at, at+stretch).Down
		for from := at; from < at+10*stretch; from += stretch {
			if r := path.Report(from, from+stretch).Down; r.Bytes < least.Bytes {
				least = r
			}
		}
		t.Logf("%s: the link was used to %.2f and more in each three round trips", name, least.Utilisation)
		if late := path.Report(at, at+10*stretch).Down.Lateness.Max; late > slack {
			t.Logf("%s: the link was %v late, on too busy a machine to judge by", name, late)
			continue
		}
		assert.Positive(t, least.Delivered, "%s: it stalls", name)
	}
}

// TestListenersComeAndGoWithAReload has a tunnel take the place of the listener that
// there was, whose connection goes on, and is of the program as it is shipped: it has
// dropped what privileges it no longer needs.
func TestListenersComeAndGoWithAReload(t *testing.T) {
	use(t, released)
	asking, phone := named("connect"), named("wireguard over IPv4")
	rest := asking.yaml("")
	rest = rest[strings.Index(rest, "telemetry:"):]
	listener := func(w way, name string) string { return "  - name: " + name + "\n    " + w.config + "\n" }
	s := newScene(t)
	p := s.start("listeners:\n" + listener(asking, "way") + rest)
	echo := func(client, server net.Conn, word string) {
		for _, each := range [][2]net.Conn{{client, server}, {server, client}} {
			_, err := io.WriteString(each[0], word)
			require.NoError(t, err)
			got := make([]byte, len(word))
			_, err = io.ReadFull(each[1], got)
			require.NoError(t, err)
			assert.Equal(t, word, string(got))
		}
	}
	client, server := asking.pair(s)
	echo(client, server, "before")

	p.rewrite("listeners:\n" + listener(phone, "vpn") + rest)
	p.signal(syscall.SIGHUP)
	p.reloaded(1)
	s.capture(phone)
	inside, far := phone.pair(s)
	echo(inside, far, "through the tunnel")
	echo(client, server, "as before")
	_, err := asking.connect(s, asking.target(s, servicePort))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	require.NoError(t, client.Close())
	require.NoError(t, server.Close())
	require.Eventually(t, func() bool {
		return strings.Contains(p.said.String(), "listener is "+
			"closed")
	}, patience, time.Millisecond)

	// One that cannot be opened keeps all as it is.
	p.rewrite("listeners:\n" + listener(asking, "way") + "  - {name: far, mode: mixed, address: " +
		"\"203.0.113.77:1080\"}\n" + rest)
	p.signal(syscall.SIGHUP)
	p.awaitMetric(1, "penstock_config_reloads_total", `result="failure"`)
	assert.Contains(t, p.said.String(), "listeners[1]")
	_, err = asking.connect(s, asking.target(s, servicePort))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
	echo(inside, far, "all the same")
}

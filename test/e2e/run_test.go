//go:build linux

package e2e

import (
	"io"
	"net"
	"net/netip"
	"regexp"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

func TestWithoutAConfigurationAndWithoutPrivilegesItServesLoopback(t *testing.T) {
	need.Users(t)
	s := newScene(t)
	p := s.launch("sh", "-c", `exec setpriv --reuid=65534 --regid=65534 --clear-groups --bounding-set=-all --inh-caps=-all "$@"`, "sh", executable, "run")
	need.Serve(t, s.listen(netip.AddrPortFrom(s.ServerAddr.V4, servicePort)), func(c net.Conn) {
		_, _ = io.Copy(c, random(4, megabyte))
	})
	conn, err := s.Edge.Dial("tcp", "127.0.0.1:1080")
	require.NoError(t, err)
	defer conn.Close()
	require.NoError(t, socks(conn, netip.AddrPortFrom(s.ServerAddr.V4, servicePort)))
	sum, _, err := digest(conn)
	require.NoError(t, err)
	assert.Equal(t, digestOf(4, megabyte), sum)
	assert.Contains(t, p.said.String(), `"down":"`+cc.Default+`"`)
}

func TestATransparentListenerWithoutPrivilegesSaysWhatIsMissing(t *testing.T) {
	need.Users(t)
	s := newScene(t)
	config := s.write(ways[0].yaml(""))
	cmd := s.Edge.Command(t.Context(), "setpriv", "--bounding-set=-all", "--inh-caps=-all", "--reuid=65534",
		"--regid=65534", "--clear-groups",
		executable, "run", "--config", config)
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	assert.Contains(t, string(out), "CAP_NET_ADMIN")
}

func TestCountersMoveWhileAFlowLives(t *testing.T) {
	w := present.way()
	s := w.open(t, "")
	client, server := w.pair(s)
	moved := func() float64 { return s.proxy.metric("penstock_bytes_total", `direction="down"`) }
	before := moved()
	_, err := io.Copy(struct{ io.Writer }{server}, random(1, megabyte))
	require.NoError(t, err)
	_, err = io.ReadFull(client, make([]byte, megabyte))
	require.NoError(t, err)
	assert.GreaterOrEqual(t, moved()-before, float64(megabyte))
	assert.Equal(t, 1.0, s.proxy.metric("penstock_flows_active"))

	flows := s.proxy.flows()
	require.Len(t, flows, 1)
	page := s.proxy.page("/flows")
	for _, key := range []string{
		"cwnd", "inflight", "srtt", "min_rtt", "queueing_delay", "delivery_bits_per_second",
		"limited_by",
	} {
		assert.Contains(t, page, key)
	}
	assert.NotRegexp(t, regexp.MustCompile(`="[^"]*(10\.77|fd77)[^"]*"`), s.proxy.page("/metrics"),
		"an address in a label")
}

// straight is what the link recorded without a proxy, which is the same over
// every tier.
var straight *netlab.DirectionReport

func plainCubic(t *testing.T) netlab.DirectionReport {
	t.Helper()
	if straight == nil {
		r := download(t, "", "cubic")
		straight = &r
	}
	return *straight
}

// TestCopaKeepsAnEmulatedCellularQueueShort is the main job in small: the same
// download straight from the kernel's Cubic and through the proxy.
func TestCopaKeepsAnEmulatedCellularQueueShort(t *testing.T) {
	needsPrivilege(t)
	if raced() {
		t.Log("the proxy is built with the race detector, which slows it down")
	}
	cubic := plainCubic(t)
	copa := download(t, "copa", "")
	t.Logf("cubic %v, queueing p95 %v; copa %v, queueing p95 %v", cubic.Throughput, cubic.DataQueueing.P95,
		copa.Throughput, copa.DataQueueing.P95)
	assert.Less(t, copa.DataQueueing.P95, cubic.DataQueueing.P95/3)
	assert.Greater(t, float64(copa.Throughput), 0.6*float64(cubic.Throughput))
}

//go:build linux

package e2e

import (
	"io"
	"net/http"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
)

// ready is what /readyz answers.
func (p *program) ready() (int, string) {
	p.t.Helper()
	resp, err := p.client.Get("http://" + p.pages + "/readyz")
	require.NoError(p.t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(p.t, err)
	return resp.StatusCode, string(body)
}

// TestADeviceThatIsDeletedIsMissedAndMadeAgain is of the program as it is shipped,
// which has dropped what privileges it no longer needs.
func TestADeviceThatIsDeletedIsMissedAndMadeAgain(t *testing.T) {
	needsPrivilege(t)
	use(t, released)
	w := named("tun over IPv4")
	s := w.open(t, "")
	client, server := w.pair(s)
	require.NoError(t, s.Edge.Do(func() error {
		link, err := netlink.LinkByName(tunDevice)
		if err != nil {
			return err
		}
		return netlink.LinkDel(link)
	}))
	require.Eventually(t, func() bool {
		status, says := s.proxy.ready()
		return status == http.StatusServiceUnavailable &&
			assert.Contains(t, says, `listener "way": TUN device "penstock0" has gone`)
	}, patience, 5*time.Millisecond)
	require.Eventually(t, func() bool {
		status, _ := s.proxy.ready()
		return status == http.StatusOK
	}, patience, 20*time.Millisecond)
	assert.Contains(t, s.proxy.said.String(), "nothing gets through")
	assert.Contains(t, s.proxy.said.String(), "open again")
	// Link and routes are the administrator's.
	s.setUpDevice()
	exchange(t, client, server, megabyte) // what had been open goes on
}

// TestAStoppedGatewayLetsItsConnectionsFinish is what systemd does to it.
func TestAStoppedGatewayLetsItsConnectionsFinish(t *testing.T) {
	for _, name := range []string{"wireguard over IPv4", "masque over IPv4"} {
		t.Run(name, func(t *testing.T) {
			w := named(name)
			s := w.open(t, "")
			client, server := w.pair(s)
			require.NoError(t, s.proxy.cmd.Process.Signal(syscall.SIGTERM))
			s.proxy.awaitMetric(1, "penstock_draining")
			exchange(t, client, server, megabyte)
			s.proxy.wait()
			assert.Zero(t, s.proxy.cmd.ProcessState.ExitCode())
			assert.NotContains(t, s.proxy.said.String(), "closed_by=client reason=error")
		})
	}
}

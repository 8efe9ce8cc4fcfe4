//go:build linux

package strangers

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/need"
)

// pythonVariable names a Python that has aioquic; python3 where it is not set.
const pythonVariable = "PENSTOCK_PYTHON"

// aioquic skips the test where there is no Python with aioquic, and returns its path.
func aioquic(t *testing.T) string {
	t.Helper()
	python := os.Getenv(pythonVariable)
	if python == "" {
		python = "python3"
	}
	path, err := exec.LookPath(python)
	if err == nil {
		err = exec.Command(path, "-c", "import aioquic").Run()
	}
	if err != nil {
		t.Skipf("not installed: aioquic (pip install aioquic; %s names another Python)", pythonVariable)
	}
	return path
}

func TestAIOQUICReachesUDPThroughMASQUE(t *testing.T) {
	python := aioquic(t)
	const port, token = 8443, "a-token-of-a-browser-s-own"
	certificate, key := certs.PEM(certs.SelfSigned("vpn.test"))
	s := open(t, edge.Options{
		Config: "rules: [{name: no-ntp, match: {protocol: udp, ports: [123]}, refuse: not through here}]",
		Listener: fmt.Sprintf("{name: edge, mode: masque, address: \":%d\", tls: {certificate: %q, key: %q}, "+
			"masque: {tokens: [{name: browser, token: %s}]}}", port, certificate, key, token),
	})
	script, err := os.ReadFile("testdata/connect_udp.py")
	require.NoError(t, err)
	client := s.write("connect_udp.py", string(script))
	ask := func(target netip.AddrPort, words ...string) string {
		t.Helper()
		return s.run(nil, python, append([]string{
			client, s.EdgeNear.V4.String(), fmt.Sprint(port), token, target.Addr().String(), fmt.Sprint(target.Port()),
		}, words...)...)
	}
	for _, server := range []netip.Addr{s.ServerAddr.V4, s.ServerAddr.V6} {
		target := netip.AddrPortFrom(server, 7)
		s.echo(target)
		long := strings.Repeat("x", 1150) // as a QUIC handshake inside would be
		assert.Equal(t, "200\none\ntwo\n"+long+"\n", ask(target, "one", "two", long))
	}
	for _, refused := range []netip.AddrPort{
		netip.AddrPortFrom(s.ServerAddr.V4, 123), // by the rule
		netip.AddrPortFrom(s.EdgeNear.V4, 9464), netip.MustParseAddrPort("127.0.0.1:9464"),
		netip.MustParseAddrPort("169.254.169.254:80"),
	} {
		assert.Equal(t, "403\n", ask(refused, "hello"), refused)
	}
}

// echo answers datagrams at the server until the test ends.
func (s *scene) echo(at netip.AddrPort) {
	s.t.Helper()
	var server net.PacketConn
	require.NoError(s.t, s.Server.Do(func() (err error) {
		server, err = net.ListenPacket("udp", at.String())
		return err
	}))
	need.Echo(s.t, server)
}

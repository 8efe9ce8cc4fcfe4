package main

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy"
)

func TestEndpointsAreReadAsTheyWereWritten(t *testing.T) {
	name := filepath.Join(t.TempDir(), "last-good.endpoints")
	for _, all := range []proxy.Endpoints{
		{
			"vpn":   {"aaaa": netip.MustParseAddrPort("192.0.2.1:51820")},
			"other": {"bbbb": netip.MustParseAddrPort("[fe80::1%eth0]:7")},
		},
		{"vpn": {"aaaa": netip.MustParseAddrPort("[2001:db8::1]:51820")}},
	} {
		require.NoError(t, writeEndpoints(name, all))
		read, err := readEndpoints(name)
		require.NoError(t, err)
		assert.Equal(t, all, read)
	}
	info, err := os.Stat(name)
	require.NoError(t, err)
	assert.Equal(t, os.FileMode(0o600), info.Mode())
	files, err := os.ReadDir(filepath.Dir(name))
	require.NoError(t, err)
	assert.Len(t, files, 1, "nothing is left lying about")

	require.NoError(t, os.WriteFile(name, []byte(`{"vpn": {"aaaa": "nowhere"}}`), 0o600))
	_, err = readEndpoints(name)
	require.Error(t, err)
	require.Error(t, writeEndpoints(filepath.Join(name, "a file"), proxy.Endpoints{}), "it is no directory")
}

// The peer's socket is the test's: all it has to see is that it is asked first.
func TestAGatewayThatStartsAsksPeersForAHandshakeWhereTheyWere(t *testing.T) {
	peer, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	defer peer.Close() //nolint:errcheck // nothing is in it
	path := gatewayFolder(t, gatewayConfig)
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "peers.conf"), nil, 0o600))
	lastGood := filepath.Join(t.TempDir(), "last-good")
	require.NoError(t, writeEndpoints(lastGood+".endpoints", proxy.Endpoints{
		"vpn": {"BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA=": peer.LocalAddr().(*net.UDPAddr).AddrPort()},
	}))
	in := startRunWithout(t, "--config", path, "--last-good", lastGood)
	require.NoError(t, peer.SetReadDeadline(time.Now().Add(time.Minute)))
	b := make([]byte, 2048)
	n, err := peer.Read(b)
	require.NoError(t, err)
	assert.Equal(t, 148, n, "an initiation")
	assert.EqualValues(t, 1, b[0], "likewise")
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}

package main

import (
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
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

// Nobody writes to the pipe: opening it would wait, and the start with it.
func TestAPipeInThePlaceOfEndpointsIsRefused(t *testing.T) {
	name := filepath.Join(t.TempDir(), "endpoints.json")
	require.NoError(t, syscall.Mkfifo(name, 0o600))
	_, err := readEndpoints(name)
	assert.ErrorContains(t, err, "a regular file belongs there")
}

// The peer's socket is the test's: all it has to see is that it is asked first.
func TestAGatewayThatStartsAsksPeersForAHandshakeWhereTheyWere(t *testing.T) {
	for name, c := range map[string]struct {
		file  string // in the configuration's directory
		flags []string
	}{
		"beside the configuration":      {file: "penstock.yaml.state/endpoints.json"},
		"in the state directory":        {file: "state/endpoints.json", flags: []string{"--state-directory", "state"}},
		"where former versions kept it": {file: "last-good.endpoints", flags: []string{"--last-good", "last-good"}},
	} {
		t.Run(name, func(t *testing.T) {
			peer, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
			require.NoError(t, err)
			defer peer.Close() //nolint:errcheck // nothing is in it
			path := gatewayFolder(t, gatewayConfig)
			dir := filepath.Dir(path)
			t.Chdir(dir)
			require.NoError(t, os.WriteFile("peers.conf", nil, 0o600))
			require.NoError(t, writeEndpoints(c.file, proxy.Endpoints{
				"vpn": {"BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA=": peer.LocalAddr().(*net.UDPAddr).AddrPort()},
			}))
			in := startRunWithout(t, append([]string{"--config", path}, c.flags...)...)
			require.NoError(t, peer.SetReadDeadline(time.Now().Add(time.Minute)))
			b := make([]byte, 2048)
			n, err := peer.Read(b)
			require.NoError(t, err)
			assert.Equal(t, 148, n, "an initiation")
			assert.EqualValues(t, 1, b[0], "likewise")
			in.signal()
			assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
			assert.NotContains(t, in.log.String(), "nothing is kept")
		})
	}
}

func TestWhereStateIs(t *testing.T) {
	for name, c := range map[string]struct {
		flags               runFlags
		env                 string
		directory, lastGood string
	}{
		"beside the configuration":      {runFlags{config: "/etc/p.yaml"}, "", "/etc/p.yaml.state", ""},
		"no configuration":              {runFlags{}, "", "", ""},
		"systemd's":                     {runFlags{config: "/etc/p.yaml"}, "/var/lib/p:/var/lib/q", "/var/lib/p", "/var/lib/p/last-good"},
		"systemd's, after an empty one": {runFlags{config: "/etc/p.yaml"}, ":/var/lib/p", "/var/lib/p", "/var/lib/p/last-good"},
		"the flag's":                    {runFlags{config: "/etc/p.yaml", stateDirectory: "/s"}, "/var/lib/p", "/s", "/s/last-good"},
		"a last good one of its own":    {runFlags{config: "/etc/p.yaml", lastGood: "/l"}, "", "/etc/p.yaml.state", "/l"},
		"likewise, and the flag's":      {runFlags{config: "/etc/p.yaml", lastGood: "/l", stateDirectory: "/s"}, "", "/s", "/l"},
		"systemd's, no configuration":   {runFlags{}, "/var/lib/p", "/var/lib/p", ""},
		"a relative one, as it is read": {runFlags{config: "p.yaml"}, "", "p.yaml.state", ""},
	} {
		c.flags.locateState(c.env)
		assert.Equal(t, c.directory, c.flags.stateDirectory, name)
		assert.Equal(t, c.lastGood, c.flags.lastGood, name)
	}
}

func TestTheStateDirectoryHasTheLastGoodConfiguration(t *testing.T) {
	state := filepath.Join(t.TempDir(), "made", "here")
	in := startRun(t, runConfig, "--state-directory", state)
	in.signal()
	require.Equal(t, cli.ExitOK, <-in.code, in.log.String())
	require.NoError(t, os.WriteFile(in.config, []byte("frob: 1\n"), 0o600))
	again := startRunWithout(t, "--config", in.config, "--state-directory", state)
	assert.Contains(t, again.log.String(), "the last good one is in force")
	again.signal()
	assert.Equal(t, cli.ExitOK, <-again.code, again.log.String())
}

func TestAProxyWithoutPeersLeavesNothingBesideItsConfiguration(t *testing.T) {
	in := startRun(t, runConfig)
	in.signal()
	require.Equal(t, cli.ExitOK, <-in.code, in.log.String())
	assert.NoDirExists(t, in.config+".state")
}

// A file stands where the directory would be, which stops root as well.
func TestAStateDirectoryThatCannotBeIsToldWithTheCure(t *testing.T) {
	path := gatewayFolder(t, gatewayConfig)
	require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(path), "peers.conf"), nil, 0o600))
	require.NoError(t, os.WriteFile(path+".state", nil, 0o600))
	in := startRunWithout(t, "--config", path)
	warns := regexp.MustCompile("WARN.*nothing is kept for the next start.*--state-directory")
	require.Eventually(t, func() bool { return warns.MatchString(in.log.String()) }, time.Minute, time.Millisecond)
	in.signal()
	assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
}

func TestEndpointsAreWrittenWhenTheyChange(t *testing.T) {
	var log strings.Builder
	k := stateKeeper{
		directory: filepath.Join(t.TempDir(), "state"), log: slog.New(slog.NewTextHandler(&log, nil)),
	}
	save := func(at string) (written bool) {
		t.Helper()
		before, _ := os.Stat(k.endpointsFile())
		k.saveEndpoints(func(proxy.Endpoints) proxy.Endpoints {
			return proxy.Endpoints{"vpn": {"aaaa": netip.MustParseAddrPort(at)}}
		})
		after, err := os.Stat(k.endpointsFile())
		require.NoError(t, err)
		return before == nil || !os.SameFile(before, after)
	}
	assert.True(t, save("192.0.2.1:4000"), "a first handshake")
	assert.False(t, save("192.0.2.1:4000"))
	assert.True(t, save("192.0.2.9:4000"), "it has moved")
	read, err := readEndpoints(k.endpointsFile())
	require.NoError(t, err)
	assert.Equal(t, k.written, read)

	k.directory = filepath.Join(k.endpointsFile(), "not a directory")
	for range 3 {
		k.saveEndpoints(func(proxy.Endpoints) proxy.Endpoints { return nil })
	}
	assert.Equal(t, 1, strings.Count(log.String(), "is not kept for a restart"))
}

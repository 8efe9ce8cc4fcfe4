package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
)

// A port that somebody has is told with who that is and what to do, in the words of the flag or the file.
func TestAPortThatIsInUseIsToldWithItsOwnerAndTheCure(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	datagrams, err := net.ListenPacket("udp", ":0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = datagrams.Close() })
	at := taken.Addr().String()
	tunnel := fmt.Sprintf(":%d", datagrams.LocalAddr().(*net.UDPAddr).Port)
	inUse := func(network, at string) string {
		_, port, err := net.SplitHostPort(at)
		require.NoError(t, err)
		return fmt.Sprintf("port %s (%s %s) is in use by penstock.test (process %d); ", port, network, at, os.Getpid())
	}
	file := func(listener string) []string {
		path := filepath.Join(t.TempDir(), "c.yaml")
		text := "listeners: [{" + listener + "}]\ntelemetry: {address: \"off\"}\n"
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return []string{"--config", path}
	}
	for name, c := range map[string]struct {
		flags []string
		says  string
	}{
		"of the flag": {
			[]string{"--listen", at},
			"penstock: --listen: " + inUse("tcp", at) + "name another by --listen, such as --listen 127.0.0.1:3128\n",
		},
		"of telemetry": {
			[]string{"--listen", "127.0.0.1:0", "--telemetry", at},
			"penstock: telemetry.address: " + inUse("tcp", at) + "--telemetry or telemetry.address changes it, off does without\n",
		},
		"of the file": {
			file("name: a, mode: mixed, address: \"" + at + "\""),
			"penstock: listeners[0].address: " + inUse("tcp", at) + "choose another port, or end what has it\n",
		},
		"of a tunnel": {
			file("name: a, mode: wireguard, address: \"" + tunnel +
				"\", wireguard: {private_key: EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=}"),
			"penstock: listeners[0].address: " + inUse("udp", tunnel) +
				"choose another port, or end what has it\n",
		},
		"an address of another machine": {
			file(`name: a, mode: mixed, address: "192.0.2.1:1080", users: [{name: a, password: b}]`),
			"penstock: listeners[0].address: 192.0.2.1 is not an address of this machine; write one that it has, or " +
				"0.0.0.0:1080 for all of them\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			code, _, says := run(t, append([]string{"run", "--keep-privileges", "--telemetry", "off"}, c.flags...)...)
			assert.Equal(t, cli.ExitFail, code)
			assert.Contains(t, says, c.says)
		})
	}
}

func TestAReloadTellsWhoHasAPort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = taken.Close() })
	in := startRun(t, runConfig)
	in.rewrite(strings.Replace(runConfig, "listeners: [",
		"listeners: [{name: more, mode: mixed, address: \""+taken.Addr().String()+"\"}, ", 1))
	code, says := in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, code)
	assert.Contains(t, says, "listeners[0].address: port ")
	assert.Contains(t, says, fmt.Sprintf("is in use by penstock.test (process %d); choose another port", os.Getpid()))
	assert.NotContains(t, says, "tunnel")
	in.signal()
	assert.Equal(t, cli.ExitOK, in.ends())
}

//go:build linux

package strangers

import (
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// signalWireGuardGo signals the program that has made the edge's interface.
func signalWireGuardGo(t *testing.T, is map[string]string, name string) {
	t.Helper()
	parent := strconv.Itoa(os.Getpid())
	require.NoError(t, exec.Command(is["pkill"], name, "-P", parent, "-f", edgeDevice+"$").Run())
}

func TestTheEndWaitsForNoInterfaceWhoseProgramHasStopped(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip", "pkill")
	s, _, _, _ := overAnInterface(t, is)
	signalWireGuardGo(t, is, "-STOP")
	require.NoError(t, s.proxy.Stop())
	signalWireGuardGo(t, is, "-CONT")
	assert.NotContains(t, s.has(), "penstock_"+edgeDevice)
}

func TestAReloadIsRefusedWhileTheProgramOfAnInterfaceHasStopped(t *testing.T) {
	is := find(t, "wireguard-go", "wg", "ip", "pkill")
	s, k, pings, _ := overAnInterface(t, is)
	peers := must(os.ReadFile(k.peers))
	signalWireGuardGo(t, is, "-STOP")
	require.NoError(t, os.WriteFile(k.peers, nil, 0o600))
	refused, err := s.proxy.Reload(t.Context())
	require.NoError(t, err)
	assert.Contains(t, refused, "does not answer")
	signalWireGuardGo(t, is, "-CONT")
	s.reload(k.peers, string(peers))
	pings.await(t, pings.answers.Load()+10)
}

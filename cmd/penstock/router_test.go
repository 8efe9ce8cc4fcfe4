package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/access"
)

// The build for routers links nothing that ends tunnels, says so where a configuration
// wants one, and takes all others.
func TestTheBuildForRouters(t *testing.T) {
	deps, err := exec.Command("go", "list", "-deps", "-tags", "nonetstack", ".").Output()
	require.NoError(t, err)
	for _, heavy := range []string{"gvisor.dev/", "github.com/quic-go/", "golang.zx2c4.com/wireguard/device"} {
		assert.False(t, strings.Contains(string(deps), heavy), heavy)
	}
	dir := t.TempDir()
	program := filepath.Join(dir, "penstock")
	build := exec.Command("go", "build", "-trimpath", "-tags", "nonetstack", "-ldflags", "-s -w", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)

	version, err := exec.Command(program, "version").Output()
	require.NoError(t, err)
	assert.Regexp(t, ` -tags nonetstack\n$`, string(version))
	out, err = exec.Command(program, "check", "../../deploy/edge-router.yaml").CombinedOutput()
	require.NoError(t, err, "%s", out)

	path := filepath.Join(dir, "penstock.yaml")
	private, err := access.GenerateKey()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), []byte(private.String()), 0o600))
	inKernel := "listeners: [{name: vpn, mode: wireguard, address: \":51820\", " +
		"wireguard: {datapath: kernel, private_key_file: key, pool: [10.9.0.0/24]}}]"
	require.NoError(t, os.WriteFile(path, []byte(inKernel), 0o600))
	out, err = exec.Command(program, "check", path).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for _, listener := range []string{
		"{name: vpn, mode: wireguard, address: \":51820\", wireguard: {private_key_file: key, pool: [10.9.0.0/24]}}",
		"{name: vpn, mode: tun, device: penstock0}",
		"{name: vpn, mode: masque, address: \":4433\", masque: {open: true}}",
	} {
		require.NoError(t, os.WriteFile(path, []byte("listeners:\n  - "+listener+"\n"), 0o600))
		for _, command := range [][]string{{"check", path}, {"run", "--config", path}} {
			out, err := exec.Command(program, command...).CombinedOutput()
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, "%s", out)
			assert.Equal(t, cli.ExitConfig, exit.ExitCode(), "%s", out)
			assert.Contains(t, string(out), "listeners[0].mode: "+access.NoNetstack)
		}
	}
}

package deploy_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// What packages are made from is there, but for what the build makes.
func TestPackagesNameFilesThatAreThere(t *testing.T) {
	text, err := os.ReadFile("nfpm.yaml")
	require.NoError(t, err)
	var file struct {
		Contents []struct{ Src, Dst string }
		Scripts  map[string]string
	}
	require.NoError(t, yaml.Unmarshal(text, &file))
	require.NotEmpty(t, file.Contents)
	sources := []string{}
	for _, c := range file.Contents {
		assert.True(t, strings.HasPrefix(c.Dst, "/"), c.Dst)
		sources = append(sources, c.Src)
	}
	for _, s := range file.Scripts {
		sources = append(sources, s)
		out, err := exec.Command("sh", "-n", filepath.Join("..", s)).CombinedOutput()
		assert.NoError(t, err, "%s", out)
	}
	for _, s := range sources {
		if s != "" && !strings.HasPrefix(s, "dist/package/") {
			assert.FileExists(t, filepath.Join("..", s))
		}
	}
}

// uci has the functions of OpenWrt's that the init script reads its settings with.
const uci = `
config_load() { :; }
config_get() { eval "v=\${UCI_$3-}"; [ -n "$v" ] || v="${4-}"; eval "$1=\$v"; }
. openwrt/files/penstock.init
yaml
`

func TestOpenWrtMakesAConfigurationThatIsValid(t *testing.T) {
	for name, settings := range map[string][]string{
		"as it is shipped": nil,
		"all of it": {
			"UCI_port=7001", "UCI_algorithm=copa:delta=0.1", "UCI_max_rate=20mbit",
			"UCI_telemetry=off",
		},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command("sh", "-c", uci)
			cmd.Env = append(os.Environ(), settings...)
			out, err := cmd.Output()
			require.NoError(t, err)
			path := filepath.Join(t.TempDir(), "penstock.yaml")
			require.NoError(t, os.WriteFile(path, out, 0o600))
			c, err := config.Load(path)
			require.NoError(t, err, "%s", out)
			assert.Empty(t, c.Warnings())
			if settings != nil {
				assert.Equal(t, "[::]:7001", c.Listeners[0].Address)
				assert.NotZero(t, c.Defaults.MaxRate)
				assert.Equal(t, "off", c.Telemetry.Address)
			}
		})
	}
}

// The image runs without a file of the user's.
func TestTheImageHasAConfiguration(t *testing.T) {
	c, err := config.Load("container.yaml")
	require.NoError(t, err)
	assert.NotEqual(t, "off", c.Telemetry.Health, "penstock ready asks there")
	text, err := os.ReadFile("Dockerfile")
	require.NoError(t, err)
	assert.Contains(t, string(text), "COPY deploy/container.yaml /etc/penstock/penstock.yaml")
}

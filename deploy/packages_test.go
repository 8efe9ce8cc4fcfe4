package deploy_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// What packages are made from is there, but for what the build makes.
func TestPackagesNameFilesThatAreThere(t *testing.T) {
	for _, name := range []string{"nfpm.yaml", "nfpm-lab.yaml"} {
		t.Run(name, func(t *testing.T) { checkPackage(t, name) })
	}
}

// TestPackagesHaveTheVersionOfTheTreeAndNoAddressOfTheirOwn finds addresses of projects and people in what is
// installed. The name of the module is one of the program's, and leads nowhere.
func TestPackagesHaveTheVersionOfTheTreeAndNoAddressOfTheirOwn(t *testing.T) {
	version, err := os.ReadFile("../internal/cli/VERSION")
	require.NoError(t, err)
	for name, want := range map[string]string{
		"nfpm.yaml": "version: ${VERSION}", "nfpm-lab.yaml": "version: ${VERSION}", "Dockerfile": "ARG VERSION=",
		"openwrt/Makefile": "PKG_VERSION:=" + string(version), "kubernetes/Chart.yaml": "version: " + string(version),
		"penstock.service": "Documentation=man:penstock(1)",
	} {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		assert.Contains(t, string(text), want, name)
		assert.NotRegexp(t, `https?://|git@|@[a-z.-]+\.(invalid|example|org|com)\b`, string(text), name)
	}
}

// checkPackage checks the description of one package.
func checkPackage(t *testing.T, name string) {
	text, err := os.ReadFile(name)
	require.NoError(t, err)
	var file struct {
		Contents []struct{ Src, Dst string }
		Scripts  map[string]string
		APK      struct{ Scripts map[string]string }
	}
	require.NoError(t, yaml.Unmarshal(text, &file))
	require.NotEmpty(t, file.Contents)
	sources := []string{}
	for _, c := range file.Contents {
		assert.True(t, strings.HasPrefix(c.Dst, "/"), c.Dst)
		sources = append(sources, c.Src)
	}
	// apk runs another script at an upgrade, which replaces a configuration that is as it came.
	assert.Equal(t, file.Scripts["postinstall"], file.APK.Scripts["postupgrade"])
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

// script runs one of a package's on a system that systemd manages, or OpenRC, with programs that write
// down how they are called, and returns that.
func script(t *testing.T, name string, systemd, config bool, args ...string) string {
	t.Helper()
	dir := t.TempDir()
	manager := dir
	if !systemd {
		manager = filepath.Join(dir, "none")
	}
	text, err := os.ReadFile(filepath.Join("package", name))
	require.NoError(t, err)
	here := strings.NewReplacer("/etc/penstock", dir+"/etc", "/usr/bin/penstock", "penstock",
		"/run/systemd/system", manager).Replace(string(text))
	for _, program := range []string{"systemctl", "systemd-sysusers", "rc-service", "getent", "penstock"} {
		call := fmt.Sprintf("#!/bin/sh\necho %s \"$@\" >>%s/calls\n", program, dir)
		require.NoError(t, os.WriteFile(filepath.Join(dir, program), []byte(call), 0o755)) //nolint:gosec // a program
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "chgrp"),
		[]byte("#!/bin/sh\n[ -e \"$2\" ] && echo chgrp \"$1\" >>"+dir+"/calls\n"), 0o755)) //nolint:gosec // likewise
	if config {
		require.NoError(t, os.Mkdir(filepath.Join(dir, "etc"), 0o755)) //nolint:gosec // as in a package
		require.NoError(t, os.WriteFile(filepath.Join(dir, "etc", "penstock.yaml"), nil, 0o600))
	}
	cmd := exec.Command("sh", append([]string{"-c", here, name}, args...)...)
	cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if !os.IsNotExist(err) {
		require.NoError(t, err)
	}
	return string(calls)
}

// apk says which version goes, deb that one does, rpm how many stay.
func TestWhatCapturesGoesWithThePackage(t *testing.T) {
	for _, args := range [][]string{{"remove"}, {"0"}, {"1.2.3-r0"}, nil} {
		calls := script(t, "preremove.sh", true, true, args...)
		assert.Contains(t, calls, "penstock rules remove", args)
		assert.Contains(t, calls, "systemctl disable --now penstock.service", args)
	}
	for _, args := range [][]string{{"upgrade", "1.2.4"}, {"failed-upgrade", "1.2.3"}, {"1"}} {
		assert.Empty(t, script(t, "preremove.sh", true, true, args...), args)
	}
}

func TestThePackageIsInstalledWithoutTheFileThatItBrought(t *testing.T) {
	assert.Contains(t, script(t, "postinstall.sh", true, true), "chgrp penstock")
	calls := script(t, "postinstall.sh", true, false, "configure", "1.2.3") // its administrator has removed it
	assert.Contains(t, calls, "systemctl reload penstock.service")
	assert.NotContains(t, calls, "restart", "what runs is taken over")
	assert.NotContains(t, calls, "rc-service", "where systemd runs")
	calls = script(t, "postinstall.sh", false, true)
	assert.Contains(t, calls, "rc-service --ifstarted penstock restart")
	assert.NotContains(t, calls, "systemctl", "where OpenRC runs")
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

// procd plays OpenWrt's init system, and writes down what it is asked for, as the program does.
const procd = `
config_load() { :; }
config_get() { eval "v=\${UCI_$3-}"; [ -n "$v" ] || v="${4-}"; eval "$1=\$v"; }
config_get_bool() { config_get "$@"; }
config_list_foreach() { for i in $UCI_interface; do "$3" "$i"; done; }
append() { eval "$1=\"\${$1-} $2\""; }
running() { [ -n "$RUNNING" ]; }
procd_send_signal() { echo "SIGHUP to $1"; }
start() { echo start; }
stop() { echo stop; }
. openwrt/files/penstock.init
penstock() { echo "penstock $*"; return "$CODE"; }
PROG=penstock OWN=$DIR/penstock.yaml
reload_service
`

// Whoever changes a setting of uci has it in force after reload_config.
func TestOpenWrtPutsWhatChangesIntoForce(t *testing.T) {
	reloads := "penstock reload --config DIR/penstock.yaml\n"
	for name, c := range map[string]struct {
		settings []string
		does     string
	}{
		"another port and interface": {
			[]string{"UCI_enabled=1", "RUNNING=1", "UCI_port=7001", "UCI_interface=br-lan br-guest"},
			reloads + "penstock rules apply --interface br-lan --interface br-guest --port 7001 --dport 80,443\n",
		},
		"what the proxy refuses": {
			[]string{"UCI_enabled=1", "RUNNING=1", "UCI_interface=br-lan", "CODE=78"}, reloads,
		},
		"a proxy that cannot be asked": {
			[]string{"UCI_enabled=1", "RUNNING=1", "UCI_interface=br-lan", "UCI_telemetry=off", "CODE=1"},
			reloads + "SIGHUP to penstock\npenstock rules apply --interface br-lan --port 7000 --dport 80,443\n",
		},
		"switched on":  {[]string{"UCI_enabled=1", "UCI_interface=br-lan"}, "start\n"},
		"switched off": {[]string{"UCI_enabled=0", "RUNNING=1"}, "stop\nstart\n"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			cmd := exec.Command("sh", "-c", procd)
			cmd.Env = append(append(os.Environ(), "DIR="+dir, "CODE=0"), c.settings...)
			out, err := cmd.Output()
			if !slices.ContainsFunc(c.settings, func(s string) bool { return strings.HasPrefix(s, "CODE=") }) {
				require.NoError(t, err)
			}
			assert.Equal(t, c.does, strings.ReplaceAll(string(out), dir, "DIR"))
		})
	}
}

// What is captured goes through the proxy until that has drained.
func TestOpenWrtCapturesUntilTheProxyHasEnded(t *testing.T) {
	cmd := exec.Command("sh", "-c", `
sleep() { echo sleep; kill "$proxy"; wait "$proxy"; }
. openwrt/files/penstock.init
penstock() { echo "penstock $*"; }
PROG=penstock PID=$DIR/pid
cat <&3 >/dev/null 2>&1 & # ends at SIGTERM
proxy=$!
echo $proxy >"$PID"
stop_service; echo procd_kill; service_stopped
rm "$PID"; stop_service; service_stopped # there was none
`)
	cmd.Env = append(os.Environ(), "DIR="+t.TempDir())
	held, end, err := os.Pipe()
	require.NoError(t, err)
	defer end.Close()  //nolint:errcheck // a pipe
	defer held.Close() //nolint:errcheck // likewise
	cmd.ExtraFiles = []*os.File{held}
	out, err := cmd.Output()
	require.NoError(t, err)
	assert.Equal(t, "procd_kill\nsleep\npenstock rules remove\npenstock rules remove\n", string(out))
}

// The image runs without a file of the user's.
func TestTheImageHasAConfiguration(t *testing.T) {
	c, err := config.Load("container.yaml")
	require.NoError(t, err)
	assert.NotEqual(t, "off", c.Telemetry.Health, "penstock ready asks there")
	assert.Less(t, c.Shutdown.Drain, 10*time.Second, "docker stop kills then")
	text, err := os.ReadFile("Dockerfile")
	require.NoError(t, err)
	assert.Contains(t, string(text), " deploy/container.yaml /etc/penstock/penstock.yaml")
}

// Package deploy_test checks what is shipped for operating the proxy: that the
// examples are valid and that systemd understands the units.
package deploy_test

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/proxy/config"
)

func TestExamplesAreValid(t *testing.T) {
	paths, err := filepath.Glob("*.yaml")
	require.NoError(t, err)
	require.NotEmpty(t, paths)
	for _, path := range paths {
		if path == "alerts.yaml" || path == "nfpm.yaml" || path == "nfpm-lab.yaml" {
			continue // Prometheus's, and the packager's
		}
		t.Run(path, func(t *testing.T) {
			c, err := config.Load(withFiles(t, path))
			require.NoError(t, err)
			for _, warning := range c.Warnings() {
				// The image's address is meant to serve whoever it is published to.
				meant := map[string]string{"container.yaml": "0.0.0.0:1080"}
				require.NotEmpty(t, meant[path], "an example that warns: %s", warning)
				assert.Contains(t, warning, meant[path])
			}
		})
	}
}

// withFiles copies an example to where the files are that it names.
func withFiles(t *testing.T, path string) string {
	t.Helper()
	dir := t.TempDir()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	for name, content := range map[string]string{
		path: string(text), "vpn.key": "EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=\n", "peers.conf": "",
	} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	return filepath.Join(dir, path)
}

func TestRouterMarksItsConnectionsAsTheRulesExpect(t *testing.T) {
	c, err := config.Load("edge-router.yaml")
	require.NoError(t, err)
	assert.EqualValues(t, capture.DefaultOwnMark, c.Mark)
}

func TestUnitGivesTheDrainItsTime(t *testing.T) {
	unit, err := os.ReadFile("penstock.service")
	require.NoError(t, err)
	match := regexp.MustCompile(`(?m)^TimeoutStopSec=(\d+)s$`).FindSubmatch(unit)
	require.NotNil(t, match)
	stop, err := strconv.Atoi(string(match[1]))
	require.NoError(t, err)
	drain := config.Default().Shutdown.Drain
	assert.Greater(t, time.Duration(stop)*time.Second, drain, "systemd would kill what is still being drained")
}

// Go's crashes exit with 2, and so does what the watchdog ends: the unit starts
// the proxy again after all but a mistake in the configuration.
func TestUnitStartsAgainAfterACrash(t *testing.T) {
	unit, err := os.ReadFile("penstock.service")
	require.NoError(t, err)
	assert.Regexp(t, `(?m)^Restart=on-failure$`, string(unit))
	assert.Regexp(t, `(?m)^RestartPreventExitStatus=78$`, string(unit))
	assert.Regexp(t, `(?m)^ExecReload=/usr/bin/penstock reload `, string(unit))
	assert.NotContains(t, string(unit), "ExecStartPre=", "it runs when the old proxy is gone")
}

func TestSystemdUnderstandsTheUnits(t *testing.T) {
	path := unitElsewhere(t)
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", path).CombinedOutput()
	assert.NoError(t, err, "%s", out)
	for line := range strings.Lines(string(out)) {
		// It tells of every unit it happens to load.
		assert.NotContains(t, line, filepath.Dir(path))
	}
}

func TestSystemdUnderstandsTheUnitWithTUN(t *testing.T) {
	path := unitElsewhere(t)
	drop, err := os.ReadFile("penstock-tun.conf")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(path+".d", "tun.conf"), drop, 0o644))
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", path).CombinedOutput()
	assert.NoError(t, err, "%s", out)
	for line := range strings.Lines(string(out)) {
		assert.NotContains(t, line, filepath.Dir(path))
	}
}

func TestUnitIsHardened(t *testing.T) {
	const most = 20 // tenths: systemd calls up to 4.9 "OK"
	path := unitElsewhere(t)
	out, err := exec.Command("systemd-analyze", "security", "--offline=true", "--threshold="+strconv.Itoa(most),
		path).CombinedOutput()
	if err != nil && strings.Contains(string(out), "unrecognized option") {
		t.Skip("this systemd-analyze knows no security --offline; systemd 250 does")
	}
	assert.NoError(t, err, "%s", out)
}

// unitElsewhere copies the units to where systemd-analyze finds the program
// they start, and returns the path of the service.
func unitElsewhere(t *testing.T) string {
	t.Helper()
	need.Programs(t, "systemd-analyze")
	dir := t.TempDir()
	program := filepath.Join(dir, "penstock")
	require.NoError(t, os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755))
	unit, err := os.ReadFile("penstock.service")
	require.NoError(t, err)
	drop, err := os.ReadFile("penstock-capture.conf")
	require.NoError(t, err)
	place := func(text []byte) []byte {
		return []byte(strings.ReplaceAll(string(text), "/usr/bin/penstock", program))
	}
	path := filepath.Join(dir, "penstock.service")
	require.NoError(t, os.WriteFile(path, place(unit), 0o644))
	require.NoError(t, os.Mkdir(path+".d", 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(path+".d", "capture.conf"), place(drop), 0o644))
	return path
}

// dashboard is what tests look at of Grafana's.
type dashboard struct {
	Title  string
	Panels []struct {
		Title   string
		Targets []struct{ Expr string }
	}
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	data, err := os.ReadFile("grafana.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(data, &d))
	return d
}

func TestDashboardIsValid(t *testing.T) {
	dashboard := readDashboard(t)
	assert.NotEmpty(t, dashboard.Title)
	require.NotEmpty(t, dashboard.Panels)
	for _, p := range dashboard.Panels {
		assert.NotEmpty(t, p.Targets, p.Title)
	}
}

// TestPrometheusUnderstandsAlertsAndDashboard has promtool, which is Prometheus's own,
// judge the alerts, and the queries of the dashboard as rules.
func TestPrometheusUnderstandsAlertsAndDashboard(t *testing.T) {
	need.Programs(t, "promtool")
	type rule struct {
		Record, Expr string
	}
	type group struct {
		Name  string
		Rules []rule
	}
	queries := group{Name: "dashboard"}
	for _, p := range readDashboard(t).Panels {
		for _, target := range p.Targets {
			queries.Rules = append(queries.Rules, rule{
				Record: fmt.Sprintf("query:%d", len(queries.Rules)),
				Expr:   strings.ReplaceAll(target.Expr, "$__rate_interval", "5m"),
			})
		}
	}
	require.NotEmpty(t, queries.Rules)
	rules, err := yaml.Marshal(map[string][]group{"groups": {queries}})
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	require.NoError(t, os.WriteFile(file, rules, 0o600))
	out, err := exec.Command("promtool", "check", "rules", "alerts.yaml", file).CombinedOutput()
	assert.NoError(t, err, "%s", out)
	assert.NotContains(t, string(out), "FAILED")
}

func TestAlertsAreValid(t *testing.T) {
	data, err := os.ReadFile("alerts.yaml")
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	require.NoError(t, yaml.UnmarshalWithOptions(data, &file, yaml.Strict()))
	require.Len(t, file.Groups, 1)
	for _, r := range file.Groups[0].Rules {
		assert.NotEmpty(t, r.Expr, r.Alert)
		assert.NotEmpty(t, r.Annotations["summary"], r.Alert)
		assert.Contains(t, []string{"warning", "critical"}, r.Labels["severity"], r.Alert)
	}
}

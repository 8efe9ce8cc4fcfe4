package deploy_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// inside is what runs in a booted machine, and writes what it sees to /out/seen.
const inside = `#!/bin/bash
file=/etc/penstock/penstock.yaml
mkdir -p /etc/penstock; cp /opt/good.yaml $file; chmod 644 $file
systemd-sysusers /opt/penstock.sysusers; systemctl daemon-reload
show() { systemctl show penstock -p "$1" --value; }
up() { # waits until another process than $1 is the active one
  for i in $(seq 300); do
    now=$(show MainPID); [ "$now" != 0 ] && [ "$now" != "$1" ] && systemctl is-active -q penstock && return; sleep .1
  done
}
say() { echo "$*" >> /out/seen; }
serves() { (exec 3<>/dev/tcp/127.0.0.1/1080) 2>/dev/null && echo yes || echo no; }
systemctl start penstock; say "start $? $(show ActiveState) $(show StatusText)"
for s in ABRT SEGV KILL STOP; do pid=$(show MainPID); kill -$s $pid; up $pid; say "$s $(show ActiveState)"; done
systemctl reload penstock; say "reload $?"
pid=$(show MainPID); echo 'frob: 1' >> $file
systemctl reload penstock; code=$?; say "broken reload $code $([ $pid = $(show MainPID) ] && echo same) $(serves)"
say "why $(journalctl -u penstock -o cat -p err --no-pager | grep -c 'penstock.yaml:3:1: frob: unknown key')"
sleep .5; say "status $(show StatusText | cut -c1-70)"
systemctl restart penstock; say "broken restart $? $(show ActiveState) $(serves)"
say "loud $(journalctl -u penstock -o cat -p err --no-pager | grep -c 'the last good one is in force')"
cp /opt/good.yaml $file; systemctl reload penstock; say "mended $? $(show StatusText)"
systemctl stop penstock; rm -rf /var/lib/penstock/*; echo 'frob: 1' >> $file
systemctl start penstock; say "broken start $? $(show ExecMainStatus) $(show NRestarts)"
`

// TestUnderSystemd boots this machine's own system, on a root of its own that is
// gone afterwards, and has systemd run the proxy there.
func TestUnderSystemd(t *testing.T) {
	if _, err := exec.LookPath("systemd-nspawn"); err != nil || os.Geteuid() != 0 {
		t.Skip("needs root and systemd-nspawn")
	}
	if testing.Short() {
		t.Skip("boots a system")
	}
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	build := exec.Command("go", "build", "-o", filepath.Join(dir, "penstock"), "../cmd/penstock")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	unit, err := os.ReadFile("penstock.service")
	require.NoError(t, err)
	users, err := os.ReadFile("penstock.sysusers")
	require.NoError(t, err)
	write("penstock.service", strings.NewReplacer("/usr/bin/penstock", "/opt/penstock", "WatchdogSec=30s",
		"WatchdogSec=2s").Replace(string(unit)))
	write("penstock.sysusers", string(users))
	write("good.yaml", "listeners: [{name: a, mode: mixed, address: '127.0.0.1:1080'}]\nshutdown: {drain: 1ms}\n")
	write("inside", inside)
	write("inside.service", "[Service]\nType=oneshot\nExecStart=/bin/bash /opt/inside\nExecStopPost=/bin/systemctl "+
		"poweroff --no-block\n")

	args := []string{
		"120s", "systemd-nspawn", "-q", "-b", "-D", "/", "-M", fmt.Sprintf("penstock-%d",
			os.Getpid()), "--volatile=yes", "--private-network",
		"--register=no", "--keep-unit", "--bind=" + dir + ":/out",
	}
	for name, place := range map[string]string{
		"penstock": "/opt/penstock", "penstock.sysusers": "/opt/penstock.sysusers", "good.yaml": "/opt/good.yaml", "inside": "/opt/inside",
		"penstock.service": "/etc/systemd/system/penstock.service", "inside.service": "/etc/systemd/system/inside.service",
	} {
		args = append(args, "--bind-ro="+filepath.Join(dir, name)+":"+place)
	}
	args = append(args, "systemd.unit=inside.service", "systemd.firstboot=no",
		"systemd.mask=systemd-networkd-wait-online.service")
	boot, err := exec.Command("timeout", args...).CombinedOutput()
	seen, failed := os.ReadFile(filepath.Join(dir, "seen"))
	if failed != nil {
		t.Skipf("no system can be booted here (%v): %s", err, lastLines(string(boot), 5))
	}
	assert.Equal(t, []string{
		"start 0 active serving 0 connections",
		"ABRT active", "SEGV active", "KILL active",
		"STOP active", // which the watchdog ends
		"reload 0",
		"broken reload 1 same yes",
		"why 2", // of the command, and of the proxy
		"status serving 0 connections; the configuration file is not in force: /etc/pe",
		"broken restart 0 active yes",
		"loud 1",
		"mended 0 serving 0 connections",
		"broken start 1 78 0",
	}, strings.Split(strings.TrimSpace(string(seen)), "\n"), "%s", boot)
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/doctor"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

func checkOf(t *testing.T, r doctor.Report, name string) doctor.Check {
	t.Helper()
	i := slices.IndexFunc(r.Checks, func(c doctor.Check) bool { return c.Name == name })
	require.GreaterOrEqual(t, i, 0, "no check %s", name)
	return r.Checks[i]
}

// runDoctor runs this test binary as the program, as the given user, and returns
// its report and the number it had.
func runDoctor(t *testing.T, credential *syscall.Credential) (r doctor.Report, pid int) {
	t.Helper()
	cmd := clitest.Program(t.Context(), "doctor", "--json")
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, stderr.String())
	assert.Empty(t, stderr.String())
	require.NoError(t, json.Unmarshal(out, &r), string(out))
	for _, c := range r.Checks {
		assert.Equal(t, c.State == doctor.OK, c.Fix == "", "%s is %s, with fix %q", c.Name, c.State, c.Fix)
	}
	return r, cmd.Process.Pid
}

// traces is what a trial could leave behind where this process is.
func traces(t *testing.T) (lines []string) {
	t.Helper()
	links, err := netlink.LinkList()
	require.NoError(t, err)
	for _, l := range links {
		lines = append(lines, "link "+l.Attrs().Name)
	}
	rules, err := netlink.RuleList(netlink.FAMILY_ALL)
	require.NoError(t, err)
	for _, r := range rules {
		lines = append(lines, "rule "+r.String())
	}
	return lines
}

func TestDoctorTellsRootAboutThisMachine(t *testing.T) {
	needRoot(t)
	before := traces(t)
	r, pid := runDoctor(t, nil)
	assert.Equal(t, before, traces(t), "something was left behind")
	available, _, err := kernel.Envelopes()
	require.NoError(t, err)
	assert.NotContains(t, available, fmt.Sprintf("penstock%d", pid), "a control was left behind")

	d, err := kernel.New(kernel.Config{Clock: monotonicTime})
	require.NoError(t, err)
	defer func() { require.NoError(t, d.Close()) }()
	assert.Equal(t, d.Envelope(), r.Envelope)
	assert.Equal(t, doctor.OK, checkOf(t, r, "net_admin").State)
	assert.Equal(t, doctor.OK, checkOf(t, r, "tproxy_ipv4").State)
	effective, _, err := caps.Held()
	require.NoError(t, err)
	if effective != 0 {
		assert.Equal(t, effective.Words(), checkOf(t, r, "capabilities").Found)
	}
	if effective.Has(caps.SysAdmin) {
		assert.NotContains(t, checkOf(t, r, "tproxy_rules_ipv4").Found, "could not be tried")
	}
}

func TestDoctorTellsAUserWhatIsMissing(t *testing.T) {
	needRoot(t) // to become nobody
	r, _ := runDoctor(t, &syscall.Credential{Uid: 65534, Gid: 65534})
	assert.Equal(t, "unprivileged", r.Tier)
	for _, name := range []string{"net_admin", "tproxy_ipv4", "tproxy_ipv6"} {
		c := checkOf(t, r, name)
		assert.Equal(t, doctor.Missing, c.State, name)
		assert.Contains(t, c.Fix, "setcap cap_net_admin+ep on the binary", name)
	}
	assert.Equal(t, doctor.Warn, checkOf(t, r, "ebpf").State)
	assert.Equal(t, "none: what needs no privilege works", checkOf(t, r, "capabilities").Found)
	switch namespaces := checkOf(t, r, "user_namespaces"); namespaces.State {
	case doctor.OK:
		assert.NotContains(t, checkOf(t, r, "redirect_rules_ipv4").Found, "could not be tried")
	default:
		assert.Contains(t, checkOf(t, r, "redirect_rules_ipv4").Fix, "run penstock doctor as root")
	}
}

func TestDoctorHelpHasExamples(t *testing.T) {
	code, stdout, _ := run(t, "doctor", "--help")
	require.Equal(t, cli.ExitOK, code)
	assert.Contains(t, stdout, "penstock doctor --json")
	assert.NotContains(t, stdout, trialsFlag)
}

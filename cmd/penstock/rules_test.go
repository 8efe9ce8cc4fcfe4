package main

import (
	"bytes"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// runRules runs "penstock rules …" by itself.
func runRules(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := rulesCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestRulesPrintSaysWhatTheFlagsSay(t *testing.T) {
	out, err := runRules(t, "print", "--port", "1081", "-i", "lan0", "--dport", "80,8000-8099",
		"--source", "192.168.0.0/16", "--not-destination", "192.168.1.1", "--ipv6=false",
		"--mark", "0x10", "--own-mark", "0x20", "--route-table", "7")
	require.NoError(t, err)
	for _, want := range []string{
		"fwmark 0x10/0x10 lookup 7", `{ "lan0" }`, "{ 80, 8000-8099 }", "{ 192.168.0.0/16 }", "{ 192.168.1.1/32 }",
		"meta mark & 0x00000020 == 0x00000020 return", "tproxy ip to :1081",
	} {
		assert.Contains(t, out, want)
	}
	assert.NotContains(t, out, "ip6")
	out, err = runRules(t, "print", "--port", "1082", "--mode", "redirect", "--interface", "any", "--connected")
	require.NoError(t, err)
	assert.Contains(t, out, "redirect to :1082")
	assert.NotContains(t, out, "ip rule")
	assert.NotContains(t, out, "iifname")
	assert.NotContains(t, out, "connected")
}

// The manifest for Kubernetes applies rules as well.
func TestTheRulesOfTheEdgeOnNodesAreRules(t *testing.T) {
	text, err := os.ReadFile("../../deploy/kubernetes/edge.yaml")
	require.NoError(t, err)
	var args []string
	for _, document := range strings.Split(string(text), "\n---\n") {
		var set struct {
			Spec struct {
				Template struct {
					Spec struct {
						InitContainers []struct{ Args []string } `yaml:"initContainers"`
					}
				}
			}
		}
		require.NoError(t, yaml.Unmarshal([]byte(document), &set))
		for _, c := range set.Spec.Template.Spec.InitContainers {
			args = append(args, c.Args...)
		}
	}
	require.Greater(t, len(args), 2)
	require.Equal(t, []string{"rules", "apply"}, args[:2])
	out, err := runRules(t, append([]string{"print"}, args[2:]...)...)
	require.NoError(t, err)
	assert.Contains(t, out, "{ 10.244.0.0/16 }")
	// Pods behind an overlay are narrower than the nodes' network.
	for _, errors := range []string{"icmp type != redirect", "icmpv6 type < 128"} {
		assert.Contains(t, out, errors+" socket transparent 1 meta mark set meta mark | 0x00000010 accept")
	}
}

func TestRulesApplySaysWhatIsToBeKnown(t *testing.T) {
	lab, err := netlab.NewRouted()
	if errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	defer func() { require.NoError(t, lab.Close()) }()
	require.NoError(t, lab.Edge.Do(func() error {
		said, err := runRules(t, "apply", "--port", "1081", "--interface", netlab.NearDevice, "--interface",
			"nosuch0", "--connected=no")
		assert.Contains(t, said, "note: interface nosuch0 does not exist")
		assert.Contains(t, said, "note: connections to networks of this machine go past the proxy")
		assert.Contains(t, said, "("+netlab.NearDevice+")")
		return err
	}))
}

// A machine without IPv6 has IPv4 captured all the same, and what breaks that is told with its cure.
func TestRulesApplyWarnsOfSettingsInTheWay(t *testing.T) {
	lab, err := netlab.NewRouted()
	if errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	defer func() { require.NoError(t, lab.Close()) }()
	apply := func(more ...string) (said string, err error) {
		_ = lab.Edge.Do(func() error {
			said, err = runRules(t, append([]string{"apply", "--port", "1081", "--interface", netlab.NearDevice}, more...)...)
			return nil
		})
		return said, err
	}
	said, err := apply()
	require.NoError(t, err)
	assert.NotContains(t, said, "warning")
	assert.NotContains(t, said, "IPv6")

	require.NoError(t, lab.Edge.Sysctl("net.ipv4.tcp_syncookies", "2"))
	require.NoError(t, lab.Edge.Sysctl("net.ipv4.ip_local_port_range", "50000 50999"))
	for setting, cure := range map[string]string{
		"net.ipv6.conf.lo.disable_ipv6":  "on lo, so the rules leave it out; to capture it: sysctl -w net.ipv6.conf.lo.disable_ipv6=0",
		"net.ipv6.conf.all.disable_ipv6": "here, so the rules leave it out; to capture it: sysctl -w net.ipv6.conf.all.disable_ipv6=0",
	} {
		require.NoError(t, lab.Edge.Sysctl(setting, "1"))
		said, err = apply()
		require.NoError(t, err)
		assert.Contains(t, said, "note: IPv6 is switched off "+cure)
		assert.Contains(t, said, "warning: net.ipv4.tcp_syncookies is 2, always: every connection captured by tproxy is reset: "+
			"sysctl -w net.ipv4.tcp_syncookies=1")
		assert.Contains(t, said, "warning: net.ipv4.ip_local_port_range is 1000 ports")
		_, err = apply("--ipv4=false")
		require.ErrorContains(t, err, "or switch it on (sysctl -w net.ipv6.conf.all.disable_ipv6=0)")
		require.NoError(t, lab.Edge.Sysctl(setting, "0"))
	}
	said, err = apply("--mode", "redirect")
	require.NoError(t, err)
	assert.NotContains(t, said, "syncookies", "address translation needs no socket")
}

func TestRulesMistakesAreTheUsersToFix(t *testing.T) {
	for want, args := range map[string][]string{
		"--port: missing; name the port":                   {"print"},
		"or --interface any":                               {"apply", "--port", "1"},
		`--mode: "tun" is not one of tproxy, redirect`:     {"apply", "--port", "1", "--mode", "tun"},
		`--dport: capture: port "https"`:                   {"apply", "--port", "1", "--dport", "https"},
		`--not-source: "10/8"`:                             {"print", "--port", "1", "--not-source", "10/8"},
		`--connected: "maybe" is not one of auto, yes, no`: {"print", "--port", "1", "-i", "lan0", "--connected=maybe"},
		"both are off":                                     {"apply", "--port", "1", "--ipv4=false", "--ipv6=false"},
		"share bits":                                       {"print", "--port", "1", "--mark", "3", "--own-mark", "1"},
		`interface "lan*"`:                                 {"print", "--port", "1", "-i", "lan*"},
	} {
		code, _, stderr := run(t, append([]string{"rules"}, args...)...)
		assert.Equal(t, cli.ExitInput, code)
		assert.Contains(t, stderr, want)
	}
}

func TestRulesStatusSaysWhatIsInForce(t *testing.T) {
	lab, err := netlab.NewRouted()
	if errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	defer func() { require.NoError(t, lab.Close()) }()
	rules := func(args ...string) (said string, err error) {
		require.NoError(t, lab.Edge.Do(func() error {
			said, err = runRules(t, args...)
			return nil
		}))
		return said, err
	}
	_, err = rules("status")
	require.ErrorContains(t, err, "no rules are in force, so that nothing is captured: penstock rules apply")

	_, err = rules("apply", "--mode", "redirect", "--port", "1081", "--interface", netlab.NearDevice)
	require.NoError(t, err)
	said, err := rules("status")
	require.ErrorContains(t, err, "nothing is seen to listen at port 1081")
	assert.Contains(t, said, "in force: redirect, from "+netlab.NearDevice+" to port 1081 (nothing is seen there)\n"+
		"  IPv4: 0 connections' first packets captured\n  IPv6: 0 connections' first packets captured\n")

	ln, err := lab.Edge.Listen("tcp", "[::]:1081")
	require.NoError(t, err)
	defer ln.Close()
	c, err := lab.Client.Dial("tcp", netip.AddrPortFrom(lab.ServerAddr.V4, 80).String())
	require.NoError(t, err)
	defer c.Close()
	said, err = rules("status")
	require.NoError(t, err)
	assert.Contains(t, said, " to port 1081 (", "and who listens there")
	assert.Contains(t, said, "  IPv4: 1 connections' first packets captured\n")

	_, err = rules("apply", "--port", "1081", "--interface", netlab.NearDevice)
	require.NoError(t, err)
	require.NoError(t, lab.Edge.Do(func() error { return exec.Command("ip", "rule", "del", "priority", "120").Run() }))
	_, err = rules("status")
	require.ErrorContains(t, err, "the ip policy rule of priority 120 has gone: apply the rules again")
}

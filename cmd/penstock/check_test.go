package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
)

func checkFile(t *testing.T, content string) (code int, stdout, stderr string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(file, []byte(content), 0o600))
	var out, errs bytes.Buffer
	code = runCommandLine(context.Background(), []string{"check", file}, &out, &errs)
	return code, out.String(), errs.String()
}

func TestCheckPrintsWhatWouldRun(t *testing.T) {
	code, out, errs := checkFile(t, `
listeners:
- {name: lan, mode: socks5, address: "192.168.1.1:1080"}
rules:
- {name: mail, match: {ports: [25]}, refuse: no mail}
- {name: old, match: {ports: [25], source: [192.168.1.0/24]}}
- {name: call, match: {ports: [5061]}, down: {algorithm: cubic, class: guarantee, target: 5mbit, min_rate: 500kbit, hint_cap: 0.95}, up: {algorithm: janus, group: flow, class: delay_sensitive}}
- {name: video, match: {ports: [443]}, down: {algorithm: "copa:delta=0.1", max_rate: 20mbit, weight: 2}, up: {algorithm: none}}
`)
	require.Equal(t, cli.ExitOK, code, errs)
	assert.Contains(t, out, "listener lan: socks5 on 192.168.1.1:1080")
	assert.Contains(t, out, "rule mail: refuse (no mail)")
	assert.Contains(t, out, "rule video: down copa:delta=0.1 at most 20mbit in a group weight 2, up none\n")
	assert.Contains(t, out, "rule call: down cubic class guarantee target 5mbit at least 500kbit within 0.95 of "+
		"hints, up janus:class=delay_sensitive, clients' windows held by penstock\n")
	assert.Contains(t, out, "otherwise: down penstock, up penstock, clients' windows held by penstock\n")
	assert.Contains(t, errs, "warning: listeners[0]: lan serves everybody")
	assert.Contains(t, errs, "warning: rules[0]: mail matches all that these rules below it match, so that they are "+
		"never reached: old; put it below them")
}

func TestCheckPrintsTunnels(t *testing.T) {
	code, out, errs := checkFile(t, `
listeners:
- {name: vpn, mode: wireguard, address: ":51820", wireguard: {private_key: EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=, peers: [
    {name: phone, public_key: BBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBBA=, allowed_ips: [10.9.0.2]}]}}
- {name: other, mode: tun, device: penstock0}
`)
	require.Equal(t, cli.ExitOK, code, errs)
	assert.Contains(t, out, "listener vpn: wireguard on :51820, MTU 1420, 1 peers\n")
	assert.Contains(t, out, "listener other: tun on penstock0, MTU 1500\n")
	assert.NotContains(t, out+errs, "EEEE")
}

func TestCheckTellsWhoEndsATunnel(t *testing.T) {
	code, out, errs := checkFile(t, "listeners: [{name: vpn, mode: wireguard, address: ':51820', wireguard: {datapath: "+
		"auto, private_key: EEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEEE=, pool: [10.9.0.0/24]}}]")
	require.Equal(t, cli.ExitOK, code, errs)
	assert.Contains(t, out, "listener vpn: wireguard on :51820, datapath auto, interface wg-vpn, MTU 1420\n")
}

func TestCheckTellsWhereHintsComeFrom(t *testing.T) {
	const lan = "listeners: [{name: lan, mode: mixed, address: '127.0.0.1:1080'}]\n"
	for config, says := range map[string]string{
		"": "hints: on 127.0.0.1:9464\n",
		"telemetry: {hints: {token: 0123456789abcdef, socket: /run/h.sock}}": "hints: on 127.0.0.1:9464 with the " +
			"token, on /run/h.sock\n",
		"telemetry: {address: '0.0.0.0:9464', hints: {socket: /run/h.sock}}": "hints: on /run/h.sock\n",
	} {
		code, out, errs := checkFile(t, lan+config)
		require.Equal(t, cli.ExitOK, code, errs)
		assert.Contains(t, out, says)
		assert.NotContains(t, out, "0123456789abcdef")
	}
	_, out, _ := checkFile(t, lan+"telemetry: {address: 'off'}")
	assert.NotContains(t, out, "hints")
}

func TestCheckTellsWhichRulesNeedAServerName(t *testing.T) {
	code, out, errs := checkFile(t, `
listeners:
- {name: lan, mode: mixed, address: "127.0.0.1:1080"}
rules:
- {name: ads, match: {server_name: ["*.Ads.example."]}, refuse: true, undecided: refuse}
- {name: video, match: {server_name: [video.example, "*.video.example"], ports: [443]}, algorithm: copa}
limits: {server_name_wait: 250ms}
`)
	require.Equal(t, cli.ExitOK, code, errs)
	assert.Contains(t, out, "rule ads (server name *.ads.example, or none: refuse): refuse (refused by rule)\n")
	assert.Contains(t, out, "rule video (server name video.example, *.video.example): down copa, up copa, "+
		"clients' windows held by penstock\n")
	assert.Contains(t, out, "server names: the client's first bytes are awaited for at most 250ms, until the "+
		"server speaks\n")
}

func TestCheckShowsWhereAMistakeIs(t *testing.T) {
	code, out, errs := checkFile(t, "listeners:\n- name: lan\n  mod: mixed\n")
	assert.Equal(t, cli.ExitConfig, code)
	assert.Empty(t, out)
	lines := strings.Split(strings.TrimSpace(errs), "\n")
	assert.Contains(t, errs, ">  3 |   mod: mixed")
	assert.Regexp(t, `^penstock: .*penstock\.yaml:3:3: listeners\[0\]\.mod: unknown key; did you mean mode\?$`,
		lines[len(lines)-1])
}

func TestCheckOfAFileThatIsNotThere(t *testing.T) {
	var out, errs bytes.Buffer
	args := []string{"check", filepath.Join(t.TempDir(), "absent.yaml")}
	code := runCommandLine(context.Background(), args, &out, &errs)
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, errs.String(), "absent.yaml: no such file")
}

func TestSchemaIsJSON(t *testing.T) {
	var out, errs bytes.Buffer
	require.Equal(t, cli.ExitOK, runCommandLine(context.Background(), []string{"schema"}, &out, &errs), errs.String())
	var schema map[string]any
	require.NoError(t, json.Unmarshal(out.Bytes(), &schema))
	assert.Equal(t, "object", schema["type"])
}

// Models that are added stay, so one that is added is checked in a process of its own.
func TestCheckKnowsTheModelsOfItsCommandLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	const text = "listeners: [{name: a, mode: socks5, address: '127.0.0.1:1080'}]\n" +
		"defaults: {algorithm: 'mdi:model=mine'}\n"
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	code, _, stderr := run(t, "check", path)
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, stderr, `parameter model is "mine", but must be one of verus`)

	packed, err := os.Open("../../cc/mdi/verus.csv.gz")
	require.NoError(t, err)
	defer packed.Close()
	unpacked, err := gzip.NewReader(packed)
	require.NoError(t, err)
	model, err := io.ReadAll(unpacked)
	require.NoError(t, err)
	mine := filepath.Join(t.TempDir(), "model.csv")
	require.NoError(t, os.WriteFile(mine, model, 0o600))
	cmd := clitest.Program(t.Context(), "check", "--mdi-model", "mine="+mine, path)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	assert.Contains(t, string(out), "mdi:model=mine")
}

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
)

func TestCheckExplainsWhichRuleDecides(t *testing.T) {
	path := filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(path, []byte(`
listeners:
  - {name: lan, mode: tproxy, address: "[::]:7000", udp: {queue: 1}}
  - {name: local, mode: mixed, address: "127.0.0.1:1080"}
rules:
  - {name: calls, match: {server_name: ["*.meet.example"]}, class: guarantee, target: 4mbit}
  - {name: tv, match: {source: [192.168.1.99], listener: [lan]}, max_rate: 5mbit}
  - {name: asked, match: {host: [one.example]}, algorithm: none}
  - {name: none-at-all, match: {sample: 0.000001%}, algorithm: copa}
  - {name: quic, match: {protocol: udp, ports: [443]}, refuse: true}
  - {name: pages, match: {ports: [80, 443], destination: [203.0.113.0/24]}, class: delay_sensitive}
`), 0o600))
	for args, want := range map[string][]string{
		"192.168.1.50 203.0.113.7:443 --name x.meet.example": {
			"calls: decides", "  down: penstock class guarantee target 4mbit, in the group down lan 192.168.1.50",
		},
		"192.168.1.99 203.0.113.7:443": {
			"calls: no, match.server_name does not match: no --name is given", "tv: decides", "at most 5mbit",
		},
		"192.168.1.99:5000 203.0.113.7:443 --listener local --name one.example": {
			"calls: no, match.server_name does not match: the name is one.example",
			"tv: no, match.listener does not match: it comes to local", "asked: decides\n  down: none",
		},
		"192.168.1.50 203.0.113.7:443/udp": {"quic: refuses it (refused by rule)"},
		"192.168.1.50 203.0.113.7:80": {
			"tv: no, match.source does not match: it comes from 192.168.1.50",
			"asked: no, match.host does not match: no --name is given",
			"none-at-all: no, match.sample does not match: the host 192.168.1.50 is not in it",
			"quic: no, match.protocol does not match: it is tcp", "pages: decides",
		},
		"2001:db8::5 [2001:db8:1::7]:80": {
			"pages: no, match.destination does not match: it goes to 2001:db8:1::7", "defaults: decides",
			"in the group up lan to 2001:db8:1::7",
		},
		"192.168.1.50 203.0.113.7:22":                {"pages: no, match.ports does not match: it goes to port 22"},
		"192.168.1.50 127.0.0.1:80 --listener local": {"listener local refuses it before any rule: "},
		"phone 203.0.113.7:443":                      {`"phone" is no client; write an address such as`},
		"192.168.1.50 203.0.113.7":                   {`"203.0.113.7" is no server; write an address and a port such as`},
		"192.168.1.50 203.0.113.7:443 --listener wlan": {
			`--listener: there is none of the name "wlan"; there are lan, local`,
		},
		"192.168.1.50": {"2 arguments do not fit; write: penstock check FILE [--explain CLIENT SERVER]"},
	} {
		var out, errs strings.Builder
		code := runCommandLine(t.Context(), append([]string{"check", path, "--explain"}, strings.Fields(args)...),
			&out, &errs)
		said := out.String() + errs.String()
		if out.Len() == 0 {
			assert.Equal(t, cli.ExitInput, code, args)
		} else {
			assert.Equal(t, cli.ExitOK, code, args)
		}
		for _, words := range want {
			assert.Contains(t, said, words, args)
		}
	}
}

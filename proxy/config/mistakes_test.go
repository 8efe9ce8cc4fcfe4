package config_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/config"
)

// mistakesIn loads a configuration beside other files; every line but the first has no file name.
func mistakesIn(t *testing.T, files map[string]string) (first *config.Error, rest []string) {
	t.Helper()
	path := filepath.Join(folder(t, files), "c.yaml")
	_, err := config.Load(path)
	require.ErrorAs(t, err, &first)
	for _, line := range config.Rest(first) {
		rest = append(rest, strings.TrimPrefix(line, path+":"))
	}
	return first, rest
}

// What cannot be read, what does not go together and what is wrong with files are told at once.
func TestAllMistakesAreToldAtOnce(t *testing.T) {
	first, rest := mistakesIn(t, map[string]string{"wrong.pw": strings.Repeat("x", 256), "c.yaml": `
limits: {bufer: 64KiB, dial_timeout: 0s}
listeners:
- {name: a, mode: mixd, address: "127.0.0.1:1080"}
- {name: b, mode: socks5, address: nowhere, target: "x:1", keep_client: true, users: [{name: x, password_file: gone}]}
- {name: c, mode: socks5, address: "127.0.0.1:1081", users: [{name: x, password_file: gone}, {name: y, password_file: wrong.pw}]}
- {name: d, mode: masque, address: "127.0.0.1:443"}
rules:
- {name: one, match: {listener: [nobody], ports: [99999]}, down: {weight: 2000}}
- {name: two, params: {delta: 1}, group: source/99}
mark: x
`})
	assert.Equal(t, "limits.bufer", first.Key)
	assert.Contains(t, first.Excerpt, ">  2 | limits: {bufer: 64KiB")
	assert.Equal(t, "unknown key; did you mean buffer?", first.Message)
	var keys []string
	for _, line := range rest {
		require.Regexp(t, `^\d+:\d+: [a-z0-9_.\[\]]+: .`, line)
		keys = append(keys, strings.SplitN(line, ": ", 3)[1])
	}
	assert.Equal(t, []string{
		"limits.dial_timeout",
		"listeners[0].mode", // nothing else of this listener: it may follow from its mode
		"listeners[1].address", "listeners[1].target", "listeners[1].keep_client", "listeners[1].users[0].password_file",
		"listeners[2].users[0].password_file", "listeners[2].users[1].password_file",
		"listeners[3].tls.certificate", "listeners[3].tls.key", "listeners[3].masque.tokens_file",
		"rules[0].match.ports[0]", "rules[0].down.weight",
		"rules[1].params.delta", "rules[1].group",
		"mark",
	}, keys, strings.Join(rest, "\n"))
}

// A mistake is not told again in what follows from it.
func TestWhatFollowsFromAMistakeIsNotTold(t *testing.T) {
	for name, text := range map[string]string{
		"a listener's name": "listeners: [{name: 5, mode: mixed, address: '127.0.0.1:1'}]\nrules: [{name: a, match: " +
			"{listener: [b]}}]\n",
		"no list of listeners": "listeners: 5\n",
		"the default algorithm": lan + "defaults: {algorithm: cpa, params: {delta: 1}}\nrules: [{name: a, params: " +
			"{delta: " +
			"1}}]\n",
		"of the defaults":  lan + "defaults: {params: {nonsense: 1}}\nrules: [{name: a}, {name: b}]\n",
		"an agent":         lan + "agents: [{name: 5}]\nrules: [{name: a, algorithm: 'ccp:b'}]\n",
		"no configuration": "[1, 2]\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, rest := mistakesIn(t, map[string]string{"c.yaml": text})
			assert.Empty(t, rest)
		})
	}
}

func TestMoreMistakesThanTwentyAreCounted(t *testing.T) {
	var rules strings.Builder
	for i := range 50 {
		fmt.Fprintf(&rules, "- {name: r%d, weigth: 1}\n", i)
	}
	first, rest := mistakesIn(t, map[string]string{"c.yaml": lan + "rules:\n" + rules.String()})
	assert.Equal(t, "rules[0].weigth", first.Key)
	require.Len(t, rest, 20)
	assert.Equal(t, "22:15: rules[18].weigth: unknown key; did you mean weight?", rest[17])
	assert.Equal(t, "and 30 more", rest[19])
}

func TestFurtherMistakesShowNoSecrets(t *testing.T) {
	const secret = "hunter2hunter2hunter2"
	text := "mark: x\nlisteners:\n- name: a\n  mode: masque\n  address: ':1'\n  users: [{name: x, pasword: " + secret +
		"}, {name: y, password: {is: " + secret + "}}, " + secret + "]\n  masque: {tokens: [{name: a, token: " +
		secret[:10] +
		"}, " + secret + "]}\ntelemetry: {hints: {token: " +
		secret[:10] + "}}\n"
	first, rest := mistakesIn(t, map[string]string{"c.yaml": text})
	assert.Greater(t, len(rest), 4)
	assert.NotContains(t, first.Error()+first.Excerpt+strings.Join(rest, "\n"), "hunter2")
}

// TestALineWithoutAKeyIsNotShown has lines that lost their keys: YAML joins them to the values before.
func TestALineWithoutAKeyIsNotShown(t *testing.T) {
	first, rest := mistakesIn(t, map[string]string{"c.yaml": `
listeners:
  - name: a
    address: 127.0.0.1:1080
    mode: socks5
      s3cret
shutdown:
  drain: 30s
    s3cret
rules:
  - match: {host: [a.example]}
    down:
      algorithm: copa
        s3cret
`})
	assert.Equal(t, "listeners[0].mode", first.Key)
	assert.Contains(t, first.Message, "the value goes on in the next line")
	assert.Len(t, rest, 2)
	assert.NotContains(t, first.Message+strings.Join(rest, "\n"), "s3cret")
}

// A file that is missing is told with its path and the key that names it.
func TestAFileThatIsMissingIsToldWithItsPath(t *testing.T) {
	for key, text := range map[string]string{
		"telemetry.hints.token_file": lan + "telemetry: {hints: {token_file: gone}}\n",
		"listeners[0].users[0].password_file": "listeners: [{name: a, mode: mixed, address: ':1', users: " +
			"[{name: x, password_file: gone}]}]\n",
		"listeners[0].wireguard.private_key_file": "listeners: [{name: v, mode: wireguard, address: ':1', " +
			"wireguard: {private_key_file: gone}}]\n",
		"listeners[0].wireguard.config_file": "listeners: [{name: v, mode: wireguard, wireguard: " +
			"{config_file: gone}}]\n",
		"listeners[0].wireguard.peers[0].preshared_key_file": "listeners: [{name: v, mode: wireguard, address: ':1', " +
			"wireguard: {private_key: " + keyA + ", peers: [{name: p, public_key: " + keyB + ", allowed_ips: " +
			"[10.9.0.2], " +
			"preshared_key_file: gone}]}}]\n",
		"listeners[0].tls.certificate": "listeners: [{name: m, mode: masque, address: ':1', tls: " +
			"{certificate: gone, key: gone}, masque: {open: true}}]\n",
		"listeners[0].masque.tokens_file": "listeners: [{name: m, mode: masque, address: ':1', tls: " +
			"{certificate: '" + pemHead + "', key: '" + pemHead + "'}, masque: {tokens_file: gone}}]\n",
	} {
		t.Run(key, func(t *testing.T) {
			dir := folder(t, map[string]string{"c.yaml": text})
			_, err := config.Load(filepath.Join(dir, "c.yaml"))
			var e *config.Error
			require.ErrorAs(t, err, &e)
			all := append([]string{e.Error()}, config.Rest(e)...)
			assert.Contains(t, strings.Join(all, "\n"), key+": ")
			assert.Contains(t, strings.Join(all, "\n"), filepath.Join(dir, "gone"))
		})
	}
}

const pemHead = "-----BEGIN NOTHING-----"

// What looks right, or nearly so, is told in words that help.
func TestMistakesOfTypingAreToldWithTheCure(t *testing.T) {
	const listener = "listeners: [{name: a, mode: mixed, address: '127.0.0.1:1'}]\n"
	for name, c := range map[string]struct{ doc, says string }{
		"a tab":               {"listeners:\n\t- name: a\n", "2:1: a tab begins the line; YAML wants spaces"},
		"a tab behind spaces": {"listeners:\n- name: a\n \t mode: mixed\n", ": a tab begins the line; YAML wants spaces"},
		"a mode": {
			"listeners: [{name: a, mode: sock5, address: '127.0.0.1:1'}]\n", "; did you mean socks5?",
		},
		"an envelope": {
			listener + "envelope: ebfp\n", `"ebfp" is not one of auto, ebpf, bbr, cubic, reno; did you mean ebpf?`,
		},
		"an algorithm": {
			listener + "defaults: {algorithm: pensotck}\n", `"pensotck"; did you mean penstock? There are bbr,`,
		},
		"a setting": {listener + "defaults: {algorithm: 'copa:dleta=1'}\n", "; did you mean delta?"},
		"a setting of its own": {
			listener + "defaults: {algorithm: copa, params: {dleta: 1}}\n", "; did you mean delta?",
		},
		"letters that swapped": {
			"defualts: {algorithm: copa}\n" + listener, "defualts: unknown key; did you mean defaults?",
		},
		"nothing that is nearby": {
			listener + "log: {level: verbose}\n", `"verbose" is not one of debug, info, warn, error`,
		},
		"an address without quotes": {
			"listeners:\n- mode: tproxy\n  address: [::]:7000\n", `3:16: a value that begins with a bracket or a colon is ` +
				`written in quotes, such as "[::]:7000"`,
		},
		"the same between braces": {
			"listeners: [{mode: tproxy, address: [::]:7000}]\n", `is written in quotes, such as "[::]:7000"`,
		},
		"a prefix without quotes": {
			listener + "rules: [{name: a, match: {source: [2001:db8::/32]}}]\n",
			"rules[0].match.source[0]: expected one value, not keys with values; one with a colon is written in quotes",
		},
		"a line too far to the left": {
			"listeners:\n  - name: a\n   mode: mixed\n", "3:4: this cannot stand here: its line begins in another column than",
		},
		"a line too far to the right": {
			"listeners:\n- name: a\n    mode: mixed\n", "no key can stand here: its line begins too far to the right",
		},
		"no colon":                    {"listeners:\n- name: a\n  mode mixed\n", "a colon and a space are missing"},
		"no brace":                    {"log: {level: debug\n", "no } closes this {"},
		"no brace before another key": {"log: {level: debug\nmark: 1\n", "a comma or the } is missing"},
		"no bracket":                  {"rules: [{name: a}\n", "no ] closes this ["},
		"no quote":                    {"log: {level: \"debug}\n", "no quote closes this one"},
		"a character of YAML's own": {
			listener + "log: {level: @}\n", "'@' is a reserved character; write the value in quotes",
		},
		"a key twice": {listener + "mark: 1\nmark: 2\n", `key "mark" already defined at [2:1]; keep one of them`},
		"one port":    {listener + "rules: [{name: a, match: {ports: 25}}]\n", `not "25"; put brackets around it`},
		"one prefix": {
			listener + "rules: [{name: a, match: {source: 2001:db8::/32}}]\n", "; put quotes and brackets around it",
		},
		"no dash":         {"listeners: {name: a}\n", "not keys with values; begin each entry with a -"},
		"a section's key": {listener + "algorithm: copa\n", "algorithm: unknown key; it stands below agents or defaults"},
		"a key of match":  {listener + "rules: [{name: a, ports: [25]}]\n", "ports: unknown key; it stands below match"},
		"no key": {
			listener + "log: debug\n", `log: expected keys with values, not "debug"; there are flows, format, level`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte(c.doc))
			assert.ErrorContains(t, err, c.says)
		})
	}
	_, err := config.Parse([]byte("defualts: {algorithm: copa}\n" + listener))
	var mistake *config.Error
	require.ErrorAs(t, err, &mistake)
	assert.Contains(t, mistake.Excerpt, "defualts: {algorithm: copa}", "it is no secret")
}

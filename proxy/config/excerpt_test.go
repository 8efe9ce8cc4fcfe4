package config_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

// said is all that is told of a mistake in a configuration.
func said(t testing.TB, text string) string {
	t.Helper()
	_, err := config.Parse([]byte(text))
	var ce *config.Error
	require.ErrorAs(t, err, &ce, text)
	return ce.Error() + "\n" + ce.Excerpt
}

// No mistake shows a secret, wherever it stands and however it is written.
func TestMistakesShowNoSecrets(t *testing.T) {
	const s = "hunter2hunter2hunter2"
	user := func(u string) string {
		return "listeners:\n- name: a\n  mode: socks5\n  address: '127.0.0.1:1'\n  users: " + u + "\n"
	}
	wireguard := func(keys string) string {
		return "listeners:\n- {name: v, mode: wireguard, address: ':51820', wireguard: {" + keys + "}}\n"
	}
	for name, text := range map[string]string{
		"a line above the mistake": wireguard("private_key: "+keyA+"}") + "",
		"two lines above": "listeners:\n- name: v\n  mode: wireguard\n  address: ':1'\n  wireguard:\n    " +
			"private_key: " + s + "\n    peers:\n    - name: a\n      public_key: x\n",
		"on the line of the mistake":        user("[{name: x, password: " + s + ", frob: 1}]"),
		"before the mistake in one mapping": user("[{password: '" + s + "', name: ''}, {name: y}]"),
		"a quoted key":                      user(`[{"name": "x", "password":"` + s + `", "frob": 1}]`),
		"below the mistake":                 "listeners:\n- naem: a\n  users:\n  - name: x\n    password: " + s + "\n",
		"a block of text": "listeners:\n- users:\n  - password: |\n      one\n      " + s + "\n      " +
			"name: " + s + "\n    naem: x\n",
		"a folded text":             "listeners:\n- users:\n  - password: >-\n\n\n      " + s + "\n    naem: x\n",
		"a plain text of two lines": "listeners:\n- users:\n  - password: one\n      " + s + "\n    naem: x\n",
		"a quoted text of two lines": "listeners:\n- users: [{name: x, password: " +
			"\"one\n" + s + "\nname: " + s + "\", naem: y}]\n",
		"quotation marks in it":     "listeners:\n- users: [{name: x, password: \"one\\\" \n" + s + "\", naem: y}]\n",
		"a quotation mark too many": user("[{name: x, password: 'it's " + s + "'}]"),
		"JSON, the value on its own line": "{\"listeners\": [{\"name\": \"a\", \"users\": " +
			"[{\"password\":\n\"" + s + "\"\n, \"naem\": 1}]}]}",
		"a key in capitals":         user("[{name: x, PASSWORD: " + s + "}]"),
		"no space behind the colon": user("[{name: x, password:" + s + ", frob: 1}]"),
		"a mapping for a text":      user("[{name: x, password: {is: " + s + "}}]"),
		"a list for a text":         user("[{name: x, password: [" + s + "]}]"),
		"a tag":                     user("[{name: x, password: !!int " + s + "}]"),
		"an anchor":                 user("[{name: x, password: &a " + s + "}]"),
		"an alias":                  user("[{name: x, password: *" + s + "}]"),
		"twice":                     user("[{name: x, password: " + s + ", password: " + s + "}]"),
		"too long":                  user("[{name: x, password: " + strings.Repeat(s, 20) + "}]"),
		"a key's mistake":           wireguard("private_key: " + s),
		"a mark of a block":         "listeners:\n- users:\n  - password: |" + s + "\n",
		"a short token":             lan + "telemetry: {hints: {token: " + s[:10] + "}}\n",
		"a token with a space":      lan + "telemetry: {hints: {token: " + s + " " + s + "}}\n",
		"a key in PEM": "listeners:\n- name: m\n  tls:\n    key: |\n      -----BEGIN PRIVATE " +
			"KEY-----\n      " + s + "\n      -----END PRIVATE KEY-----\n    cert: x\n",
		"in a comment":                 "listeners:\n# password: " + s + "\n- naem: a\n",
		"no YAML at all":               "listeners: [}\npassword: " + s + "\n",
		"YAML that ends too soon":      user("[{name: x, password: " + s),
		"equal signs for colons":       "listeners:\n- name = a\n  password = " + s + "\n",
		"an equal sign for a colon":    "telemetry: token=" + s + "\n",
		"words where a list is wanted": "listeners:\n  name = a\n  password = " + s + "\n",
		"an equal sign in a mapping":   user("[{name: x, password=" + s + "}]"),
		"the first key's equal sign":   user("[{password=" + s + ", name: x}]"),
		"a colon on the next line":     "listeners:\n- {name: a, users: [{name: x, password\n   : " + s + "}]}\n",
		"Windows lines": "listeners:\r\n- users:\r\n  - password: one\r\n      " + s + "\r\n    naem: " +
			"x\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			text = strings.ReplaceAll(text, "\t", "  ")
			out := said(t, text)
			assert.NotContains(t, out, s)
			assert.NotContains(t, out, s[:10])
			assert.NotContains(t, out, keyA)
		})
	}
}

// A message shows no secret even where the excerpt shows it, since no key there is that of a secret.
func TestMessagesShowNoSecretsWithoutTheirKeys(t *testing.T) {
	const s = "hunter2hunter2hunter2"
	user := func(u string) string {
		return "listeners:\n- name: a\n  mode: socks5\n  address: '127.0.0.1:1'\n  users: " + u + "\n"
	}
	for name, text := range map[string]string{
		"a key that is spelt wrong": user("[{name: x, pasword: " + s + "}]"),
		"a key of another tool":     user("[{name: x, passwd: " + s + "}]"),
		"a list of words":           user("[alice, " + s + "]"),
		"a list of words below":     user("\n  - alice\n  - " + s),
		"names for keys":            user("{alice: " + s + "}"),
		"one word":                  user(s),
		"tokens as words": "listeners: [{name: m, mode: masque, address: ':1', masque: {tokens: " +
			"[" + s + "]}}]\n",
		"a file of keys":           "[Interface]\nPrivateKey = " + s + "\nListenPort = 51820\n",
		"a key alone":              s + "\n",
		"a binary file":            "\x00\x01\x02" + s + "\xff\xfe\n",
		"equal signs in a mapping": user("[{name: x, pasword = " + s + "}]"),
		"a space for a colon":      user("[{name: x, password " + s + "}]"),
		"an equal sign for users":  "listeners: [{name: a, mode: socks5, users = " + s + "}]\n",
		"an anchor of a short key": "x: &p " + s + "\n" + user("[{name: x, password: *p}]"),
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Parse([]byte(text))
			require.Error(t, err)
			assert.NotContains(t, err.Error()+strings.Join(config.Rest(err), "\n"), s[:10])
		})
	}
}

// What is no secret is shown, and the mark stands where the mistake is.
func TestExcerptsShowThePlace(t *testing.T) {
	_, err := config.Parse([]byte("# a comment\nlisteners:\n- name: lan\n  mode: mixed\n  address: " +
		"\"127.0.0.1:1080\"\n " +
		" users: [{name: x, password: y}]\n  conections: 5\nmark: 1\n"))
	var ce *config.Error
	require.ErrorAs(t, err, &ce)
	assert.Equal(t, `   4 |   mode: mixed
   5 |   address: "127.0.0.1:1080"
   6 |   users: [{name: x, password: ***
>  7 |   conections: 5
         ^
   8 | mark: 1
`, ce.Excerpt)

	_, err = config.Parse([]byte("listeners: [{name: a, mode: mixed, address: '127.0.0.1:1'}]\ndefaults: {params: " +
		"{delta: 1}, max_rate: 5}\n"))
	require.ErrorAs(t, err, &ce)
	assert.Contains(t, ce.Excerpt, ">  2 | defaults: {params: {delta: 1}, max_rate: 5}\n"+strings.Repeat(" ",
		7+41)+"^\n")

	_, err = config.Parse([]byte("listeners: [{" + strings.Repeat("name: a, ", 30) + "mode: mixed, frob: 1}]\n"))
	require.ErrorAs(t, err, &ce)
	for line := range strings.Lines(ce.Excerpt) {
		assert.Less(t, len([]rune(line)), 140, "a long line is cut")
	}
}

// What a terminal would act on is written as an escape, in the message and in the lines.
func TestMistakesDoNotReachTheTerminal(t *testing.T) {
	const evil = "\x1b[31mRED\x1b]0;owned\x07\u202e\u009b"
	for _, text := range []string{
		"listeners:\n- {name: \"a" + evil + "\", mode: mixed}\n",
		"listeners:\n- {\"a" + evil + "\": 1}\n",
		"listeners:\n- {name: \"a\\e[31m\\a\\L\", mode: mixed}\n",
		lan + "defaults: {group: \"" + evil + "\"}\n",
		evil,
	} {
		out := said(t, text)
		for _, r := range out {
			assert.False(t, r < ' ' && r != '\n' || r >= 0x7f && r < 0xa0 || r == 0x202e, "%q", out)
		}
	}
	assert.Contains(t, said(t, "listeners:\n- {name: \"a"+evil+"\", mode: mixed}\n"), `\x1b[31mRED\x1b]0;owned\a`)
}

func TestAByteOrderMarkIsNoKey(t *testing.T) {
	_, err := config.Parse([]byte("\ufeff" + lan))
	require.NoError(t, err)
	dir := folder(t, map[string]string{
		"c.yaml": "\ufefflisteners:\n- {name: a, mode: socks5, address: '127.0.0.1:1', users: [{name: x, " +
			"password_file: " +
			"pw}]}\n",
		"pw": "\ufeffhunter2\r\n",
	})
	cfg, err := config.Load(filepath.Join(dir, "c.yaml"))
	require.NoError(t, err)
	assert.EqualValues(t, "hunter2", cfg.Listeners[0].Users[0].Password)
}

// Secrets in files are not shown either, nor those that stand in the wrong place.
func TestMistakesInFilesShowNoSecrets(t *testing.T) {
	for _, text := range []string{
		keyA + "\n", "[Peer]\n" + keyA + "\n", "[Peer]\nPublicKey " + keyA + "\n",
		"[" + keyA + "]\n", "[Interface]\nPrivateKey = " + keyA + "x\n",
	} {
		_, err := access.ParseQuick(text)
		require.Error(t, err)
		assert.NotContains(t, strings.ToLower(err.Error()), strings.ToLower(keyA[:20]), text)
	}
	const s = "0123456789abcdef0123"
	for _, text := range []string{
		s + " phone\n", s + "\n", "phone " + s + "\nphone " + s + "\n",
		"a " + s + "\n" + s + " a\n", "\x1b[31m " + s,
	} {
		_, err := access.ParseTokens(strings.NewReader(text))
		require.Error(t, err)
		assert.NotContains(t, err.Error(), s)
		assert.NotContains(t, err.Error(), "\x1b")
	}
}

// A secret in the place of its file's name is no name that a message shows.
func TestASecretInPlaceOfAFileIsNotShown(t *testing.T) {
	const body = "MC4CAQAwBQYDK2VwBCIEIJ1hsZ3v/VpguoRK9JLsLMREScVpezJpGXA7rAMcrn9g"
	const urlToken, hexToken = "1ZzLHwoT4iFr5elVoApjm0Q6iFBxnnOplYJ-iNsvcHk", "3f786850e387550fdab836ed7e6dc881"
	const noEnd = "6DJ4+Yw0CG7EiYqk7WKzXg8iV5TTBuCqVq0nhzzzm1g"
	masque := "listeners:\n  - name: m\n    mode: masque\n    address: ':1'\n    masque: {open: true}\n" +
		"    tls: {certificate: c.pem, key: \"%s\"}\n"
	wireguard := "listeners:\n  - name: v\n    mode: wireguard\n    address: ':1'\n    wireguard: {%s}\n"
	for name, text := range map[string]string{
		"PEM without its frame": fmt.Sprintf(masque, body),
		"in lines":              fmt.Sprintf(masque, body[:32]+"\\n"+body[32:]),
		"a WireGuard key":       fmt.Sprintf(wireguard, "private_key_file: \""+keyA+"\""),
		"where peers are":       fmt.Sprintf(wireguard, "private_key: "+keyA+", peers_file: "+keyA),
		"a token":               lan + "telemetry:\n  change_token_file: bm8gb25lIHNlZXMgdGhpcyB0b2tlbg==\n",
		"without its end":       lan + "telemetry:\n  change_token_file: " + noEnd + "\n",
		"base64url":             lan + "telemetry:\n  change_token_file: " + urlToken + "\n",
		"hexadecimal":           lan + "telemetry:\n  change_token_file: " + hexToken + "\n",
		"in the line below":     lan + "telemetry:\n  change_token_file:\n    " + urlToken + "\n",
		"in a block":            lan + "telemetry:\n  change_token_file: |\n    " + urlToken + "\n",
		"folded":                lan + "telemetry:\n  change_token_file: >-\n    " + urlToken + "\n",
		"behind a tag":          lan + "telemetry:\n  change_token_file: !!str " + urlToken + "\n",
		"behind an anchor":      lan + "telemetry:\n  change_token_file: &a " + urlToken + "\n",
	} {
		dir := folder(t, map[string]string{"c.yaml": text, "c.pem": "-----BEGIN CERTIFICATE-----\n"})
		_, err := config.Load(filepath.Join(dir, "c.yaml"))
		var ce *config.Error
		require.ErrorAs(t, err, &ce, name)
		told := ce.Error() + ce.Excerpt
		if !strings.HasPrefix(name, "behind") { // which is a mistake of its own
			assert.Contains(t, told, "may be a secret", name)
		}
		for _, secret := range []string{
			body[:32], body[32:], keyA[:43], "bm8gb25lIHNlZXMgdGhpcyB0b2tlbg", urlToken,
			hexToken, noEnd,
		} {
			assert.NotContains(t, told, secret, name)
		}
	}
}

// What openssl pkcs12 writes has lines before the key.
func TestPEMMayHaveLinesBeforeIt(t *testing.T) {
	dir := masqueFolder(t, func(f map[string]string) {
		key := "      Bag Attributes: <No Attributes>\n" + f["key.pem"]
		f["c.yaml"] = strings.Replace(f["c.yaml"], "key: key.pem", "key: "+strconv.Quote(key), 1)
	})
	_, err := config.Load(dir)
	assert.NoError(t, err)
}

// A file with a secret that others may read is refused, whichever key names it,
// and so is the configuration itself with a secret in it.
func TestFilesOfSecretsAreClosedToOthers(t *testing.T) {
	const wireguard = "listeners: [{name: v, mode: wireguard, address: ':1', wireguard: {"
	for name, c := range map[string]struct{ text, file, content string }{
		"password_file": {"listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', users: [{name: x, " +
			"password_file: f}]}]", "f", "hunter2"},
		"token_file":        {lan + "telemetry: {hints: {token_file: f}}", "f", "0123456789abcdef"},
		"change_token_file": {lan + "telemetry: {change_token_file: f}", "f", "0123456789abcdef"},
		"private_key_file":  {wireguard + "private_key_file: f}}]", "f", keyA},
		"preshared_key_file": {wireguard + "private_key_file: k, peers: [{name: a, public_key: " + keyB + ", " +
			"preshared_key_file: f, allowed_ips: [10.9.0.2]}]}}]", "f", keyC},
		"config_file": {wireguard + "config_file: f}}]", "f", "[Interface]\nPrivateKey = " + keyA + "\n"},
		"peers_file": {
			wireguard + "private_key_file: k, peers_file: f}}]", "f",
			"[Peer]\nPublicKey = " + keyB + "\nPresharedKey = " + keyC + "\nAllowedIPs = 10.9.0.2/32\n",
		},
		"password": {"", "c.yaml", "listeners: [{name: a, mode: socks5, address: '127.0.0.1:1', users: [{name: " +
			"x, password: y}]}]"},
		"token":        {"", "c.yaml", lan + "telemetry: {hints: {token: 0123456789abcdef}}"},
		"change_token": {"", "c.yaml", lan + "telemetry: {change_token: 0123456789abcdef}"},
		"private_key":  {"", "c.yaml", wireguard + "private_key: " + keyA + "}}]"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := folder(t, map[string]string{"k": keyA, "c.yaml": c.text, c.file: c.content})
			_, err := config.Load(filepath.Join(dir, "c.yaml"))
			require.NoError(t, err)
			for _, mode := range []os.FileMode{0o644, 0o604, 0o660} {
				require.NoError(t, os.Chmod(filepath.Join(dir, c.file), mode))
				_, err = config.Load(filepath.Join(dir, "c.yaml"))
				require.ErrorContains(t, err, name+": "+filepath.Join(dir, c.file)+" holds a secret and has mode")
				assert.ErrorContains(t, err, "chmod 0600")
			}
			require.NoError(t, os.Chmod(filepath.Join(dir, c.file), 0o640))
			_, err = config.Load(filepath.Join(dir, "c.yaml"))
			assert.NoError(t, err)
		})
	}
	dir := folder(t, map[string]string{"c.yaml": lan})
	require.NoError(t, os.Chmod(filepath.Join(dir, "c.yaml"), 0o644))
	_, err := config.Load(filepath.Join(dir, "c.yaml"))
	assert.NoError(t, err, "a configuration without secrets may be read by all")
}

// Whatever is wrong elsewhere in the file, a secret does not show.
func FuzzMistakesShowNoSecrets(f *testing.F) {
	f.Add(uint64(1), []byte("frob: 1"), uint8(0))
	f.Add(uint64(2), []byte("'"), uint8(1))
	f.Add(uint64(3), []byte("\n  - ["), uint8(2))
	f.Add(uint64(4), []byte("name: \"x"), uint8(3))
	f.Fuzz(func(t *testing.T, seed uint64, noise []byte, style uint8) {
		const s = "Xq7Zk2Wv9Jm4"
		value := []string{
			s, "'" + s + "'", `"` + s + `"`, "|\n      " + s, "one\n      " + s, "\"one\n      " + s + "\"",
		}[style%6]
		text := "mark: 1\nlisteners:\n- name: a\n  mode: socks5\n  users:\n  - name: x\n    password: " + value +
			"\n    " +
			"frob: 1\n  - name: y\n"
		// The noise stands at the end of a line, where it takes no part of the secret away.
		lines := strings.SplitAfter(text, "\n")
		before := rand.New(rand.NewPCG(seed, 0)).IntN(6)
		text = strings.Join(lines[:before], "") + fmt.Sprintf("%s\n", noise) + strings.Join(lines[before:], "")
		if _, err := config.Parse([]byte(text)); err != nil {
			var ce *config.Error
			require.ErrorAs(t, err, &ce)
			assert.NotContains(t, ce.Error()+ce.Excerpt, s, text)
			assert.NotContains(t, ce.Message, "a defect of Penstock", text)
		}
	})
}

package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/proxy/config"
)

const masqueConfig = `
listeners:
  - name: masque
    mode: masque
    address: "127.0.0.1:0"
    tls: {certificate: cert.pem, key: key.pem}
    masque: {pool: [10.10.0.0/24], tokens_file: tokens}
`

// certified is a certificate for tests and its key as PEM.
func certified() (certificate, key string) { return certs.PEM(certs.SelfSigned("vpn.test")) }

// masqueFolder has a configuration of mode masque with its files.
func masqueFolder(t *testing.T, change func(files map[string]string)) (path string) {
	t.Helper()
	files := map[string]string{"c.yaml": masqueConfig, "tokens": "phone phone-0123456789abcdef\n"}
	files["cert.pem"], files["key.pem"] = certified()
	if change != nil {
		change(files)
	}
	return filepath.Join(folder(t, files), "c.yaml")
}

func TestMistakesInMASQUEAreToldWithTheirKey(t *testing.T) {
	replace := func(from, to string) func(map[string]string) {
		return func(f map[string]string) { f["c.yaml"] = strings.Replace(f["c.yaml"], from, to, 1) }
	}
	for name, c := range map[string]struct {
		change func(map[string]string)
		says   string
	}{
		"no certificate": {replace("certificate: cert.pem, ", ""), "listeners[0].tls.certificate: missing"},
		"no key":         {replace(", key: key.pem", ""), "listeners[0].tls.key: missing"},
		"no file":        {replace("cert.pem", "no.pem"), "listeners[0].tls.certificate: "},
		"no PEM":         {func(f map[string]string) { f["cert.pem"] = "secret" }, "there is no PEM in"},
		"another's key":  {func(f map[string]string) { _, f["key.pem"] = certified() }, "listeners[0].tls: "},
		"nobody":         {replace(", tokens_file: tokens", ""), "listeners[0].masque.tokens_file: missing"},
		"everybody and some": {
			replace("tokens_file: tokens", "tokens_file: tokens, open: true"),
			"listeners[0].masque.open: not together",
		},
		"no tokens": {func(f map[string]string) { f["tokens"] = "# none\n" }, "there is no token in it"},
		"a short token": {
			replace("tokens_file: tokens", "tokens: [{name: a, token: b}]"),
			"listeners[0].masque.tokens[0].token",
		},
		"a short token in a file": {func(f map[string]string) {
			f["tokens"] = "a " +
				"b\n"
		}, "listeners[0].masque.tokens_file"},
		"a pool in another": {
			replace("10.10.0.0/24", "10.10.0.0/24, 10.10.0.0/16"),
			"listeners[0].masque.pool[1]: 10.10.0.0/16 overlaps 10.10.0.0/24",
		},
		"a pool of one": {replace("10.10.0.0/24", "10.10.0.1"), "listeners[0].masque.pool[0]"},
		"an authority that is not": {
			replace("key: key.pem", "key: key.pem, client_ca: key.pem"),
			"listeners[0].tls.client_ca: there is no certificate",
		},
		"in another mode": {func(f map[string]string) {
			f["c.yaml"] = "listeners: [{name: m, mode: tun, device: t, masque: {open: true}}]"
		}, "listeners[0].masque: only mode masque"},
		"TLS in another mode": {func(f map[string]string) {
			f["c.yaml"] = "listeners: [{name: m, mode: tun, device: t, " +
				"tls: {key: x}}]"
		}, "listeners[0].tls: only mode masque"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := config.Load(masqueFolder(t, c.change))
			require.ErrorContains(t, err, c.says)
			assert.NotContains(t, err.Error(), "secret")
		})
	}
	path := masqueFolder(t, nil)
	require.NoError(t, os.Chmod(filepath.Join(filepath.Dir(path), "tokens"), 0o644))
	_, err := config.Load(path)
	assert.ErrorContains(t, err, "chmod 0600")
}

package config_test

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/config"
)

const farAgent = `
listeners: [{name: lan, mode: mixed, address: "127.0.0.1:0"}]
agents:
  - name: far
    address: controller.example:4433
    tls: {certificate: cert.pem, key: key.pem, ca: cert.pem}
defaults: {algorithm: "ccp:far"}
`

func TestAnAgentOnAnotherMachineNeedsAddressAndCertificates(t *testing.T) {
	certificate, key := certified()
	load := func(old, now string) (config.Config, error) {
		require.Contains(t, farAgent, old)
		files := map[string]string{
			"c.yaml": strings.Replace(farAgent, old, now,
				1), "cert.pem": certificate, "key.pem": key, "other.pem": "nothing",
		}
		return config.Load(filepath.Join(folder(t, files), "c.yaml"))
	}
	cfg, err := load("far", "far")
	require.NoError(t, err)
	assert.Equal(t, agent.TLS{Certificate: certificate, Key: key, CA: certificate}, cfg.Agents[0].TLS)

	for _, wrong := range []struct{ old, now, says string }{
		{"    address: controller.example:4433\n", "", "agents[0].address: missing"},
		{"controller.example:4433", "controller.example", "agents[0].address: \"controller.example\" is not host:port"},
		{":4433", ":99999", "agents[0].address: port \"99999\" is not a number from 1 to 65535"},
		{"    address:", "    socket: /run/x\n    address:", "agents[0].socket: not together with address"},
		{"    address:", "    reply: /run/x\n    address:", "agents[0].reply: not together with address"},
		{"certificate: cert.pem, ", "", "agents[0].tls.certificate: missing"},
		{"key: key.pem, ", "", "agents[0].tls.key: missing"},
		{", ca: cert.pem", "", "agents[0].tls.ca: missing"},
		{"ca: cert.pem", "ca: other.pem", "agents[0].tls.ca: there is no PEM in"},
		{"ca: cert.pem", "ca: key.pem", "agents[0].tls: ca: there is no certificate in it"},
		{"key: key.pem", "key: cert.pem", "agents[0].tls: tls: found a certificate rather than a key"},
	} {
		_, err := load(wrong.old, wrong.now)
		assert.ErrorContains(t, err, wrong.says, wrong.now)
	}
}

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/config"
)

func TestAlgorithmsPageIsCurrent(t *testing.T) {
	_, stdout, _ := run(t, "algorithms", "--markdown")
	assert.Equal(t, stdout, clitest.Doc(t, "algorithms.md"),
		"docs/algorithms.md is not what the registry says; run: make docs")
}

func TestConfigurationReferenceIsCurrent(t *testing.T) {
	_, stdout, _ := run(t, "schema", "--markdown")
	assert.Contains(t, stdout, "| `limits.idle_timeout` | such as 10s, 1h30m |")
	_, reference, found := strings.Cut(clitest.Doc(t, "configuration.md"), "a test compares it with the types. -->\n")
	require.True(t, found)
	assert.Equal(t, stdout, reference, "docs/configuration.md is not what the types say; run: make docs")
}

func TestExamplesOfTheGatewayGuideAreValid(t *testing.T) {
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(clitest.Doc(t, "gateway.md"), -1)
	require.Len(t, blocks, 8)
	for _, b := range blocks {
		_, err := config.Parse([]byte(b[1]))
		assert.NoError(t, err, b[1])
	}
	shown, err := config.Parse([]byte(blocks[len(blocks)-1][1]))
	require.NoError(t, err)
	file, err := os.ReadFile("../../deploy/kernel-wireguard.yaml")
	require.NoError(t, err)
	shipped, err := config.Parse(file)
	require.NoError(t, err)
	assert.Equal(t, shipped, shown, "the guide shows deploy/kernel-wireguard.yaml")
}

func TestExamplesOfTheConfigurationPageAreValid(t *testing.T) {
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(clitest.Doc(t, "configuration.md"), -1)
	require.Len(t, blocks, 6)
	for _, b := range blocks {
		_, err := config.Parse([]byte(b[1]))
		assert.NoError(t, err, b[1])
	}
	written, err := config.Parse([]byte(blocks[0][1]))
	require.NoError(t, err)
	assert.Equal(t, config.Default(), written, "the first example is not what a file leaves out")
}

// The README's way to a gateway works as written, in an empty directory.
func TestTheGatewayOfTheREADMEWorks(t *testing.T) {
	page, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(page), "### For a phone with the WireGuard app")
	require.True(t, found)
	block := regexp.MustCompile("(?s)```sh\n(.*?)```").FindStringSubmatch(section)
	require.NotNil(t, block)
	guide := clitest.Doc(t, "gateway.md")
	t.Chdir(t.TempDir())
	var printed string
	nobody := need.Host() + ":9464" // in place of the address at which this machine may run a proxy
	for line := range strings.Lines(block[1]) {
		command, _, _ := strings.Cut(line, "#")
		if strings.HasPrefix(command, "kill ") { // here a signal ends it
			continue
		}
		command, _, _ = strings.Cut(command, "&")
		words := strings.Fields(command)
		require.Equal(t, "penstock", words[0])
		if words[1] == "run" { // on ports of its own, since other tests have others
			text, err := os.ReadFile("penstock.yaml")
			require.NoError(t, err)
			mine := strings.NewReplacer(":51820", ":0", nobody, "127.0.0.1:0").Replace(string(text))
			require.NoError(t, os.WriteFile("penstock.yaml", []byte(mine), 0o600))
			in := startRunWithout(t, words[2:]...)
			_, peers := in.get("/v1/peers")
			assert.Contains(t, peers, `"phone"`)
			in.signal()
			assert.Equal(t, cli.ExitOK, <-in.code, in.log.String())
			continue
		}
		code, stdout, stderr := run(t, words[1:]...)
		require.Equal(t, cli.ExitOK, code, "%s%s", line, stderr)
		printed += stdout
		if words[2] == "init" {
			text, err := os.ReadFile("penstock.yaml")
			require.NoError(t, err)
			text = append(text, "telemetry: {address: '"+nobody+"'}\n"...)
			require.NoError(t, os.WriteFile("penstock.yaml", text, 0o600))
		}
	}
	assert.Contains(t, printed, "[Interface]")
	assert.Contains(t, printed, "Endpoint = vpn.example.com:51820")
	code, _, stderr := run(t, "gateway", "init", "penstock.yaml")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "penstock.yaml is there already")
	code, _, stderr = run(t, "gateway", "init", "other.yaml")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "vpn.key is there already")
	assert.NoFileExists(t, "other.yaml", "all or nothing")

	_, guide, found = strings.Cut(guide, "penstock gateway init")
	require.True(t, found)
	shown := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindStringSubmatch(guide)
	want, err := config.Parse([]byte(newGatewayConfig))
	require.NoError(t, err)
	got, err := config.Parse([]byte(shown[1]))
	require.NoError(t, err)
	assert.Equal(t, want, got, "the guide shows what init writes")
}

package main

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/proxy"
)

// readDoc returns a page below docs.
func readDoc(t *testing.T, name string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/" + name)
	require.NoError(t, err)
	return string(page)
}

func TestAlgorithmsPageIsCurrent(t *testing.T) {
	_, stdout, _ := run(t, "algorithms", "--markdown")
	assert.Equal(t, stdout, readDoc(t, "algorithms.md"), "docs/algorithms.md is not what the registry says; run: make docs")
}

func TestConfigurationReferenceIsCurrent(t *testing.T) {
	_, stdout, _ := run(t, "schema", "--markdown")
	assert.Contains(t, stdout, "| `limits.idle_timeout` | such as 10s, 1h30m |")
	_, reference, found := strings.Cut(readDoc(t, "configuration.md"), "a test compares it with the types. -->\n")
	require.True(t, found)
	assert.Equal(t, stdout, reference, "docs/configuration.md is not what the types say; run: make docs")
}

func TestExamplesOfTheGatewayGuideAreValid(t *testing.T) {
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(readDoc(t, "gateway.md"), -1)
	require.Len(t, blocks, 6)
	for _, b := range blocks {
		_, err := proxy.Parse([]byte(b[1]))
		assert.NoError(t, err, b[1])
	}
	shown, err := proxy.Parse([]byte(blocks[5][1]))
	require.NoError(t, err)
	shipped, err := proxy.Load("../../deploy/kernel-wireguard.yaml")
	require.NoError(t, err)
	assert.Equal(t, shipped, shown, "the guide shows deploy/kernel-wireguard.yaml")
}

func TestExamplesOfTheConfigurationPageAreValid(t *testing.T) {
	blocks := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(readDoc(t, "configuration.md"), -1)
	require.Len(t, blocks, 5)
	for _, b := range blocks {
		_, err := proxy.Parse([]byte(b[1]))
		assert.NoError(t, err, b[1])
	}
	written, err := proxy.Parse([]byte(blocks[0][1]))
	require.NoError(t, err)
	assert.Equal(t, proxy.DefaultConfig(), written, "the first example is not what a file leaves out")
}

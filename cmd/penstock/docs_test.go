package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/internal/cli/clitest"
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

// yamlBlocks returns the YAML of a page, block by block.
func yamlBlocks(page string) (blocks []string) {
	for _, b := range regexp.MustCompile("(?ms)^[ ]*```yaml\n(.*?)```").FindAllStringSubmatch(page, -1) {
		blocks = append(blocks, b[1])
	}
	return blocks
}

func TestConfigurationsOfThePagesAreValid(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	checked := 0
	for _, path := range append(pages, "../../README.md") {
		if filepath.Base(path) == "recipes.md" { // its blocks are experiments
			continue
		}
		page, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, block := range yamlBlocks(string(page)) {
			text := dedent(block)
			if !strings.Contains(text, "listeners:") { // the block shows a part of a file
				text = "listeners: [{name: lan, mode: tproxy, address: '[::]:7000'}]\n" + text
			}
			_, err := config.Parse([]byte(text))
			assert.NoError(t, err, "%s:\n%s", path, block)
			checked++
		}
	}
	assert.Greater(t, checked, 15)
}

// dedent removes the indentation of a block's first line from all its lines.
func dedent(block string) string {
	indent := block[:len(block)-len(strings.TrimLeft(block, " "))]
	return strings.TrimPrefix(strings.ReplaceAll("\n"+block, "\n"+indent, "\n"), "\n")
}

func TestThePagesShowWhatTheySayTheyShow(t *testing.T) {
	gateway := yamlBlocks(clitest.Doc(t, "gateway.md"))
	asFile := func(text string) config.Config {
		c, err := config.Parse([]byte(text))
		require.NoError(t, err)
		return c
	}
	for what, row := range map[string]struct {
		shown string
		want  config.Config
	}{
		"the defaults":             {yamlBlocks(clitest.Doc(t, "configuration.md"))[0], config.Default()},
		"what gateway init writes": {gateway[0], asFile(newGatewayConfig)},
	} {
		assert.Equal(t, row.want, asFile(row.shown), what)
	}
}

// A gateway that is there already is left as it is.
func TestGatewayInitReplacesNoFile(t *testing.T) {
	t.Chdir(t.TempDir())
	code, _, stderr := run(t, "gateway", "init", "penstock.yaml")
	require.Equal(t, cli.ExitOK, code, stderr)
	code, _, stderr = run(t, "gateway", "init", "penstock.yaml")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "penstock.yaml is there already")
	code, _, stderr = run(t, "gateway", "init", "other.yaml")
	assert.Equal(t, cli.ExitInput, code)
	assert.Contains(t, stderr, "vpn.key is there already")
	assert.NoFileExists(t, "other.yaml", "all or nothing")
}

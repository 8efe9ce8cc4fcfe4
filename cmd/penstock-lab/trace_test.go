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

func TestTracesAreGeneratedConvertedAndDescribed(t *testing.T) {
	dir := t.TempDir()
	trace, rates, again := filepath.Join(dir, "a.trace"), filepath.Join(dir, "a.csv"), filepath.Join(dir, "b.trace")
	for _, args := range []string{
		"generate lte " + trace + " --seed 3 --duration 20s",
		"convert --to rates --every 1s " + trace + " " + rates,
		"convert " + rates + " " + again,
	} {
		code, _, stderr := run(t, append([]string{"trace"}, strings.Fields(args)...)...)
		require.Equal(t, cli.ExitOK, code, stderr)
	}
	code, stdout, stderr := run(t, "trace", "info", trace, again)
	require.Equal(t, cli.ExitOK, code, stderr)
	lines := strings.Split(stdout, "\n")
	first, second := strings.Fields(lines[1]), strings.Fields(lines[2])
	assert.Equal(t, []string{"a.trace", "20.000"}, first[:2])
	assert.Equal(t, []string{"b.trace", "20.000"}, second[:2])
	assert.Equal(t, first[4][:1], second[4][:1], "about the same median")

	require.NoError(t, os.WriteFile(rates, []byte("0,x\n1,2\n2,y\n"), 0o600))
	assertRefused(t, "trace", map[string]string{
		"info /nope":                     "open /nope",
		"info " + rates:                  `a.csv: line 1: "x" is not a number`,
		"convert " + rates + " " + again: `a.csv: line 1: "x" is not a number`,
		"convert --to x a b":             `--to is "x"`,
		"convert " + rates + " " + rates: "a.csv would be overwritten",

		"convert --to rates --every 20s " + trace + " " + rates: "--every is 20s, but must be shorter than",

		"convert --every 1us a b":              "--every is 1µs",
		"generate nope " + again:               `no model "nope"`,
		"record server.example lte.trace":      `"server.example" is not SERVER:PORT, such as server.example:9000`,
		"record 127.0.0.1:1 x --rate 0mbit":    "--rate",
		"record 127.0.0.1:1 x --duration 10ms": "--duration is 10ms",
		"serve --most 0mbit":                   "--most",
		"serve --listen nowhere":               "--listen",
	})
}

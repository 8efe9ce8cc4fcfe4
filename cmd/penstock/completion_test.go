package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/penstock-net/penstock/internal/cli"
)

func TestShellsCompleteValues(t *testing.T) {
	for line, want := range map[string]string{
		"run --algorithm |":         "copa\t",
		"run --envelope |":          "ebpf\n",
		"algorithms |":              "penstock\t",
		"rules apply --interface |": "lo\n",
		"rules print --mode |":      "tproxy\n",
		"run --log-level |":         "debug\n",
	} {
		var out, errs bytes.Buffer
		args := append([]string{"__complete"}, strings.Fields(strings.TrimSuffix(line, "|"))...)
		assert.Equal(t, cli.ExitOK, runCommandLine(t.Context(), append(args, ""), &out, &errs), line)
		assert.Contains(t, out.String(), want, line)
	}
	var errs bytes.Buffer
	runCommandLine(t.Context(), []string{"rules", "aply"}, &errs, &errs)
	assert.Contains(t, errs.String(), "did you mean apply?")
}

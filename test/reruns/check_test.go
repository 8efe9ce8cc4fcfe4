// Package reruns tells which tests may be run again when they fail.
package reruns

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestOnlyTestsOverEmulatedLinksMayBeRunAgain(t *testing.T) {
	event := func(test, says string) string {
		return fmt.Sprintf(`{"Action":"output","Package":"example.com/m/lab","Test":%q,"Output":"    x_test.go:1: %s\n"}`+"\n",
			test, says)
	}
	output := event("TestLink/ebpf", "runs over an emulated link") + event("TestFile", "no such file")
	for name, c := range map[string]struct {
		report string
		fails  string // the test that is named; empty: the check passes
	}{
		"nothing was run again":     {"", ""},
		"a test over a link":        {"example.com/m/lab.TestLink: 2 runs, 1 failures\n", ""},
		"one below it":              {"example.com/m/lab.TestLink/bbr.Test: x: 2 runs, 1 failures\n", ""},
		"a test of files":           {"example.com/m/lab.TestFile: 2 runs, 1 failures\n", "example.com/m/lab.TestFile\n"},
		"one of its name elsewhere": {"example.com/m/other.TestLink: 2 runs, 1 failures\n", "example.com/m/other.TestLink\n"},
		"one that begins with a name": {
			"example.com/m/lab.TestLink2: 2 runs, 1 failures\n", "example.com/m/lab.TestLink2\n",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write := func(name, text string) string {
				path := filepath.Join(dir, name)
				require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
				return path
			}
			said, err := exec.Command("./check.sh", write("report", c.report), write("output", output)).CombinedOutput()
			if c.fails == "" {
				require.NoError(t, err, "%s", said)
				return
			}
			require.Error(t, err)
			assert.True(t, strings.HasSuffix(string(said), "alone:\n"+c.fails), "%s", said)
		})
	}
}

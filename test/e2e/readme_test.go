//go:build linux

package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
)

// leftOut are the commands of the README that this test does not run, and why.
var leftOut = []struct {
	command *regexp.Regexp
	why     string
}{
	{regexp.MustCompile(`^make `), "it builds, or runs these tests"},
	{regexp.MustCompile(`//example\.com/`), "it needs the internet"},
	{regexp.MustCompile(`^go mod init|^gomobile `), "it needs the SDK of a phone"},
	{regexp.MustCompile(`^penstock-relay `), "it needs a certificate and serves until it is ended"},
	{regexp.MustCompile(`--runs 5|bench fidelity`), "it plays over real sockets for minutes"},
}

// shellBlocks returns the commands of each block of a page, as a script. Those that are left out are logged.
func shellBlocks(t *testing.T, page string) (scripts []string) {
	t.Helper()
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(page, -1) {
		script := ""
	next:
		for _, command := range regexp.MustCompile(`(?m)^(?:.*\\\n)*.*\n`).FindAllString(block[1], -1) {
			for _, rule := range leftOut {
				if rule.command.MatchString(command) {
					t.Logf("left out, since %s: %s", rule.why, command)
					continue next
				}
			}
			script += command
		}
		scripts = append(scripts, script)
	}
	return scripts
}

// Every command of the README's blocks works as it is written, in order, in a shell of its own for each block.
func TestTheREADMEsCommandsWorkAsWritten(t *testing.T) {
	need.Programs(t, "curl", "go")
	repository, err := filepath.Abs("../..")
	require.NoError(t, err)
	page, err := os.ReadFile(filepath.Join(repository, "README.md"))
	require.NoError(t, err)
	dir := t.TempDir()
	bin := filepath.Join(dir, "bin")
	require.NoError(t, os.Mkdir(bin, 0o700))
	require.NoError(t, os.Symlink(released, filepath.Join(bin, "penstock")))
	require.NoError(t, os.Symlink(filepath.Join(repository, "deploy"), filepath.Join(dir, "deploy")))
	build := exec.Command("go", "build", "-o", filepath.Join(bin, "penstock-lab"), "./cmd/penstock-lab")
	build.Dir = repository
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	// sudo has nothing to do for root. A pause is long enough for a proxy that starts beside it, on any machine.
	for name, script := range map[string]string{
		"sudo":  `exec "$@"`,
		"sleep": "n=0; until penstock ready 2>/dev/null; do n=$((n+1)); [ $n -lt 300 ]; /bin/sleep 0.1; done",
	} {
		text := "#!/bin/sh -e\n" + script + "\n"
		require.NoError(t, os.WriteFile(filepath.Join(bin, name), []byte(text), 0o700)) //nolint:gosec // a program
	}

	s := newScene(t)
	scripts := shellBlocks(t, string(page))
	require.Len(t, scripts, 6)
	for i, script := range scripts {
		t.Run(fmt.Sprintf("block %d", i+1), func(t *testing.T) {
			if script == "" {
				t.Skip("every command is left out")
			}
			if strings.Contains(script, "&") {
				script += "wait $!\n" // for how it ended
			}
			cmd := s.Edge.Command(context.Background(), "sh", "-e", "-c", script)
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "HOME="+dir)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s\n%s", script, out)
			assert.NotContains(t, string(out), "ERROR")
		})
	}
}

package agents_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/agents"
	"github.com/penstock-net/penstock/internal/lab/labtest"
)

func TestAgentsAreStartedAndEnded(t *testing.T) {
	labtest.Agents(t)
	there, stop, err := agents.Agents{{Name: "a", Program: "reno"}, {Name: "cubic"}, {Name: "x", Socket: "/x"}}.Start()
	require.NoError(t, err)
	for _, a := range there[:2] {
		_, err := os.Stat(a.Socket)
		assert.NoError(t, err)
	}
	assert.Equal(t, "/x", there[2].Socket)
	used, err := there.CPUTime()
	require.NoError(t, err)
	assert.Positive(t, used)
	stop()
	for _, a := range there[:2] {
		_, err := os.Stat(filepath.Dir(a.Socket))
		assert.ErrorIs(t, err, os.ErrNotExist)
	}
	_, err = there.CPUTime()
	assert.Error(t, err)
}

func TestAnAgentThatDoesNotStartIsNamed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	_, _, err := agents.Agents{{Name: "nonesuch"}}.Start()
	assert.ErrorContains(t, err, "agent nonesuch: penstock-agent-nonesuch is neither beside this program nor in $PATH; "+
		"build it by make build; or start one yourself and name it by --agent nonesuch=SOCKET")
	script := "#!/bin/sh\necho no; exit 1\n"
	dies := filepath.Join(dir, "penstock-agent-dies")
	require.NoError(t, os.WriteFile(dies, []byte(script), 0o755)) //nolint:gosec // it is run
	_, _, err = agents.Agents{{Name: "one", Program: "dies"}}.Start()
	assert.ErrorContains(t, err, "ended: no")
}

func TestWhatIsThereTakesThePlaceOfWhatIsStarted(t *testing.T) {
	own := agents.Agents{{Name: "reno", Algorithm: "10ms"}, {Name: "cubic", Program: "c"}}
	all := agents.Agents{{Name: "reno", Socket: "/reno"}, {Name: "more", Socket: "/more"}}.Over(own)
	assert.Equal(t, agents.Agents{
		{Name: "reno", Socket: "/reno", Algorithm: "10ms"},
		{Name: "more", Socket: "/more"},
		{Name: "cubic", Program: "c"},
	}, all)
	assert.Equal(t, all[2:], all.In("defaults: {algorithm: \"ccp:cubic\"}"))
	assert.Contains(t, all.YAML(), `{name: cubic, socket: "/cubic", algorithm: ""}`, "a place until it is started")
}

package main

import (
	"net/http"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/cli"
)

// The reading of a configuration that names an algorithm of this family panics.
func init() {
	cc.RegisterFamily("panics", func(string) (cc.Spec, error) { panic("on purpose") })
}

// Whatever panics while a configuration is read, by whichever way, the proxy goes on with the one that it has,
// says so, and takes the next.
func TestAPanicInTheReadingOfAConfigurationEndsNoProxy(t *testing.T) {
	const bad = runConfig + "defaults: {algorithm: \"panics:x\"}\n"
	const says = "please report it"
	lastGood := filepath.Join(t.TempDir(), "last-good")
	in := startRun(t, runConfig, "--last-good", lastGood)
	conn := in.connect()
	echoes(t, conn)

	in.rewrite(bad)
	in.hangUp()
	in.counts(0, 1, 0)
	status, body := in.post("/-/reload")
	assert.Equal(t, http.StatusUnprocessableEntity, status, body)
	assert.Contains(t, body, says)
	echoes(t, conn)
	code, _, told := run(t, "check", in.config)
	assert.Equal(t, cli.ExitConfig, code)
	assert.Contains(t, told, says)
	in.rewrite(runConfig + "log: {level: debug}\n")
	status, body = in.post("/-/reload")
	assert.Equal(t, http.StatusOK, status, body)
	echoes(t, conn)
	require.NoError(t, conn.Close())
	in.signal()
	assert.Equal(t, cli.ExitOK, in.ends())

	in.rewrite(bad)
	again := startRunWithout(t, "--config", in.config, "--last-good", lastGood, "--watch")
	line := again.log.line(t, "the configuration has a mistake; the last good one is in force until it is mended and reloaded")
	assert.Contains(t, line["err"], says)
	in.rewrite(bad + "# again\n")
	again.log.has(t, `"configuration not reloaded","by":"file"`)
	again.signal()
	assert.Equal(t, cli.ExitOK, again.ends())
}

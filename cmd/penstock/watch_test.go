package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A file with a secret is refused while others may read it, until chmod, which writes nothing.
func TestAFileThatIsClosedToOthersHasChanged(t *testing.T) {
	h := &service{}
	h.flags.config = filepath.Join(t.TempDir(), "penstock.yaml")
	require.NoError(t, os.WriteFile(h.flags.config, nil, 0o600))
	closed := h.stamps()
	require.NoError(t, os.Chmod(h.flags.config, 0o644)) //nolint:gosec // it has no secret
	assert.NotEqual(t, closed, h.stamps())
	require.NoError(t, os.Chmod(h.flags.config, 0o600))
	assert.Equal(t, closed, h.stamps())
}

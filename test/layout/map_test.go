package layout

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestTheMapNamesWhatIsThere(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs/architecture.md"))
	require.NoError(t, err)
	places := placesIn(string(page))
	require.Greater(t, len(places), 5, "too little was found to mean anything")
	if missing := missingPlaces(places, filesBelow(t, directories...)); len(missing) > mayBeMissing {
		assert.Fail(t, "docs/architecture.md names what is not there", missing)
	}
}

// filesBelow returns the paths of all files in folders of the top level, from the top level on.
func filesBelow(t *testing.T, folders ...string) (paths []string) {
	t.Helper()
	for _, folder := range folders {
		require.NoError(t, fs.WalkDir(os.DirFS(root), folder, func(path string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				paths = append(paths, path)
			}
			return err
		}))
	}
	return paths
}

func TestPlacesOfAPage(t *testing.T) {
	page := "See `cc/flow`, cc/flow/group.go (and flow.go), `proxy/datapath/...`, docs/x.md#part, cc/flow/*.\n" +
		"Not a/path, TCP/IP, cc, go.mod or 1.5/2; `kernel/poll_linux.go`. cc/flow again."
	places := placesIn(page)
	assert.Equal(t, []string{
		"cc/flow", "cc/flow/group.go", "flow.go", "proxy/datapath", "docs/x.md", "kernel/poll_linux.go",
	}, places)
	tree := []string{"cc/flow/flow.go", "cc/flows/x.go", "proxy/datapath/kernel/poll_linux.go"}
	assert.Equal(t, []string{"cc/flow/group.go", "docs/x.md"}, missingPlaces(places, tree))
}

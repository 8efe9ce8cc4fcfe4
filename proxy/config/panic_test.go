package config_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
)

// Naming an algorithm of this family has the reading of a configuration panic: with an error of Go's
// runtime, or with a value of its own.
func init() {
	cc.RegisterFamily("panics", func(member string) (cc.Spec, error) {
		if member == "index" {
			return cc.Spec{}, []error{}[len(member)-5:][0]
		}
		panic("the password is hunter2")
	})
}

func TestSectionsOfAnyKey(t *testing.T) {
	for _, key := range []string{".", "..", ".x", ".x.y", "x.", "x..", "[", "]", "].", "x].y", ".[0]", "a.b.c", ""} {
		doc := `"` + key + `": 1` + "\ndefaults: {algorithm: nosuch}\nlisteners: [{name: a, mode: mixd}]\nmark: x\n"
		_, err := config.Parse([]byte(doc))
		var mistake *config.Error
		require.ErrorAs(t, err, &mistake, doc)
		assert.Contains(t, mistake.Message, "unknown key", doc)
		assert.Len(t, mistake.Others, 3, doc)
	}
}

// Whatever panics in it, the reading of a configuration refuses the file, and shows no value of it.
func TestAPanicRefusesTheConfiguration(t *testing.T) {
	const good = "listeners: [{name: a, mode: mixed, address: \"127.0.0.1:1080\"}]\n"
	for name, c := range map[string]struct{ algorithm, says string }{
		"of the runtime": {"panics:index", "index out of range [0] with length 0 at panic_test.go:"},
		"of a library":   {"panics:text", "(panic at panic_test.go:"},
	} {
		t.Run(name, func(t *testing.T) {
			bad := good + "defaults: {algorithm: \"" + c.algorithm + "\"}\n"
			dir := folder(t, map[string]string{"c.yaml": bad})
			path := filepath.Join(dir, "c.yaml")
			kept, err := json.Marshal(map[string]any{"path": path, "files": map[string][]byte{path: []byte(bad)}})
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(dir, "last"), kept, 0o600))
			cfg, err := config.Parse([]byte(good))
			require.NoError(t, err)
			cfg.Defaults.Algorithm = policy.Algorithm(c.algorithm)

			_, parsed := config.Parse([]byte(bad))
			loaded, read := config.LoadFiles(path)
			_, written := config.LoadAlone(path)
			_, saved := config.LoadSaved(filepath.Join(dir, "last"), path)
			for by, err := range map[string]error{
				"Parse": parsed, "LoadFiles": read, "Written": written, "LoadSaved": saved, "Validate": cfg.Validate(),
			} {
				var mistake *config.Error
				require.ErrorAs(t, err, &mistake, by)
				assert.Contains(t, err.Error(), c.says, by)
				assert.Contains(t, err.Error(), "please report it", by)
				assert.NotContains(t, err.Error(), "hunter2", by)
				assert.False(t, strings.Contains(err.Error(), "\n"), by)
			}
			assert.Equal(t, []string{path}, loaded.Files, "what was read is known, so that it can be watched")
		})
	}
}

//go:build linux

package kubernetes

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// image is what deploy/Dockerfile makes: one layer on nothing.
type image struct {
	name       string
	entrypoint []string
	cmd        []string
	user       string
	files      map[string]string // path in the image → path here
}

// images are all that the cluster has; no registry is there for others.
func images() []image {
	return []image{
		{
			name: penstockImage, user: "65532:65532", entrypoint: []string{"/usr/bin/penstock"},
			cmd: []string{"run", "--config", "/etc/penstock/penstock.yaml", "--watch"},
			files: map[string]string{
				"usr/bin/penstock":           filepath.Join(place, "bin", "penstock"),
				"etc/penstock/penstock.yaml": "../../deploy/container.yaml",
			},
		},
		{
			name: podImage, user: "65532:65532", entrypoint: []string{"/pod"}, cmd: []string{"pause"},
			files: map[string]string{"pod": filepath.Join(place, "bin", "pod")},
		},
	}
}

const (
	penstockImage = "localhost/penstock:test"
	podImage      = "localhost/pod:test"
)

// archive writes the image as container runtimes import it.
func (i image) archive(t *testing.T, to string) {
	t.Helper()
	layer := map[string][]byte{}
	for inside, here := range i.files {
		content, err := os.ReadFile(here)
		require.NoError(t, err)
		layer[inside] = content
	}
	packed := pack(t, layer, 0o755)
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": i.entrypoint, "Cmd": i.cmd, "User": i.user},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(packed))}},
	})
	require.NoError(t, err)
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{i.name}, "Layers": []string{"layer.tar"},
	}})
	require.NoError(t, err)
	whole := pack(t, map[string][]byte{"manifest.json": manifest, "config.json": config, "layer.tar": packed}, 0o644)
	require.NoError(t, os.WriteFile(to, whole, 0o600))
}

func pack(t *testing.T, files map[string][]byte, mode int64) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	made := map[string]bool{".": true}
	var parents func(dir string)
	parents = func(dir string) {
		if made[dir] {
			return
		}
		parents(path.Dir(dir))
		made[dir] = true
		require.NoError(t, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}))
	}
	for name, content := range files {
		parents(path.Dir(name))
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(content))}))
		_, err := w.Write(content)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	return b.Bytes()
}

// Package bind has a program in Java upload through package alcc/mobile, bound as gomobile bind does it, with a virtual
// machine of a desktop in place of Android's. It is a module of its own, since it needs golang.org/x/mobile.
package bind

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	_ "golang.org/x/mobile/bind" // which what gobind writes imports

	"github.com/penstock-net/penstock/alcc/relay"
)

const mobile = "github.com/penstock-net/penstock/alcc/mobile"

// runTool runs a command, and returns what it prints.
func runTool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	require.NoError(t, err, "%s %s: %s", name, args, out)
	return string(out)
}

// bindLibrary generates and compiles both halves, and returns the folders of the classes and of the library.
func bindLibrary(t *testing.T) (classes, library string) {
	t.Helper()
	javac, err := exec.LookPath("javac")
	if err != nil {
		t.Skip("there is no javac: install a JDK")
	}
	javac, err = filepath.EvalSymlinks(javac)
	require.NoError(t, err)
	include := filepath.Join(filepath.Dir(filepath.Dir(javac)), "include")
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("there is no gcc, which the native half needs")
	}
	here, err := filepath.Abs(".")
	require.NoError(t, err)
	out := t.TempDir()
	runTool(t, "go", "tool", "gobind", "-lang=java,go", "-outdir", out, mobile)

	// Go leaves files out that are named after Android.
	sources := filepath.Join(here, "generated")
	require.NoError(t, os.RemoveAll(sources))
	require.NoError(t, os.CopyFS(sources, os.DirFS(filepath.Join(out, "src", "gobind"))))
	t.Cleanup(func() { assert.NoError(t, os.RemoveAll(sources)) })
	files, err := filepath.Glob(filepath.Join(sources, "*"))
	require.NoError(t, err)
	for _, f := range files {
		text, err := os.ReadFile(f)
		require.NoError(t, err)
		text = bytes.ReplaceAll(bytes.ReplaceAll(text, []byte("-llog"), nil), []byte("-Werror"), nil)
		require.NoError(t, os.Remove(f))
		if !strings.HasSuffix(f, ".h") {
			f = strings.Replace(f, "_android.", "_jvm.", 1)
		}
		require.NoError(t, os.WriteFile(f, text, 0o600))
	}
	t.Setenv("CGO_ENABLED", "1")
	t.Setenv("CGO_CFLAGS", "-w -D__GOBIND_ANDROID__ -I"+filepath.Join(here, "testdata")+" -I"+include+" -I"+
		filepath.Join(include, "linux"))
	runTool(t, "go", "build", "-buildmode=c-shared", "-o", filepath.Join(out, "libgojni.so"), "./generated")

	classes = filepath.Join(out, "classes")
	java := []string{"-d", classes, "testdata/Phone.java", "testdata/Context.java"}
	require.NoError(t, filepath.WalkDir(filepath.Join(out, "java"), func(path string, _ os.DirEntry, err error) error {
		if strings.HasSuffix(path, ".java") {
			java = append(java, path)
		}
		return err
	}))
	runTool(t, "javac", java...)
	return classes, out
}

func TestAProgramInJavaUploads(t *testing.T) {
	classes, library := bindLibrary(t)
	const token = "the token of a test"
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	s := relay.Server{Token: token, Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}}
	go func() { ended <- s.Serve(ctx, ln) }()
	t.Cleanup(func() {
		stop()
		assert.NoError(t, <-ended)
	})
	var got []byte
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		got, _ = io.ReadAll(r.Body)
	}))
	defer server.Close()
	file, content := filepath.Join(t.TempDir(), "file"), bytes.Repeat([]byte("of a phone"), 200_000)
	require.NoError(t, os.WriteFile(file, content, 0o600))
	said := runTool(t, "java", "-Djava.library.path="+library, "-cp", classes, "Phone", ln.Addr().String(), token,
		file, server.URL)
	assert.True(t, bytes.Equal(content, got))
	assert.Contains(t, said, "sent 2000000 of 2000000\n")
	assert.Contains(t, said, `"algorithm":"mdi"`)
	assert.Contains(t, said, "error: mobile: upload: open /none: no such file or directory\n")
}

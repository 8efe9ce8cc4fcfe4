package output_test

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/lab/output"
)

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(text)
}

func say(words string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, words)
		return err
	}
}

func TestAFileAppearsWholeOrNotAtAll(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "out.png")
	require.NoError(t, output.Check(path))
	assert.NoFileExists(t, path, "a check leaves nothing")
	failed := errors.New("the disk is full")
	broken := func(w io.Writer) error {
		_, err := io.WriteString(w, "half")
		return errors.Join(err, failed)
	}
	require.ErrorIs(t, output.Write(path, broken), failed)
	assert.NoFileExists(t, path)
	require.NoError(t, output.Write(path, say("one")))
	assert.Equal(t, "one", content(t, path))
	require.ErrorIs(t, output.Write(path, broken), failed)
	assert.Equal(t, "one", content(t, path), "what was there stays")

	link := filepath.Join(dir, "link")
	require.NoError(t, os.Symlink("out.png", link))
	require.NoError(t, output.Write(link, say("two")))
	assert.Equal(t, "two", content(t, path), "a link goes on leading there")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	assert.Len(t, left, 2, "nothing lies beside it")
}

func TestWhatCannotBeMadeIsKnownBefore(t *testing.T) {
	dir := t.TempDir()
	require.Error(t, output.Check(dir))
	require.Error(t, output.Check(filepath.Join(dir, "none", "x")))
	require.Error(t, output.Check("/proc/x.png"))
	require.NoError(t, output.Check("/dev/null"))
	require.NoError(t, output.Write("/dev/null", say("x")))
	info, err := os.Stat("/dev/null")
	require.NoError(t, err)
	assert.NotZero(t, info.Mode()&os.ModeDevice, "it is what it was")
	require.Error(t, output.Write("/dev/full", say("x")))
}

func TestNoFileIsWrittenOverAnother(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("there", nil, 0o600))
	require.NoError(t, os.Symlink("there", "link"))
	require.NoError(t, output.Apart([]string{"a", "", "b", "there", ""}, "c", ""))
	require.NoError(t, output.Apart([]string{"/dev/null", "/dev/null"}, "/dev/null"))
	for _, written := range [][]string{{"a", "./a"}, {"there", "link"}, {"read"}, {"a", "b/../read"}} {
		assert.ErrorContains(t, output.Apart(written, "read"), "would be overwritten", written)
	}
}

func TestRecordsStandBehindEarlierOnes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runs.jsonl")
	for _, record := range []string{"{\"n\":1}\n", "{\"n\":2}\n"} {
		r, err := output.Append(path)
		require.NoError(t, err)
		_, err = r.Write([]byte(record))
		require.NoError(t, err)
		require.NoError(t, r.Close())
	}
	assert.Equal(t, "{\"n\":1}\n{\"n\":2}\n", content(t, path))
	require.NoError(t, os.WriteFile(path, []byte("{\"n\":1"), 0o600))
	r, err := output.Append(path)
	require.NoError(t, err)
	_, err = r.Write([]byte("{}\n"))
	require.NoError(t, err)
	require.NoError(t, r.Close())
	assert.Equal(t, "{\"n\":1\n{}\n", content(t, path), "a line that was left open is ended")
	_, err = output.Append(filepath.Join(path, "x"))
	assert.Error(t, err)
}

func TestARecordThatDoesNotFitIsTakenBack(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4k"); err != nil {
		t.Skip("needs the right to mount a small file system: ", err)
	}
	t.Cleanup(func() { require.NoError(t, unix.Unmount(dir, 0)) })
	path := filepath.Join(dir, "runs.jsonl")
	r, err := output.Append(path)
	require.NoError(t, err)
	_, err = r.Write([]byte("{}\n"))
	require.NoError(t, err)
	_, err = r.Write(make([]byte, 10_000))
	require.ErrorIs(t, err, unix.ENOSPC)
	require.NoError(t, r.Close())
	assert.Equal(t, "{}\n", content(t, path))
}

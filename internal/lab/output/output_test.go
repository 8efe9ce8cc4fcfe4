package output_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/lab/output"
	"github.com/penstock-net/penstock/internal/need"
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
	require.NoError(t, output.CheckPath(path))
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

// What an earlier process of the same number has left when it was killed is in nobody's way.
func TestARestOfAnEarlierProcessHindersNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out.csv")
	rest := fmt.Sprintf("%s/.out.csv.%d", filepath.Dir(path), os.Getpid())
	require.NoError(t, os.WriteFile(rest, []byte("half"), 0o600))
	require.NoError(t, output.CheckPath(path))
	require.NoError(t, output.Write(path, say("one")))
	assert.Equal(t, "one", content(t, path))
}

func TestWhatCannotBeMadeIsKnownBefore(t *testing.T) {
	dir := t.TempDir()
	require.Error(t, output.CheckPath(dir))
	require.Error(t, output.CheckPath(filepath.Join(dir, "none", "x")))
	require.Error(t, output.CheckPath("/proc/x.png"))
	require.NoError(t, output.CheckPath("/dev/null"))
	require.NoError(t, output.Write("/dev/null", say("x")))
	info, err := os.Stat("/dev/null")
	require.NoError(t, err)
	assert.NotZero(t, info.Mode()&os.ModeDevice, "it is what it was")
	require.Error(t, output.Write("/dev/full", say("x")))
}

// A named pipe that was opened and closed would have ended for who reads it.
func TestANamedPipeIsOpenedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	reader, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { _ = unix.Close(reader) }()
	seen := []unix.PollFd{{Fd: int32(reader), Events: unix.POLLIN}}
	require.NoError(t, output.CheckPath(path))
	_, err = unix.Poll(seen, 0)
	require.NoError(t, err)
	assert.Zero(t, seen[0].Revents)
	require.NoError(t, output.Write(path, say("x")))
	_, err = unix.Poll(seen, 0)
	require.NoError(t, err)
	assert.EqualValues(t, unix.POLLIN|unix.POLLHUP, seen[0].Revents)
}

func TestAFolderThatIsNotOursIsToldAsSuch(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none")
	require.NoError(t, os.Mkdir(path, 0o500))
	require.NoError(t, need.Unprivileged(func() error {
		_, err := output.Append(filepath.Join(path, "runs.jsonl"))
		assert.ErrorIs(t, err, fs.ErrPermission)
		return nil
	}))
}

// Who writes records to a pipe hears that its reader has gone.
func TestRecordsOfAPipeEndWithItsReader(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	reader := make(chan error)
	go func() {
		f, err := os.Open(path)
		if err == nil {
			err = f.Close()
		}
		reader <- err
	}()
	records, err := output.Append(path)
	require.NoError(t, err)
	require.NoError(t, <-reader)
	_, err = records.Write([]byte("{}\n"))
	require.ErrorIs(t, err, unix.EPIPE)
	require.NoError(t, records.Close())
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
	long := strings.Repeat("x", 1<<17)
	for there, want := range map[string]string{
		"{\"n\":1}":             "{\"n\":1}\n{}\n", // a line that was left open is ended
		"something else":        "something else\n{}\n",
		"{}\n{\"n\":1":          "{}\n{}\n", // a record that was cut off is none
		"{\"n\":1":              "{}\n",
		"{}\n{\"n\": \"" + long: "{}\n{}\n",
		"{\"n\": \"" + long + "\"}\n{\"n\": " + long: "{\"n\": \"" + long + "\"}\n{}\n",
	} {
		require.NoError(t, os.WriteFile(path, []byte(there), 0o600))
		r, err := output.Append(path)
		require.NoError(t, err)
		_, err = r.Write([]byte("{}\n"))
		require.NoError(t, err)
		require.NoError(t, r.Close())
		assert.Equal(t, want, content(t, path))
	}
	_, err := output.Append(filepath.Join(path, "x"))
	assert.Error(t, err)
}

// A second process would lose records to the first, and the first to the second.
func TestRecordsHaveOneWriter(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runs.jsonl")
	one, err := output.Append(path)
	require.NoError(t, err)
	_, err = one.Write([]byte("{\"n\":1}\n{\"n\":2"))
	require.NoError(t, err)
	_, err = output.Append(path)
	require.ErrorContains(t, err, path+" is being written by another process")
	assert.Equal(t, "{\"n\":1}\n{\"n\":2", content(t, path), "what is not ended yet is not cut off")
	require.NoError(t, one.Close())
	two, err := output.Append(path)
	require.NoError(t, err)
	require.NoError(t, two.Close())
	for range 2 {
		r, err := output.Append("/dev/null")
		require.NoError(t, err, "what is no file takes several")
		defer r.Close()
	}
}

func TestAFilterKeepsBytes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "runs.jsonl")
	const text = "{ \"n\":1 }\n\nno\n{\"n\":2}\n{\"n\":3}"
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	require.NoError(t, output.Filter(path, func(line []byte) bool { return string(line) != "{\"n\":2}\n" }))
	assert.Equal(t, "{ \"n\":1 }\n\nno\n{\"n\":3}", content(t, path))
}

// A file that standard output was led to holds all that is written, in its order.
func TestStandardOutputGoesOn(t *testing.T) {
	file, err := os.Create(filepath.Join(t.TempDir(), "out"))
	require.NoError(t, err)
	defer file.Close()
	stdout := os.Stdout
	t.Cleanup(func() { os.Stdout = stdout })
	os.Stdout = file
	fmt.Println("first")
	require.NoError(t, output.CheckPath(file.Name()))
	require.NoError(t, output.Write(file.Name(), say("page\n")))
	records, err := output.Append(file.Name())
	require.NoError(t, err)
	_, err = records.Write([]byte("record\n"))
	require.NoError(t, err)
	require.NoError(t, records.Close())
	require.NoError(t, output.Write(file.Name(), say("trace\n")))
	fmt.Println("last")
	assert.Equal(t, "first\npage\nrecord\ntrace\nlast\n", content(t, file.Name()))
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

// Package output writes the files that commands leave: those that appear whole or
// not at all, and records behind earlier ones. It knows nothing of what is in them.
package output

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// CheckPath finds out whether Write can make a file at path, so that a mistake shows
// before a long run. It leaves nothing behind.
func CheckPath(path string) error {
	if info, err := os.Stat(path); err == nil && info.Mode()&fs.ModeNamedPipe != 0 {
		if err := unix.Access(path, unix.W_OK); err != nil { // opened and closed, it would end for its reader
			return &fs.PathError{Op: "open", Path: path, Err: err}
		}
		return nil
	}
	f, _, err := begin(path)
	if err != nil {
		return err
	}
	err = f.Close()
	if f.Name() != path {
		err = errors.Join(err, os.Remove(f.Name()))
	}
	return err
}

// Apart refuses files to be written that are one, or that are among those that are read: the
// later would take the place of the earlier. What is no regular file takes several.
func Apart(written []string, read ...string) error {
	others := slices.Clone(read)
	for _, path := range written {
		for _, other := range others {
			if path != "" && same(path, other) {
				return fmt.Errorf("%s would be overwritten: give each file a name of its own", path)
			}
		}
		others = append(others, path)
	}
	return nil
}

// same reports whether two paths lead to one regular file, which need not be there yet.
func same(a, b string) bool {
	one, errA := os.Stat(a)
	other, errB := os.Stat(b)
	if errA == nil && errB == nil {
		return one.Mode().IsRegular() && os.SameFile(one, other)
	}
	if errA == nil || errB == nil {
		return false
	}
	a, errA = filepath.Abs(a)
	b, errB = filepath.Abs(b)
	return errA == nil && errB == nil && a == b
}

// Write has write make a file that appears at path, or replaces what is there, when
// it is complete. On an error nothing has changed. What is there and no regular
// file, and standard output whatever it is, is written to as it is.
func Write(path string, write func(io.Writer) error) error {
	f, place, err := begin(path)
	if err != nil {
		return err
	}
	err = errors.Join(write(f), f.Close())
	if f.Name() == path {
		return err
	}
	if err == nil {
		err = os.Rename(f.Name(), place)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// begin opens a file beside the place it will take, or path itself where that
// is no regular file.
func begin(path string) (f *os.File, place string, err error) {
	if f, err = standard(path); f != nil || err != nil {
		return f, path, err
	}
	place = path
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, "", err
	case info.IsDir():
		return nil, "", fmt.Errorf("%s is a directory", path)
	case !info.Mode().IsRegular():
		f, err = os.OpenFile(path, os.O_WRONLY, 0)
		return f, path, err
	default:
		if place, err = filepath.EvalSymlinks(path); err != nil {
			return nil, "", err
		}
	}
	beside := filepath.Join(filepath.Dir(place), fmt.Sprintf(".%s.%x", filepath.Base(place), rand.Uint64()))
	f, err = os.OpenFile(beside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666) // less the umask, as any new file
	if err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			pe.Path = path
		}
		return nil, "", err
	}
	return f, place, nil
}

// standard opens standard output or standard error once more, where path is a name of it; nil: it is none.
// Opened by its name, a file would be written from its beginning, over what is there.
func standard(path string) (*os.File, error) {
	info, _ := os.Stat(path) // where nothing is there, it is not the same as any file
	for _, f := range []*os.File{os.Stdout, os.Stderr} {
		if open, err := f.Stat(); err != nil || !os.SameFile(open, info) {
			continue
		}
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
	return nil, nil
}

// Records are lines behind those that a file has already.
type Records struct {
	f    *os.File
	file bool  // a regular one
	end  int64 // of the last whole record in it
}

// Append opens a file, or makes it, for records of one line each. What is in it stays, except a last record that
// was cut off. While it is open, no other process can open it so.
func Append(path string) (*Records, error) {
	if f, err := standard(path); f != nil || err != nil {
		return &Records{f: f}, err
	}
	flags := os.O_RDWR | os.O_CREATE | os.O_APPEND
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() { // a pipe that is open for reading would not tell that its reader has gone
		flags = os.O_WRONLY
	}
	f, err := os.OpenFile(path, flags, 0o666)
	if err != nil {
		return nil, err
	}
	r := &Records{f: f}
	info, err = f.Stat()
	if err == nil && info.Mode().IsRegular() {
		if r.file, err = true, r.lock(path); err == nil {
			err = r.endLine()
		}
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

// lock makes this process the one that writes the file, until it is closed, and finds its end.
func (r *Records) lock(path string) error {
	locked := unix.Flock(int(r.f.Fd()), unix.LOCK_EX|unix.LOCK_NB) // some file systems have no locks
	info, err := r.f.Stat()
	if err != nil {
		return err
	}
	there, _ := os.Stat(path)
	if errors.Is(locked, unix.EWOULDBLOCK) || !os.SameFile(info, there) { // or Filter has replaced it since
		return fmt.Errorf("%s is being written by another process: wait for its end, or give another file", path)
	}
	r.end = info.Size()
	return nil
}

// endLine ends a last line that has no end, or cuts it off where it is a part of a record.
func (r *Records) endLine() error {
	text, err := io.ReadAll(io.NewSectionReader(r.f, 0, r.end))
	line := text[bytes.LastIndexByte(text, '\n')+1:]
	if err != nil || len(line) == 0 {
		return err
	}
	if line[0] == '{' && !json.Valid(line) {
		r.end -= int64(len(line))
		return r.f.Truncate(r.end)
	}
	_, err = r.Write([]byte("\n"))
	return err
}

// Write implements io.Writer for one record. One that does not fit on the disk is
// taken back, so that what follows is not joined to a part of it.
func (r *Records) Write(record []byte) (int, error) {
	n, err := r.f.Write(record)
	if r.file && err != nil {
		return 0, errors.Join(err, r.f.Truncate(r.end))
	}
	r.end += int64(n)
	return n, err
}

// Filter leaves out the lines of a file that keep refuses. Records of it that are open can only be closed then.
func Filter(path string, keep func(line []byte) bool) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return Write(path, func(w io.Writer) error {
		kept := bufio.NewWriter(w)
		for line := range bytes.Lines(text) {
			if keep(line) {
				_, _ = kept.Write(line) // Flush tells of an error
			}
		}
		return kept.Flush()
	})
}

// Close closes the file.
func (r *Records) Close() error { return r.f.Close() }

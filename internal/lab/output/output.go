// Package output writes the files that commands leave: those that appear whole or
// not at all, and records behind earlier ones. It knows nothing of what is in them.
package output

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Check finds out whether Write can make a file at path, so that a mistake shows
// before a long run. It leaves nothing behind.
func Check(path string) error {
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

// same tells whether two paths lead to one regular file, which need not be there yet.
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
// file, such as /dev/stdout, is written to as it is.
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
	beside := filepath.Join(filepath.Dir(place), fmt.Sprintf(".%s.%d", filepath.Base(place), os.Getpid()))
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

// Records are lines behind those that a file has already.
type Records struct {
	f    *os.File
	file bool  // a regular one
	end  int64 // of the last whole record in it
}

// Append opens a file, or makes it, for records of one line each. What is in it stays.
func Append(path string) (*Records, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o666)
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrInvalid) { // such as a pipe that cannot be read
		f, err = os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	}
	if err != nil {
		return nil, err
	}
	r := &Records{f: f}
	info, err := f.Stat()
	if err == nil && info.Mode().IsRegular() {
		r.file, r.end = true, info.Size()
		err = r.endLine()
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return r, nil
}

// endLine ends a last line that something else left open.
func (r *Records) endLine() error {
	if r.end == 0 {
		return nil
	}
	last := make([]byte, 1)
	if _, err := r.f.ReadAt(last, r.end-1); err != nil {
		return err
	}
	if last[0] == '\n' {
		return nil
	}
	_, err := r.Write([]byte("\n"))
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

// Close closes the file.
func (r *Records) Close() error { return r.f.Close() }

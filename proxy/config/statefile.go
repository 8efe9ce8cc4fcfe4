package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// OpenRegular opens a regular file for reading, and refuses other files. It does not wait for the writer of a pipe.
func OpenRegular(path string) (*os.File, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is %s; a regular file belongs there", path, fileKind(info.Mode()))
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

// CreateTemporary creates a file of mode 0600 beside path, for the caller to write and to rename to path. It first
// removes the files of killed processes, because they may hold secrets. The new file is locked until it is closed, so
// that another process does not remove it.
func CreateTemporary(path string) (*os.File, error) {
	dir, prefix := filepath.Dir(path), "."+filepath.Base(path)+"."
	removeAbandoned(dir, prefix)
	f, err := os.CreateTemp(dir, prefix+"*")
	if err != nil {
		return nil, err
	}
	_ = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) // some file systems have no locks
	return f, nil
}

// removeAbandoned removes the files that CreateTemporary has made and that no process has locked.
func removeAbandoned(dir, prefix string) {
	entries, _ := os.ReadDir(dir) // after an error the caller cannot create a file either
	for _, e := range entries {
		suffix, ours := strings.CutPrefix(e.Name(), prefix)
		if _, err := strconv.ParseUint(suffix, 10, 64); !ours || err != nil || !e.Type().IsRegular() {
			continue
		}
		name := filepath.Join(dir, e.Name())
		f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
		if err != nil {
			continue
		}
		if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			_ = os.Remove(name)
		}
		_ = f.Close()
	}
}

// fileKind describes a file that is not regular.
func fileKind(m fs.FileMode) string {
	switch {
	case m.IsDir():
		return "a directory"
	case m&fs.ModeDevice != 0:
		return "a device"
	}
	return "not a file"
}

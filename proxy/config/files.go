package config

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"time"
	"unicode"

	"github.com/penstock-net/penstock/proxy/config/check"
)

const (
	// pipePatience bounds how long a pipe may take over its content.
	pipePatience = 2 * time.Second
)

// files reads the configuration and the files that it names, and keeps their contents.
type files struct {
	dir    string // of relative names
	read   map[string]file
	failed []string               // paths that could not be read
	seen   map[string]fs.FileInfo // each file that was looked for, as it was then; nil: it was not there
	saved  bool                   // all contents are in read already, from a saved configuration
}

// newFiles returns the files of a configuration at a path. None is read yet.
func newFiles(config string) *files {
	return &files{dir: filepath.Dir(config), read: map[string]file{}, seen: map[string]fs.FileInfo{}}
}

// file is one that was read.
type file struct {
	data []byte
	info fs.FileInfo
}

// readBytes returns the content of a file, without a byte order mark.
func (f *files) readBytes(name string) ([]byte, error) {
	path := f.pathOf(name)
	if _, ok := f.read[path]; !ok {
		if f.saved {
			return nil, fs.ErrNotExist
		}
		before, err := os.Stat(path)
		if err != nil {
			before = nil
		}
		data, info, err := readFile(path)
		if err != nil {
			f.seen[path] = before // of before the failure, so that a repair in between counts as a change
			if !mayBeSecret(name) {
				f.failed = append(f.failed, path)
			}
			return nil, err
		}
		f.read[path], f.seen[path] = file{data, info}, info
	}
	return withoutBOM(f.read[path].data), nil
}

// checkPrivate refuses a file with secrets that others than its owner and group can read, or that others than its
// owner can write. The file has been read.
func (f *files) checkPrivate(path string) error {
	path = f.pathOf(path)
	if f.saved { // it was private when it was read, and LoadSaved has checked the file of Save
		return nil
	}
	return checkClosedToOthers(path, f.read[path].info)
}

// Read implements check.Files.
func (f *files) Read(name string, secret bool) (string, error) {
	data, err := f.readBytes(name)
	if err != nil {
		return "", fmt.Errorf("%s: %w", f.Path(name), err)
	}
	if secret {
		err = f.checkPrivate(name)
	}
	return string(data), err
}

// readInto replaces the names of files in c by their contents. Errors are *check.Errors, joined.
func (f *files) readInto(c *Config) error {
	var errs []error
	secrets := map[string]reflect.Value{}
	for at, field := range fieldsIn("", reflect.ValueOf(c).Elem()) {
		if field.Tag.Get("secret") == "true" {
			secrets[at] = field.value
		} else if to, ok := secrets[strings.TrimSuffix(at, "_file")]; ok {
			errs = append(errs, check.Within(at, f.readSecret(field.value, to)))
		}
		if field.Tag.Get("pem") != "" {
			errs = append(errs, check.Within(at, f.readPEM(field.value, field.Tag.Get("secret") != "")))
		}
	}
	for i := range c.Agents {
		errs = append(errs, check.Within(fmt.Sprintf("agents[%d]", i), c.Agents[i].LoadFiles(f)))
	}
	for i := range c.Listeners {
		errs = append(errs, check.Within(fmt.Sprintf("listeners[%d]", i), c.Listeners[i].LoadFiles(f)))
	}
	return errors.Join(errs...)
}

// readSecret sets to to the first line of the file of that name, and empties name.
func (f *files) readSecret(name, to reflect.Value) error {
	path := name.String()
	if path == "" {
		return nil
	}
	text, err := f.Read(path, true)
	if err != nil {
		return check.Errorf("", "%v", err)
	}
	line, _, _ := strings.Cut(text, "\n")
	secret := reflect.ValueOf(strings.TrimSuffix(line, "\r"))
	if scalar, ok := scalars[to.Type()]; ok {
		value, err := scalar.parse(secret.String())
		if err != nil {
			return check.Errorf("", "%s: %v", f.Path(path), err)
		}
		secret = reflect.ValueOf(value)
	}
	secret = secret.Convert(to.Type())
	if err := checkSecret("", secret); err != nil {
		return err
	}
	to.Set(secret)
	name.SetString("")
	return nil
}

// readPEM replaces the name of a file in v by its contents, without the lines before the first block of PEM.
func (f *files) readPEM(v reflect.Value, secret bool) error {
	text := v.String()
	if text == "" {
		return nil
	}
	begin := strings.Index(text, check.PEMBegin)
	if begin < 0 {
		var err error
		if text, err = f.Read(text, secret); err != nil {
			return check.Errorf("", "%v", err)
		}
		if begin = strings.Index(text, check.PEMBegin); begin < 0 {
			return check.Errorf("", "there is no PEM in %s", f.pathOf(v.String()))
		}
	}
	v.SetString(text[begin:])
	return nil
}

// pathOf returns the path of a file; its name may be relative to the configuration.
func (f *files) pathOf(name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(f.dir, name)
}

// Path implements check.Files: the file's path for messages, without what may be a secret in the place of its name.
func (f *files) Path(name string) string {
	if mayBeSecret(name) {
		return hidden + " (which may be a secret; the name of a file belongs here)"
	}
	return f.pathOf(name)
}

// leastSecret is how many bytes of base64, or of hexadecimal digits, may be a key or a token.
const leastSecret = 16

// mayBeSecret reports whether the name of a file may be a secret instead: it has several lines, or is base64 or
// hexadecimal as only chance writes it, and not a path to a directory that there is.
func mayBeSecret(name string) bool {
	if strings.ContainsAny(name, "\r\n") {
		return true
	}
	if dir := filepath.Dir(name); filepath.IsAbs(name) && dir != "/" {
		if _, err := os.Stat(dir); err == nil {
			return false
		}
	}
	bare := strings.TrimRight(name, "=")
	if data, err := hex.DecodeString(bare); err == nil {
		return len(data) >= leastSecret
	}
	data, err := base64.RawURLEncoding.DecodeString(strings.NewReplacer("+", "-", "/", "_").Replace(bare))
	mixed := strings.ContainsAny(bare, "0123456789") && strings.ContainsFunc(bare, unicode.IsUpper) &&
		strings.ContainsFunc(bare, unicode.IsLower)
	return err == nil && len(data) >= leastSecret && (mixed || bare != name)
}

// fileNames returns the files that were read, in order, and those that could not be read.
func (f *files) fileNames() []string { return append(slices.Sorted(maps.Keys(f.read)), f.failed...) }

// withoutBOM removes the byte order mark with which some editors begin a file.
func withoutBOM(data []byte) []byte { return bytes.TrimPrefix(data, []byte("\ufeff")) }

// ReadFile reads a configuration or a file that one names, of at most 1 MiB, as
// the proxy itself does. Errors do not name the file.
func ReadFile(path string) ([]byte, error) {
	data, _, err := readFile(path)
	return data, err
}

// kernelFiles are the file systems (statfs(2)) with files that are made as they are read:
// some wait for something to happen, or lose what is read.
var kernelFiles = map[int64]string{
	0x9fa0: "proc", 0x62656572: "sysfs", 0x64626720: "debugfs", 0x74726163: "tracefs",
}

// readFile reads a regular file, or a pipe with a writer, of at most
// maxFile bytes. It neither waits for a writer nor reads a device. Errors do not
// name the file.
func readFile(path string) ([]byte, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, withoutPath(err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	info, err := f.Stat()
	if err != nil {
		return nil, nil, withoutPath(err)
	}
	made, err := kernelFile(f)
	if err != nil {
		return nil, nil, err
	}
	switch {
	case info.Mode().IsRegular() && made != "":
		return nil, nil, fmt.Errorf("it is a file of the kernel's (%s); name a regular file", made)
	case info.Mode().IsRegular():
	case info.Mode()&fs.ModeNamedPipe != 0:
		late := time.AfterFunc(pipePatience, func() { _ = f.SetReadDeadline(time.Unix(0, 1)) })
		defer late.Stop()
	default:
		return nil, nil, fmt.Errorf("it is %s; name a regular file", fileKind(info.Mode()))
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, nil, fmt.Errorf("it is a pipe whose writer has not ended after %v; name a regular file",
			pipePatience)
	case err != nil:
		return nil, nil, withoutPath(err)
	case len(data) > maxFile:
		return nil, nil, fmt.Errorf("it has more than %d bytes, which is all that is read", maxFile)
	}
	return data, info, nil
}

// kernelFile returns the name of the file system of f if it is one of kernelFiles, else an empty one.
func kernelFile(f *os.File) (string, error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return "", withoutPath(err)
	}
	var on syscall.Statfs_t
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = syscall.Fstatfs(int(fd), &on) }); err != nil || failed != nil {
		return "", fmt.Errorf("statfs: %w", errors.Join(err, failed))
	}
	return kernelFiles[int64(on.Type)], nil //nolint:unconvert // 32 bits wide elsewhere
}

// withoutPath returns the cause of err without the path, because callers name the file.
func withoutPath(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// checkClosedToOthers refuses a file with secrets that others than its owner and group can read, or that others than
// its owner can write.
func checkClosedToOthers(path string, info fs.FileInfo) error {
	m := info.Mode().Perm()
	if !info.Mode().IsRegular() || m&0o027 == 0 || inPrivateHome(path, info) {
		return nil
	}
	return fmt.Errorf("%s holds a secret and has mode %04o: others may read it or its group change it; "+
		"chmod 0600 %s (0640 where the proxy reads it by its group)", path, m, path)
}

// inPrivateHome reports whether the file lies in a directory that its owner, an
// ordinary user, has closed to everybody else: then modes inside it do not matter.
// Directories of root and of services are not trusted to stay closed.
func inPrivateHome(path string, info fs.FileInfo) bool {
	dir, err := os.Stat(filepath.Dir(path))
	if err != nil || dir.Mode().Perm()&0o077 != 0 {
		return false
	}
	d, ok := dir.Sys().(*syscall.Stat_t)
	f, both := info.Sys().(*syscall.Stat_t)
	return ok && both && d.Uid != 0 && d.Uid == f.Uid
}

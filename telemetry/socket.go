package telemetry

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
)

// socketMode lets the owner's group write, which connecting takes.
const socketMode = 0o660

// ListenSocket listens on a Unix socket at path. One that a process left behind
// is replaced; another file, or a socket that a process answers, is not. The
// listener's Close removes it, unless another has taken its place.
func ListenSocket(path string) (net.Listener, error) {
	if err := checkVacant(path); err != nil {
		return nil, err
	}
	// The socket is made beside path and moved there. So no client finds one with another mode, or none while one
	// replaces another.
	fresh := path + ".new"
	if err := os.Remove(fresh); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: fresh, Net: "unix"})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("telemetry: there is no directory %s; make it, or let the service manager do so "+
			"(RuntimeDirectory=)", filepath.Dir(path))
	}
	if err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	ln.SetUnlinkOnClose(false) // Close would remove fresh, where the socket is no longer
	s := &socket{Listener: ln, path: path}
	if err := s.moveIntoPlace(fresh); err != nil {
		return nil, errors.Join(fmt.Errorf("telemetry: %w", err), ln.Close(), os.Remove(fresh))
	}
	return s, nil
}

// AdoptSocket is ListenSocket for a listener at path that another process has opened, which has called Abandon.
func AdoptSocket(ln net.Listener, path string) (net.Listener, error) {
	own, err := os.Lstat(path)
	if err != nil {
		return nil, fmt.Errorf("telemetry: %w", err)
	}
	return &socket{Listener: ln, path: path, own: own}, nil
}

// Abandon makes Close keep the file of a Unix socket, because another process listens there.
func Abandon(ln net.Listener) {
	if s, ok := ln.(*socket); ok {
		s.own = nil
	}
}

// checkVacant returns an error if path has a file that must not be replaced.
func checkVacant(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("telemetry: %w", err)
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("telemetry: %s is there and is no socket; remove it, or choose another path", path)
	}
	conn, err := net.Dial("unix", path)
	switch {
	case err == nil:
		_ = conn.Close()
		return fmt.Errorf("telemetry: another process answers on %s; end it, or choose another path", path)
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist): // left behind, or gone by now
		return nil
	}
	return fmt.Errorf("telemetry: %w", err)
}

// socket is a listener that removes its file.
type socket struct {
	net.Listener
	path string
	own  fs.FileInfo // the file that this listener made; nil: Close removes none
}

// moveIntoPlace sets the mode of the socket and moves it to its place.
func (s *socket) moveIntoPlace(from string) (err error) {
	if err = os.Chmod(from, socketMode); err != nil {
		return err
	}
	if s.own, err = os.Lstat(from); err != nil {
		return err
	}
	return os.Rename(from, s.path)
}

// SyscallConn implements syscall.Conn.
func (s *socket) SyscallConn() (syscall.RawConn, error) {
	return s.Listener.(syscall.Conn).SyscallConn()
}

// Close implements net.Listener.
func (s *socket) Close() error {
	err := s.Listener.Close()
	if there, statErr := os.Lstat(s.path); statErr != nil || !os.SameFile(there, s.own) {
		return err
	}
	return errors.Join(err, os.Remove(s.path))
}

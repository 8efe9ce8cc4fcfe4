package edge

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Find returns the program that is the proxy: the one that is named, or else the one
// beside this program, or else the one in $PATH.
func Find(named string) (string, error) {
	if named == "" {
		return Beside("penstock")
	}
	path, err := exec.LookPath(named)
	if err != nil {
		return "", fmt.Errorf("find the proxy: %w", err)
	}
	return filepath.Abs(path)
}

// Beside returns the program of a name that stands beside this program, or else the one in $PATH.
func Beside(program string) (string, error) {
	if own, err := os.Executable(); err == nil {
		if path, err := exec.LookPath(filepath.Join(filepath.Dir(own), program)); err == nil {
			return path, nil
		}
	}
	path, err := exec.LookPath(program)
	if err != nil && !errors.Is(err, exec.ErrDot) {
		return "", fmt.Errorf("%s is neither beside this program nor in $PATH", program)
	}
	return filepath.Abs(path)
}

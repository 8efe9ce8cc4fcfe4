package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

// lockFile keeps other commands from working on what belongs to the file until
// release is called.
func lockFile(path string) (release func(), err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0) // which waits for no writer of a pipe
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}

// pathBeside is a file named in the configuration.
func pathBeside(config, name string) string {
	if filepath.IsAbs(name) {
		return name
	}
	return filepath.Join(filepath.Dir(config), name)
}

// makeLike makes an empty file unless there is one, of the same owner and group
// as model and with its mode, but closed to others.
func makeLike(model, path string) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	info, err := os.Stat(model)
	if err != nil {
		return err
	}
	return writeNew(path, nil, info, info.Mode().Perm()&^0o027, nil)
}

// replaceFile puts other content into a file at once: whoever reads it sees the
// old or the new. Owner, group and mode stay. An error of last, which is called once nothing
// but the name is missing, leaves the old; nil: there is nothing else to do.
func replaceFile(path string, content []byte, last func() error) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	return writeNew(path, content, info, info.Mode().Perm(), last)
}

// writeNew writes a file beside path and has it take that name, unless last says no.
func writeNew(
	path string, content []byte, owner fs.FileInfo, mode fs.FileMode, last func() error,
) (err error) {
	f, err := config.CreateTemporary(path)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.Close(), os.Remove(f.Name()))
		}
	}()
	if s, ok := owner.Sys().(*syscall.Stat_t); ok {
		if err := f.Chown(int(s.Uid), int(s.Gid)); err != nil {
			return fmt.Errorf("%s keeps its owner, which takes root: %w", path, err)
		}
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if last != nil {
		if err := last(); err != nil {
			return err
		}
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	return f.Close()
}

// proxyPatience bounds how long a running proxy may take over an answer.
const proxyPatience = 10 * time.Second

// errTelemetryOff is why a proxy that may well run cannot be asked.
var errTelemetryOff = errors.New("telemetry.address is off, so that no proxy can be asked; SIGHUP has it reread its " +
	"files")

// requestPage asks the running proxy for a page and returns what it answers.
func (g *gateway) requestPage(ctx context.Context, method, page string) (status int, body []byte, err error) {
	at := g.telemetry
	if at == "" {
		at = g.cfg.Telemetry.Address
	}
	return askProxy(ctx, at, method, page)
}

// askProxy asks the proxy whose telemetry is at that address for a page.
func askProxy(ctx context.Context, at, method, page string) (status int, body []byte, err error) {
	if at == "off" {
		return 0, nil, errTelemetryOff
	}
	host, port, err := net.SplitHostPort(at)
	if err != nil {
		return 0, nil, cli.BadInput(fmt.Errorf("--telemetry: %w", err))
	}
	if addr, err := netip.ParseAddr(host); host == "" || err == nil && addr.IsUnspecified() {
		at = net.JoinHostPort("localhost", port) // it is there, too
	}
	ctx, cancel := context.WithTimeout(ctx, proxyPatience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://"+at+page, nil)
	if err != nil {
		return 0, nil, err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // and no proxy between
	resp, err := client.Do(req)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return 0, nil, fmt.Errorf("no proxy answers at %s: %w", at, syscall.ECONNREFUSED)
	}
	if err != nil {
		return 0, nil, err
	}
	body, err = io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		err = fmt.Errorf("read what %s answers: %w", at, err)
	}
	return resp.StatusCode, body, err
}

// reloadProxy has a running proxy take the file over. That none runs is no error.
func (g *gateway) reloadProxy(ctx context.Context, notes io.Writer) error {
	status, body, err := g.requestPage(ctx, http.MethodPost, "/-/reload")
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, errTelemetryOff):
		fmt.Fprintf(notes, "not reloaded: %v\n", err)
		if cfg, err := config.Load(g.config); err == nil { // with the changed file
			printWarnings(notes, cfg)
		}
		return nil
	case err != nil:
		return fmt.Errorf("the proxy was not reloaded; systemctl reload penstock does it: %w", err)
	case status != http.StatusOK:
		return fmt.Errorf("the proxy was not reloaded: %s", strings.TrimSpace(string(body)))
	}
	fmt.Fprintln(notes, "the running proxy has taken it over")
	_, warnings := splitAnswer(string(body))
	for _, warning := range warnings {
		fmt.Fprintln(notes, config.Printable(warning))
	}
	return nil
}

// askPeers returns what the running proxy knows of peers.
func (g *gateway) askPeers(ctx context.Context) ([]telemetry.Peer, error) {
	status, body, err := g.requestPage(ctx, http.MethodGet, "/v1/peers?limit=0")
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("it answers %d: %s", status, strings.TrimSpace(string(body)))
	}
	if err != nil {
		return nil, err
	}
	var peers []telemetry.Peer
	if err := json.Unmarshal(body, &peers); err != nil {
		return nil, fmt.Errorf("what answers there is no proxy of this kind: %w", err)
	}
	return peers, nil
}

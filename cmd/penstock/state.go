package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

const (
	// endpointsPeriod is how soon a peer that was heard from, or has moved, is written down. A
	// crash loses no more.
	endpointsPeriod = 2 * time.Second
	maxEndpoints    = 16 << 20 // bytes of the file
)

// locateState decides where this process keeps what the next one needs: in the directory of
// --state-directory, else in systemd's (env is its STATE_DIRECTORY), else beside the configuration file.
// The copy of the configuration has its secrets, so that without a directory of our own nothing but --last-good
// asks for one.
func (f *runFlags) locateState(env string) {
	if f.stateDirectory == "" {
		f.stateDirectory, _, _ = strings.Cut(strings.TrimLeft(env, ":"), ":") // the first that has a name
	}
	switch {
	case f.stateDirectory != "":
		f.ownState = true
		if f.lastGood == "" && f.config != "" {
			f.lastGood = filepath.Join(f.stateDirectory, "last-good")
		}
	case f.config != "":
		f.stateDirectory = f.config + ".state"
	}
}

// needsState tells whether something is to be kept in the state directory.
func (h *service) needsState() bool {
	return h.flags.stateDirectory != "" && (h.flags.ownState || hasPeers(h.cfg))
}

func hasPeers(cfg config.Config) bool {
	for _, l := range cfg.Listeners {
		if l.Mode == access.WireGuard {
			return true
		}
	}
	return false
}

// makeStateDirectory comes while the process still has its privileges. The directory is its own, so
// that it can write there without them.
func (h *service) makeStateDirectory() {
	if h.needsState() {
		_ = os.MkdirAll(h.flags.stateDirectory, 0o700) // checkStateDirectory tells whether it is there
	}
}

// checkStateDirectory warns where nothing can be kept. It comes after privileges have been dropped.
func (h *service) checkStateDirectory() {
	if !h.needsState() {
		return
	}
	f, err := config.CreateTemporary(filepath.Join(h.flags.stateDirectory, "writable"))
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if err != nil {
		h.log.Warn("nothing is kept for the next start: WireGuard's clients will take 15 s to notice a restart; "+
			"let this user write in the directory, or name another with --state-directory",
			"directory", h.flags.stateDirectory, "uid", os.Getuid(), "err", err)
	}
}

// endpointKeeper writes down where peers of tunnels are.
type endpointKeeper struct {
	file string // empty: nowhere
	log  *slog.Logger

	mu      sync.Mutex
	written proxy.Endpoints
	failed  bool // the last time
}

// resumePeers has the peers of tunnels found where the process before this one left them.
func (h *service) resumePeers() {
	if h.flags.stateDirectory == "" {
		return
	}
	k := &h.endpoints
	k.log, k.file = h.log, filepath.Join(h.flags.stateDirectory, "endpoints.json")
	all, err := readEndpoints(k.file)
	if errors.Is(err, fs.ErrNotExist) && h.flags.lastGood != "" { // where former versions had it
		all, err = readEndpoints(h.flags.lastGood + ".endpoints")
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		h.log.Warn("peers of tunnels have to find out by themselves that the proxy was restarted", "file", k.file,
			"err", err)
	default:
		h.proxy.Resume(all)
	}
}

func readEndpoints(name string) (all proxy.Endpoints, err error) {
	f, _, err := config.OpenRegular(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	return all, json.NewDecoder(io.LimitReader(f, maxEndpoints)).Decode(&all)
}

// keepEndpoints writes down where peers are when that has changed, until ctx is done.
func (h *service) keepEndpoints(ctx context.Context) {
	tick := time.NewTicker(endpointsPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			h.saveEndpoints()
		}
	}
}

// saveEndpoints writes down where peers are at present.
func (h *service) saveEndpoints() {
	h.endpoints.save(h.proxy.Endpoints)
}

func (k *endpointKeeper) save(read func(before proxy.Endpoints) proxy.Endpoints) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.file == "" {
		return
	}
	all := read(k.written)
	if all.Equal(k.written) {
		return
	}
	err := writeEndpoints(k.file, all)
	if err != nil && !k.failed {
		k.log.Warn("where peers of tunnels are is not kept for a restart", "file", k.file, "err", err)
	}
	if k.failed = err != nil; err == nil {
		k.written = all
	}
}

// writeEndpoints replaces the file at once; only its owner reads it. The directory of a tunnel that a
// reload has added may not be there yet.
func writeEndpoints(name string, all proxy.Endpoints) error {
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := config.CreateTemporary(name)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("write %s: %w", name, err), os.Remove(f.Name()))
	}
	return nil
}

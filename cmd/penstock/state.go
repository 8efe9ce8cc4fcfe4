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
	"slices"
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
)

const (
	// endpointsPeriod is the time between two writes of where peers are. A crash loses what changed within it.
	endpointsPeriod = 2 * time.Second
	maxEndpoints    = 16 << 20 // bytes of the file
)

// stateKeeper stores in a directory what the next process needs: where peers of tunnels are. The directory may also
// have the last good configuration, which config.Loaded writes.
type stateKeeper struct {
	directory string // empty: nothing is stored
	needed    bool   // there is something to store from the start on
	lastGood  string // the file of the last good configuration; empty: there is none
	log       *slog.Logger

	mu      sync.Mutex // guards what follows
	written proxy.Endpoints
	failed  bool // the newest write has failed; only the first failure of a row is logged
}

// newStateKeeper returns the keeper of this process. It opens nothing.
func newStateKeeper(f runFlags, cfg config.Config, log *slog.Logger) *stateKeeper {
	return &stateKeeper{
		directory: f.stateDirectory, needed: f.stateDirectory != "" && (f.ownState || hasPeers(cfg)),
		lastGood: f.lastGood, log: log,
	}
}

// hasPeers reports whether a listener has WireGuard peers to find again.
func hasPeers(cfg config.Config) bool {
	return slices.ContainsFunc(cfg.Listeners, func(l access.Listener) bool { return l.Mode == access.WireGuard })
}

// endpointsFile returns the path of the file that says where peers are.
func (k *stateKeeper) endpointsFile() string { return filepath.Join(k.directory, "endpoints.json") }

// makeDirectory makes the directory. It is called while the process still has its privileges. The process owns the
// directory, so that it can write there without them.
func (k *stateKeeper) makeDirectory() {
	if k.needed {
		_ = os.MkdirAll(k.directory, 0o700) // checkDirectory reports whether it is there
	}
}

// checkDirectory warns if the process cannot write in the directory. It is called after privileges have been dropped.
func (k *stateKeeper) checkDirectory() {
	if !k.needed {
		return
	}
	f, err := config.CreateTemporary(filepath.Join(k.directory, "writable"))
	if err == nil {
		err = errors.Join(f.Close(), os.Remove(f.Name()))
	}
	if err != nil {
		k.log.Warn("nothing is kept for the next start: WireGuard's clients will take 15 s to notice a restart; "+
			"let this user write in the directory, or name another with --state-directory",
			"directory", k.directory, "uid", os.Getuid(), "err", err)
	}
}

// resumePeers calls resume with where peers of tunnels were when the process before this one ended.
func (k *stateKeeper) resumePeers(resume func(proxy.Endpoints)) {
	if k.directory == "" {
		return
	}
	all, err := readEndpoints(k.endpointsFile())
	if errors.Is(err, fs.ErrNotExist) && k.lastGood != "" { // former versions wrote it there
		all, err = readEndpoints(k.lastGood + ".endpoints")
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		k.log.Warn("peers of tunnels have to find out by themselves that the proxy was restarted",
			"file", k.endpointsFile(), "err", err)
	default:
		resume(all)
	}
}

// keepEndpoints writes where peers are whenever that has changed, until ctx is done. read returns where they are, and
// may reuse what it returned before.
func (k *stateKeeper) keepEndpoints(ctx context.Context, read func(before proxy.Endpoints) proxy.Endpoints) {
	tick := time.NewTicker(endpointsPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			k.saveEndpoints(read)
		}
	}
}

// saveEndpoints writes where peers are, if that has changed.
func (k *stateKeeper) saveEndpoints(read func(before proxy.Endpoints) proxy.Endpoints) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.directory == "" {
		return
	}
	all := read(k.written)
	if all.Equal(k.written) {
		return
	}
	err := writeEndpoints(k.endpointsFile(), all)
	if err != nil && !k.failed {
		k.log.Warn("where peers of tunnels are is not kept for a restart", "file", k.endpointsFile(), "err", err)
	}
	if k.failed = err != nil; err == nil {
		k.written = all
	}
}

// readEndpoints reads what writeEndpoints wrote. It opens regular files only, and reads at most maxEndpoints of one.
func readEndpoints(name string) (all proxy.Endpoints, err error) {
	f, _, err := config.OpenRegular(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	return all, json.NewDecoder(io.LimitReader(f, maxEndpoints)).Decode(&all)
}

// writeEndpoints replaces the file at once, so that a crash leaves the old one or the new one; only its owner reads
// it. The directory of a tunnel that a reload has added may not be there yet.
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

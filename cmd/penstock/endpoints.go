package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/penstock-net/penstock/proxy"
)

const (
	endpointsPeriod = time.Minute // how old what is kept of endpoints may be after a crash
	maxEndpoints    = 16 << 20    // bytes of the file
)

// endpointsFile is beside the last good configuration; empty: nothing is kept.
func (h *service) endpointsFile() string {
	if h.flags.lastGood == "" {
		return ""
	}
	return h.flags.lastGood + ".endpoints"
}

// resume has the peers of tunnels found where the process before this one left them.
func (h *service) resume() {
	name := h.endpointsFile()
	if name == "" {
		return
	}
	all, err := readEndpoints(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		h.log.Warn("peers of tunnels have to find out by themselves that the proxy was restarted", "file", name,
			"err", err)
	default:
		h.proxy.Resume(all)
	}
}

func readEndpoints(name string) (all proxy.Endpoints, err error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close() //nolint:errcheck // nothing was written
	return all, json.NewDecoder(io.LimitReader(f, maxEndpoints)).Decode(&all)
}

// keepEndpoints writes down where peers are, now and then, until ctx is done.
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

// saveEndpoints writes down where peers are at present, if any is anywhere.
func (h *service) saveEndpoints() {
	name, all := h.endpointsFile(), h.proxy.Endpoints()
	if name == "" || len(all) == 0 {
		return
	}
	if err := writeEndpoints(name, all); err != nil {
		h.log.Warn("where peers of tunnels are is not kept for a restart", "file", name, "err", err)
	}
}

// writeEndpoints replaces the file at once; only its owner reads it.
func writeEndpoints(name string, all proxy.Endpoints) error {
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*") // of mode 0600
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

package main

import (
	"context"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// watchPeriod is how often the files of the configuration are looked at. They are polled:
// a ConfigMap is a symbolic link to a link that is replaced, and a change there comes
// up to a minute late anyway.
const watchPeriod = time.Second

// stamp tells one state of a file from another; zero: it is not there. Whose it is, and who
// may read it, decides whether it is taken.
type stamp struct {
	device, inode      uint64
	mode, owner, group uint32
	size, modified     int64 // bytes, nanoseconds
}

func stampOf(info fs.FileInfo) stamp {
	if info == nil {
		return stamp{}
	}
	s, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return stamp{}
	}
	return stamp{
		uint64(s.Dev), s.Ino, //nolint:unconvert // other widths elsewhere
		s.Mode, s.Uid, s.Gid, info.Size(), info.ModTime().UnixNano(),
	}
}

// stamps are of the files that the configuration is from: as they are, and as they were read last.
func (h *service) stamps() (now, read map[string]stamp) {
	h.reloads.mu.Lock()
	files := slices.Concat([]string{filepath.Clean(h.flags.config)}, h.reloads.files, h.reloads.wanted)
	infos := maps.Clone(h.reloads.infos)
	h.reloads.mu.Unlock()
	now, read = map[string]stamp{}, map[string]stamp{}
	for _, name := range files {
		read[name] = stampOf(infos[name])
		info, err := os.Stat(name) // of what links lead to
		if err != nil {
			info = nil
		}
		now[name] = stampOf(info)
	}
	return now, read
}

// watchFiles reloads once files have changed since they were read and then stayed as they are for a period, until ctx
// is done. What cannot be taken over is tried again when it has changed again.
func (h *service) watchFiles(ctx context.Context) {
	if !h.flags.watch || h.flags.config == "" {
		return
	}
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	tried, _ := h.stamps() // as files were that could not be read
	before := tried
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now, read := h.stamps()
		for name, is := range read {
			if is == (stamp{}) {
				read[name] = tried[name]
			}
		}
		if maps.Equal(now, before) && !maps.Equal(now, read) {
			_, _ = h.reload("file") // which has logged what came of it
			tried = now
		}
		before = now
	}
}

package main

import (
	"context"
	"maps"
	"os"
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

// stamps looks at the files that the configuration is from.
func (h *service) stamps() map[string]stamp {
	h.reloads.mu.Lock()
	files := slices.Concat([]string{h.flags.config}, h.reloads.files, h.reloads.wanted)
	h.reloads.mu.Unlock()
	out := map[string]stamp{}
	for _, name := range files {
		out[name] = stamp{}
		info, err := os.Stat(name) // of what links lead to
		if err != nil {
			continue
		}
		if s, ok := info.Sys().(*syscall.Stat_t); ok {
			out[name] = stamp{
				uint64(s.Dev), s.Ino, //nolint:unconvert // other widths elsewhere
				s.Mode, s.Uid, s.Gid, info.Size(), info.ModTime().UnixNano(),
			}
		}
	}
	return out
}

// watchFiles reloads once files, which were as known, have changed and then stayed as they are for a period,
// until ctx is done. One that cannot be taken over is tried again when it has changed again.
func (h *service) watchFiles(ctx context.Context, known map[string]stamp) {
	if !h.flags.watch || h.flags.config == "" {
		return
	}
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	before := known
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := h.stamps()
		if maps.Equal(now, before) && !maps.Equal(now, known) {
			_, err := h.reload("file") // which has logged what came of it
			known = h.stamps()         // of other files, perhaps
			for name := range known {
				if s, ok := now[name]; ok {
					known[name] = s
				} else if err != nil { // it may have come since it was missed
					known[name] = stamp{}
				}
			}
		}
		before = now
	}
}

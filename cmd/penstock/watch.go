package main

import (
	"context"
	"io/fs"
	"maps"
	"os"
	"syscall"
	"time"
)

// watchPeriod is how often the files of the configuration are looked at. They are polled:
// a ConfigMap is a symbolic link to a link that is replaced, and a change there comes
// up to a minute late anyway.
const watchPeriod = time.Second

// watchUnrest is how many periods files may go on changing before they are read nevertheless.
const watchUnrest = 10

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

// currentStamps returns those of the configuration's files as they were when it was read last.
func (r *reloads) currentStamps() map[string]stamp {
	r.mu.Lock()
	defer r.mu.Unlock()
	read := map[string]stamp{}
	for name, info := range r.seen {
		read[name] = stampOf(info)
	}
	return read
}

// stampsNow returns the stamps of the same files as they are.
func stampsNow(read map[string]stamp) map[string]stamp {
	now := map[string]stamp{}
	for name := range read {
		info, err := os.Stat(name) // of what links lead to
		if err != nil {
			info = nil
		}
		now[name] = stampOf(info)
	}
	return now
}

// watchFiles reloads, until ctx is done, once files have changed since they were read and then stayed as they are for a
// period, or have changed for watchUnrest periods. What cannot be taken over is tried again when it has changed again.
func (h *service) watchFiles(ctx context.Context) {
	if !h.flags.watch || h.flags.config == "" {
		return
	}
	watchStamps(ctx, h.reloads.currentStamps, func() {
		if !h.isEnding() {
			_, _ = h.reloadConfig("file") // which has logged what came of it
		}
	})
}

// watchStamps calls changed once files differ from their stamps as read, and have stayed as they are for a period, or
// have changed for watchUnrest periods. It compares with what was read and not with what it saw first: files may change
// before its first look.
func watchStamps(ctx context.Context, read func() map[string]stamp, changed func()) {
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	var before map[string]stamp
	unrest := 0 // periods since files differ from what was read
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		asRead := read()
		now := stampsNow(asRead)
		if unrest++; maps.Equal(now, asRead) {
			unrest = 0
		} else if maps.Equal(now, before) || unrest >= watchUnrest {
			changed()
			unrest = 0
		}
		before = now
	}
}

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/telemetry"
)

// reloads remembers how rereading the configuration went.
type reloads struct {
	turn sync.Mutex // one at a time

	mu  sync.Mutex
	now telemetry.Config
	err error // of the last time

	seen map[string]fs.FileInfo // files of the configuration that was read last, as they were then; nil: not there

	written config.Config // that was reread last, or that of the start: without later changes
}

// noteStart notes that the first configuration is in force.
// broken is what is wrong with the file, where an older one is in force.
func (r *reloads) noteStart(hash string, broken error) {
	r.noteOutcome(telemetry.Config{Hash: hash, OK: broken == nil, Since: unixNow()}, broken)
}

func (r *reloads) noteOutcome(c telemetry.Config, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now, r.err = c, err
}

// noteTaken notes that cfg is in force, and which files were looked for to read it.
func (r *reloads) noteTaken(cfg config.Config, from config.Loaded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written, r.seen = cfg, from.Seen
}

// noteRefused notes which files were looked for to read a configuration that cannot be put into force: the mistake may
// be in one of them.
func (r *reloads) noteRefused(from config.Loaded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = from.Seen
}

// pendingError is what keeps the file that lies there from being in force; nil: nothing.
func (r *reloads) pendingError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *reloads) configStatus() telemetry.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

// unixNow is what the wall clock showed when the process began, plus the time since.
func unixNow() float64 {
	return float64(started.UnixNano()+int64(monotonicTime().Sub(cc.Time(time.Second)))) / 1e9
}

// reloadConfig rereads the configuration file, lays the flags over it as at the start
// and puts it into force. It logs one line and returns the same in words; on an
// error nothing has changed.
func (h *service) reloadConfig(by string) (string, error) {
	h.reloads.turn.Lock()
	defer h.reloads.turn.Unlock()
	defer func() { h.notifySystemd(h.statusLine()) }()
	if h.flags.config == "" {
		h.log.Warn("configuration not reloaded", "by", by, "err", telemetry.ErrNoFile)
		return "", telemetry.ErrNoFile
	}
	hash, warnings, done, err := h.rereadConfig()
	status := h.reloads.configStatus()
	if err != nil {
		status.Failed++
		status.OK = false
		h.reloads.noteOutcome(status, err)
		h.log.Error("configuration not reloaded", "by", by, "config", h.flags.config, "err", err)
		var rest strings.Builder
		for _, line := range config.Rest(err) {
			h.log.Error("configuration not reloaded", "by", by, "config", h.flags.config, "err", line)
			rest.WriteString("\n" + line)
		}
		return "", fmt.Errorf("not reloaded, the configuration of before stays in force: %w%s", err, rest.String())
	}
	if len(status.Changed) > 0 {
		h.log.Info("changes of algorithms have ended with the reload", "were", status.Changed)
	}
	status.Succeeded++
	h.reloads.noteOutcome(telemetry.Config{
		Hash: hash, OK: true, Since: unixNow(), Succeeded: status.Succeeded,
		Failed: status.Failed,
	}, nil)
	h.log.Info("configuration reloaded", "by", by, "config", h.flags.config, "hash", hash,
		"opened", done.Opened, "closing", done.Closing, "moved", done.Moved, "kept", done.Kept,
		"refused", done.Refused, "revoked", done.Revoked)
	answer := describeReload("reloaded", done)
	for _, w := range warnings {
		answer += "\n" + warningMark + w
	}
	return answer, nil
}

// warningMark begins each line of the answer to a reload that tells of a warning.
const warningMark = "warning: "

// splitAnswer takes the warnings out of the answer to a reload.
func splitAnswer(answer string) (words string, warnings []string) {
	var other []string
	for line := range strings.Lines(answer) {
		line = strings.TrimRight(line, "\n")
		if strings.HasPrefix(line, warningMark) {
			warnings = append(warnings, line)
		} else {
			other = append(other, line)
		}
	}
	return strings.Join(other, "\n"), warnings
}

// rereadConfig does what can fail. It logs the warnings, too.
func (h *service) rereadConfig() (hash string, warnings []string, done proxy.Reloaded, err error) {
	if !h.proxy.Ready() {
		return "", nil, done, errors.New("the proxy is ending")
	}
	flags := h.flags
	cfg, err := flags.loadConfig(h.written)
	if err == nil {
		if done, err = h.proxy.Reload(cfg); err != nil {
			err = h.explainListen(err)
		}
	}
	if err != nil {
		h.reloads.noteRefused(flags.loaded)
		return "", nil, done, err
	}
	h.level.Set(cfg.Log.Level.Level())
	h.hints.SetToken(cfg.Telemetry.Hints.Token)
	h.changes.SetToken(cfg.Telemetry.ChangeToken)
	warnings = cfg.Warnings()
	for _, w := range warnings {
		h.log.Warn(w)
	}
	h.saveLastGood(flags.loaded)
	h.reloads.noteTaken(cfg, flags.loaded)
	return flags.loaded.Hash, warnings, done, nil
}

// saveLastGood saves a configuration that works, for a start with one that does not.
func (h *service) saveLastGood(l config.Loaded) {
	if h.flags.lastGood == "" || h.flags.config == "" {
		return
	}
	if err := l.Save(h.flags.lastGood); err != nil {
		h.log.Warn("the configuration is not kept for a start with a broken one", "file", h.flags.lastGood, "err", err)
	}
}

// describeReload tells what has been done, and what became of running connections.
func describeReload(what string, done proxy.Reloaded) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %d directions of running connections have other terms", what, done.Moved)
	if done.Opened > 0 {
		fmt.Fprintf(&b, "; %d listeners are open that were not", done.Opened)
	}
	if done.Closing > 0 {
		fmt.Fprintf(&b, "; %d listeners take no new connections any more", done.Closing)
	}
	if done.Kept > 0 {
		fmt.Fprintf(&b, "; %d keep theirs, since none and our own control cannot take over from each other", done.Kept)
	}
	if done.Refused > 0 {
		fmt.Fprintf(&b, "; %d connections go on although new ones like them are refused", done.Refused)
	}
	if done.Revoked > 0 {
		fmt.Fprintf(&b, "; %d connections of peers that are gone are reset", done.Revoked)
	}
	return b.String()
}

// reloadOnSignal is reload for whoever sends SIGHUP, systemd among them.
func (h *service) reloadOnSignal() {
	tell := !h.isEnding() // else it has been told that we are stopping
	if tell {
		var t unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // which cannot fail
		h.notifySystemd(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, t.Nano()/1000))
	}
	_, _ = h.reloadConfig("SIGHUP") // which has logged what came of it
	if tell {
		h.notifySystemd(daemon.SdNotifyReady)
	}
}

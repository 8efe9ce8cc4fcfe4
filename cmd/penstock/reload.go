package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/policy"
	"github.com/penstock-net/penstock/telemetry"
)

// reloader puts changes into force while the proxy runs: a configuration that is read again, and another algorithm for
// a rule until then. It remembers what came of it for telemetry and for systemd's status.
//
//	lock   guards
//	turn   the whole of a change: one at a time
//	mu     the fields below it, which others read at any time
type reloader struct {
	*service

	turn sync.Mutex

	mu     sync.Mutex
	now    telemetry.Config
	err    error                  // of the newest attempt; nil: it went well
	seen   map[string]fs.FileInfo // files of the configuration as they were when it was read; nil: not there
	inFile config.Config          // of the newest reload, or of the start: without changes of algorithms since
}

// noteStart notes that the first configuration is in force. broken is what is wrong with the file, where an older one
// is in force; nil: nothing.
func (r *reloader) noteStart(hash string, broken error) {
	r.noteOutcome(telemetry.Config{Hash: hash, OK: broken == nil, Since: unixNow()}, broken)
}

// noteOutcome notes what came of an attempt.
func (r *reloader) noteOutcome(c telemetry.Config, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now, r.err = c, err
}

// noteTaken notes that cfg is in force, and which files were looked for to read it.
func (r *reloader) noteTaken(cfg config.Config, from config.Loaded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inFile, r.seen = cfg, from.Seen
}

// noteRefused notes which files were looked for to read a configuration that cannot be put into force: the mistake may
// be in one of them.
func (r *reloader) noteRefused(from config.Loaded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = from.Seen
}

// noteChange notes which rules differ from the file from now on.
func (r *reloader) noteChange(words []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now.Changed = words
}

// pendingError is what keeps the file that lies there from being in force; nil: nothing.
func (r *reloader) pendingError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// configStatus returns how the configuration stands, for metrics.
func (r *reloader) configStatus() telemetry.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

// fileConfig is the configuration as it was read, with the flags over it.
func (r *reloader) fileConfig() config.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.inFile
}

// unixNow is what the wall clock showed when the process began, plus the time since.
func unixNow() float64 {
	return float64(started.UnixNano()+int64(monotonicTime().Sub(cc.Time(time.Second)))) / 1e9
}

// reloadConfig rereads the configuration file, lays the flags over it as at the start
// and puts it into force. by says who asked: SIGHUP, http (POST /-/reload) or file (--watch).
// It logs one line and returns the same in words; on an error nothing has changed.
func (r *reloader) reloadConfig(by string) (string, error) {
	r.turn.Lock()
	defer r.turn.Unlock()
	defer func() { r.notifySystemd(r.statusLine()) }()
	if r.flags.config == "" {
		r.log.Warn("configuration not reloaded", "by", by, "err", telemetry.ErrNoFile)
		return "", telemetry.ErrNoFile
	}
	hash, warnings, done, err := r.rereadConfig()
	status := r.configStatus()
	if err != nil {
		status.Failed++
		status.OK = false
		r.noteOutcome(status, err)
		r.log.Error("configuration not reloaded", "by", by, "config", r.flags.config, "err", err)
		var rest strings.Builder
		for _, line := range config.Rest(err) {
			r.log.Error("configuration not reloaded", "by", by, "config", r.flags.config, "err", line)
			rest.WriteString("\n" + line)
		}
		return "", fmt.Errorf("not reloaded, the configuration of before stays in force: %w%s", err, rest.String())
	}
	if len(status.Changed) > 0 {
		r.log.Info("changes of algorithms have ended with the reload", "were", status.Changed)
	}
	status.Succeeded++
	r.noteOutcome(telemetry.Config{
		Hash: hash, OK: true, Since: unixNow(), Succeeded: status.Succeeded,
		Failed: status.Failed,
	}, nil)
	r.log.Info("configuration reloaded", "by", by, "config", r.flags.config, "hash", hash,
		"opened", done.Opened, "closing", done.Closing, "moved", done.Moved, "kept", done.Kept,
		"refused", done.Refused, "revoked", done.Revoked)
	answer := describeReload("reloaded", done)
	for _, w := range warnings {
		answer += "\n" + warningMark + w
	}
	return answer, nil
}

// rereadConfig reads the configuration and puts it into force, as far as that can fail. The proxy takes over all of it
// or nothing; level, tokens and the saved copy follow only after that. It also logs the warnings.
func (r *reloader) rereadConfig() (hash string, warnings []string, done proxy.Reloaded, err error) {
	if !r.proxy.Ready() {
		return "", nil, done, errors.New("the proxy is ending")
	}
	flags := r.flags
	cfg, err := flags.loadConfig(r.given)
	if err == nil {
		if done, err = r.proxy.Reload(cfg); err != nil {
			err = r.explainListen(err)
		}
	}
	if err != nil {
		r.noteRefused(flags.loaded)
		return "", nil, done, err
	}
	r.level.Set(cfg.Log.Level.Level())
	r.hints.SetToken(string(cfg.Telemetry.Hints.Token))
	r.changes.SetToken(string(cfg.Telemetry.ChangeToken))
	r.exporter.SetHeaders(cfg.Telemetry.OTLP.Headers.Fields())
	if r.fleet != nil {
		if err := r.fleet.Reload(&cfg.Fleet); err != nil {
			r.log.Warn("the fleet goes on with its old keys", "err", err)
		}
	}
	warnings = cfg.Warnings()
	for _, w := range warnings {
		r.log.Warn(w)
	}
	r.saveLastGood(flags.loaded)
	r.noteTaken(cfg, flags.loaded)
	return flags.loaded.Hash, warnings, done, nil
}

// saveLastGood saves a configuration that works, for a start with one that does not. A failure is logged: the proxy
// does without the copy.
func (r *reloader) saveLastGood(l config.Loaded) {
	if r.flags.lastGood == "" || r.flags.config == "" {
		return
	}
	if err := l.Save(r.flags.lastGood); err != nil {
		r.log.Warn("the configuration is not kept for a start with a broken one", "file", r.flags.lastGood, "err", err)
	}
}

// describeReload says what has been done, and what became of running connections.
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

// reloadOnSignal is the reload of SIGHUP. systemd wants RELOADING=1 with the time before, and READY=1 after
// (Type=notify-reload, systemd.service(5)). A proxy that is ending has sent STOPPING=1, which neither may follow.
func (r *reloader) reloadOnSignal() {
	tell := !r.isEnding()
	if tell {
		var t unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // which cannot fail
		r.notifySystemd(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, t.Nano()/1000))
	}
	_, _ = r.reloadConfig("SIGHUP") // which has logged what came of it
	if tell {
		r.notifySystemd(daemon.SdNotifyReady)
	}
}

// currentRules returns the rules in force, the defaults last, and the algorithms that there are to choose from.
func (r *reloader) currentRules() (out telemetry.Rules, err error) {
	cfg := r.proxy.Config()
	routes, err := cfg.Routes()
	if err != nil {
		return out, err
	}
	for _, route := range routes {
		rule := telemetry.Rule{Name: route.Rule, Refuse: route.Refuse}
		if route.Refuse == "" {
			rule.Down, rule.Up = describeAlgorithm(route.Down), describeAlgorithm(route.Up)
		}
		out.Rules = append(out.Rules, rule)
	}
	for _, s := range cc.Specs() {
		out.Algorithms = append(out.Algorithms, s.Name)
	}
	for _, a := range cfg.Agents {
		out.Algorithms = append(out.Algorithms, "ccp:"+a.Name)
	}
	return out, nil
}

// changeAlgorithm puts what is in force, but for one algorithm, into force as a reload would: until
// the next reload, for the file does not have it. It logs one line and returns the same in
// words; on an error nothing has changed.
func (r *reloader) changeAlgorithm(c telemetry.Change, client string) (string, error) {
	r.turn.Lock()
	defer r.turn.Unlock()
	log := r.log.With("rule", telemetry.RuleName(*c.Rule), "direction", cmp.Or(c.Direction, "both"),
		"algorithm", c.Algorithm, "client", client)
	done, err := r.putChanged(c)
	if err != nil {
		log.Warn("algorithm not changed", "err", err)
		return "", err
	}
	log.Info("algorithm changed until the next reload", "moved", done.Moved, "kept", done.Kept)
	return describeReload("changed until the next reload", done), nil
}

// putChanged makes the change, as far as that can fail. The proxy takes it as a reload, so that running connections
// move.
func (r *reloader) putChanged(c telemetry.Change) (done proxy.Reloaded, err error) {
	cfg, err := r.proxy.Config().SetAlgorithm(*c.Rule, c.Direction, c.Algorithm)
	if err != nil {
		return done, err
	}
	return r.putUnfiled(cfg)
}

// putUnfiled puts cfg into force, which has the rules of the file with changes, and notes which rules differ.
func (r *reloader) putUnfiled(cfg config.Config) (done proxy.Reloaded, err error) {
	different, err := cfg.Different(r.fileConfig())
	if err != nil {
		return done, err
	}
	if done, err = r.proxy.Reload(cfg); err != nil {
		return done, err
	}
	var words []string
	for _, v := range different {
		words = append(words, describeRule(v))
	}
	for _, rule := range cfg.Rules {
		if rule.Match.Sample == policy.NoHosts {
			words = append(words, rule.Name+": its sample is stopped")
		}
	}
	r.noteChange(words)
	return done, nil
}

// stopSample takes a sampled rule out of force until the next reload.
func (r *reloader) stopSample(rule, why string) error {
	r.turn.Lock()
	defer r.turn.Unlock()
	cfg, err := r.proxy.Config().StopSample(rule)
	if err != nil {
		return err
	}
	done, err := r.putUnfiled(cfg)
	if err != nil {
		return err
	}
	r.log.Warn("sample stopped until the next reload", "rule", rule, "why", why, "moved", done.Moved, "kept", done.Kept)
	return nil
}

// describeRule writes a rule with its algorithms, for logs and pages.
func describeRule(v policy.Verdict) string {
	down, up := describeAlgorithm(v.Down), describeAlgorithm(v.Up)
	if down == up {
		return telemetry.RuleName(v.Rule) + ": " + down
	}
	return telemetry.RuleName(v.Rule) + ": down " + down + ", up " + up
}

// watchPeriod is how often the files of the configuration are looked at. They are polled, because inotify does not see
// a change of a ConfigMap in one place: it is a symbolic link to a link that is replaced. A change there comes up to a
// minute late anyway.
const watchPeriod = time.Second

// watchUnrest is how many periods files may go on changing before they are read nevertheless.
const watchUnrest = 10

// stamp tells one state of a file from another; zero: it is not there. Owner, group and mode are in it, because they
// decide whether a secret file is taken.
type stamp struct {
	device, inode      uint64
	mode, owner, group uint32
	size, modified     int64 // bytes, nanoseconds
}

// stampOf returns the stamp of a file; nil: of one that is not there.
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
func (r *reloader) currentStamps() map[string]stamp {
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

// watchFiles reloads, until ctx is done, once files have changed since they were read and then stayed as they are for
// a period, or have changed for watchUnrest periods. What cannot be taken over is tried again when it has changed
// again.
func (r *reloader) watchFiles(ctx context.Context) {
	if !r.flags.watch || r.flags.config == "" {
		return
	}
	watchStamps(ctx, r.currentStamps, func() {
		if !r.isEnding() {
			_, _ = r.reloadConfig("file") // which has logged what came of it
		}
	})
}

// watchStamps calls changed once files differ from their stamps as read, and have stayed as they are for a period, or
// have changed for watchUnrest periods. It compares with what was read and not with what it saw first: files may
// change before its first look.
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

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

// reloader puts changes into force while the proxy runs: a configuration that is read again, and until then another
// algorithm for a rule. It has the outcome for telemetry and for systemd's status.
//
//	lock      guards
//	changing  the whole of a change: there is one at a time
//	mu        the fields below it, which others read at any time
type reloader struct {
	*service

	changing sync.Mutex

	mu      sync.Mutex
	outcome telemetry.Config
	err     error                  // of the newest attempt; nil: it succeeded
	seen    map[string]fs.FileInfo // files of the configuration as they were when it was read; nil: not there
	inFile  config.Config          // of the newest reload, or of the start: without changes of algorithms since
}

// recordStart stores the outcome of the start. A start with the last good configuration counts as a failed reload, and
// the files of the broken one are watched until they are mended.
func (r *reloader) recordStart() {
	f := &r.flags
	r.setOutcome(telemetry.Config{Hash: f.loaded.Hash, OK: f.broken == nil, Since: unixNow()}, f.broken)
	r.setInForce(r.cfg, f.loaded)
	if f.broken != nil {
		r.setSeen(f.wanted)
	}
}

// setOutcome stores the outcome of a start or a reload.
func (r *reloader) setOutcome(c telemetry.Config, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.outcome, r.err = c, err
}

// setInForce stores cfg, which is in force, and the files that were looked for to read it.
func (r *reloader) setInForce(cfg config.Config, from config.Loaded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inFile, r.seen = cfg, from.Seen
}

// setSeen stores the files that were looked for to read a configuration that cannot be put into force, because the
// mistake may be in any of them.
func (r *reloader) setSeen(from config.Loaded) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen = from.Seen
}

// setChanged stores which rules differ from the file.
func (r *reloader) setChanged(words []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.outcome.Changed = words
}

// pendingError returns why the configuration file is not in force; nil: it is.
func (r *reloader) pendingError() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// configStatus returns which configuration is in force, and how reloads went.
func (r *reloader) configStatus() telemetry.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.outcome
}

// fileConfig returns the configuration as it was read, with the flags applied.
func (r *reloader) fileConfig() config.Config {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.inFile
}

// unixNow returns the date when the process began plus the monotonic time since, so that it never goes back.
func unixNow() float64 {
	return float64(started.UnixNano()+int64(monotonicTime().Sub(cc.Time(time.Second)))) / 1e9
}

// reloadConfig rereads the configuration file, applies the flags as at the start and puts it into force. by says who
// asked: SIGHUP, http (POST /-/reload) or file (--watch). It logs one line and returns the same in words. On an error
// nothing has changed.
func (r *reloader) reloadConfig(by string) (string, error) {
	r.changing.Lock()
	defer r.changing.Unlock()
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
		r.setOutcome(status, err)
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
	r.setOutcome(telemetry.Config{
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

// rereadConfig reads the configuration and puts it into force. The proxy takes all of it or nothing. Log level, tokens
// and the saved copy follow only after that, because none of them can fail. It also logs the warnings.
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
		r.setSeen(flags.loaded)
		return "", nil, done, err
	}
	r.level.Set(cfg.Log.Level.Level())
	r.setSecrets(&cfg)
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
	r.setInForce(cfg, flags.loaded)
	return flags.loaded.Hash, warnings, done, nil
}

// saveLastGood saves a configuration that works, for a start with one that does not. It only logs a failure, because
// the proxy runs without the copy.
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

// reloadOnSignal reloads after SIGHUP. systemd wants RELOADING=1 with the time before, and READY=1 after
// (Type=notify-reload, systemd.service(5)). A proxy that is ending has sent STOPPING=1, which neither may follow.
func (r *reloader) reloadOnSignal() {
	notify := !r.isEnding()
	if notify {
		var t unix.Timespec
		_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // which cannot fail
		r.notifySystemd(fmt.Sprintf("%s\nMONOTONIC_USEC=%d", daemon.SdNotifyReloading, t.Nano()/1000))
	}
	_, _ = r.reloadConfig("SIGHUP") // it logs the outcome
	if notify {
		r.notifySystemd(daemon.SdNotifyReady)
	}
}

// currentRules returns the rules in force, the defaults last, and all algorithms that a change may name.
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

// changeAlgorithm changes one algorithm of the configuration in force, until the next reload. It logs one line and
// returns the same in words. On an error nothing has changed.
func (r *reloader) changeAlgorithm(c telemetry.Change, client string) (string, error) {
	r.changing.Lock()
	defer r.changing.Unlock()
	log := r.log.With("rule", telemetry.RuleName(*c.Rule), "direction", cmp.Or(c.Direction, "both"),
		"algorithm", c.Algorithm, "client", client)
	var done proxy.Reloaded
	cfg, err := r.proxy.Config().SetAlgorithm(*c.Rule, c.Direction, c.Algorithm)
	if err == nil {
		done, err = r.applyUnsaved(cfg)
	}
	if err != nil {
		log.Warn("algorithm not changed", "err", err)
		return "", err
	}
	log.Info("algorithm changed until the next reload", "moved", done.Moved, "kept", done.Kept)
	return describeReload("changed until the next reload", done), nil
}

// applyUnsaved puts cfg, which differs from the file, into force as a reload does, so that running connections move.
// It stores which rules differ.
func (r *reloader) applyUnsaved(cfg config.Config) (done proxy.Reloaded, err error) {
	different, err := cfg.ChangedVerdicts(r.fileConfig())
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
	r.setChanged(words)
	return done, nil
}

// stopSample takes a sampled rule out of force until the next reload.
func (r *reloader) stopSample(rule, why string) error {
	r.changing.Lock()
	defer r.changing.Unlock()
	cfg, err := r.proxy.Config().StopSample(rule)
	if err != nil {
		return err
	}
	done, err := r.applyUnsaved(cfg)
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

// watchPeriod is the time between two polls of the configuration's files. They are polled, because inotify needs a
// watch at several places for a ConfigMap, which is a symbolic link to a link that is replaced. A change of one comes
// up to a minute late anyway.
const watchPeriod = time.Second

// watchUnrest is the number of periods after which files that go on changing are read all the same.
const watchUnrest = 10

// stamp is equal for equal states of a file. The zero value: it is not there. It has owner, group and mode, because
// they decide whether a file of secrets is taken.
type stamp struct {
	device, inode      uint64
	mode, owner, group uint32
	size, modified     int64 // bytes, nanoseconds
}

// stampOf returns the stamp of a file. info is nil if it is not there.
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

// currentStamps returns the stamps of the configuration's files when it was read last.
func (r *reloader) currentStamps() map[string]stamp {
	r.mu.Lock()
	defer r.mu.Unlock()
	read := map[string]stamp{}
	for name, info := range r.seen {
		read[name] = stampOf(info)
	}
	return read
}

// stampsNow returns the stamps of the same files now.
func stampsNow(read map[string]stamp) map[string]stamp {
	now := map[string]stamp{}
	for name := range read {
		info, err := os.Stat(name) // follows links
		if err != nil {
			info = nil
		}
		now[name] = stampOf(info)
	}
	return now
}

// watchFiles reloads whenever the files of the configuration have changed, until ctx is done. A configuration with a
// mistake is tried again once its files have changed again.
func (r *reloader) watchFiles(ctx context.Context) {
	if !r.flags.watch || r.flags.config == "" {
		return
	}
	watchStamps(ctx, r.currentStamps, func() {
		if !r.isEnding() {
			_, _ = r.reloadConfig("file") // it logs the outcome
		}
	})
}

// watchStamps calls changed once files differ from their stamps when they were read. It waits until they have stayed
// as they are for a period, but for watchUnrest periods at most. It does not compare with its own first poll, because
// files may have changed before that.
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

package main

import (
	"errors"
	"os"
	"slices"
	"syscall"

	"github.com/penstock-net/penstock/internal/caps"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/config"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// neededCapabilities returns what a proxy with all its sockets open still needs of what it
// has. envelope is set on each socket; allowed are those that anybody may set.
func neededCapabilities(cfg config.Config, envelope string, allowed []string, has caps.Set) caps.Set {
	foreign := cfg.Mark != 0 // what either of two capabilities permits
	for _, l := range cfg.Listeners {
		foreign = foreign || l.KeepClient
	}
	device := slices.ContainsFunc(cfg.Listeners, func(l config.Listener) bool {
		// A device that goes is made again; peers of the kernel's come and go.
		return l.Mode == access.TUN || l.Mode == access.WireGuard && l.WireGuard.Path() != config.DatapathNetstack
	})
	var keep caps.Set
	switch {
	case foreign && !has.Has(caps.NetAdmin):
		keep = caps.NetRaw
	case foreign, device, !slices.Contains(allowed, envelope):
		keep = caps.NetAdmin
	}
	// A port below 1024 gives little away, and a later listener may want one.
	return (keep | caps.NetBindService) & has
}

// dropPrivileges gives up what the proxy needed only to open its sockets. That
// it cannot is no reason not to run, but one to say so.
func (h *service) dropPrivileges() {
	if h.flags.keepPrivileges {
		return
	}
	_, has, err := caps.Held()
	if err != nil {
		h.log.Warn("privileges stay", "err", err)
		return
	}
	_, allowed, err := kernel.Envelopes()
	if err != nil { // then nothing counts as allowed
		h.log.Debug("which congestion controls are for everybody is unknown", "err", err)
	}
	keep := neededCapabilities(h.cfg, h.proxy.Datapath.Beneath(), allowed, has) | h.neededToReread(has)
	dropped, err := caps.Drop(keep)
	switch {
	case err == nil:
		h.log.Info("privileges", "kept", keep.Words(), "dropped", dropped.Words())
	case has&^keep == 0:
		h.log.Debug("no_new_privs is not set", "err", err)
	default:
		h.log.Warn("privileges stay: "+whyTheyStay(err), "kept", has.Words(), "err", err)
	}
}

// neededToReread returns what a reload needs to read again what the start has
// read, and says what no reload will be able to.
func (h *service) neededToReread(has caps.Set) caps.Set {
	closed, err := caps.ReadOnlyBy(caps.DACOverride|caps.DACReadSearch, h.flags.loaded.Files)
	switch {
	case err != nil:
		h.log.Warn("whether a reload can read the configuration again is unknown", "err", err)
	case len(closed) == 0:
	case has.Has(caps.DACReadSearch):
		h.log.Info("CAP_DAC_READ_SEARCH is kept, since a reload reads these files only with it; where this user "+
			"may read them, such as in /etc/penstock, it is dropped",
			"uid", os.Getuid(), "files", closed)
		return caps.DACReadSearch
	default:
		h.log.Warn("a reload will not be able to read these files again: the privilege that read them is dropped; "+
			"let this user read them and search their directories",
			"uid", os.Getuid(), "files", closed)
	}
	return 0
}

// whyTheyStay says in words what keeps privileges from being dropped, and the cure.
func whyTheyStay(err error) string {
	if errors.Is(err, syscall.EPERM) {
		return "a system call filter forbids it; allow capset (under systemd: SystemCallFilter=capset, after the " +
			"other filters)"
	}
	return "the kernel refused"
}

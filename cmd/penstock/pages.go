package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"runtime"
	"time"

	"github.com/penstock-net/penstock/internal/cli"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/telemetry"
	"github.com/penstock-net/penstock/telemetry/page"
)

// openTelemetry opens what telemetry listens on.
func (h *service) openTelemetry() error {
	if at := h.cfg.Telemetry.Address; at != "off" {
		ln, err := listenTCP("telemetry.address", at, "--telemetry or telemetry.address changes it, off does without")
		if err != nil {
			return err
		}
		h.pages = h.boundListener(ln, "telemetry")
	}
	if at := h.cfg.Telemetry.Health; at != "off" {
		ln, err := listenTCP("telemetry.health", at, "write another, or off to do without")
		if err != nil {
			return errors.Join(err, h.closeTelemetry())
		}
		h.probe = h.boundListener(ln, "telemetry.health")
	}
	if path := h.cfg.Telemetry.Hints.Socket; path != "" {
		ln, err := telemetry.ListenSocket(path)
		if err != nil {
			return errors.Join(fmt.Errorf("telemetry.hints.socket: %w", err), h.closeTelemetry())
		}
		h.hintSocket = h.boundListener(ln, "telemetry.hints")
	}
	return nil
}

// boundListener keeps a port of telemetry from taking descriptors that are meant for connections.
func (h *service) boundListener(ln net.Listener, name string) *telemetry.BoundedListener {
	dialled := func(from, to netip.AddrPort) bool { return h.proxy.Dialled(from, to) }
	met := func(reason proxy.Reason) {
		h.proxy.LimitMet(name, reason, "nothing beyond 64 connections, 8 of a host: keep others out by a firewall; "+
			"below that LimitNOFILE (ulimit -n)")
	}
	return telemetry.Bound(ln, proxy.DescriptorBudget(&h.cfg).Port, dialled, met)
}

// telemetryPorts are the ports of telemetry that are open, by the names that metrics have for them.
func (h *service) telemetryPorts() map[string]*telemetry.BoundedListener {
	ports := map[string]*telemetry.BoundedListener{"pages": h.pages, "health": h.probe, "hints": h.hintSocket}
	maps.DeleteFunc(ports, func(_ string, ln *telemetry.BoundedListener) bool { return ln == nil })
	return ports
}

// closeTelemetry closes what openTelemetry opened, where nothing has been served.
func (h *service) closeTelemetry() (err error) {
	for _, ln := range h.telemetryPorts() {
		err = errors.Join(err, ln.Close())
	}
	return err
}

// telemetryPages puts the HTTP pages together.
func (h *service) telemetryPages() telemetry.Pages {
	b := cli.ReadBuild()
	o := telemetry.Options{
		Facts: telemetry.Facts{
			Version: b.Version, Revision: b.Revision, GoVersion: runtime.Version(),
			Start: float64(started.UnixNano()) / 1e9,
			Tier:  kernel.Tier, Envelope: h.proxy.Datapath.Envelope(), Missing: h.proxy.Datapath.Missing(),
		},
		Clock:   monotonicTime,
		Wall:    time.Now,
		Load:    h.datapathLoad,
		Config:  h.reloads.configStatus,
		Hints:   h.hints.Outcomes,
		Changes: h.changes.Outcomes,
		Ports:   h.telemetryPorts(),

		HintSources: h.sourceStats,
		Agents:      h.proxy.Agents,
	}
	if h.trace != nil {
		o.Dropped = h.trace.Dropped
	}
	ready := func() error {
		if h.isEnding() {
			return errors.New("draining: connect elsewhere")
		}
		return h.proxy.Health()
	}
	return telemetry.Pages{
		Source:  h.proxy,
		Metrics: telemetry.NewRegistry(h.proxy, o),
		Page: page.New(page.Options{
			Source: h.proxy, Version: b.Version, Start: o.Facts.Start, Clock: monotonicTime, Wall: time.Now,
			Ready: ready, Fallbacks: h.fallbackCount, Events: &h.events,
			Changes: func() (bool, []string) { return h.changes.On(), h.reloads.configStatus().Changed },
		}),
		Ready:   ready,
		Profile: h.flags.pprof,
		Hints:   &h.hints,
		Changes: &h.changes,
		Reload:  func() (string, error) { return h.reloadConfig("http") },
		Dialled: h.proxy.Dialled,
		Log:     h.log,
	}
}

package main

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/linkstat"
	"github.com/penstock-net/penstock/telemetry"
)

// recentUse is how long ago a flow may have moved a byte that counts as using a link.
const recentUse = time.Second

// openSources prepares the interfaces of the configuration that tell hints.
func (h *service) openSources() error {
	for _, s := range h.cfg.Hints {
		source, err := linkstat.Open(linkstat.Config{
			Interface: s.Interface, Prefixes: s.Prefix, Capacity: s.Capacity, Interval: s.Every(),
			Clock: monotonicTime, Users: h.linkUsers, Hint: h.proxy.Hint, Log: h.log,
		})
		if err != nil {
			h.closeSources()
			return err
		}
		h.sources = append(h.sources, source)
	}
	return nil
}

// runSources has them tell what they know until ctx is done.
func (h *service) runSources(ctx context.Context) {
	var all sync.WaitGroup
	for _, s := range h.sources {
		all.Go(func() { s.Run(ctx) })
	}
	all.Wait()
	h.closeSources()
}

func (h *service) closeSources() {
	for _, s := range h.sources {
		s.Close()
	}
}

// linkUsers are those that send through a link to hosts in prefixes.
func (h *service) linkUsers(prefixes []netip.Prefix) linkstat.Users {
	flows, hosts := h.proxy.Toward(prefixes, recentUse)
	return linkstat.Users{Flows: flows, Hosts: hosts}
}

// sourceStats are theirs, in telemetry's terms.
func (h *service) sourceStats() []telemetry.HintSource {
	out := make([]telemetry.HintSource, len(h.sources))
	for i, s := range h.sources {
		out[i] = telemetry.HintSource(s.Stats())
	}
	return out
}

// hintNews has the log say whose hints are no longer believed, or are again.
func (h *service) hintNews(n flow.HintNews) {
	log, words := h.log.Warn, "hints are doubted: they say more than is delivered"
	switch n.Doubt {
	case flow.HintTooLow:
		words = "hints are doubted: they say less than is delivered without a queue"
	case "":
		log, words = h.log.Info, "hints are believed again"
	}
	log(words, "group", n.Group, "algorithm", n.Algorithm, "told_bits_per_second", int64(n.Told),
		"delivered_bits_per_second", int64(n.Delivered), "believed_bits_per_second", int64(n.Believed))
}

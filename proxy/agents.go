package proxy

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/agent"
	"github.com/penstock-net/penstock/proxy/config"
)

// agents are the links to the agents of a configuration.
type agents []*agent.Link

func startAgents(list []config.Agent, clock func() cc.Time, log *slog.Logger) (agents, error) {
	var links agents
	for _, a := range list {
		secure, err := a.Secure()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("agent %q: tls: %w", a.Name, err), links.closeLinks())
		}
		l, err := agent.Start(agent.Config{
			Name: a.Name, Address: a.Address, TLS: secure, Socket: a.SocketPath(), Reply: a.ReplyPath(), Algorithm: a.Algorithm,
			Clock: clock, Log: log,
		})
		if err != nil {
			return nil, errors.Join(err, links.closeLinks())
		}
		links = append(links, l)
	}
	return links, nil
}

// lookupAlgorithm finds the algorithms that agents decide, and all others.
func (a agents) lookupAlgorithm(name string) (cc.Spec, error) {
	for _, l := range a {
		if s := l.Spec(); s.Name == name {
			return s, nil
		}
	}
	return cc.Lookup(name)
}

// updateCertificates has the next connections be by the certificates of a configuration that was checked.
func (a agents) updateCertificates(list []config.Agent) {
	for i, c := range list {
		if by, err := c.Secure(); err == nil {
			a[i].Secure(by)
		}
	}
}

// wrapTick has what flows send to agents in a tick of the kernel datapath leave at its end.
func (a agents) wrapTick(tick func(shard int, now cc.Time) cc.Time) (before func(), on func(int, cc.Time) cc.Time) {
	if len(a) == 0 {
		return nil, tick
	}
	return func() {
			for _, l := range a {
				l.Hold()
			}
		}, func(shard int, now cc.Time) cc.Time {
			next := tick(shard, now)
			for _, l := range a {
				l.Release()
			}
			return next
		}
}

func (a agents) closeLinks() (err error) {
	for _, l := range a {
		err = errors.Join(err, l.Close())
	}
	return err
}

// Agents returns how it goes with the agents, in the order of the configuration.
func (k *Kernel) Agents() []agent.Info {
	var out []agent.Info
	for _, l := range k.agents {
		out = append(out, l.Info())
	}
	return out
}

// Package agents has agents of the congestion control plane decide in what commands play:
// in virtual time, and in proxies that commands start.
package agents

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/proxy/agent"
)

// Flag is the name of the flag that Parse reads, and Usage what it says.
const (
	Flag  = "agent"
	Usage = "`NAME=SOCKET`: the agent that decides for ccp:NAME, and where it listens; NAME alone: " +
		ccp.DefaultSocket + "; repeat for several"
)

// Agents are processes that decide for algorithms ccp:NAME.
type Agents []Agent

// Agent is one of them.
type Agent struct{ Name, Socket string }

// Parse reads them as the command line has them.
func Parse(specs []string) (Agents, error) {
	var out Agents
	for _, spec := range specs {
		name, socket, named := strings.Cut(spec, "=")
		if !named {
			socket = ccp.DefaultSocket
		}
		if err := ccp.CheckName(name); err != nil {
			return nil, fmt.Errorf("--%s: %w", Flag, err)
		}
		if socket == "" {
			return nil, fmt.Errorf("--%s %s: it has no socket; write %s=/run/%s.sock", Flag, spec, name, name)
		}
		if _, err := out.socket(name); err == nil {
			return nil, fmt.Errorf("--%s %s: there is another agent %s", Flag, spec, name)
		}
		socket, err := filepath.Abs(socket)
		if err != nil {
			return nil, fmt.Errorf("--%s %s: %w", Flag, spec, err)
		}
		out = append(out, Agent{name, socket})
	}
	return out, nil
}

// socket is where the agent of a name listens.
func (a Agents) socket(name string) (string, error) {
	for _, one := range a {
		if one.Name == name {
			return one.Socket, nil
		}
	}
	return "", fmt.Errorf("no agent is named that decides for %s:%s; add --%s %s=SOCKET", ccp.Family, name, Flag, name)
}

// Check wants the algorithm, if it is of the form ccp:NAME, to be one of theirs.
func (a Agents) Check(algorithm string) error {
	word, name, _ := strings.Cut(algorithm, ":")
	if word != ccp.Family {
		return nil
	}
	_, err := a.socket(name)
	return err
}

// YAML is the part of a proxy's configuration that names them.
func (a Agents) YAML() string {
	if len(a) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("agents:\n")
	for _, one := range a {
		fmt.Fprintf(&b, "  - {name: %s, socket: %q}\n", one.Name, one.Socket)
	}
	return b.String()
}

// Simulate has them decide in virtual time for the flows of s that ask for it, while play
// plays what it is given.
func (a Agents) Simulate(s sim.Scenario, play func(sim.Scenario) error) (err error) {
	there := map[string]*agent.Virtual{}
	defer func() {
		for _, v := range there {
			err = errors.Join(err, v.Close())
		}
	}()
	var names []string
	for _, f := range s.Flows {
		names = append(names, f.Algorithm)
	}
	for _, c := range s.Changes {
		names = append(names, c.Terms.Algorithm)
	}
	for _, algorithm := range names {
		word, name, _ := strings.Cut(algorithm, ":")
		if word != ccp.Family || there[algorithm] != nil {
			continue
		}
		socket, err := a.socket(name)
		if err != nil {
			return err
		}
		if there[algorithm], err = agent.Reach(agent.Config{Name: name, Socket: socket}); err != nil {
			delete(there, algorithm)
			return err
		}
	}
	s.Lookup = func(name string) (cc.Spec, error) {
		if v := there[name]; v != nil {
			return v.Spec(), nil
		}
		return cc.Lookup(name)
	}
	if err := play(s); err != nil {
		return err
	}
	for _, v := range there {
		if err := v.Err(); err != nil {
			return err
		}
	}
	return nil
}

// Run is sim.Run with their decisions.
func (a Agents) Run(s sim.Scenario) (r sim.Result, err error) {
	err = a.Simulate(s, func(s sim.Scenario) (err error) {
		r, err = sim.Run(s)
		return err
	})
	return r, err
}

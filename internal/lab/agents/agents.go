// Package agents has agents of the congestion control plane decide in what commands play:
// in virtual time, and in proxies that commands start.
package agents

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/proxy/agent"
)

// Flag is the name of the flag that Parse reads, and Usage what it says.
const (
	Flag  = "agent"
	Usage = "`NAME=SOCKET`: the agent that decides for ccp:NAME, and where it listens; NAME alone: " +
		ccp.DefaultSocket + "; NAME=" + byCommand + "COMMAND: how to start it, at that path or at $SOCKET; " +
		"NAME=IN,OUT: one on portus 0.5, which reads at IN, answers to OUT, and is started once OUT is there; " +
		"repeat for several"

	byCommand = "run:"

	replyLen = len("4194304-99") // what tells apart our sockets beside an agent's: a process and a number
)

// Agents are processes that decide for algorithms ccp:NAME.
type Agents []Agent

// Agent is one of them.
type Agent struct {
	Name      string `yaml:"name"`
	Socket    string // where it listens; empty: it is yet to be started
	Command   string `yaml:"command"` // that Start has a shell start, in place of Program
	In, Out   string // paths of one on portus 0.5 that is started elsewhere once Start has made Out
	Program   string `yaml:"program"`   // that Start starts, without Prefix; empty: the one of its name
	Algorithm string `yaml:"algorithm"` // that flows ask it for; empty: its default

	pid  int        // 0: another program has started it
	said *edge.Tail // by what Start has started; complete once that has been ended
}

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
		if _, err := out.named(name); err == nil {
			return nil, fmt.Errorf("--%s %s: there is another agent %s", Flag, spec, name)
		}
		if command, started := strings.CutPrefix(socket, byCommand); started {
			if strings.TrimSpace(command) == "" {
				return nil, fmt.Errorf("--%s %s: it has no command; write %s=%s./%s", Flag, spec, name, byCommand, name)
			}
			out = append(out, Agent{Name: name, Command: command})
			continue
		}
		if input, output, two := strings.Cut(socket, ","); two {
			if input == "" || output == "" {
				return nil, fmt.Errorf("--%s %s: an agent on portus 0.5 has two sockets; write %s=/tmp/ccp/0/in,/tmp/ccp/0/out",
					Flag, spec, name)
			}
			out = append(out, Agent{Name: name, In: input, Out: output})
			continue
		}
		socket, err := filepath.Abs(socket)
		if err != nil {
			return nil, fmt.Errorf("--%s %s: %w", Flag, spec, err)
		}
		if most := ccp.MaxReply - len(".penstock-") - max(len(name), replyLen); len(socket) > most {
			return nil, fmt.Errorf("--%s %s: the path of its socket has %d bytes; it may have %d, as ours is beside it",
				Flag, spec, len(socket), most)
		}
		out = append(out, Agent{Name: name, Socket: socket})
	}
	return out, nil
}

// named is the agent of a name.
func (a Agents) named(name string) (Agent, error) {
	for _, one := range a {
		if one.Name == name {
			return one, nil
		}
	}
	return Agent{}, fmt.Errorf("no agent is named that decides for %s:%s; add --%s %s=SOCKET",
		ccp.Family, name, Flag, name)
}

// Check wants the algorithm, if it is of the form ccp:NAME, to be one of theirs.
func (a Agents) Check(algorithm string) error {
	word, name, _ := strings.Cut(algorithm, ":")
	if word != ccp.Family {
		return nil
	}
	_, err := a.named(name)
	return err
}

// Over are these agents, but that those of the same names take their places.
func (a Agents) Over(below Agents) Agents {
	all := slices.Clone(a)
	for _, one := range below {
		if i := slices.IndexFunc(a, func(o Agent) bool { return o.Name == one.Name }); i < 0 {
			all = append(all, one)
		} else {
			all[i].Algorithm = one.Algorithm
		}
	}
	return all
}

// In are those that decide for algorithms which a text names.
func (a Agents) In(text string) (named Agents) {
	for _, one := range a {
		if regexp.MustCompile(`\b` + ccp.Family + ":" + one.Name + `($|[^a-z0-9_-])`).MatchString(text) {
			named = append(named, one)
		}
	}
	return named
}

// YAML is the part of a proxy's configuration that names them.
func (a Agents) YAML() string {
	if len(a) == 0 {
		return ""
	}
	var b strings.Builder
	b.WriteString("agents:\n")
	for _, one := range a {
		fmt.Fprintf(&b, "  - {name: %s, socket: %q, algorithm: %q}\n", one.Name,
			cmp.Or(one.Socket, "/"+one.Name), one.Algorithm)
	}
	return b.String()
}

// Simulate has them decide in virtual time for the flows of s that ask for it, while play
// plays what it is given. Those that are not there are started for it.
func (a Agents) Simulate(s sim.Scenario, play func(sim.Scenario) error) (err error) {
	var names []string
	for _, f := range s.Flows {
		names = append(names, f.Algorithm)
	}
	for _, c := range s.Changes {
		names = append(names, c.Terms.Algorithm)
	}
	a, stop, err := a.In(strings.Join(names, " ")).Start()
	if err != nil {
		return err
	}
	defer func() {
		if stop(); err != nil {
			err = a.explain(err)
		}
	}()
	there := map[string]*agent.Virtual{}
	defer func() {
		for _, v := range there {
			err = errors.Join(err, v.Close())
		}
	}()
	for _, algorithm := range names {
		word, name, _ := strings.Cut(algorithm, ":")
		if word != ccp.Family || there[algorithm] != nil {
			continue
		}
		one, err := a.named(name)
		if err != nil {
			return err
		}
		cfg := agent.Config{Name: name, Socket: one.Socket, Algorithm: one.Algorithm}
		if there[algorithm], err = agent.Reach(cfg); err != nil {
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

// RunScenario is sim.Run with their decisions.
func (a Agents) RunScenario(s sim.Scenario) (r sim.Result, err error) {
	err = a.Simulate(s, func(s sim.Scenario) (err error) {
		r, err = sim.Run(s)
		return err
	})
	return r, err
}

// AreElsewhere reports whether another program has started one of them.
func (a Agents) AreElsewhere() bool {
	return slices.ContainsFunc(a, func(one Agent) bool { return one.Socket+one.In != "" })
}

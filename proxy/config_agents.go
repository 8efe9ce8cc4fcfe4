package proxy

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/ccp"
	"github.com/penstock-net/penstock/proxy/agent"
)

// AgentConfig is a process that decides for the flows of rules with algorithm ccp:NAME.
type AgentConfig struct {
	Name      string `yaml:"name" about:"Rules call it ccp:NAME. Lower-case letters, digits, - and _."`
	Socket    string `yaml:"socket" about:"The agent's Unix datagram socket; /tmp/ccp/portus where not set."`
	Reply     string `yaml:"reply" about:"The proxy's own, which the agent can reach. Not set: socket.penstock-NAME."`
	Algorithm string `yaml:"algorithm" about:"What flows ask the agent for, up to 63 bytes. Not set: its default."`

	Address string         `yaml:"address" about:"HOST:PORT of an agent on another machine; in place of socket, reply."`
	TLS     AgentTLSConfig `yaml:"tls" about:"For address: both ends show certificates."`
}

// AgentTLSConfig is who the proxy is to an agent on another machine, and whom it takes for one.
// Each key holds PEM, or the name of a file that does.
type AgentTLSConfig struct {
	Certificate string `yaml:"certificate" about:"The proxy's, with its chain: PEM, or a file, relative to this one."`
	Key         string `yaml:"key" secret:"pem" about:"Its private key, likewise; a file must be closed to others."`
	CA          string `yaml:"ca" about:"The authorities of the agent's certificate, likewise."`
}

func (c *Config) checkAgents() error {
	names, sockets := map[string]string{}, map[string]string{}
	for i, a := range c.Agents {
		key := fmt.Sprintf("agents[%d]", i)
		if err := ccp.CheckName(a.Name); err != nil {
			return keyErrorf(key+".name", "%v", err)
		}
		if err := unique(names, key+".name", a.Name); err != nil {
			return err
		}
		if a.Address != "" || a.TLS != (AgentTLSConfig{}) {
			if err := a.checkRemote(key); err != nil {
				return err
			}
			if err := unique(sockets, key+".address", a.Address); err != nil {
				return err
			}
		} else if err := a.checkSockets(key, sockets); err != nil {
			return err
		}
		if len(a.Algorithm) > ccp.MaxName || strings.ContainsRune(a.Algorithm, 0) {
			return keyErrorf(key+".algorithm", "%q has %d bytes; the message has room for %d",
				a.Algorithm, len(a.Algorithm), ccp.MaxName)
		}
	}
	scopes := slices.Concat(c.Defaults.scopes("defaults", "down"), c.Defaults.scopes("defaults", "up"))
	for i, r := range c.Rules {
		key := fmt.Sprintf("rules[%d]", i)
		scopes = append(append(scopes, r.scopes(key, "down")...), r.scopes(key, "up")...)
	}
	for _, s := range scopes {
		name, _, _ := strings.Cut(string(s.Algorithm), ",")
		if err := c.checkAgent(s.key+".algorithm", name); err != nil {
			return err
		}
	}
	return nil
}

// checkSockets wants paths that nobody else has.
func (a AgentConfig) checkSockets(key string, taken map[string]string) error {
	for _, at := range [...]struct{ name, path string }{{".socket", a.socket()}, {".reply", a.reply()}} {
		name, path := at.name, at.path
		if !filepath.IsAbs(path) || len(path) > agent.MaxReply {
			return keyErrorf(key+name, "%q is no whole path of at most %d bytes, such as %s",
				path, agent.MaxReply, agent.DefaultSocket)
		}
		if err := unique(taken, key+name, path); err != nil {
			return err
		}
	}
	return nil
}

// checkRemote wants all that a connection to another machine needs.
func (a AgentConfig) checkRemote(key string) error {
	switch {
	case a.Address == "":
		return keyErrorf(key+".address", "missing; tls is for an agent on another machine, as in controller.example:4433")
	case a.Socket != "":
		return keyErrorf(key+".socket", "not together with address; remove the one or the other")
	case a.Reply != "":
		return keyErrorf(key+".reply", "not together with address, whose agent answers on the same connection; remove it")
	}
	if err := checkTarget(key+".address", a.Address); err != nil {
		return err
	}
	for _, m := range [...]struct{ name, value, what string }{
		{".tls.certificate", a.TLS.Certificate, "the proxy shows one to the agent"},
		{".tls.key", a.TLS.Key, "it is the certificate's private key"},
		{".tls.ca", a.TLS.CA, "whoever has a certificate of it is taken for the agent"},
	} {
		if m.value == "" {
			return keyErrorf(key+m.name, "missing; %s", m.what)
		}
	}
	return nil
}

// readFiles puts what is in the agent's files where their names were.
func (a *AgentConfig) readFiles(key string, from *files) error {
	err := from.pem(
		pemKey{key + ".tls.certificate", &a.TLS.Certificate, false},
		pemKey{key + ".tls.key", &a.TLS.Key, true},
		pemKey{key + ".tls.ca", &a.TLS.CA, false},
	)
	if err == nil && a.Address != "" {
		if _, err = a.tls(); err != nil {
			err = keyErrorf(key+".tls", "%v", err)
		}
	}
	return err
}

// tls is how to connect to an agent on another machine; nil: it is on this one.
func (a AgentConfig) tls() (*tls.Config, error) {
	if a.Address == "" {
		return nil, nil
	}
	own, err := tls.X509KeyPair([]byte(a.TLS.Certificate), []byte(a.TLS.Key))
	if err != nil {
		return nil, err
	}
	authorities, err := certificatePool(a.TLS.CA)
	if err != nil {
		return nil, fmt.Errorf("ca: %w", err)
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{own}, RootCAs: authorities}, nil
}

// checkAgent wants an algorithm ccp:NAME to be an agent's of the configuration.
func (c *Config) checkAgent(key, algorithm string) error {
	word, name, _ := strings.Cut(algorithm, ":")
	if word != ccp.Family {
		return nil
	}
	var there []string
	for _, a := range c.Agents {
		if a.Name == name {
			return nil
		}
		there = append(there, a.Name)
	}
	if there == nil {
		return keyErrorf(key, "there is no agent %q; name it in agents, as in {name: %s}", name, name)
	}
	return keyErrorf(key, "there is no agent %q; agents has %s", name, strings.Join(there, ", "))
}

func (a AgentConfig) socket() string {
	if a.Socket == "" {
		return agent.DefaultSocket
	}
	return a.Socket
}

func (a AgentConfig) reply() string {
	if a.Reply == "" {
		return a.socket() + ".penstock-" + a.Name
	}
	return a.Reply
}

// agents are the links to the agents of a configuration.
type agents []*agent.Link

func (c *Config) startAgents(clock func() cc.Time, log *slog.Logger) (agents, error) {
	var links agents
	for _, a := range c.Agents {
		secure, err := a.tls()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("agent %q: tls: %w", a.Name, err), links.close())
		}
		l, err := agent.Start(agent.Config{
			Name: a.Name, Address: a.Address, TLS: secure, Socket: a.socket(), Reply: a.reply(), Algorithm: a.Algorithm,
			Clock: clock, Log: log,
		})
		if err != nil {
			return nil, errors.Join(err, links.close())
		}
		links = append(links, l)
	}
	return links, nil
}

// lookup finds the algorithms that agents decide, and all others.
func (a agents) lookup(name string) (cc.Spec, error) {
	for _, l := range a {
		if s := l.Spec(); s.Name == name {
			return s, nil
		}
	}
	return cc.Lookup(name)
}

func (a agents) close() (err error) {
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

package config

import (
	"crypto/tls"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/penstock-net/penstock/cc/ccp"
)

// Agent is a process that decides for the flows of rules with algorithm ccp:NAME.
type Agent struct {
	Name      string `yaml:"name"`
	Socket    string `yaml:"socket"`
	Reply     string `yaml:"reply"`
	Algorithm string `yaml:"algorithm"`

	Address string   `yaml:"address"`
	TLS     AgentTLS `yaml:"tls" reload:"yes"`
}

// AgentTLS is who the proxy is to an agent on another machine, and whom it takes for one.
// Each key holds PEM, or the name of a file that does.
type AgentTLS struct {
	Certificate string `yaml:"certificate"`
	Key         string `yaml:"key" secret:"pem"`
	CA          string `yaml:"ca"`
}

func (c *Config) checkAgents() error {
	var errs []error
	names, sockets := map[string]string{}, map[string]string{}
	for i, a := range c.Agents {
		key := fmt.Sprintf("agents[%d]", i)
		if err := ccp.CheckName(a.Name); err != nil {
			errs = append(errs, keyErrorf(key+".name", "%v", err))
		} else {
			errs = append(errs, checkUnique(names, key+".name", a.Name))
		}
		switch {
		case a.Address == "" && a.TLS == AgentTLS{}:
			errs = append(errs, a.checkSockets(key, sockets))
		default:
			errs = append(errs, a.checkRemote(key))
			if a.Address != "" {
				errs = append(errs, checkUnique(sockets, key+".address", a.Address))
			}
		}
		if len(a.Algorithm) > ccp.MaxName || strings.ContainsRune(a.Algorithm, 0) {
			errs = append(errs, keyErrorf(key+".algorithm", "%q has %d bytes; the message has room for %d",
				a.Algorithm, len(a.Algorithm), ccp.MaxName))
		}
	}
	scopes := slices.Concat(c.Defaults.scopesOf("defaults", "down"), c.Defaults.scopesOf("defaults", "up"))
	for i, r := range c.Rules {
		key := fmt.Sprintf("rules[%d]", i)
		scopes = append(append(scopes, r.scopesOf(key, "down")...), r.scopesOf(key, "up")...)
	}
	for _, s := range scopes {
		name, _, _ := strings.Cut(string(s.Algorithm), ",")
		errs = append(errs, withCause("agents", c.checkAgent(s.key+".algorithm", name)))
	}
	return errors.Join(errs...)
}

// checkSockets wants paths that nobody else has.
func (a Agent) checkSockets(key string, taken map[string]string) error {
	var errs []error
	for _, at := range [...]struct{ name, path string }{{".socket", a.SocketPath()}, {".reply", a.ReplyPath()}} {
		name, path := at.name, at.path
		if !filepath.IsAbs(path) || len(path) > ccp.MaxReply {
			errs = append(errs, keyErrorf(key+name, "%q is no whole path of at most %d bytes, such as %s",
				path, ccp.MaxReply, ccp.DefaultSocket))
			if a.Reply == "" { // it begins with the socket's
				break
			}
			continue
		}
		errs = append(errs, checkUnique(taken, key+name, path))
	}
	return errors.Join(errs...)
}

// checkRemote wants all that a connection to another machine needs.
func (a Agent) checkRemote(key string) error {
	var errs []error
	if a.Address == "" {
		errs = append(errs, keyErrorf(key+".address",
			"missing; tls is for an agent on another machine, as in controller.example:4433"))
	} else {
		errs = append(errs, checkTarget(key+".address", a.Address))
	}
	if a.Socket != "" {
		errs = append(errs, keyErrorf(key+".socket", "not together with address; remove the one or the other"))
	}
	if a.Reply != "" {
		errs = append(errs, keyErrorf(key+".reply",
			"not together with address, whose agent answers on the same connection; remove it"))
	}
	for _, m := range [...]struct{ name, value, what string }{
		{".tls.certificate", a.TLS.Certificate, "the proxy shows one to the agent"},
		{".tls.key", a.TLS.Key, "it is the certificate's private key"},
		{".tls.ca", a.TLS.CA, "whoever has a certificate of it is taken for the agent"},
	} {
		if m.value == "" {
			errs = append(errs, keyErrorf(key+m.name, "missing; %s", m.what))
		}
	}
	return errors.Join(errs...)
}

// readFiles puts what is in the agent's files where their names were.
func (a *Agent) readFiles(key string, from *files) error {
	err := from.readPEM(
		pemKey{key + ".tls.certificate", &a.TLS.Certificate, false},
		pemKey{key + ".tls.key", &a.TLS.Key, true},
		pemKey{key + ".tls.ca", &a.TLS.CA, false},
	)
	if err == nil && a.Address != "" {
		if _, err = a.Secure(); err != nil {
			err = keyErrorf(key+".tls", "%v", err)
		}
	}
	return err
}

// Secure is how to connect to an agent on another machine; nil: it is on this one.
func (a Agent) Secure() (*tls.Config, error) {
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

// SocketPath is where the agent listens.
func (a Agent) SocketPath() string {
	if a.Socket == "" {
		return ccp.DefaultSocket
	}
	return a.Socket
}

// ReplyPath is where it answers.
func (a Agent) ReplyPath() string {
	if a.Reply == "" {
		return a.SocketPath() + ".penstock-" + a.Name
	}
	return a.Reply
}

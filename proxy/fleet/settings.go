// Package fleet lets edges share maximum rates, and pass on their memories of hosts when they drain. memberlist finds
// the members and encrypts their messages. Package division divides the rates.
package fleet

import (
	"embed"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/penstock-net/penstock/proxy/config/check"
)

// Sources are the files with the types of this room's keys. The comment of a field says what its key is for.
//
//go:embed settings.go
var Sources embed.FS

// Settings are the keys of a fleet: several edges that share maximum rates. The zero value has none.
type Settings struct {
	// host:port that the other edges reach, over UDP and TCP, such as 10.0.0.1:7946. Not set: there is no fleet.
	Listen string `yaml:"listen"`
	// The edge's name, unlike all others'; the host's name where not set.
	Name string `yaml:"name"`
	// What encrypts and authenticates all messages: 32 bytes in base64, as openssl rand -base64 32 prints. All edges
	// have the same.
	Key Key `yaml:"key" reload:"yes" secret:"true"`
	// A file that holds the key in its first line, closed to others; relative to the configuration file, and reread with
	// it.
	KeyFile string `yaml:"key_file" reload:"yes"`
	// A key that is taken from others and not sent with: the next one, until all edges have it, and then the last one.
	OtherKey Key `yaml:"other_key" reload:"yes" secret:"true"`
	// A file that holds that key in its first line.
	OtherKeyFile string `yaml:"other_key_file" reload:"yes"`
	// Other edges, as host:port, or names that stand for several, such as a headless Service's. They are asked for again
	// every 30 s. One that is there is enough, because it knows the others.
	Join []string `yaml:"join" reload:"yes"`
}

// Key is 32 bytes in base64; empty: not set.
type Key string

// keySize is that of AES-256.
const keySize = 32

// minDistinct is the least number of distinct bytes in a key. A random key of 32 bytes has fewer less often than once
// in 10^14 keys.
const minDistinct = 16

// Validate checks that the key has the right form and looks random. The error does not show it.
func (k Key) Validate() error {
	if len(k) == 0 {
		return nil
	}
	raw, err := base64.StdEncoding.DecodeString(string(k))
	if err != nil || len(raw) != keySize {
		return fmt.Errorf("a key is %d bytes in base64; write what openssl rand -base64 32 prints", keySize)
	}
	distinct := map[byte]bool{}
	for _, b := range raw {
		distinct[b] = true
	}
	if len(distinct) < minDistinct {
		return errors.New("the key is too regular to be random; write what openssl rand -base64 32 prints")
	}
	return nil
}

// rawBytes returns the raw key; nil: it is not set.
func (k Key) rawBytes() []byte {
	raw, _ := base64.StdEncoding.DecodeString(string(k)) // it has been checked
	return raw
}

// IsOn reports whether there is a fleet.
func (s *Settings) IsOn() bool { return s.Listen != "" }

// EdgeName returns the name of this edge.
func (s *Settings) EdgeName() string {
	if s.Name != "" {
		return s.Name
	}
	name, _ := os.Hostname()
	return name
}

// maxName bounds the name of an edge, in bytes.
const maxName = 128

// maxJoin bounds Settings.Join.
const maxJoin = 64

// Validate checks the keys against each other. Errors are *check.Errors.
func (s *Settings) Validate() error {
	if !s.IsOn() {
		if s.Name != "" || s.Key != "" || s.KeyFile != "" || len(s.Join) > 0 || s.OtherKey != "" || s.OtherKeyFile != "" {
			return check.Errorf("listen", "missing; write the address that the other edges reach, such as 10.0.0.1:7946")
		}
		return nil
	}
	var errs []error
	if err := check.Address("listen", s.Listen); err != nil {
		errs = append(errs, err)
	} else if err := checkListen(s.Listen); err != nil {
		errs = append(errs, err)
	}
	if s.Key == "" && s.KeyFile == "" {
		errs = append(errs, check.Errorf("key_file", "missing; write the name of a file that holds what "+
			"openssl rand -base64 32 prints, the same at all edges"))
	}
	for key, k := range map[string]Key{"key": s.Key, "other_key": s.OtherKey} {
		if err := k.Validate(); err != nil {
			errs = append(errs, check.Errorf(key, "%v", err))
		}
	}
	if name := s.EdgeName(); name == "" || len(name) > maxName {
		errs = append(errs, check.Errorf("name", "%q is no name of 1 to %d bytes", name, maxName))
	}
	if len(s.Join) > maxJoin {
		errs = append(errs, check.Errorf("join", "%d addresses; at most %d", len(s.Join), maxJoin))
	}
	for i, at := range s.Join {
		errs = append(errs, check.Target(fmt.Sprintf("join[%d]", i), at))
	}
	return errors.Join(errs...)
}

// checkListen checks that the other edges can reach the address. With a host that it cannot read, memberlist would
// listen at every address.
func checkListen(listen string) error {
	host, port, _ := net.SplitHostPort(listen)
	switch addr, err := netip.ParseAddr(host); {
	case host == "" || addr == netip.IPv6Unspecified():
		return check.Errorf("listen", "%q is every address; write the one that the other edges reach", listen)
	case err != nil || addr.Zone() != "":
		return check.Errorf("listen", "%q has no address without a zone; write one that the other edges reach, such as "+
			"10.0.0.1:7946", listen)
	case port == "0":
		return check.Errorf("listen", "the other edges must know the port; write one, such as 7946")
	}
	return nil
}

// Warnings describes settings that are allowed and probably not intended.
func (s *Settings) Warnings() (out []string) {
	host, _, _ := net.SplitHostPort(s.Listen)
	if addr, err := netip.ParseAddr(host); err == nil && addr.IsUnspecified() {
		out = append(out, "fleet.listen: "+s.Listen+" is every address of this machine; the edges need one")
	}
	return out
}

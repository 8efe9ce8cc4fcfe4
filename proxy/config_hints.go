package proxy

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/linkstat"
)

// SourceConfig is an interface of this machine that tells what it knows.
type SourceConfig struct {
	Interface string   `yaml:"interface" required:"yes" about:"Name of the interface that leads to the hosts, such as wlan0. It need not exist yet."`
	Prefix    []Prefix `yaml:"prefix" about:"The hosts whose path leads through it; those of the interface's own addresses where not set."`
	Capacity  Rate     `yaml:"capacity" about:"What it carries at most, such as 54mbit, where neither its queue nor its device says so: a modem behind an Ethernet port. Not set: what they say."`
	Interval  Duration `yaml:"interval" about:"Between two readings, 5ms to 1s; 20ms where not set."`
}

// maxInterfaceName is IFNAMSIZ without its terminating zero.
const maxInterfaceName = 15

func (c *Config) checkSources() error {
	seen := map[string]string{}
	for i, s := range c.Hints {
		key := fmt.Sprintf("hints[%d]", i)
		switch every := s.Every(); {
		case s.Interface == "":
			return keyErrorf(key+".interface", "missing; write the interface's name, such as wlan0")
		case len(s.Interface) > maxInterfaceName || strings.ContainsAny(s.Interface, "/ :") || s.Interface == "." || s.Interface == "..":
			return keyErrorf(key+".interface", "%q is no interface's name, such as wlan0: it has at most %d characters, without spaces, / and :", s.Interface, maxInterfaceName)
		case every < linkstat.ShortestInterval || every > linkstat.LongestInterval:
			return keyErrorf(key+".interval", "%v is outside %v to %v", every, linkstat.ShortestInterval, linkstat.LongestInterval)
		}
		if err := unique(seen, key+".interface", s.Interface); err != nil {
			return err
		}
	}
	return nil
}

// Every is the time between two readings.
func (s SourceConfig) Every() time.Duration {
	if s.Interval == 0 {
		return linkstat.DefaultInterval
	}
	return s.Interval.std()
}

// Prefixes are the hosts of Prefix.
func (s SourceConfig) Prefixes() []netip.Prefix { return prefixes(s.Prefix) }

// Toward counts the connections with a byte moved in the time before now whose
// bytes go to hosts in any of the prefixes, down or up, and these hosts.
func (s *Server) Toward(within []netip.Prefix, lately time.Duration) (flows, hosts int) {
	now := s.clock()
	seen := map[netip.Addr]bool{}
	for _, c := range s.live() {
		if now.Sub(cc.Time(c.active.Load())) > lately {
			continue
		}
		found := false
		for _, host := range c.hosts() {
			if host.IsValid() && covers(within, host) {
				found, seen[host] = true, true
			}
		}
		if found {
			flows++
		}
	}
	return flows, len(seen)
}

// hosts are where its bytes go to: the client's and, once it is reached, the server's.
func (c *connection) hosts() [2]netip.Addr {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := [2]netip.Addr{c.source().Addr().Unmap().WithZone("")}
	if c.state != StateGreeting && c.state != StateDialing {
		out[1] = addrPort(c.server.conn.RemoteAddr()).Addr().Unmap().WithZone("")
	}
	return out
}

func covers(list []netip.Prefix, host netip.Addr) bool {
	for _, p := range list {
		if p.Contains(host) {
			return true
		}
	}
	return false
}

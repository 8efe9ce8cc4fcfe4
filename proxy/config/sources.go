package config

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Source is an interface of this machine that tells what it knows.
type Source struct {
	Interface string         `yaml:"interface" required:"yes"`
	Prefix    []netip.Prefix `yaml:"prefix"`
	Capacity  cc.Rate        `yaml:"capacity"`
	Interval  time.Duration  `yaml:"interval"`
}

// How often an interface may be read. Below the shortest, a reading costs more than it
// tells: what it is averaged over is eight times as long.
const (
	defaultInterval  = 20 * time.Millisecond
	shortestInterval = 5 * time.Millisecond
	longestInterval  = time.Second
)

// maxInterfaceName is IFNAMSIZ without its terminating zero.
const maxInterfaceName = 15

func (c *Config) checkSources() error {
	var errs []error
	seen := map[string]string{}
	for i, s := range c.Hints {
		key := fmt.Sprintf("hints[%d]", i)
		if every := s.Every(); every < shortestInterval || every > longestInterval {
			errs = append(errs, keyErrorf(key+".interval", "%v is outside %v to %v", every, shortestInterval,
				longestInterval))
		}
		key += ".interface"
		switch name := s.Interface; {
		case name == "":
			errs = append(errs, keyErrorf(key, "missing; write the interface's name, such as wlan0"))
		case len(name) > maxInterfaceName || strings.ContainsAny(name, "/ :") || name == "." || name == "..":
			errs = append(errs, keyErrorf(key, "%q is no interface's name, such as wlan0: "+
				"it has at most %d characters, without spaces, / and :", name, maxInterfaceName))
		default:
			errs = append(errs, checkUnique(seen, key, name))
		}
	}
	return errors.Join(errs...)
}

// Every is the time between two readings.
func (s Source) Every() time.Duration {
	if s.Interval == 0 {
		return defaultInterval
	}
	return s.Interval
}

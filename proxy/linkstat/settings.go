package linkstat

import (
	"embed"
	"errors"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/config/check"
)

// Sources are the files with the types of this room's keys. The comment of a field says what its key is for.
//
//go:embed settings.go
var Sources embed.FS

// Settings are the keys of an interface of this machine: its rate and queue become hints.
type Settings struct {
	// Name of the interface that leads to the hosts, such as wlan0. It need not exist yet.
	Interface string `yaml:"interface" required:"yes"`
	// The hosts with a path that leads through it; those of the interface's own addresses where not set.
	Prefix []netip.Prefix `yaml:"prefix"`
	// What it carries at most, such as 54mbit, where neither its queue nor its device says so: a modem behind an
	// Ethernet port. Not set: what they say.
	Capacity cc.Rate `yaml:"capacity"`
	// Between two readings, 5ms to 1s; 20ms where not set.
	Interval time.Duration `yaml:"interval"`
}

// The time between two readings. Shorter ones would cost time and show no more, because rates are averaged over
// meterWindow, eight times the shortest.
const (
	defaultInterval  = 20 * time.Millisecond
	shortestInterval = 5 * time.Millisecond
	longestInterval  = time.Second
)

// Validate finds what is wrong with the keys. Errors are *check.Errors.
func (s *Settings) Validate() error {
	var errs []error
	if every := s.Every(); every < shortestInterval || every > longestInterval {
		errs = append(errs, check.Errorf("interval", "%v is outside %v to %v", every, shortestInterval, longestInterval))
	}
	switch name := s.Interface; {
	case name == "":
		errs = append(errs, check.Errorf("interface", "missing; write the interface's name, such as wlan0"))
	case !check.IsDeviceName(name, "/ :"):
		errs = append(errs, check.Errorf("interface", "%q is no interface's name, such as wlan0: "+
			"it has at most %d characters, without spaces, / and :", name, check.MaxDevice))
	}
	return errors.Join(errs...)
}

// Every is the time between two readings.
func (s *Settings) Every() time.Duration {
	if s.Interval == 0 {
		return defaultInterval
	}
	return s.Interval
}

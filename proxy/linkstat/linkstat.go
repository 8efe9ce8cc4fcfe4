// Package linkstat makes hints about a link of this machine: its rate, how much comes to its queue, and how much room
// is left there. It reads them by netlink, from queueing disciplines and from nl80211. It changes nothing and needs no
// privilege.
package linkstat

import (
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Times between readings of what changes rarely.
const (
	linkEvery    = time.Second            // rate, limits, addresses; also between attempts after a failure
	stationEvery = 100 * time.Millisecond // stations, and who uses the link
)

// Config describes what a source watches, and who gets its hints.
type Config struct {
	// Interface is the name; it need not exist yet.
	Interface string

	// Prefixes have the hosts behind the interface. Networks of other interfaces are taken out of them. None: the
	// interface's own networks.
	Prefixes []netip.Prefix

	// Capacity bounds the rate that the interface reports. 0: there is no bound.
	Capacity cc.Rate
	// Interval is the time between two readings.
	Interval time.Duration

	Clock func() cc.Time
	// Users counts the senders to the hosts in prefixes; nil: they are not known.
	Users func([]netip.Prefix) Users
	// Hint takes a hint for the hosts in a prefix, and returns how many groups of flows took it.
	Hint func(netip.Prefix, cc.Hint) int
	// Log may be nil: silent.
	Log *slog.Logger
}

// Users counts the senders through a link.
type Users struct {
	Flows int // flows that have moved bytes lately
	Hosts int // hosts that these flows lead to
}

// Stats are a source's totals since Open.
type Stats struct {
	Interface string
	Readings  uint64
	Errors    uint64
	// Up reports whether the last reading worked.
	Up bool
}

// checkConfig returns an error if something is missing, and fills in a silent log.
func (c *Config) checkConfig() error {
	switch {
	case c.Interface == "":
		return fmt.Errorf("linkstat: no interface is named")
	case c.Interval <= 0:
		return fmt.Errorf("linkstat: no interval between readings is given")
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

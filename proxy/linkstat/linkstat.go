// Package linkstat makes hints of what the machine knows about a link of its
// own: how fast it is, how much comes to its queue, and how much room there is.
// It reads netlink, from a queueing discipline and, where there is a radio, from
// nl80211; it changes nothing and needs no privilege.
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

// Config is what one source watches and whom it tells.
type Config struct {
	Interface string

	// Prefixes of the hosts whose paths lead through the interface. Networks of other interfaces within
	// them do not count. None: the interface's own networks.
	Prefixes []netip.Prefix

	Capacity cc.Rate       // bound of the rate that the interface tells; 0: none
	Interval time.Duration // between readings

	Clock func() cc.Time
	Users func([]netip.Prefix) Users      // nil: not known
	Hint  func(netip.Prefix, cc.Hint) int // as proxy.Server's
	Log   *slog.Logger                    // nil: silent
}

// Users are those who send through a link.
type Users struct {
	Flows int // that have moved bytes lately
	Hosts int // to which these flows lead
}

// Stats are a source's totals since Open.
type Stats struct {
	Interface string
	Readings  uint64
	Errors    uint64
	Up        bool // the last reading worked
}

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

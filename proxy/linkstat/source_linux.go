package linkstat

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Source reads one interface at intervals, and gives hints of what it has found. Run uses it alone;
// only Stats may be called from other goroutines.
type Source struct {
	cfg     Config
	machine *machine

	// device is nil until it is found, and after it was lost.
	device *device
	// foundAt is the time of the last attempt to find it, or of its last failure.
	foundAt cc.Time
	meter   *meter
	users   Users
	// stations are by hardware address.
	stations map[string]*stationState
	// usersAt is the time at which users and stations were last read.
	usersAt cc.Time

	readings, errors atomic.Uint64
	up               atomic.Bool
	// logged reports whether the log says that the source is up.
	logged bool
}

// Open prepares a source for an interface, which need not exist yet, in the network namespace of
// the calling thread. Close ends it.
func Open(cfg Config) (*Source, error) {
	if err := cfg.checkConfig(); err != nil {
		return nil, err
	}
	m, err := openMachine()
	if err != nil {
		return nil, err
	}
	return &Source{cfg: cfg, machine: m, meter: newMeter(cfg.Interval), stations: map[string]*stationState{}}, nil
}

// Close closes the sockets. Run has to return first.
func (s *Source) Close() { s.machine.closeSockets() }

// Stats returns the totals. It may be called from any goroutine.
func (s *Source) Stats() Stats {
	return Stats{Interface: s.cfg.Interface, Readings: s.readings.Load(), Errors: s.errors.Load(), Up: s.up.Load()}
}

// Run reads until ctx is done. It tries again each second after a failure.
func (s *Source) Run(ctx context.Context) {
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		s.readOnce(s.cfg.Clock())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// readOnce makes one reading and gives its hints. It does nothing within linkEvery of a failure.
func (s *Source) readOnce(now cc.Time) {
	if s.device == nil && s.foundAt != 0 && now.Sub(s.foundAt) < linkEvery {
		return
	}
	if err := s.giveHints(now); err != nil {
		s.device, s.foundAt = nil, now
		s.errors.Add(1)
		s.up.Store(false)
		if s.logged || s.errors.Load() == 1 {
			s.cfg.Log.Warn("no hints from the interface; trying again", "interface", s.cfg.Interface, "err", err)
		}
		s.logged = false
		return
	}
	s.readings.Add(1)
	s.up.Store(true)
	if !s.logged {
		s.cfg.Log.Info("hints from the interface", "interface", s.cfg.Interface, "prefixes", s.device.prefixes,
			"queue", s.device.queue.kind, "link_rate", s.device.rate.String(), "radio", s.device.radio != nil)
	}
	s.logged = true
}

// giveHints makes a reading, and gives the hints that follow from it. The stations of an access
// point get a hint each.
func (s *Source) giveHints(now cc.Time) error {
	if s.device == nil || now.Sub(s.foundAt) >= linkEvery {
		if err := s.findInterface(now); err != nil {
			return err
		}
	}
	r, err := s.machine.readQueue(s.device, now)
	if err != nil {
		return err
	}
	if r.queue != s.device.queue { // another has replaced it
		if err := s.findInterface(now); err != nil {
			return err
		}
	}
	s.meter.addReading(r)
	if s.usersAt == 0 || now.Sub(s.usersAt) >= stationEvery {
		s.usersAt = now
		if err := s.findUsers(); err != nil {
			return err
		}
	}
	h := s.device.makeHint(s.meter, s.users)
	if d := s.device; d.radio != nil && !d.radio.client {
		for _, l := range s.stations {
			for _, host := range l.hosts {
				s.cfg.Hint(netip.PrefixFrom(host, host.BitLen()), l.makeHint(h, s.users.Hosts))
			}
		}
		return nil
	}
	for _, l := range s.stations { // the access point, if there is one
		h = l.makeHint(h, s.users.Hosts)
	}
	for _, p := range s.device.prefixes {
		s.cfg.Hint(p, h)
	}
	return nil
}

// findInterface reads all that changes rarely about the interface.
func (s *Source) findInterface(now cc.Time) error {
	d, err := s.machine.describeDevice(s.cfg.Interface)
	if err != nil {
		return err
	}
	d.rate = leastKnownOf(d.rate, s.cfg.Capacity)
	if d.radio != nil && d.queue.kind == kindNone {
		d.limit.packets = d.radio.packets
	}
	if len(s.cfg.Prefixes) > 0 {
		d.prefixes = prefixesBehind(s.cfg.Prefixes, d.others)
	}
	s.device, s.foundAt = d, now
	return nil
}

// findUsers reads the number of users and, for a radio, its stations with their hosts.
func (s *Source) findUsers() error {
	prefixes := s.device.prefixes
	if s.cfg.Users != nil {
		s.users = s.cfg.Users(prefixes)
	}
	if s.device.radio == nil {
		clear(s.stations)
		return nil
	}
	stations, err := s.machine.listStations(s.device)
	if err != nil {
		return err
	}
	hosts, err := s.machine.listNeighbours(s.device.upper)
	if err != nil {
		return err
	}
	present := map[string]bool{}
	for _, each := range stations {
		l := s.stations[each.mac]
		if l == nil {
			l = &stationState{}
			s.stations[each.mac] = l
		}
		l.updateFrom(each, hostsWithin(prefixes, hosts[each.mac]))
		present[each.mac] = true
	}
	maps.DeleteFunc(s.stations, func(mac string, _ *stationState) bool { return !present[mac] })
	return nil
}

// hostsWithin returns the hosts that lie in any of the prefixes.
func hostsWithin(prefixes []netip.Prefix, hosts []netip.Addr) (out []netip.Addr) {
	for _, host := range hosts {
		if slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(host) }) {
			out = append(out, host)
		}
	}
	return out
}

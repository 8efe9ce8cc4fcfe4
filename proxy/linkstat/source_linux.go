package linkstat

import (
	"context"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Source reads one interface again and again and tells what it has found.
type Source struct {
	cfg     Config
	machine *machine

	device   *device // nil: not found yet, or lost
	found    cc.Time // when device was last looked for, or lost
	meter    *meter
	users    Users
	stations map[string]*listener // by hardware address
	asked    cc.Time              // when users and stations were asked for last

	readings, errors atomic.Uint64
	up               atomic.Bool
	said             bool // whether it is up, in the log
}

// Open prepares a source for an interface, which need not exist yet, in the
// network namespace of the calling thread. End it with Close.
func Open(cfg Config) (*Source, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	m, err := openMachine()
	if err != nil {
		return nil, err
	}
	return &Source{cfg: cfg, machine: m, meter: newMeter(cfg.Interval), stations: map[string]*listener{}}, nil
}

// Close ends what Open began, once Run has returned.
func (s *Source) Close() { s.machine.close() }

// Stats may be called from any goroutine.
func (s *Source) Stats() Stats {
	return Stats{Interface: s.cfg.Interface, Readings: s.readings.Load(), Errors: s.errors.Load(), Up: s.up.Load()}
}

// Run reads until ctx is done. What does not work is tried again each second.
func (s *Source) Run(ctx context.Context) {
	defer context.AfterFunc(ctx, s.machine.interrupt)()
	tick := time.NewTicker(s.cfg.Interval)
	defer tick.Stop()
	for {
		s.turn(ctx, s.cfg.Clock())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// turn makes one reading, or none within linkEvery of one that failed.
func (s *Source) turn(ctx context.Context, now cc.Time) {
	if s.device == nil && s.found != 0 && now.Sub(s.found) < linkEvery {
		return
	}
	err := s.tell(now)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		s.device, s.found = nil, now
		s.errors.Add(1)
		s.up.Store(false)
		if s.said || s.errors.Load() == 1 {
			s.cfg.Log.Warn("no hints from the interface; trying again", "interface", s.cfg.Interface, "err", err)
		}
		s.said = false
		return
	}
	s.readings.Add(1)
	s.up.Store(true)
	if !s.said {
		s.cfg.Log.Info("hints from the interface", "interface", s.cfg.Interface, "prefixes", s.device.prefixes,
			"queue", s.device.queue.kind, "link_rate", s.device.rate.String(), "radio", s.device.radio != nil)
	}
	s.said = true
}

// tell makes a reading and gives the hints that follow from it.
func (s *Source) tell(now cc.Time) error {
	if s.device == nil || now.Sub(s.found) >= linkEvery {
		if err := s.find(now); err != nil {
			return err
		}
	}
	r, err := s.machine.read(s.device, now)
	if err != nil {
		return err
	}
	if r.queue != s.device.queue { // somebody has put another in its place
		if err := s.find(now); err != nil {
			return err
		}
	}
	s.meter.add(r)
	if s.asked == 0 || now.Sub(s.asked) >= stationEvery {
		s.asked = now
		if err := s.ask(); err != nil {
			return err
		}
	}
	h := s.device.hint(s.meter, s.users)
	if d := s.device; d.radio != nil && !d.radio.client {
		for _, l := range s.stations {
			for _, host := range l.hosts {
				s.cfg.Hint(netip.PrefixFrom(host, host.BitLen()), l.hint(h, s.users.Hosts))
			}
		}
		return nil
	}
	for _, l := range s.stations { // the access point, or nobody
		h = l.hint(h, s.users.Hosts)
	}
	for _, p := range s.device.prefixes {
		s.cfg.Hint(p, h)
	}
	return nil
}

// find looks at the interface anew.
func (s *Source) find(now cc.Time) error {
	d, err := s.machine.device(s.cfg.Interface)
	if err != nil {
		return err
	}
	d.rate = leastKnown(d.rate, s.cfg.Capacity)
	if d.radio != nil && d.queue.kind == kindNone {
		d.limit.packets = d.radio.packets
	}
	if len(s.cfg.Prefixes) > 0 {
		d.prefixes = behind(s.cfg.Prefixes, d.others)
	}
	s.device, s.found = d, now
	return nil
}

// ask finds out who uses the link and, of a radio, which stations there are.
func (s *Source) ask() error {
	prefixes := s.device.prefixes
	if s.cfg.Users != nil {
		s.users = s.cfg.Users(prefixes)
	}
	if s.device.radio == nil {
		clear(s.stations)
		return nil
	}
	heard, err := s.machine.stations(s.device)
	if err != nil {
		return err
	}
	near, err := s.machine.neighbours(s.device.above)
	if err != nil {
		return err
	}
	present := map[string]bool{}
	for _, each := range heard {
		l := s.stations[each.mac]
		if l == nil {
			l = &listener{}
			s.stations[each.mac] = l
		}
		l.hear(each, within(prefixes, near[each.mac]))
		present[each.mac] = true
	}
	for mac := range s.stations {
		if !present[mac] {
			delete(s.stations, mac)
		}
	}
	return nil
}

// within are those hosts that lie in any of the prefixes.
func within(prefixes []netip.Prefix, hosts []netip.Addr) (out []netip.Addr) {
	for _, host := range hosts {
		for _, p := range prefixes {
			if p.Contains(host) {
				out = append(out, host)
				break
			}
		}
	}
	return out
}

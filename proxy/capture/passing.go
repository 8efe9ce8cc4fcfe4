package capture

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// passingSet begins the names of the sets of hosts to count packets for. A proxy fills them. Their elements expire, so
// that nothing is counted when the proxy is gone.
const passingSet = "passing"

// passingLasts is how long the kernel counts for a host. Half of it is left when Passing asks for that time again.
const passingLasts = time.Minute

// Passing counts what this machine forwards to hosts and no queue of Hold takes. Its zero value is ready to use, from
// one goroutine. It needs CAP_NET_ADMIN.
type Passing struct {
	hosts map[netip.Addr]*passingHost
}

// passingHost is what is known of a host that packets are counted for.
type passingHost struct {
	renewed time.Duration // when the kernel was asked to count, by the clock of Read
	counter uint64        // bytes by the kernel's counter, which begins anew with each element
	total   uint64        // bytes of all counters so far
	wanted  bool
}

// Read returns how many bytes have passed to each of the hosts since Read was first called with it. From then on the
// kernel counts for these hosts only. now is the time by any clock, the same one in all calls. Without rules that hold
// UDP no bytes are added.
func (p *Passing) Read(now time.Duration, hosts []netip.Addr) (totals map[netip.Addr]uint64, err error) {
	if p.hosts == nil {
		p.hosts = map[netip.Addr]*passingHost{}
	}
	for _, h := range p.hosts {
		h.wanted = false
	}
	for _, host := range hosts {
		if p.hosts[host] == nil {
			p.hosts[host] = &passingHost{}
		}
		p.hosts[host].wanted = true
	}
	c, err := nftables.New()
	if err != nil {
		return nil, explainError("open nftables", err)
	}
	for _, f := range []family{ipv4, ipv6} {
		if err := p.readFamily(c, f, now); err != nil {
			return nil, err
		}
	}
	totals = map[netip.Addr]uint64{}
	for host, h := range p.hosts {
		if !h.wanted {
			delete(p.hosts, host)
			continue
		}
		totals[host] = h.total
	}
	return totals, nil
}

// readFamily reads the counters of one family's set, and puts the hosts that are wanted into it, if there is such a
// set.
func (p *Passing) readFamily(c *nftables.Conn, f family, now time.Duration) error {
	s := &nftables.Set{
		Table: &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}, Name: passingSet + f.version,
		KeyType: f.addresses, HasTimeout: true, Counter: true,
	}
	elements, err := c.GetSetElements(s)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return explainError("read what passes", err)
	}
	there := map[netip.Addr]bool{}
	for _, e := range elements {
		host, ok := netip.AddrFromSlice(e.Key)
		if h := p.hosts[host]; ok && h != nil && e.Counter != nil {
			there[host] = true
			h.addCounter(e.Counter.Bytes)
		}
	}
	var toAdd, toDelete []nftables.SetElement
	for host, h := range p.hosts {
		key := nftables.SetElement{Key: host.AsSlice(), Timeout: passingLasts}
		switch isDue := now-h.renewed >= passingLasts/2; {
		case host.Is4() != f.isIPv4():
			continue
		case !h.wanted && there[host]:
			toDelete = append(toDelete, key)
		case h.wanted && there[host] && isDue: // adding an element that is there does not renew its timeout
			toDelete, toAdd = append(toDelete, key), append(toAdd, key)
		case h.wanted && !there[host]:
			toAdd = append(toAdd, key)
		}
	}
	for part := range slices.Chunk(toDelete, maxKeysPerMessage) {
		err = errors.Join(err, c.SetDeleteElements(s, part))
	}
	for part := range slices.Chunk(toAdd, maxKeysPerMessage) {
		err = errors.Join(err, c.SetAddElements(s, part))
	}
	if err != nil {
		return fmt.Errorf("capture: set %s: %w", s.Name, err)
	}
	if len(toDelete)+len(toAdd) > 0 {
		if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
			return explainError("count what passes", err)
		}
	}
	for _, e := range toAdd {
		host, _ := netip.AddrFromSlice(e.Key)
		p.hosts[host].renewed, p.hosts[host].counter = now, 0
	}
	return nil
}

// addCounter adds to total what the kernel's counter has grown by. A lower one has begun anew.
func (h *passingHost) addCounter(bytes uint64) {
	if bytes < h.counter {
		h.counter = 0
	}
	h.total += bytes - h.counter
	h.counter = bytes
}

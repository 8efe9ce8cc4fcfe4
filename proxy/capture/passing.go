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

// passingSet begins the names of the sets of hosts to count packets for. A proxy fills them, and their elements
// expire: without one nothing is counted.
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
	renewed time.Duration // when the kernel was asked to count
	counter uint64        // bytes, as the kernel said last
	total   uint64        // bytes, whatever became of the kernel's counter
	wanted  bool
}

// Read returns, at a reading of any one clock, how many bytes have passed to each of the hosts since Read first asked
// for it, and has the kernel go on counting for these alone. Without rules that hold UDP no bytes are added.
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
	var anew, old []nftables.SetElement
	for host, h := range p.hosts {
		key := nftables.SetElement{Key: host.AsSlice(), Timeout: passingLasts}
		switch isDue := now-h.renewed >= passingLasts/2; {
		case host.Is4() != f.isIPv4():
			continue
		case !h.wanted && there[host]:
			old = append(old, key)
		case h.wanted && there[host] && isDue: // an element that is there keeps its timeout
			old, anew = append(old, key), append(anew, key)
		case h.wanted && !there[host]:
			anew = append(anew, key)
		}
	}
	for part := range slices.Chunk(old, maxKeysPerMessage) {
		err = errors.Join(err, c.SetDeleteElements(s, part))
	}
	for part := range slices.Chunk(anew, maxKeysPerMessage) {
		err = errors.Join(err, c.SetAddElements(s, part))
	}
	if err != nil {
		return fmt.Errorf("capture: set %s: %w", s.Name, err)
	}
	if len(old)+len(anew) > 0 {
		if err := c.Flush(); err != nil && !errors.Is(err, unix.ENOENT) {
			return explainError("count what passes", err)
		}
	}
	for _, e := range anew {
		host, _ := netip.AddrFromSlice(e.Key)
		p.hosts[host].renewed, p.hosts[host].counter = now, 0
	}
	return nil
}

// addCounter takes in the kernel's counter, which begins anew with its element.
func (h *passingHost) addCounter(bytes uint64) {
	if bytes < h.counter {
		h.counter = 0
	}
	h.total += bytes - h.counter
	h.counter = bytes
}

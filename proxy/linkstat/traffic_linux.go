package linkstat

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/nldump"
)

// Traffic is what an interface has carried since it came up.
type Traffic struct {
	Name           string
	Sent, Received cc.Bytes
	// Rate is that of its queue or its cable. 0: neither has one.
	Rate cc.Rate
}

// Links reads all interfaces of a network namespace, and which of them leads to a host. One goroutine uses it at a
// time.
type Links struct {
	machine *machine
	names   map[int]string     // by index, at the last reading
	rates   map[string]cc.Rate // at the last reading of rates
}

// OpenLinks opens a reader for the network namespace of the calling thread. Close ends it.
func OpenLinks() (*Links, error) {
	m, err := openMachine()
	if err != nil {
		return nil, err
	}
	return &Links{machine: m}, nil
}

// Close closes the sockets.
func (l *Links) Close() { l.machine.closeSockets() }

// ReadTraffic returns the interfaces that are up, without loopback. withRates reads their rates anew, which takes
// several requests for each. Without it they are those of the last time.
func (l *Links) ReadTraffic(withRates bool) (out []Traffic, err error) {
	all, err := nldump.Retry(l.machine.links.LinkList)
	if err != nil {
		return nil, fmt.Errorf("linkstat: %w", err)
	}
	if withRates {
		described, err := l.machine.describeInterfaces(all)
		if err != nil {
			return nil, err
		}
		l.rates = map[string]cc.Rate{}
		for _, i := range described {
			l.rates[i.Name] = i.Rate
		}
	}
	l.names = map[int]string{}
	for _, link := range all {
		attrs := link.Attrs()
		l.names[attrs.Index] = attrs.Name
		if attrs.Flags&net.FlagUp == 0 || attrs.Flags&net.FlagLoopback != 0 || attrs.Statistics == nil {
			continue
		}
		out = append(out, Traffic{
			Name: attrs.Name, Sent: cc.Bytes(attrs.Statistics.TxBytes), Received: cc.Bytes(attrs.Statistics.RxBytes),
			Rate: l.rates[attrs.Name],
		})
	}
	return out, nil
}

// FindInterface returns the name of the interface that packets to a host leave by; empty: there is no route. It knows
// the interfaces of the last ReadTraffic.
func (l *Links) FindInterface(host netip.Addr) string {
	routes, err := l.machine.links.RouteGet(host.WithZone("").Unmap().AsSlice())
	if err != nil || len(routes) == 0 {
		return ""
	}
	return l.names[routes[0].LinkIndex]
}

package capture

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// interception is what the firewall has to let through for rules that are in force, or will be.
type interception struct {
	mode       Mode
	port       uint16
	mark, own  uint32 // 0: unknown
	interfaces []string
	tunnel     bool // it is of a tunnel, which restores what it needs
	families   []family
	ports      []uint16 // destinations that stand for all
}

// somePorts stand for all destinations: what a firewall lets in for services of its own machine is not enough.
var somePorts = []uint16{443, 80, 50000}

func (r Rules) interception() interception {
	t := interception{
		mode: r.Mode, port: r.Port, mark: r.Mark, own: r.OwnMark, interfaces: r.Interfaces, families: r.usedFamilies(),
	}
	for _, p := range r.Ports {
		t.ports = append(t.ports, p.First)
	}
	if len(t.ports) == 0 {
		t.ports = somePorts
	}
	return t
}

// interception returns what a tunnel needs.
func (t Tunnel) interception() interception {
	return interception{
		mode: TPROXY, port: t.Port, mark: DefaultMark, interfaces: []string{t.Interface}, families: t.usedFamilies(),
		ports: somePorts,
	}
}

const (
	allBits       = 1<<32 - 1
	ephemeralPort = 49173 // one of those that clients dial from
)

// firstPacket returns the first packet of a captured connection.
func (t *interception) firstPacket(f family, c client, server netip.Addr, port uint16) packet {
	p := packet{
		family: f, from: c.via, source: c.address, target: server, sourcePort: ephemeralPort, targetPort: port,
		flags: flagSYN, state: expr.CtStateBitNEW, mark: t.mark, known: allBits,
		sourceType: unix.RTN_UNICAST, targetType: unix.RTN_UNICAST,
	}
	if t.mode == Redirect {
		p.mark, p.target, p.targetPort = 0, c.via.address(f), t.port
		p.translated, p.targetType = true, unix.RTN_LOCAL
	}
	return p
}

// answerPacket returns the answer to the first packet of a connection. Its mark is unknown: with keep_client, answers
// of servers have ours.
func (p packet) answerPacket() packet {
	p.from, p.to = p.to, p.from
	p.source, p.target = p.target, p.source
	p.sourcePort, p.targetPort = p.targetPort, p.sourcePort
	p.sourceType, p.targetType = p.targetType, p.sourceType
	p.flags, p.state, p.reply = flagSYN|flagACK, expr.CtStateBitESTABLISHED, true
	p.mark, p.known = 0, 0
	return p
}

// client is an address that connections may be captured from, and the interface that they come in by.
type client struct {
	via     *iface
	address netip.Addr
}

// clientGroups returns those that the rules capture: by network where the rules name interfaces. Where they name none,
// clients are behind some of the interfaces.
func (t *interception) clientGroups(m machine, f family) (groups [][]client) {
	everywhere := slices.Contains(t.interfaces, AnyInterface)
	interfaces := m.interfacesNamed(t.interfaces)
	if everywhere {
		interfaces = m.anyInterface()
	}
	for _, by := range interfaces {
		for _, addresses := range by.clientAddresses(f) {
			var group []client
			for _, a := range addresses {
				group = append(group, client{by, a})
			}
			groups = append(groups, group)
		}
	}
	if everywhere {
		groups = [][]client{slices.Concat(groups...)}
	}
	return groups
}

// readInterceptions returns what the rules in force need, as their table tells it.
func readInterceptions() ([]interception, error) {
	w, err := readFirewall()
	if err != nil {
		return nil, err
	}
	var traps []interception
	for _, c := range w.chains {
		tunnel, ofTunnel := strings.CutPrefix(c.Table.Name, tunnelTable)
		if c.Table.Family != nftables.TableFamilyINet || c.Name != ourChain || c.Table.Name != Table && !ofTunnel {
			continue
		}
		t, err := w.readInterception(c)
		switch {
		case errors.Is(err, syscall.ENOENT): // replaced in the meantime
			continue
		case err != nil:
			return nil, err
		case len(t.families) == 0:
			continue // somebody else's
		}
		if ofTunnel {
			t.own, t.interfaces, t.tunnel = 0, []string{tunnel}, true
		}
		traps = append(traps, t)
	}
	return traps, nil
}

// readInterception reads a chain that Rules or a Tunnel made: marks, the listener's port, families, and the sets.
func (w *firewall) readInterception(c *nftables.Chain) (interception, error) {
	t := interception{mode: TPROXY, interfaces: []string{AnyInterface}, ports: somePorts}
	rules, err := w.rulesOf(c)
	if err != nil {
		return t, err
	}
	if c.Type == nftables.ChainTypeNAT {
		t.mode = Redirect
	}
	for i, rule := range rules {
		var port []byte
		captured := ipv4
		for j, x := range rule.Exprs {
			switch x := x.(type) {
			case *expr.Bitwise:
				switch {
				case i == 0 && len(x.Mask) == 4:
					t.own = binary.NativeEndian.Uint32(x.Mask)
				case len(x.Xor) == 4 && !slices.Equal(x.Xor, nativeBytes(0)):
					t.mark = binary.NativeEndian.Uint32(x.Xor)
				}
			case *expr.Immediate:
				port = x.Data
			case *expr.Meta:
				if x.Key == expr.MetaKeyNFPROTO && j+1 < len(rule.Exprs) {
					if is, ok := rule.Exprs[j+1].(*expr.Cmp); ok && slices.Equal(is.Data, []byte{ipv6.proto}) {
						captured = ipv6
					}
				}
			case *expr.Lookup:
				if err := w.readSet(&t, c.Table, x.SetName); err != nil {
					return t, err
				}
			}
		}
		if len(port) == 2 {
			t.port = binary.BigEndian.Uint16(port)
			t.families = append(t.families, captured)
		}
	}
	return t, nil
}

// readSet reads one of the sets that say which connections are captured.
func (w *firewall) readSet(t *interception, table *nftables.Table, name string) error {
	if name != "interfaces" && name != "ports" {
		return nil
	}
	s, err := w.readFilterSet(table, name)
	if err != nil {
		return err
	}
	if name == "interfaces" {
		t.interfaces = nil
	} else {
		t.ports = nil
	}
	for _, e := range s.elements {
		switch {
		case e.IntervalEnd:
		case name == "interfaces":
			t.interfaces = append(t.interfaces, unix.ByteSliceToString(e.Key))
		case len(e.Key) == 2:
			t.ports = append(t.ports, binary.BigEndian.Uint16(e.Key))
		}
	}
	return nil
}

//go:build linux

package netlab

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// catchTable routes what Catch has caught to the node itself.
const catchTable = 77

// Catch has the node take all TCP and UDP that reaches the device, for whatever address and port, by a transparent
// socket at the port. The socket's local address is then what the sender asked for. The node answers other packets,
// such as pings, as if each address were its own.
func (n *Node) Catch(device string, port uint16) error {
	err := n.withNetlink(func(h *netlink.Handle) error {
		lo, err := h.LinkByName("lo")
		for _, all := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
			rule := netlink.NewRule()
			rule.IifName, rule.Table, rule.Family = device, catchTable, unix.AF_INET
			if all.Is6() {
				rule.Family = unix.AF_INET6
			}
			if err == nil {
				err = h.RuleAdd(rule)
			}
			if err == nil {
				err = h.RouteAdd(&netlink.Route{
					Table: catchTable, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index,
					Dst: ipNet(netip.PrefixFrom(all, 0)),
				})
			}
		}
		return err
	})
	if err == nil {
		err = n.Do(func() error { return catchRules(device, port) })
	}
	if err != nil {
		return fmt.Errorf("netlab: catch what comes to %s in %s: %w", device, n.name, err)
	}
	return nil
}

// catchRules hands packets from the device to the socket, in the namespace of the calling thread.
func catchRules(device string, port uint16) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "catch"})
	chain := c.AddChain(&nftables.Chain{
		Table: table, Name: "all", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting,
		Priority: nftables.ChainPriorityMangle,
	})
	name := make([]byte, unix.IFNAMSIZ)
	copy(name, device)
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: name},
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{protocol}},
			&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
			&expr.TProxy{Family: unix.NFPROTO_UNSPEC, TableFamily: unix.NFPROTO_INET, RegPort: 1},
		}})
	}
	return c.Flush()
}

package capture

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

// namespace is a network namespace of a test's own.
type namespace struct{ handle netns.NsHandle }

// newNamespace makes one with its lo up, or skips the test.
func newNamespace(t *testing.T) namespace {
	t.Helper()
	ns := namespace{handle: netns.None()}
	err := onThread(func() (err error) {
		ns.handle, err = netns.New()
		return err
	})
	if errors.Is(err, os.ErrPermission) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { _ = ns.handle.Close() })
	ns.do(t, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.LinkSetUp(lo)
	})
	return ns
}

// onThread runs f on a thread that ends with it, so that it may leave it in
// any namespace.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- f()
	}()
	return <-done
}

// in runs f inside; sockets it opens stay there.
func (ns namespace) in(f func() error) error {
	return onThread(func() error {
		if err := netns.Set(ns.handle); err != nil {
			return err
		}
		return f()
	})
}

func (ns namespace) do(t *testing.T, f func() error) {
	t.Helper()
	require.NoError(t, ns.in(f))
}

// state is all that capture rules could touch, a line each, to be compared.
func (ns namespace) state(t *testing.T) []string {
	t.Helper()
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	ns.do(t, func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		tables, err := c.ListTables()
		if err != nil {
			return err
		}
		for _, table := range tables {
			add("table %d %s", table.Family, table.Name)
			sets, err := c.GetSets(table)
			if err != nil {
				return err
			}
			for _, set := range sets {
				elements, err := c.GetSetElements(set)
				if err != nil {
					return err
				}
				for _, e := range elements {
					add("element %d %s %s %x end=%v", table.Family, table.Name, set.Name, e.Key, e.IntervalEnd)
				}
			}
		}
		chains, err := c.ListChains()
		if err != nil {
			return err
		}
		for _, chain := range chains {
			add("chain %d %s %s %s", chain.Table.Family, chain.Table.Name, chain.Name, chain.Type)
			rules, err := c.GetRules(chain.Table, chain)
			if err != nil {
				return err
			}
			for i, rule := range rules {
				exprs, err := json.Marshal(rule.Exprs)
				if err != nil {
					return err
				}
				add("rule %d %s %d %s", chain.Table.Family, chain.Table.Name, i, exprs)
			}
		}
		for _, af := range []int{unix.AF_INET, unix.AF_INET6} {
			rules, err := netlink.RuleList(af)
			if err != nil {
				return err
			}
			for _, r := range rules {
				mask := uint32(0)
				if r.Mask != nil {
					mask = *r.Mask
				}
				add("policy %d priority %d mark %#x/%#x table %d proto %d", af, r.Priority, r.Mark, mask, r.Table,
					r.Protocol)
			}
			routes, err := netlink.RouteListFiltered(af, &netlink.Route{}, netlink.RT_FILTER_TABLE)
			if err != nil {
				return err
			}
			for _, r := range routes {
				add("route %d table %d type %d %v dev %d proto %d", af, r.Table, r.Type, r.Dst, r.LinkIndex, r.Protocol)
			}
		}
		return nil
	})
	slices.Sort(lines)
	return lines
}

// count says how many lines of a state begin with prefix.
func count(lines []string, prefix string) (n int) {
	for _, l := range lines {
		if strings.HasPrefix(l, prefix) {
			n++
		}
	}
	return n
}

// veth joins two namespaces and gives each end its addresses.
func veth(t *testing.T, a namespace, nameA string, addrsA []string, b namespace, nameB string, addrsB []string) {
	t.Helper()
	a.do(t, func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: nameA},
			PeerName:  nameB, PeerNamespace: netlink.NsFd(b.handle),
		})
	})
	up := func(ns namespace, name string, addrs []string) {
		ns.do(t, func() error {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			for _, s := range addrs {
				addr, err := netlink.ParseAddr(s)
				if err != nil {
					return err
				}
				addr.Flags = unix.IFA_F_NODAD // usable at once
				if err := netlink.AddrAdd(link, addr); err != nil {
					return err
				}
			}
			return netlink.LinkSetUp(link)
		})
	}
	up(a, nameA, addrsA)
	up(b, nameB, addrsB)
}

// via adds default routes.
func (ns namespace) via(t *testing.T, gateways ...string) {
	t.Helper()
	for _, g := range gateways {
		ns.do(t, func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(g)}) })
	}
}

// markFrom marks everything that comes in from an interface, before our chain.
func markFrom(name string, mark uint32) error {
	c, err := nftables.New()
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "marks"})
	chain := c.AddChain(&nftables.Chain{
		Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	})
	key := make([]byte, 16)
	copy(key, name)
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append([]expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: reg}, equalTo(key...),
	}, addMark(mark).exprs...)})
	return c.Flush()
}

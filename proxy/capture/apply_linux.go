package capture

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Apply makes what is installed in this network namespace exactly what the
// rules say, whatever an earlier call left. The table is replaced in one
// transaction; routes that it needs are there before, those that it no longer
// needs are removed afterwards, so that a crash between leaves a state that
// works. On an error, what this call added is taken back.
func (r Rules) Apply(ctx context.Context) (err error) {
	r, err = r.normalise()
	if err != nil {
		return err
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return explain("open netlink", err)
	}
	defer h.Close()
	routing := routing{handle: h}
	defer func() {
		if err != nil {
			err = errors.Join(err, routing.undo())
		}
	}()
	if r.Mode == TPROXY {
		if err := routing.add(r); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	if err := replaceTable(r.ruleset()); err != nil {
		return err
	}
	routing.added = nil // from here on the table needs them
	return routing.remove(func(o object) bool { return r.Mode == TPROXY && o.wanted(r) })
}

// Remove takes away everything that Apply can have made, with whatever
// settings and however far it came. Without anything to remove it does nothing.
func Remove(ctx context.Context) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return explain("open netlink", err)
	}
	defer h.Close()
	// The table first: marked packets without a route would be lost.
	if err := deleteTable(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	routing := routing{handle: h}
	return routing.remove(func(object) bool { return false })
}

func replaceTable(t ruleset) error {
	c, err := nftables.New()
	if err != nil {
		return explain("open nftables", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: Table}
	// Deleting needs a table to be there: add it, so that it always is.
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	for _, s := range t.sets {
		err := c.AddSet(&nftables.Set{
			Table: table, Name: s.name, KeyType: s.kind, Interval: s.interval, KeyByteOrder: s.order,
		}, s.keys())
		if err != nil {
			return fmt.Errorf("capture: set %s: %w", s.name, err)
		}
	}
	policy := nftables.ChainPolicyAccept
	chain := c.AddChain(&nftables.Chain{
		Table: table, Name: "prerouting", Type: t.kind,
		Hooknum: nftables.ChainHookPrerouting, Priority: t.priority, Policy: &policy,
	})
	for _, rule := range t.rules {
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: ruleExprs(rule)})
	}
	if err := c.Flush(); err != nil {
		return explain("install the nftables table", err)
	}
	return nil
}

func deleteTable() error {
	c, err := nftables.New()
	if err != nil {
		return explain("open nftables", err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return explain("list nftables tables", err)
	}
	for _, t := range tables {
		if t.Name != Table {
			continue
		}
		c.DelTable(t)
		if err := c.Flush(); err != nil && !errors.Is(err, syscall.ENOENT) {
			return explain("delete the nftables table", err)
		}
	}
	return nil
}

// explain says what is missing, and how to get it.
func explain(what string, err error) error {
	switch {
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("capture: %s: needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep on the binary, "+
			"or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit: %w", what, err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EAFNOSUPPORT):
		return fmt.Errorf("capture: %s: this address family is switched off here: leave it out of the rules: %w", what, err)
	case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("capture: %s: the kernel lacks a part of nftables: load the modules nft_fib_inet and "+
			"nft_tproxy, nft_socket (tproxy) or nft_redir, nft_chain_nat (redirect): %w", what, err)
	}
	return fmt.Errorf("capture: %s: %w", what, err)
}

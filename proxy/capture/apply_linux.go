package capture

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ourChain is the one chain of the table for Rules.
const ourChain = "prerouting"

// Apply makes what is installed in this network namespace exactly what the
// rules say, whatever an earlier call left. The table is replaced in one
// transaction; routes that it needs are there before, those that it no longer
// needs are removed afterwards, so that a crash between leaves a state that
// works. On an error, what this call added is taken back.
func (r Rules) Apply(ctx context.Context) (err error) {
	r, err = r.withDefaults()
	if err != nil {
		return err
	}
	r, _ = r.leaveOutIPv6()
	if r, err = r.withMachineState(); err != nil {
		return err
	}
	h, done, err := lockNetlink()
	if err != nil {
		return err
	}
	defer done()
	routing := routing{handle: h}
	defer func() {
		if err != nil {
			err = errors.Join(err, routing.undoAdded())
		}
	}()
	if r.Mode == TPROXY {
		if err := routing.addObjects(r); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	if err := replaceTable(r.buildRuleset()); err != nil {
		return err
	}
	routing.added = nil // from here on the table needs them
	return routing.removeUnless(func(o object) bool { return r.Mode == TPROXY && o.isWantedBy(r) })
}

// Remove takes away everything that Apply can have made, with whatever
// settings and however far it came. Without anything to remove it does nothing.
func Remove(ctx context.Context) error {
	h, done, err := lockNetlink()
	if err != nil {
		return err
	}
	defer done()
	// The table first: marked packets without a route would be lost.
	if err := deleteTable(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("capture: %w", err)
	}
	routing := routing{handle: h}
	return routing.removeUnless(func(object) bool { return false })
}

// keysAtOnce bounds the keys in one message: the library puts all of a call into one attribute, whose
// length is 16 bits, and a key takes 40 bytes at most.
const maxKeysPerMessage = 1000

// transaction bounds the bytes of a table's messages, and of the kernel's answers to them: a socket
// has 208 KiB for either by default.
const transactionBytes = 1 << 26

// lockFile is one of each network namespace, and whoever may not change rules may not open it.
const lockFile = "/proc/sys/net/ipv4/tcp_fastopen_key"

// lockNetlink opens netlink once no other call changes the rules of this network namespace, in
// whatever process: each would take what the other has just made for left over.
func lockNetlink() (h *netlink.Handle, done func(), err error) {
	lock, err := os.Open(lockFile)
	if errors.Is(err, os.ErrPermission) {
		return nil, nil, explainError("change rules", syscall.EPERM)
	}
	if err != nil {
		return nil, nil, explainError("open "+lockFile, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		_ = lock.Close()
		return nil, nil, explainError("lock "+lockFile, err)
	}
	if h, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		_ = lock.Close()
		return nil, nil, explainError("open netlink", err)
	}
	return h, func() {
		h.Close()
		_ = lock.Close()
	}, nil
}

// setBuffers makes room for a transaction. Its parameter is a *netlink.Conn of the library below
// nftables, which nothing else here needs.
func setBuffers[C interface {
	SetWriteBuffer(bytes int) error
	SetReadBuffer(bytes int) error
}](c C) error {
	return errors.Join(c.SetWriteBuffer(transactionBytes), c.SetReadBuffer(transactionBytes))
}

func replaceTable(t ruleset) error {
	c, err := nftables.New(nftables.WithSockOptions(setBuffers))
	if err != nil {
		return explainError("open nftables", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: t.table}
	if t.table == Table {
		there, mine, err := findTable(c)
		switch {
		case err != nil:
			return err
		case there != nil && !mine:
			return fmt.Errorf("capture: there is a table inet %s that penstock has not made: "+
				"give it another name, or remove it (nft delete table inet %s), and apply again", Table, Table)
		}
	}
	// Deleting needs a table to be there: add it, so that it always is.
	c.AddTable(table)
	c.DelTable(table)
	c.AddTable(table)
	for _, s := range t.sets {
		to := &nftables.Set{
			Table: table, Name: s.name, KeyType: s.kind, Interval: s.interval, KeyByteOrder: s.order,
		}
		err := c.AddSet(to, nil)
		for part := range slices.Chunk(s.setElements(), maxKeysPerMessage) {
			err = errors.Join(err, c.SetAddElements(to, part))
		}
		if err != nil {
			return fmt.Errorf("capture: set %s: %w", s.name, err)
		}
	}
	policy := nftables.ChainPolicyAccept
	for _, chain := range t.chains {
		added := c.AddChain(&nftables.Chain{
			Table: table, Name: chain.name, Type: chain.kind, Hooknum: chain.hook, Priority: chain.priority, Policy: &policy,
		})
		for _, rule := range chain.rules {
			c.AddRule(&nftables.Rule{Table: table, Chain: added, Exprs: ruleExprs(rule)})
		}
	}
	if err := c.Flush(); err != nil {
		return explainError("install the nftables table", err)
	}
	return nil
}

func deleteTable() error {
	c, err := nftables.New()
	if err != nil {
		return explainError("open nftables", err)
	}
	table, mine, err := findTable(c)
	if err != nil || !mine {
		return err // another's, which stays, or none
	}
	c.DelTable(table)
	if err := c.Flush(); err != nil && !errors.Is(err, syscall.ENOENT) {
		return explainError("delete the nftables table", err)
	}
	return nil
}

// findTable returns the table of our name, nil if there is none, and whether it is ours
// by what is in it: our one chain, which begins with a look at the mark. A comment of ours
// would tell more, but kernels before 5.10 do not keep it, and earlier versions wrote none.
func findTable(c *nftables.Conn) (table *nftables.Table, mine bool, err error) {
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, false, explainError("list nftables tables", err)
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == Table })
	if i < 0 {
		return nil, false, nil
	}
	table = tables[i]
	chains, err := c.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, false, explainError("list nftables chains", err)
	}
	chains = slices.DeleteFunc(chains, func(c *nftables.Chain) bool { return c.Table.Name != Table })
	switch {
	case len(chains) != 1 || chains[0].Name != ourChain,
		chains[0].Hooknum == nil || *chains[0].Hooknum != *nftables.ChainHookPrerouting:
		return table, false, nil
	}
	rules, err := c.GetRules(table, chains[0])
	switch {
	case errors.Is(err, syscall.ENOENT): // replaced in the meantime, by an Apply of ours
		return table, true, nil
	case err != nil:
		return nil, false, explainError("list nftables rules", err)
	case len(rules) == 0 || len(rules[0].Exprs) == 0:
		return table, false, nil
	}
	first, ok := rules[0].Exprs[0].(*expr.Meta)
	return table, ok && first.Key == expr.MetaKeyMARK, nil
}

// explainError says what is missing, and how to get it.
func explainError(what string, err error) error {
	switch {
	case errors.Is(err, syscall.EPERM):
		return fmt.Errorf("capture: %s: needs CAP_NET_ADMIN: run as root, or setcap cap_net_admin+ep on the binary, "+
			"or AmbientCapabilities=CAP_NET_ADMIN in the systemd unit: %w", what, err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EAFNOSUPPORT):
		return fmt.Errorf("capture: %s: this address family is switched off here: leave it out of the rules, or switch "+
			"it on (sysctl -w %s=0): %w", what, ipv6Switches[0], err)
	case errors.Is(err, syscall.EOPNOTSUPP), errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("capture: %s: the kernel lacks a part of nftables: load the modules nft_fib_inet and "+
			"nft_tproxy, nft_socket (tproxy) or nft_redir, nft_chain_nat (redirect): %w", what, err)
	}
	return fmt.Errorf("capture: %s: %w", what, err)
}

//go:build linux

package netlab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Node is one host of a lab.
type Node struct {
	name string
	ctx  context.Context

	mu      sync.RWMutex // held while ns is in use, so that Close cannot pull it away
	closed  bool
	ns      netns.NsHandle
	nl      *netlink.Handle
	spawner *spawner // born with the first command
}

// quiet are the settings of a new node: no IPv6 autoconfiguration and no search
// for duplicate addresses, which takes a second; no reverse path filter; and no
// memory of earlier connections, which would give a later flow to the same host
// the ssthresh of an earlier one.
var quiet = []struct{ key, value string }{
	{"net.ipv6.conf.all.disable_ipv6", "0"},
	{"net.ipv6.conf.default.disable_ipv6", "0"},
	{"net.ipv6.conf.default.accept_ra", "0"},
	{"net.ipv6.conf.default.accept_dad", "0"},
	{"net.ipv4.conf.all.rp_filter", "0"},
	{"net.ipv4.conf.default.rp_filter", "0"},
	{"net.ipv4.tcp_no_metrics_save", "1"},
}

func newNode(ctx context.Context, name string) (*Node, error) {
	n := &Node{name: name, ctx: ctx, ns: netns.None()}
	err := onThread(func() (err error) {
		if n.ns, err = netns.New(); err != nil {
			return fmt.Errorf("netlab: create network namespace for %s: %w%s", name, err, privilegeHint(err))
		}
		if n.nl, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("netlab: open netlink in %s: %w", name, err)
		}
		for _, s := range quiet {
			if err := writeSysctl(s.key, s.value); err != nil {
				return err
			}
		}
		lo, err := n.nl.LinkByName("lo")
		if err == nil {
			err = n.nl.LinkSetUp(lo)
		}
		if err != nil {
			return fmt.Errorf("netlab: bring up loopback in %s: %w%s", name, err, privilegeHint(err))
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, n.close())
	}
	return n, nil
}

// Name returns the name the node was given.
func (n *Node) Name() string { return n.name }

// Do runs fn with its thread inside the node's namespace: sockets and /proc/sys
// entries it opens belong to the node and stay so afterwards. Goroutines that fn
// starts are not in the namespace.
func (n *Node) Do(fn func() error) error {
	return onThread(func() error {
		if err := n.enter(); err != nil {
			return err
		}
		return fn()
	})
}

func (n *Node) enter() error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.closed {
		return errClosed
	}
	if err := netns.Set(n.ns); err != nil {
		return fmt.Errorf("netlab: enter namespace of %s: %w", n.name, err)
	}
	return nil
}

var errGoexit = errors.New("netlab: function ended its goroutine instead of returning")

// onThread runs fn on a thread of its own and puts the thread's namespace back
// afterwards. When that fails the goroutine ends while locked, and the runtime
// discards the thread with it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		err := errGoexit
		defer func() { done <- err }()
		runtime.LockOSThread()
		home, homeErr := netns.Get()
		if homeErr != nil {
			err = fmt.Errorf("netlab: find the current network namespace: %w", homeErr)
			return
		}
		defer func() {
			if netns.Set(home) == nil {
				runtime.UnlockOSThread()
			}
			_ = home.Close() // a read-only descriptor has nothing to lose
		}()
		err = fn()
	}()
	return <-done
}

// Sysctl sets a key such as "net.ipv4.tcp_rmem" in the node's namespace.
func (n *Node) Sysctl(key, value string) error {
	return n.Do(func() error { return writeSysctl(key, value) })
}

// writeSysctl acts on the namespace of the thread that opens the file.
func writeSysctl(key, value string) error {
	path := filepath.Join("/proc/sys", strings.ReplaceAll(key, ".", "/"))
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		return fmt.Errorf("netlab: set %s to %q: %w", key, value, err)
	}
	return nil
}

// Forward makes the node route packets between its devices, IPv4 and IPv6.
func (n *Node) Forward() error {
	return n.Do(func() error {
		if err := writeSysctl("net.ipv4.ip_forward", "1"); err != nil {
			return err
		}
		return writeSysctl("net.ipv6.conf.all.forwarding", "1")
	})
}

// Route sends what is for dst through via; the zero Prefix is the default route
// of via's family. The zero Addr makes dst unreachable.
func (n *Node) Route(dst netip.Prefix, via netip.Addr) error {
	r := &netlink.Route{Gw: via.AsSlice()}
	if !via.IsValid() {
		r.Type = unix.RTN_UNREACHABLE
	}
	if dst.IsValid() && dst.Bits() > 0 {
		r.Dst = ipNet(dst.Masked())
	}
	return n.withNetlink(func(h *netlink.Handle) error {
		if err := h.RouteAdd(r); err != nil {
			return fmt.Errorf("netlab: route %s via %s in %s: %w", dst, via, n.name, err)
		}
		return nil
	})
}

// Address gives a device of the node one more IPv4 address.
func (n *Node) Address(device string, addr netip.Prefix) error {
	err := n.withLink(device, func(h *netlink.Handle, link netlink.Link) error {
		return h.AddrAdd(link, &netlink.Addr{IPNet: ipNet(addr)})
	})
	if err != nil {
		return fmt.Errorf("netlab: give %s in %s the address %s: %w", device, n.name, addr, err)
	}
	return nil
}

// withLink is withNetlink for one of the node's devices.
func (n *Node) withLink(device string, fn func(*netlink.Handle, netlink.Link) error) error {
	return n.withNetlink(func(h *netlink.Handle) error {
		link, err := h.LinkByName(device)
		if err != nil {
			return fmt.Errorf("find %s in %s: %w", device, n.name, err)
		}
		return fn(h, link)
	})
}

func (n *Node) withNetlink(fn func(*netlink.Handle) error) error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.closed {
		return errClosed
	}
	return fn(n.nl)
}

func (n *Node) close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	n.closed = true
	s := n.spawner
	n.mu.Unlock()
	if s != nil {
		s.stop() // outside the lock: the thread may be about to enter the namespace
	}
	if n.nl != nil {
		n.nl.Close()
	}
	if n.ns.IsOpen() {
		return n.ns.Close()
	}
	return nil
}

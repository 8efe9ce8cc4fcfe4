package linkstat

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

func TestMain(m *testing.M) { os.Exit(need.Run(m)) }

// namespace is a network namespace of a test's own.
type namespace struct{ handle netns.NsHandle }

// newNamespace makes one, or skips the test.
func newNamespace(t testing.TB) namespace {
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

// do runs f inside; sockets it opens stay there.
func (ns namespace) do(t testing.TB, f func() error) {
	t.Helper()
	require.NoError(t, onThread(func() error {
		if err := netns.Set(ns.handle); err != nil {
			return err
		}
		return f()
	}))
}

// The two ends of a link, and the routers name of theirs.
const (
	near, far = "cell0", "host0"
	nearAddr  = "10.9.7.1/24"
	farAddr   = "10.9.7.2/24"
)

// joined makes two namespaces with a veth between them.
func joined(t testing.TB) (router, host namespace) {
	t.Helper()
	router, host = newNamespace(t), newNamespace(t)
	join(t, router, host)
	return router, host
}

func join(t testing.TB, router, host namespace) {
	t.Helper()
	router.do(t, func() error {
		return netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: near, MTU: 1500, TxQLen: 1000},
			PeerName:  far, PeerNamespace: netlink.NsFd(host.handle),
		})
	})
	router.up(t, near, nearAddr)
	host.up(t, far, farAddr)
}

func (ns namespace) up(t testing.TB, name, address string) {
	t.Helper()
	ns.do(t, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrAdd(link, addr), netlink.LinkSetUp(link))
	})
}

// shape puts a qdisc at an interface's root, or skips the test where the kernel
// does not have it.
func (ns namespace) shape(t testing.TB, name string, build func(netlink.QdiscAttrs) netlink.Qdisc) {
	t.Helper()
	var kind string
	err := error(nil)
	ns.do(t, func() error {
		link, linkErr := netlink.LinkByName(name)
		if linkErr != nil {
			return linkErr
		}
		q := build(netlink.QdiscAttrs{
			LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
			Parent: netlink.HANDLE_ROOT,
		})
		kind, err = q.Type(), netlink.QdiscReplace(q)
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		t.Skipf("this kernel has no %s", kind)
	}
	require.NoError(t, err)
}

// tbf lets a rate pass, with a burst of ten frames and a queue of so many bytes.
func tbf(bits uint64, queue uint32) func(netlink.QdiscAttrs) netlink.Qdisc {
	return func(attrs netlink.QdiscAttrs) netlink.Qdisc {
		rate := bits / 8
		return &netlink.Tbf{QdiscAttrs: attrs, Rate: rate, Limit: queue, Buffer: netlink.Xmittime(rate, 15140)}
	}
}

// connect opens a connection from the router to the host.
func connect(t testing.TB, router, host namespace) (from, to *net.TCPConn) {
	t.Helper()
	addr := netip.MustParsePrefix(farAddr).Addr().String()
	var ln net.Listener
	host.do(t, func() (err error) {
		ln, err = net.Listen("tcp", net.JoinHostPort(addr, "0"))
		return err
	})
	defer ln.Close()
	router.do(t, func() error {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err == nil {
			from = c.(*net.TCPConn)
		}
		return err
	})
	t.Cleanup(func() { from.Close() })
	c, err := ln.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return from, c.(*net.TCPConn)
}

func TestLinksSayWhichInterfaceLeadsToAHost(t *testing.T) {
	newNamespace(t).do(t, func() error {
		for i, name := range []string{"lan", "wan"} {
			link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "to-" + name}
			addr, err := netlink.ParseAddr(fmt.Sprintf("192.0.2.%d/26", 1+64*i))
			err = errors.Join(err, netlink.LinkAdd(link), netlink.AddrAdd(link, addr), netlink.LinkSetUp(link))
			if err != nil {
				return err
			}
		}
		links, err := OpenLinks()
		if err != nil {
			return err
		}
		defer links.Close()
		traffic, err := links.ReadTraffic(true)
		if err != nil {
			return err
		}
		assert.Len(t, traffic, 2, "the other ends are down")
		for host, want := range map[string]string{"192.0.2.9": "lan", "::ffff:192.0.2.99": "wan", "198.51.100.1": ""} {
			assert.Equal(t, want, links.FindInterface(netip.MustParseAddr(host)), host)
		}
		return nil
	})
}

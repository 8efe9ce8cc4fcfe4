package capture

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/access"
	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/ingress"
)

// The network of these tests:
//
//	client .2 ─── 10.1.0.0/24, fd01::/64 ─── .1 router .1 ─── 10.2.0.0/24, fd02::/64 ─── .2 server
//
// The server tells every client the address it sees; the router runs the
// proxy. The client's .3 is excluded from capture, and so is port 81.
type network struct {
	client, router, server namespace
}

const proxyPort = 1081

func newNetwork(t *testing.T) network {
	t.Helper()
	n := network{newNamespace(t), newNamespace(t), newNamespace(t)}
	veth(t, n.client, "up", []string{"10.1.0.2/24", "10.1.0.3/24", "fd01::2/64", "fd01::3/64"},
		n.router, "lan", []string{"10.1.0.1/24", "fd01::1/64"})
	veth(t, n.router, "wan", []string{"10.2.0.1/24", "fd02::1/64"},
		n.server, "up", []string{"10.2.0.2/24", "fd02::2/64"})
	n.client.via(t, "10.1.0.1", "fd01::1")
	n.server.via(t, "10.2.0.1", "fd02::1")
	n.router.do(t, func() error {
		return errors.Join(
			os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0),
			os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0))
	})
	n.server.do(t, func() error {
		for _, port := range []string{":80", ":81"} {
			ln, err := net.Listen("tcp", port)
			if err != nil {
				return err
			}
			serve(t, ln.Close, func() error {
				conn, err := ln.Accept()
				if err == nil {
					fmt.Fprint(conn, conn.RemoteAddr())
					conn.Close()
				}
				return err
			})
		}
		return nil
	})
	return n
}

// serve repeats next until it fails, which it does when the test closes.
func serve(t *testing.T, stop func() error, next func() error) {
	t.Helper()
	var running sync.WaitGroup
	running.Go(func() {
		for next() == nil {
		}
	})
	t.Cleanup(func() {
		_ = stop()
		running.Wait()
	})
}

// leg is a socket as a datapath.Conn, no more.
type leg struct{ *net.TCPConn }

func (leg) Enforce(datapath.Hold, int) datapath.Hold { return 0 }
func (leg) Observe(func(flow.Report))                {}
func (leg) Apply(flow.Limit)                         {}
func (leg) Info() datapath.Info                      { return datapath.Info{} }
func (leg) Undelivered() (cc.Bytes, error)           { return 0, nil }
func (leg) Aborted() bool                            { return false }
func (leg) InProcess() bool                          { return false }

func (l leg) Reset() error { return l.TCPConn.Close() }

func (l leg) Close() error {
	_ = l.SetLinger(-1) // the listener's sockets reset otherwise
	return l.TCPConn.Close()
}

// acceptor has package net accept.
type acceptor struct{ *net.TCPListener }

func (a acceptor) SetTransparent() error { return nil } // it was opened so

func (a acceptor) Duplicate() (int, error) { return 0, errors.ErrUnsupported }

func (a acceptor) Serve(take func(datapath.Conn), _ func(error) time.Duration) error {
	for {
		c, err := a.AcceptTCP()
		if err != nil {
			return err
		}
		take(leg{c})
	}
}

// proxy runs a listener on the router and joins each client to its target,
// from the client's address if keep says so. It tells targets where clients
// were going.
func (n network) proxy(t *testing.T, mode access.Mode, keep bool, targets chan<- netip.AddrPort) {
	t.Helper()
	var l ingress.Listener
	n.router.do(t, func() (err error) {
		l, err = ingress.Listen(t.Context(), ingress.Config{
			Name: "lan", Mode: mode,
			Addr: fmt.Sprintf(":%d", proxyPort),
		},
			func(ln *net.TCPListener) (ingress.Acceptor, error) { return acceptor{ln}, nil })
		return err
	})
	conns := make(chan datapath.Conn)
	go func() {
		defer close(conns)
		_ = l.Serve(func(c datapath.Conn) { conns <- c })
	}()
	serve(t, l.Close, func() error {
		conn, ok := <-conns
		if !ok {
			return net.ErrClosed
		}
		var client ingress.Client
		if n.router.in(func() (err error) { // where the local addresses are the router's
			client, err = l.Greet(t.Context(), conn)
			return err
		}) != nil {
			return nil // refused, and closed
		}
		defer client.Close()
		targets <- client.Target
		var server net.Conn
		if err := n.router.in(func() (err error) {
			server, err = dialer(client.Source.Addr(), keep).DialContext(t.Context(), "tcp", client.Target.String())
			return err
		}); err != nil {
			return client.Answer(netip.AddrPort{}, err)
		}
		defer server.Close()
		_, _ = io.Copy(client, server)
		return nil
	})
}

// dialer dials as the proxy does: marked, and from any address if keep.
func dialer(source netip.Addr, keep bool) *net.Dialer {
	d := &net.Dialer{Timeout: time.Minute}
	if keep {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(source, 0))
	}
	d.Control = func(network, _ string, c syscall.RawConn) error {
		var err error
		ctrl := c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, DefaultOwnMark)
			if err == nil && keep && network == "tcp4" {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_TRANSPARENT, 1)
			}
			if err == nil && keep && network == "tcp6" {
				err = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
			}
		})
		return errors.Join(ctrl, err)
	}
	return d
}

// ask connects the client from one of its addresses and returns what the
// server saw.
func (n network) ask(from, target string) (local, seen netip.AddrPort, err error) {
	err = n.client.in(func() error {
		d := net.Dialer{Timeout: time.Minute, LocalAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))}
		conn, err := d.Dial("tcp", target)
		if err != nil {
			return err
		}
		defer conn.Close()
		local = netip.MustParseAddrPort(conn.LocalAddr().String())
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			return err
		}
		said, err := io.ReadAll(conn)
		if err != nil {
			return err
		}
		seen, err = netip.ParseAddrPort(string(said))
		seen = netip.AddrPortFrom(seen.Addr().Unmap(), seen.Port())
		return err
	})
	return local, seen, err
}

func TestConnectionsAreCaptured(t *testing.T) {
	for _, row := range []struct {
		name string
		mode Mode
		keep bool
	}{
		{"tproxy", TPROXY, false},
		{"tproxy, client's address kept", TPROXY, true},
		{"redirect", Redirect, false},
	} {
		t.Run(row.name, func(t *testing.T) {
			n := newNetwork(t)
			targets := make(chan netip.AddrPort, 10)
			n.proxy(t, access.Mode(row.mode), row.keep, targets)
			rules := Rules{
				Mode: row.mode, Interfaces: anywhere, Connected: ConnectedCapture, Port: proxyPort,
				Ports: []PortRange{{80, 80}, {proxyPort, proxyPort}, {1024, 65535}}, // also the clients' own
				Sources: Match{Exclude: []netip.Prefix{
					netip.MustParsePrefix("10.1.0.3/32"), netip.MustParsePrefix("fd01::3/128"),
				}},
			}
			n.router.do(t, func() error { return rules.Apply(t.Context()) })
			n.router.do(t, func() error { // as wg-quick and Tailscale set it
				return os.WriteFile("/proc/sys/net/ipv4/conf/all/src_valid_mark", []byte("1"), 0)
			})

			for _, family := range []struct{ client, other, server, router, near string }{
				{"10.1.0.2", "10.1.0.3", "10.2.0.2", "10.2.0.1", "10.1.0.1"},
				{"fd01::2", "fd01::3", "fd02::2", "fd02::1", "fd01::1"},
			} {
				target := net.JoinHostPort(family.server, "80")
				want := family.router
				if row.keep {
					want = family.client
				}
				// From the same port again: the proxy closed first and is in
				// TIME_WAIT.
				for range 3 {
					_, seen, err := n.ask(net.JoinHostPort(family.client, "3000"), target)
					require.NoError(t, err)
					assert.Equal(t, target, (<-targets).String(), "the proxy knows the original destination")
					assert.Equal(t, want, seen.Addr().String(), "as the server sees it")
				}

				// Not captured, so end to end, ports and all.
				for from, target := range map[string]string{
					net.JoinHostPort(family.other, "0"):  target,
					net.JoinHostPort(family.client, "0"): net.JoinHostPort(family.server, "81"),
				} {
					local, seen, err := n.ask(from, target)
					require.NoError(t, err)
					assert.Equal(t, local, seen, "%s to %s goes past the proxy", from, target)
				}

				// To the proxy itself: refused, not dialled in a circle.
				_, _, err := n.ask(net.JoinHostPort(family.client, "0"),
					net.JoinHostPort(family.near, fmt.Sprint(proxyPort)))
				assert.ErrorIs(t, err, syscall.ECONNRESET)
			}
			assert.Empty(t, targets, "nothing else came to the proxy")

			n.router.do(t, func() error { return Remove(t.Context()) })
			local, seen, err := n.ask("10.1.0.2:0", "10.2.0.2:80")
			require.NoError(t, err)
			assert.Equal(t, local, seen, "without rules everything goes past")
		})
	}
}

// What a forward chain keeps apart is mostly the networks of the machine.
func TestConnectionsToNetworksOfThisMachineGoPast(t *testing.T) {
	for _, mode := range []Mode{TPROXY, Redirect} {
		t.Run(string(mode), func(t *testing.T) {
			n := newNetwork(t)
			targets := make(chan netip.AddrPort, 10)
			n.proxy(t, access.Mode(mode), false, targets)
			address := func(ns namespace, name, addr string) {
				ns.do(t, func() error {
					link, err := netlink.LinkByName(name)
					if err != nil {
						return err
					}
					a, err := netlink.ParseAddr(addr)
					if err != nil {
						return err
					}
					a.Flags = unix.IFA_F_NODAD
					return netlink.AddrAdd(link, a)
				})
			}
			// Beyond the next hop, as most of the world is.
			for _, far := range []struct{ addr, via string }{
				{"203.0.113.5/32", "10.2.0.2"},
				{"2001:db8::5/128", "fd02::2"},
			} {
				address(n.server, "lo", far.addr)
				n.router.do(t, func() error {
					_, dst, err := net.ParseCIDR(far.addr)
					if err != nil {
						return err
					}
					return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(far.via)})
				})
			}
			captured := func(from, target string) bool {
				local, seen, err := n.ask(from, target)
				require.NoError(t, err)
				return local != seen
			}
			apply := func() {
				rules := Rules{Mode: mode, Port: proxyPort, Interfaces: []string{"lan"}}
				n.router.do(t, func() error { return rules.Apply(t.Context()) })
			}
			apply()
			assert.True(t, captured("10.1.0.2:0", "10.2.0.2:80"), "nothing keeps the networks apart")
			assert.True(t, captured("[fd01::2]:0", "[fd02::2]:80"))

			n.router.do(t, func() error {
				c, err := nftables.New()
				if err != nil {
					return err
				}
				accept := nftables.ChainPolicyAccept
				table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: "firewall"})
				c.AddChain(&nftables.Chain{
					Name: "forward", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
					Priority: nftables.ChainPriorityFilter, Policy: &accept,
				})
				c.AddRule(&nftables.Rule{Table: table, Chain: c.AddChain(&nftables.Chain{
					Name:  "guests",
					Table: table,
				}), Exprs: []expr.Any{&expr.Reject{}}})
				return c.Flush()
			})
			apply()
			assert.False(t, captured("10.1.0.2:0", "10.2.0.2:80"))
			assert.False(t, captured("[fd01::2]:0", "[fd02::2]:80"))
			assert.True(t, captured("10.1.0.2:0", "203.0.113.5:80"))
			assert.True(t, captured("[fd01::2]:0", "[2001:db8::5]:80"))

			address(n.server, "up", "2001:db8:7::2/64")
			address(n.router, "wan", "2001:db8:7::1/64")
			caught := func() (networks []Network) {
				n.router.do(t, func() (err error) {
					networks, err = CapturedNetworks()
					return err
				})
				return networks
			}
			assert.Equal(t, []Network{{netip.MustParsePrefix("2001:db8:7::/64"), "wan"}}, caught())
			apply()
			assert.Empty(t, caught())
			assert.False(t, captured("[fd01::2]:0", "[2001:db8:7::2]:80"),
				"another network, once the rules are applied again")
		})
	}
}

// Captured packets keep their destination on the way in.
func TestAnInputChainForbidsWhatTheForwardChainCannot(t *testing.T) {
	n := newNetwork(t)
	targets := make(chan netip.AddrPort, 10)
	n.proxy(t, access.TPROXY, false, targets)
	n.router.do(t, func() error {
		return Rules{
			Mode: TPROXY, Interfaces: anywhere, Connected: ConnectedCapture,
			Port: proxyPort,
		}.Apply(t.Context())
	})
	n.router.do(t, func() error {
		c, err := nftables.New()
		if err != nil {
			return err
		}
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "captured"})
		chain := c.AddChain(&nftables.Chain{
			Table: table, Name: "input", Type: nftables.ChainTypeFilter,
			Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter,
		})
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(hasMark(DefaultMark).exprs,
			&expr.Payload{
				DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: ipv4.target,
				Len: ipv4.length,
			},
			equalTo(10, 2, 0, 2), isTCP().exprs[0], isTCP().exprs[1], &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})})
		return c.Flush()
	})
	_, _, err := n.ask("10.1.0.2:0", "10.2.0.2:80")
	assert.ErrorIs(t, err, syscall.ECONNREFUSED)
	local, seen, err := n.ask("[fd01::2]:0", "[fd02::2]:80")
	require.NoError(t, err)
	assert.NotEqual(t, local, seen, "what is not forbidden is captured")
}

func TestAdviceSaysWhatIsNotWhatItSeems(t *testing.T) {
	n := newNetwork(t)
	advice := func(r Rules) (said string) {
		n.router.do(t, func() error {
			said = strings.Join(r.Advice(), "\n")
			return nil
		})
		return said
	}
	r := Rules{Mode: TPROXY, Port: proxyPort, Interfaces: []string{"lan"}}
	assert.Empty(t, advice(r), "nothing keeps networks apart, so none is left out")
	r.Connected = ConnectedLeave
	assert.Equal(t, "connections to networks of this machine go past the proxy: 10.1.0.0/24 (lan), 10.2.0.0/24 (wan), "+
		"fd01::/64 (lan), fd02::/64 (wan); --connected captures them, and applying again follows changes", advice(r))
	r.Connected = ConnectedCapture
	assert.Empty(t, advice(r))
	r.Interfaces = []string{"lan", "nosuch0"}
	assert.Contains(t, advice(r), "interface nosuch0 does not exist")
	r.Interfaces = anywhere
	assert.Contains(t, advice(r), "connections from outside are captured too")

	r.Interfaces = []string{"lan"}
	drop, accept := nftables.ChainPolicyDrop, nftables.ChainPolicyAccept
	asked := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIF, Register: 1},
		&expr.Lookup{SourceRegister: 1, SetName: "verdicts", IsDestRegSet: true},
	}
	for _, row := range []struct {
		name   string
		family nftables.TableFamily
		policy nftables.ChainPolicy
		hook   *nftables.ChainHook
		rule   []expr.Any       // of a chain beside it
		decide expr.VerdictKind // what the map "verdicts" says, where the rule asks it
		says   string
	}{
		{
			"drops", nftables.TableFamilyINet, drop, nftables.ChainHookForward, nil, 0,
			"inet drops forward (policy drop)",
		},
		{"old", nftables.TableFamilyIPv4, drop, nftables.ChainHookForward, nil, 0, "ip old forward (policy drop)"},
		{
			"jumps", nftables.TableFamilyIPv6, accept, nftables.ChainHookForward,
			[]expr.Any{&expr.Reject{}},
			0,
			"ip6 jumps forward (rules that drop or reject)",
		},
		{
			"lets", nftables.TableFamilyINet, accept, nftables.ChainHookForward,
			[]expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}},
			0, "",
		},
		{"input", nftables.TableFamilyINet, drop, nftables.ChainHookInput, nil, 0, ""},
		{
			"maps", nftables.TableFamilyINet, accept, nftables.ChainHookForward, asked, expr.VerdictDrop,
			"inet maps forward (rules that drop or reject)",
		},
		{"passes", nftables.TableFamilyINet, accept, nftables.ChainHookForward, asked, expr.VerdictAccept, ""},
	} {
		n.router.do(t, func() error {
			c, err := nftables.New()
			if err != nil {
				return err
			}
			c.FlushRuleset()
			table := c.AddTable(&nftables.Table{Family: row.family, Name: row.name})
			c.AddChain(&nftables.Chain{
				Name: "forward", Table: table, Type: nftables.ChainTypeFilter, Hooknum: row.hook,
				Priority: nftables.ChainPriorityFilter, Policy: &row.policy,
			})
			verdicts := &nftables.Set{
				Table: table, Name: "verdicts", IsMap: true, KeyType: nftables.TypeIFIndex, DataType: nftables.TypeVerdict,
			}
			element := nftables.SetElement{
				Key: binaryutil.NativeEndian.PutUint32(1), VerdictData: &expr.Verdict{Kind: row.decide},
			}
			if err := c.AddSet(verdicts, []nftables.SetElement{element}); err != nil {
				return err
			}
			if row.rule != nil {
				c.AddRule(&nftables.Rule{
					Table: table, Chain: c.AddChain(&nftables.Chain{Name: "more", Table: table}),
					Exprs: row.rule,
				})
			}
			return c.Flush()
		})
		if row.says == "" {
			assert.Empty(t, advice(r), row.name)
			continue
		}
		assert.Contains(t, advice(r), "do not pass the forward chain, which drops some here: "+row.says+";")
	}
}

func TestWithoutAListenerTPROXYCapturesNothing(t *testing.T) {
	n := newNetwork(t)
	n.router.do(t, func() error {
		return Rules{
			Mode: TPROXY, Interfaces: anywhere, Connected: ConnectedCapture,
			Port: proxyPort,
		}.Apply(t.Context())
	})
	for from, target := range map[string]string{"10.1.0.2:0": "10.2.0.2:80", "[fd01::2]:0": "[fd02::2]:80"} {
		local, seen, err := n.ask(from, target)
		require.NoError(t, err)
		assert.Equal(t, local, seen)
	}
}

func TestOwnPacketsAreNeverCaptured(t *testing.T) {
	n := newNetwork(t)
	targets := make(chan netip.AddrPort, 10)
	n.proxy(t, access.TPROXY, false, targets)
	// The client bears our mark here, standing for a proxy behind this one on
	// the same machine: its packets pass through prerouting marked.
	n.router.do(t, func() error {
		return Rules{
			Mode: TPROXY, Interfaces: anywhere, Connected: ConnectedCapture, Port: proxyPort,
			OwnMark: 0x4,
		}.Apply(t.Context())
	})
	n.router.do(t, func() error { return markFrom("lan", 0x4) })
	local, seen, err := n.ask("10.1.0.2:0", "10.2.0.2:80")
	require.NoError(t, err)
	assert.Equal(t, local, seen)
	assert.Empty(t, targets)
}

func TestOpenConnectionsSurviveTheRules(t *testing.T) {
	for _, mode := range []Mode{TPROXY, Redirect} {
		n := newNetwork(t)
		targets := make(chan netip.AddrPort, 10)
		n.proxy(t, access.Mode(mode), false, targets)
		var ln net.Listener
		n.server.do(t, func() (err error) {
			ln, err = net.Listen("tcp", fmt.Sprintf(":%d", proxyPort)) // the port our listener has, too
			return err
		})
		defer ln.Close()
		var client net.Conn
		n.client.do(t, func() (err error) {
			client, err = net.Dial("tcp", fmt.Sprintf("10.2.0.2:%d", proxyPort))
			return err
		})
		defer client.Close()
		server, err := ln.Accept()
		require.NoError(t, err)
		defer server.Close()

		n.router.do(t, func() error {
			return Rules{
				Mode: mode, Interfaces: anywhere, Connected: ConnectedCapture,
				Port: proxyPort,
			}.Apply(t.Context())
		})
		for range 2 {
			for _, leg := range [][2]net.Conn{{client, server}, {server, client}} {
				_, err = fmt.Fprint(leg[0], "still here")
				require.NoError(t, err)
				require.NoError(t, leg[1].SetDeadline(time.Now().Add(time.Minute)))
				got := make([]byte, 10)
				_, err = io.ReadFull(leg[1], got)
				require.NoError(t, err, "mode %s", mode)
			}
		}
		assert.Empty(t, targets)
	}
}

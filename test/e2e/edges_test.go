//go:build linux

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/internal/netlab"
)

// edgeFiles are what docs/edges.md has routers and edges run.
const edgeFiles = "../../deploy/edges/"

// fleet is several edges between two routers, each with a proxy and a bird.
type fleet struct {
	*routedEdges
	t       *testing.T
	dir     string
	proxies []*program
}

// newFleet builds the network, and has the near router choose an edge by the client's address.
func newFleet(t *testing.T, edges, hosts int) *fleet {
	t.Helper()
	needsPrivilege(t)
	need.Programs(t, "bird", "birdc", "ip", "nft")
	lab, err := newRoutedEdges(edges, hosts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, lab.Close()) })
	f := &fleet{routedEdges: lab, t: t, dir: t.TempDir(), proxies: make([]*program, edges)}
	f.chooses(f.Near, f.EdgeNear, "1", "default", "default") // 1: by source
	f.bird(f.Near, "router.conf", "router id 10.78.0.1;", "define edges = 10.78.0.0/16;")
	for i, edge := range f.Edges {
		f.bird(edge, "edge.conf", fmt.Sprintf("router id 10.88.0.%d;", i+1),
			fmt.Sprintf("define marker = %s;", marker(i)), fmt.Sprintf("define near = %s;", f.NearAddr(i).V4),
			fmt.Sprintf("define far = %s;", f.FarAddr(i).V4))
	}
	return f
}

// marker is what an edge announces.
func marker(edge int) string { return fmt.Sprintf("10.88.0.%d/32", edge+1) }

// background runs a command in a node until the test ends.
func (f *fleet) background(node *netlab.Node, name string, args ...string) {
	f.t.Helper()
	cmd := node.Command(f.t.Context(), name, args...)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(released)+":"+os.Getenv("PATH"), "BIRDC=birdc -s "+f.socket(node))
	said := &need.Output{}
	cmd.Stdout, cmd.Stderr = said, said
	require.NoError(f.t, cmd.Start())
	go func() { _ = cmd.Wait() }()
	f.t.Cleanup(func() {
		if f.t.Failed() && said.String() != "" {
			f.t.Logf("%s %v in %s: %s", name, args, node.Name(), said)
		}
	})
}

// socket is where a node's bird is controlled.
func (f *fleet) socket(node *netlab.Node) string { return filepath.Join(f.dir, node.Name()+".ctl") }

// bird runs bird with a file that has lines of its own in place of those of the same beginning.
func (f *fleet) bird(node *netlab.Node, file string, own ...string) {
	f.t.Helper()
	text, err := os.ReadFile(edgeFiles + file)
	require.NoError(f.t, err)
	lines := strings.Split(string(text), "\n")
	for _, line := range own {
		found := false
		for i := range lines {
			words := strings.Fields(line)
			if strings.HasPrefix(lines[i], words[0]+" "+words[1]+" ") {
				lines[i], found = line, true
			}
		}
		require.True(f.t, found, line)
	}
	path := filepath.Join(f.dir, node.Name()+".conf")
	require.NoError(f.t, os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600))
	f.background(node, "bird", "-f", "-c", path, "-s", f.socket(node), "-P", path+".pid")
}

// do runs commands in a node, one a line.
func (f *fleet) do(node *netlab.Node, script string) {
	f.t.Helper()
	out, err := node.Command(f.t.Context(), "sh", "-exc", script).CombinedOutput()
	require.NoError(f.t, err, "%s", out)
}

// chooses has a router lead what is for two networks to the edges that announce themselves, by the fields that the
// kernel hashes.
func (f *fleet) chooses(router *netlab.Node, edge func(int) netlab.Addrs, fields, v4, v6 string) {
	f.t.Helper()
	for _, family := range []string{"ipv4", "ipv6"} {
		require.NoError(f.t, router.Sysctl("net."+family+".fib_multipath_hash_policy", "3"))
		require.NoError(f.t, router.Sysctl("net."+family+".fib_multipath_hash_fields", fields))
	}
	_ = router.Sysctl("net.ipv4.fib_multipath_hash_seed", "77") // before Linux 6.11 all namespaces have one seed
	var lines string
	for i := range f.Edges {
		lines += fmt.Sprintln(marker(i), edge(i).V4, edge(i).V6, fmt.Sprintf("edge%d", i))
	}
	path := filepath.Join(f.dir, router.Name()+".edges")
	require.NoError(f.t, os.WriteFile(path, []byte(lines), 0o600))
	f.background(router, edgeFiles+"nexthops.sh", path)
	f.background(router, "sh", "-c", fmt.Sprintf("until ip nexthop show id 6 >/dev/null 2>&1; do sleep .1; done; "+
		"ip route add %s nhid 4; ip -6 route add %s nhid 6", v4, v6))
}

// start runs the proxy of an edge.
func (f *fleet) start(edge int, keepClient bool) {
	f.t.Helper()
	w := ways[0]
	if keepClient {
		w = named("tproxy keeping the client's address over IPv4")
	}
	s := &scene{Routed: &netlab.Routed{Lab: f.Lab, Client: f.Client, Edge: f.Edges[edge], Server: f.Server}, t: f.t}
	f.proxies[edge] = s.start(w.yaml(""))
	s.capture(w)
	f.background(f.Edges[edge], edgeFiles+"announce.sh", "--telemetry", telemetryAddr)
}

// awaitEdges waits until a router leads to that many edges.
func (f *fleet) awaitEdges(router *netlab.Node, n int) {
	f.t.Helper()
	require.Eventually(f.t, func() bool {
		out, err := router.Command(f.t.Context(), "sh", "-c", "ip nexthop show id 6; ip -6 route show default; "+
			"ip -6 route show table all").CombinedOutput()
		group, _, _ := strings.Cut(string(out), " type")
		return err == nil && strings.Count(group, "/") == n-1 && strings.Contains(string(out), "nhid 6")
	}, patience, 100*time.Millisecond, "%s does not lead to %d edges", router.Name(), n)
}

// dial connects from an address of the client to the server.
func (f *fleet) dial(from netip.Addr) (net.Conn, error) {
	to := f.ServerAddr().V4
	if from.Is6() {
		to = f.ServerAddr().V6
	}
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from.AsSlice()}, Timeout: patience}
	d.SetMultipathTCP(false)
	conn, err := f.Client.DialWith(context.Background(), &d, "tcp", netip.AddrPortFrom(to, servicePort).String())
	if err == nil {
		f.t.Cleanup(func() { _ = conn.Close() })
	}
	return conn, err
}

// talk has the server answer what it gets.
func talk(conn net.Conn) error {
	_ = conn.SetDeadline(time.Now().Add(patience))
	words := []byte("a line of words")
	if _, err := conn.Write(words); err != nil {
		return err
	}
	_, err := conn.Read(words)
	return err
}

// owners returns the edges that have connections of each client.
func (f *fleet) owners() map[netip.Addr]map[int]bool {
	f.t.Helper()
	all := map[netip.Addr]map[int]bool{}
	for i, p := range f.proxies {
		if p == nil {
			continue
		}
		for _, flow := range p.flows() {
			client := netip.MustParseAddrPort(flow["client"].(string)).Addr().Unmap()
			if all[client] == nil {
				all[client] = map[int]bool{}
			}
			all[client][i] = true
		}
	}
	return all
}

// TestEveryClientMeetsOneEdge has routers choose one of three edges by the client's address. One edge is killed: its
// clients move, and no connection of another edge is lost. It comes back: nothing that is open moves.
func TestEveryClientMeetsOneEdge(t *testing.T) {
	const edges, hosts, each, victim = 3, 24, 2, 1
	for name, tt := range map[string]struct {
		keepClient bool
		back       func(f *fleet) // has the far router lead answers back
		comesBack  bool
	}{
		"the server sees the edge": {comesBack: true},
		"the server sees the client, and answers are led by its address": {true, func(f *fleet) {
			f.chooses(f.Far, f.EdgeFar, "2", "10.77.1.0/24", "fd77:1::/64") // 2: by destination
			f.bird(f.Far, "router.conf", "router id 10.79.0.1;", "define edges = 10.79.0.0/16;")
			f.awaitEdges(f.Near, edges)
			f.awaitEdges(f.Far, edges)
			// Buckets depend on the order in which a router has met the edges, so both groups are made anew.
			for router, to := range map[*netlab.Node][2]string{
				f.Near: {"default", "default"}, f.Far: {"10.77.1.0/24", "fd77:1::/64"},
			} {
				f.do(router, fmt.Sprintf("for f in 4 6; do ip nexthop del id $f; ip nexthop add id $f "+
					"group ${f}1/${f}2/${f}3 type resilient buckets 256 idle_timer 7200; done\n"+
					"ip route add %s nhid 4; ip -6 route add %s nhid 6", to[0], to[1]))
			}
		}, false},
		"the server sees the client, and answers are led by their connection": {true, func(f *fleet) {
			f.do(f.Far, "nft -f "+edgeFiles+"return.nft")
			for i := range f.Edges {
				at := f.EdgeFar(i)
				f.do(f.Far, fmt.Sprintf("for ip in 'ip -4' 'ip -6'; do $ip rule add fwmark %d table %d; done\n"+
					"ip route add 10.77.1.0/24 via %s table %[2]d\nip -6 route add fd77:1::/64 via %[4]s table %[2]d", i+1, 101+i,
					at.V4, at.V6))
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFleet(t, edges, hosts)
			for i := range edges {
				f.start(i, tt.keepClient)
			}
			if tt.back != nil {
				tt.back(f)
			}
			f.awaitEdges(f.Near, edges)
			ln, err := f.Server.Listen("tcp", fmt.Sprintf(":%d", servicePort))
			require.NoError(t, err)
			need.Serve(t, ln, func(conn net.Conn) { _, _ = io.Copy(conn, conn) })

			var clients []netip.Addr
			for _, h := range f.Hosts {
				clients = append(clients, h.V4, h.V6)
			}
			open := map[netip.Addr][]net.Conn{}
			connect := func(from netip.Addr) {
				conn, err := f.dial(from)
				require.NoError(t, err, from)
				require.NoError(t, talk(conn), from)
				open[from] = append(open[from], conn)
			}
			for range each {
				for _, c := range clients {
					connect(c)
				}
			}
			before := f.owners()
			share := [edges]int{}
			for _, c := range clients {
				require.Len(t, before[c], 1, "%s meets several edges: %v", c, before[c])
				for i := range before[c] {
					share[i]++
				}
			}
			for i, n := range share {
				assert.Positive(t, n, "edge %d has no client", i)
			}

			require.NoError(t, f.proxies[victim].cmd.Process.Kill())
			f.proxies[victim].wait()
			f.proxies[victim] = nil
			f.awaitEdges(f.Near, edges-1)
			if tt.keepClient && !tt.comesBack {
				f.awaitEdges(f.Far, edges-1)
			}
			moved := 0
			for _, c := range clients {
				if before[c][victim] {
					open[c] = nil
					moved++
				} else {
					for _, conn := range open[c] {
						assert.NoError(t, talk(conn), "a connection of another edge is lost")
					}
				}
				connect(c)
			}
			after := f.owners()
			for _, c := range clients {
				assert.Len(t, after[c], 1)
				if !before[c][victim] {
					assert.Equal(t, before[c], after[c])
				}
			}
			t.Logf("%v clients each; %d moved, none else", share, moved)
			if !tt.comesBack {
				return
			}
			f.start(victim, tt.keepClient)
			f.awaitEdges(f.Near, edges)
			for _, c := range clients {
				for _, conn := range open[c] {
					assert.NoError(t, talk(conn), "a connection is lost when an edge comes back")
				}
				connect(c)
			}
			assert.Equal(t, after, f.owners(), "clients with open connections stay")
		})
	}
}

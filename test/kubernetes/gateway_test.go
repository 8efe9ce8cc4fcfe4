//go:build linux

package kubernetes

import (
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/access"
)

// balancer is the address that a load balancer of the cloud would give the gateway.
const balancer = "198.51.100.53"

// balance is the load balancer: it says its address, and leads to the node that has the pod.
func (s *session) balance() {
	s.t.Helper()
	s.kubectl("-n", "penstock", "patch", "service", "penstock-gateway", "--subresource=status", "--type=merge", "-p",
		`{"status":{"loadBalancer":{"ingress":[{"ip":"`+balancer+`"}]}}}`)
	var to *node
	s.await("the gateway's node", time.Minute, func() (err error) {
		to, err = s.findGateway()
		return err
	})
	require.NoError(s.t, s.cluster.outside.Do(func() error {
		return netlink.RouteReplace(&netlink.Route{
			Dst: &net.IPNet{IP: net.ParseIP(balancer).To4(), Mask: net.CIDRMask(32, 32)}, Gw: net.ParseIP(to.ip),
		})
	}))
}

func (s *session) findGateway() (*node, error) {
	name, err := s.tryKubectl("-n", "penstock", "get", "pods", "-l", "app.kubernetes.io/name=penstock-gateway", "-o",
		`go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{.spec.nodeName}}{{end}}{{end}}`)
	for _, n := range s.nodes {
		if n.Name() == name {
			return n, err
		}
	}
	if err == nil {
		err = os.ErrNotExist
	}
	return nil, err
}

func (s *session) gatewayNode() *node {
	s.t.Helper()
	n, err := s.findGateway()
	require.NoError(s.t, err)
	return n
}

// addPeer lets a peer in, as the head of gateway.yaml says, and returns what it was given.
func (s *session) addPeer(dir, name string) (conf string) {
	s.t.Helper()
	conf, err := s.program("", "penstock", "gateway", "peer", "add", name, "--config", filepath.Join(dir, "penstock.yaml"),
		"--endpoint", balancer, "--allowed-ips", serverAddr+"/32", "--no-qr")
	require.NoError(s.t, err)
	return conf
}

// publish makes the Secret what the files are.
func (s *session) publish(dir string) {
	s.t.Helper()
	secret := s.kubectl("-n", "penstock", "create", "secret", "generic", "penstock-gateway",
		"--from-file="+filepath.Join(dir, "vpn.key"), "--from-file="+filepath.Join(dir, "peers.conf"),
		"--dry-run=client", "-o", "json")
	_, err := s.program(secret, "kubectl", "apply", "-f", "-")
	require.NoError(s.t, err)
}

// peer is a client at the far end of a tunnel, which its configuration describes.
func (s *session) peer(name string, number int, conf string) client {
	s.t.Helper()
	of := map[string]string{}
	for line := range strings.Lines(conf) {
		key, value, _ := strings.Cut(line, "=")
		of[strings.TrimSpace(key)] = strings.TrimSpace(value)
	}
	parse := func(text string) access.Key {
		k, err := access.ParseKey(text)
		require.NoError(s.t, err)
		return k
	}
	n := s.join(name, number)
	address, _, _ := strings.Cut(of["Address"], ",")
	w, err := n.WireGuard(netlab.WireGuardConfig{
		Device: "wg0", MTU: 1420, Addrs: []netip.Prefix{netip.MustParsePrefix(address)}, PrivateKey: parse(of["PrivateKey"]),
		Peers: []netlab.WireGuardPeer{{
			PublicKey: parse(of["PublicKey"]), Endpoint: netip.MustParseAddrPort(of["Endpoint"]),
			Allowed: []netip.Prefix{netip.MustParsePrefix(of["AllowedIPs"])},
		}},
	})
	require.NoError(s.t, err)
	s.tunnels = append(s.tunnels, w)
	return at(n.Node)
}

func (s *session) installGateway() {
	dir := filepath.Join(place, "gateway")
	require.NoError(s.t, os.Mkdir(dir, 0o700))
	_, err := s.program("", "penstock", "gateway", "init", filepath.Join(dir, "penstock.yaml"))
	require.NoError(s.t, err)
	phone := s.addPeer(dir, "phone")
	s.publish(dir)
	s.install("gateway", "penstock")
	s.phone = s.peer("phone", 8, phone)
	s.t.Logf("download of %d MiB through the gateway: %.2f s, hash right", len(body)>>20, s.download(s.phone, len(body))())

	laptop := s.addPeer(dir, "laptop")
	s.publish(dir)
	began := time.Now()
	pods := s.pods("penstock", "penstock-gateway")
	require.Len(s.t, pods, 1)
	s.await("the new peer", 3*time.Minute, func() error {
		if s.logged("penstock", pods[0], `"configuration reloaded","by":"file"`) == 0 {
			return os.ErrNotExist
		}
		return nil
	})
	s.t.Logf("a peer in the Secret: let in after %.1f s", time.Since(began).Seconds())
	s.download(s.peer("laptop", 9, laptop), 1<<20)()
	assert.Equal(s.t, 2, s.logged("penstock", pods[0], `"flow closed".*"listener":"vpn"`))
}

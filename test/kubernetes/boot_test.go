//go:build linux

package kubernetes

import (
	"context"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/certs"
	"github.com/penstock-net/penstock/internal/netlab"
)

const (
	services   = "10.96.0.0/16"
	pods       = "10.244.0.0/16"
	serverAddr = "198.51.100.1" // what a proxy for the world does not take for an inside address
	nodeCount  = 2
)

// cluster is the control plane and its nodes.
type cluster struct {
	t       *testing.T
	lab     *netlab.Lab
	outside *netlab.Node
	nodes   []*node
	ca      *certs.Authority
}

// node is a machine of the cluster.
type node struct {
	*netlab.Node
	number int
	ip     string
	dir    string // what its programs keep
}

func (n *node) path(elem ...string) string { return filepath.Join(append([]string{n.dir}, elem...)...) }

// socket is the container runtime's; paths of sockets are short.
func (n *node) socket() string { return "/run/" + n.Name() + "/containerd.sock" }

// boot starts all programs and returns once each node takes pods.
func boot(t *testing.T) *cluster {
	c := &cluster{t: t, lab: netlab.New(), ca: certs.NewAuthority()}
	t.Cleanup(func() { assert.NoError(t, c.lab.Close()) })
	c.connect()
	c.credentials()
	archives := []string{}
	for i, image := range images() {
		to := filepath.Join(place, fmt.Sprintf("image%d.tar", i))
		image.archive(t, to)
		archives = append(archives, to)
	}

	began := time.Now()
	first := c.nodes[0]
	c.start(first, "etcd", "--data-dir", filepath.Join(place, "etcd"), "--log-level", "warn")
	for _, n := range c.nodes {
		c.startRuntime(n)
	}
	c.startAPIServer(first)
	for _, n := range c.nodes {
		c.importImages(n, archives)
	}
	c.await("the API server", time.Minute, func() error {
		_, err := c.tryKubectl("get", "--raw", "/readyz")
		return err
	})
	for name, more := range map[string][]string{
		"kube-scheduler": nil,
		"kube-controller-manager": {
			"--service-account-private-key-file", c.file("accounts.key"), "--root-ca-file", c.file("ca.crt"),
			"--use-service-account-credentials",
		},
	} {
		who := c.file(name + ".kubeconfig")
		c.start(first, name, append(more, "--kubeconfig", who, "--authentication-kubeconfig", who,
			"--authorization-kubeconfig", who, "--leader-elect=false", "--bind-address=127.0.0.1",
			"--cert-dir", first.dir)...)
	}
	c.kubectl("create", "clusterrolebinding", "kube-proxy", "--clusterrole=system:node-proxier",
		"--user=system:kube-proxy")
	for _, n := range c.nodes {
		c.startNode(n)
	}
	c.await("the nodes", time.Minute, func() error {
		_, err := c.tryKubectl("wait", "--for=condition=Ready", "node", "node1", "node2", "--timeout=1s")
		return err
	})
	c.await("the account of pods", time.Minute, func() error {
		_, err := c.tryKubectl("get", "serviceaccount", "default")
		return err
	})
	t.Logf("%s, %d nodes: ready in %.1f s", c.kubectl("get", "node", "node1", "-o",
		"jsonpath={.status.nodeInfo.kubeletVersion}"),
		nodeCount, time.Since(began).Seconds())
	return c
}

// connect makes the network: each node and the phone have a way to outside, and the
// nodes to one another through it.
func (c *cluster) connect() {
	var err error
	c.outside, err = c.lab.Node("outside")
	require.NoError(c.t, err)
	require.NoError(c.t, c.outside.Forward())
	require.NoError(c.t, c.outside.Address("lo", netip.MustParsePrefix(serverAddr+"/32")))
	for i := 1; i <= nodeCount; i++ {
		n := c.join(fmt.Sprintf("node%d", i), i)
		require.NoError(c.t, n.Forward())
		require.NoError(c.t, c.outside.Route(netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", i)),
			netip.MustParseAddr(n.ip)))
		c.nodes = append(c.nodes, n)
	}
	// Services are the last node's to translate, which is not the one to be drained.
	require.NoError(c.t, c.outside.Route(netip.MustParsePrefix(services), netip.MustParseAddr(c.nodes[1].ip)))
}

// join makes a node with a way to outside.
func (c *cluster) join(name string, number int) *node {
	c.t.Helper()
	made, err := c.lab.Node(name)
	require.NoError(c.t, err)
	n := &node{Node: made, number: number, ip: fmt.Sprintf("10.99.%d.1", number), dir: filepath.Join(place, name)}
	require.NoError(c.t, os.MkdirAll(n.dir, 0o755)) //nolint:gosec // containers of other users look into it
	require.NoError(c.t, os.MkdirAll(filepath.Dir(n.socket()), 0o700))
	via := fmt.Sprintf("10.99.%d.2", number)
	require.NoError(c.t, c.lab.Veth(
		netlab.End{Node: made, Device: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix(n.ip + "/24")}},
		netlab.End{Node: c.outside, Device: name, Addrs: []netip.Prefix{netip.MustParsePrefix(via + "/24")}}))
	require.NoError(c.t, made.Route(netip.Prefix{}, netip.MustParseAddr(via)))
	return n
}

func (c *cluster) file(name string) string { return filepath.Join(place, "credentials", name) }

// credentials makes the certificate and the kubeconfig of each program.
func (c *cluster) credentials() {
	require.NoError(c.t, os.MkdirAll(filepath.Join(place, "credentials"), 0o700))
	write := func(name, text string) {
		require.NoError(c.t, os.WriteFile(c.file(name), []byte(text), 0o600))
	}
	write("ca.crt", c.ca.PEM())
	issue := func(name string, subject pkix.Name, names ...string) {
		certificate, key := certs.PEM(c.ca.IssueTo(subject, names...))
		write(name+".crt", certificate)
		write(name+".key", key)
		text, err := json.Marshal(map[string]any{
			"apiVersion": "v1", "kind": "Config", "current-context": "it",
			"contexts": []any{map[string]any{"name": "it", "context": map[string]string{"cluster": "it", "user": "it"}}},
			"clusters": []any{map[string]any{"name": "it", "cluster": map[string]string{
				"server":                     "https://" + c.nodes[0].ip + ":6443",
				"certificate-authority-data": base64.StdEncoding.EncodeToString([]byte(c.ca.PEM())),
			}}},
			"users": []any{map[string]any{"name": "it", "user": map[string]string{
				"client-certificate-data": base64.StdEncoding.EncodeToString([]byte(certificate)),
				"client-key-data":         base64.StdEncoding.EncodeToString([]byte(key)),
			}}},
		})
		require.NoError(c.t, err)
		write(name+".kubeconfig", string(text))
	}
	issue("apiserver", pkix.Name{CommonName: "kube-apiserver"}, c.nodes[0].ip, "127.0.0.1", "10.96.0.1")
	issue("accounts", pkix.Name{CommonName: "service accounts"})
	issue("admin", pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}})
	for _, name := range []string{"kube-controller-manager", "kube-scheduler", "kube-proxy"} {
		issue(name, pkix.Name{CommonName: "system:" + name})
	}
	for _, n := range c.nodes {
		issue(n.Name(), pkix.Name{CommonName: "system:node:" + n.Name(), Organization: []string{"system:nodes"}},
			n.ip, n.Name())
	}
}

// start runs a program on a node until the test ends. What it says is in a file, whose
// end a failed test shows.
func (c *cluster) start(n *node, name string, args ...string) {
	c.t.Helper()
	program := filepath.Join(place, "bin", name)
	if _, err := os.Stat(program); err != nil {
		program = name // the system's
	}
	said, err := os.Create(n.path(name + ".log"))
	require.NoError(c.t, err)
	cmd := n.Command(context.Background(), program, args...)
	cmd.Stdout, cmd.Stderr = said, said
	require.NoError(c.t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		err := <-ended
		_ = said.Close()
		if text, _ := os.ReadFile(said.Name()); c.t.Failed() { // then there is nothing to show
			c.t.Logf("%s on %s (%v):\n%s", name, n.Name(), err, lastLines(string(text), 5))
		}
	})
}

func lastLines(text string, n int) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// await asks until there is no error.
func (c *cluster) await(what string, within time.Duration, ask func() error) {
	c.t.Helper()
	until := time.Now().Add(within)
	for {
		err := ask()
		if err == nil {
			return
		}
		if time.Now().After(until) {
			require.NoError(c.t, err, "waited %v for %s", within, what)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

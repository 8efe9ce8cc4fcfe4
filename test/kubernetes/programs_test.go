//go:build linux

package kubernetes

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
)

// startRuntime starts containerd, with the point-to-point network of the CNI plugins.
func (c *cluster) startRuntime(n *node) {
	c.t.Helper()
	network := map[string]any{
		"cniVersion": "0.4.0", "name": "pods", "plugins": []any{
			map[string]any{"type": "ptp", "ipMasq": true, "ipam": map[string]any{
				"type": "host-local", "dataDir": n.path("addresses"),
				"ranges": []any{[]any{map[string]string{"subnet": fmt.Sprintf("10.244.%d.0/24", n.number)}}},
				"routes": []any{map[string]string{"dst": "0.0.0.0/0"}},
			}},
			map[string]any{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}},
		},
	}
	require.NoError(c.t, os.Mkdir(n.path("cni"), 0o700))
	c.write(n.path("cni", "pods.conflist"), network)
	// restrict_oom_score_adj: a machine may forbid scores below its own.
	config := fmt.Sprintf(`version = 2
root = %q
state = "/run/%s/containerd"
[grpc]
  address = %q
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = %q
[plugins."io.containerd.internal.v1.opt"]
  path = %q
`, n.path("containerd"), n.Name(), n.socket(), podImage, n.path("cni"), n.path("opt"))
	require.NoError(c.t, os.WriteFile(n.path("containerd.toml"), []byte(config), 0o600))
	c.start(n, "containerd", "--config", n.path("containerd.toml"))
}

func (c *cluster) importImages(n *node, archives []string) {
	c.t.Helper()
	c.await("containerd", time.Minute, func() error {
		return n.Command(context.Background(), "ctr", "-a", n.socket(), "version").Run()
	})
	for _, a := range archives {
		out, err := n.Command(context.Background(), "ctr", "-a", n.socket(), "-n", "k8s.io", "images", "import",
			a).CombinedOutput()
		require.NoError(c.t, err, "%s", out)
	}
}

func (c *cluster) startAPIServer(n *node) {
	c.t.Helper()
	c.start(n, "kube-apiserver", "--advertise-address", n.ip, "--etcd-servers=http://127.0.0.1:2379",
		"--service-cluster-ip-range", services, "--authorization-mode=Node,RBAC", "--allow-privileged",
		"--cert-dir", n.dir, "--client-ca-file", c.file("ca.crt"), "--requestheader-client-ca-file", c.file("ca.crt"),
		"--tls-cert-file", c.file("apiserver.crt"), "--tls-private-key-file", c.file("apiserver.key"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file", c.file("accounts.crt"),
		"--service-account-signing-key-file", c.file("accounts.key"),
		"--kubelet-client-certificate", c.file("admin.crt"), "--kubelet-client-key", c.file("admin.key"),
		"--kubelet-certificate-authority", c.file("ca.crt"), "--kubelet-preferred-address-types=InternalIP")
}

// startNode starts what makes a machine a node.
func (c *cluster) startNode(n *node) {
	c.t.Helper()
	who := c.file(n.Name() + ".kubeconfig")
	c.write(n.path("kubelet.yaml"), map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"authentication": map[string]any{
			"anonymous": map[string]bool{"enabled": false}, "x509": map[string]string{"clientCAFile": c.file("ca.crt")},
		},
		"tlsCertFile": c.file(n.Name() + ".crt"), "tlsPrivateKeyFile": c.file(n.Name() + ".key"),
		"cgroupDriver": "cgroupfs", "cgroupRoot": os.Getenv("PENSTOCK_KUBERNETES_CGROUP") + "/" + n.Name(),
		"failCgroupV1": false, "failSwapOn": false, "containerRuntimeEndpoint": "unix://" + n.socket(),
		"resolvConf": "", "maxOpenFiles": 20000, "podLogsDir": n.path("logs"), "volumePluginDir": n.path("plugins"),
		"syncFrequency": syncFrequency.String(), // a minute otherwise
		// The disk is this machine's, and others fill it.
		"evictionHard": map[string]string{"memory.available": "100Mi"}, "imageGCHighThresholdPercent": 100,
	})
	c.start(n, "kubelet", "--config", n.path("kubelet.yaml"), "--kubeconfig", who, "--hostname-override", n.Name(),
		"--node-ip", n.ip, "--root-dir", n.path("kubelet"), "--cert-dir", n.dir)
	c.write(n.path("kube-proxy.yaml"), map[string]any{
		"apiVersion": "kubeproxy.config.k8s.io/v1alpha1", "kind": "KubeProxyConfiguration", "mode": "iptables",
		"clientConnection": map[string]string{"kubeconfig": c.file("kube-proxy.kubeconfig")},
		"clusterCIDR":      pods, "hostnameOverride": n.Name(),
		"conntrack": map[string]int{"maxPerCore": 0, "min": 0}, // which is the whole machine's
	})
	c.start(n, "kube-proxy", "--config", n.path("kube-proxy.yaml"))
}

// syncFrequency is how often kubelets look after mounted ConfigMaps.
const syncFrequency = 10 * time.Second

func (c *cluster) write(path string, what any) {
	c.t.Helper()
	text, err := json.Marshal(what)
	require.NoError(c.t, err)
	require.NoError(c.t, os.WriteFile(path, text, 0o600))
}

// program runs one of ours outside of the cluster.
func (c *cluster) program(stdin, name string, args ...string) (string, error) {
	cmd := c.outside.Command(context.Background(), place+"/bin/"+name, args...)
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.file("admin.kubeconfig"), "HOME="+place)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, lastLines(said.String(), 5))
	}
	return strings.TrimSpace(string(out)), err
}

func (c *cluster) tryKubectl(args ...string) (string, error) {
	return c.program("", "kubectl", args...)
}

func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	out, err := c.tryKubectl(args...)
	require.NoError(c.t, err)
	return out
}

func (c *cluster) helm(args ...string) string {
	c.t.Helper()
	out, err := c.program("", "helm", args...)
	require.NoError(c.t, err)
	return out
}

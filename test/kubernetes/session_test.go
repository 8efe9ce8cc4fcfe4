//go:build linux

package kubernetes

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/netlab"
)

// session is what the steps of the test share.
type session struct {
	*cluster
	outside client
	inside  client // a pod on the node that is not drained
	socks   string // the flag for the proxy
	phone   client // a peer of the gateway
	tunnels []*netlab.WireGuard
}

// install installs a form of the chart.
func (s *session) install(form, namespace string, more ...string) {
	s.t.Helper()
	began := time.Now()
	s.helm(append([]string{
		"install", form, chart, "--namespace", namespace, "--set", "form=" + form + ",image=" + penstockImage,
	}, more...)...)
	workload := map[string]string{
		"proxy": "deployment/penstock", "gateway": "deployment/penstock-gateway", "edge": "daemonset/penstock-edge",
	}[form]
	if form == "gateway" {
		s.balance()
	}
	s.kubectl("-n", namespace, "rollout", "status", workload, "--timeout=60s")
	s.t.Logf("helm install, form %s: ready in %.1f s", form, time.Since(began).Seconds())
}

func (s *session) namespace(name, security string) {
	s.t.Helper()
	s.kubectl("create", "namespace", name)
	s.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce="+security)
}

// pods are those of a form that are not about to go.
func (s *session) pods(namespace, app string) []string {
	s.t.Helper()
	lines := s.kubectl("-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name="+app, "-o",
		`go-template={{range .items}}{{if not .metadata.deletionTimestamp}}{{.metadata.name}}{{"\n"}}{{end}}{{end}}`)
	return strings.Fields(lines)
}

// gone waits until none of these pods is there.
func (s *session) gone(namespace string, pods []string) {
	s.t.Helper()
	for _, pod := range pods {
		s.kubectl("-n", namespace, "wait", "--for=delete", "pod/"+pod, "--timeout=90s")
	}
}

// logged counts the lines in a pod's log that match.
func (s *session) logged(namespace, pod, pattern string) int {
	s.t.Helper()
	log := s.kubectl("-n", namespace, "logs", pod)
	return len(regexp.MustCompile("(?m)"+pattern).FindAllString(log, -1))
}

func (s *session) installProxy() {
	s.namespace("penstock", "restricted")
	s.install("proxy", "penstock")
	address := s.kubectl("-n", "penstock", "get", "service", "penstock", "-o", "jsonpath={.spec.clusterIP}")
	s.socks = "-proxy=socks5://" + address + ":1080"
	s.inside = s.clientPod(s.nodes[1])
	for who, at := range map[string]client{"a pod": s.inside, "outside": s.outside} {
		s.t.Logf("download of %d MiB through the proxy from %s: %.2f s, hash right", len(body)>>20, who,
			s.download(at, len(body), s.socks)())
	}
	refused := s.begin(s.outside, "fetch", s.socks, "http://"+s.nodes[0].ip+":6443/")
	_ = refused.stdin.Close()
	assert.Error(s.t, refused.cmd.Wait(), "the API server is not this proxy's to give away")
	flows := 0
	for _, pod := range s.pods("penstock", "penstock") {
		flows += s.logged("penstock", pod, `"flow closed".*"listener":"cluster"`)
	}
	assert.GreaterOrEqual(s.t, flows, 2)
}

const proxyConfiguration = `
listeners:
  - {name: cluster, mode: mixed, address: "0.0.0.0:1080"}
telemetry: {address: "0.0.0.0:9464", health: "0.0.0.0:9465"}
shutdown: {delay: 5s, drain: 30s}
`

func (s *session) changeConfiguration() {
	before := s.pods("penstock", "penstock")
	whole := s.download(s.inside, 48<<20, s.socks, "-rate=1500000")
	change := func(name, text, successful string) {
		file := filepath.Join(place, name+".yaml")
		require.NoError(s.t, os.WriteFile(file, []byte(text), 0o600))
		s.helm("upgrade", "proxy", chart, "--namespace", "penstock", "--reuse-values", "--set-file", "config="+file)
		began := time.Now()
		for _, pod := range before {
			s.await("the ConfigMap", 3*time.Minute, func() error {
				metrics, err := s.tryKubectl("get", "--raw", "/api/v1/namespaces/penstock/pods/"+pod+":9464/proxy/metrics")
				if err != nil {
					return err
				}
				if !strings.Contains(metrics, "\npenstock_config_last_reload_successful "+successful+"\n") {
					return fmt.Errorf("%s has not taken it", pod)
				}
				return nil
			})
		}
		s.t.Logf("%s ConfigMap: seen by all pods after %.1f s (kubelets look each %v)", name, time.Since(began).Seconds(),
			syncFrequency)
	}
	change("broken", proxyConfiguration+"defaults: {algorithm: nonsense}\n", "0")
	s.download(s.inside, 1<<20, s.socks)()
	change("good", proxyConfiguration+"defaults: {algorithm: copa}\n", "1")
	s.t.Logf("a download that was open all the time: whole after %.1f s", whole())
	assert.ElementsMatch(s.t, before, s.pods("penstock", "penstock"), "no pod was replaced")
	for _, pod := range before {
		assert.Equal(s.t, 1, s.logged("penstock", pod, `"configuration not reloaded","by":"file"`))
		assert.Equal(s.t, 1, s.logged("penstock", pod, `"configuration reloaded","by":"file"`))
	}
}

func (s *session) rollOut() {
	before := s.pods("penstock", "penstock")
	outside := s.knock("from outside", s.outside, s.socks)
	inside := s.knock("from a pod", s.inside, s.socks)
	whole := s.download(s.inside, 40<<20, s.socks, "-rate=2000000")
	began := time.Now()
	s.kubectl("-n", "penstock", "rollout", "restart", "deployment/penstock")
	s.kubectl("-n", "penstock", "rollout", "status", "deployment/penstock", "--timeout=90s")
	rolled := time.Since(began)
	s.gone("penstock", before)
	s.t.Logf("roll-out: new pods ready after %.1f s, old ones gone after %.1f s", rolled.Seconds(),
		time.Since(began).Seconds())
	outside()
	inside()
	s.t.Logf("a download that began before: whole after %.1f s", whole())
}

// drain empties the node on which the gateway is.
func (s *session) drain() {
	from := s.gatewayNode()
	inside := s.knock("from a pod", s.inside, s.socks)
	outside := s.knock("from outside", s.outside, s.socks)
	whole := s.download(s.inside, 40<<20, s.socks, "-rate=2000000")
	began := time.Now()
	s.kubectl("drain", from.Name(), "--ignore-daemonsets", "--timeout=120s")
	s.t.Logf("drain of %s: %.1f s", from.Name(), time.Since(began).Seconds())
	s.kubectl("-n", "penstock", "rollout", "status", "deployment/penstock-gateway", "--timeout=60s")
	assert.NotEqual(s.t, from, s.gatewayNode())
	s.balance()
	s.download(s.phone, 1<<20)()
	s.t.Logf("the gateway's peer is back %.1f s after the drain began, by itself", time.Since(began).Seconds())
	inside()
	outside()
	s.t.Logf("a download that began before: whole after %.1f s", whole())
	s.kubectl("uncordon", from.Name())
}

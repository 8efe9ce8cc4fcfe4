//go:build linux

package kubernetes

import (
	"strings"
	"testing"
	"time"
)

const chart = "../../deploy/kubernetes"

// TestCluster does in order what an operator does with the three forms.
func TestCluster(t *testing.T) {
	c := boot(t)
	c.serve()
	s := &session{cluster: c, outside: at(c.outside)}
	t.Cleanup(func() {
		for _, w := range s.tunnels {
			w.Close()
		}
	})
	for _, step := range []struct {
		name string
		do   func()
	}{
		{"the proxy is installed", s.installProxy},
		{"a ConfigMap changes", s.changeConfiguration},
		{"the proxy is rolled out", s.rollOut},
		{"the gateway is installed", s.installGateway},
		{"a node is drained", s.drain},
		{"the edge is installed", s.installEdge},
		{"the edge is rolled out", s.rollOutEdge},
		{"all is removed", s.remove},
	} {
		began := time.Now()
		if !t.Run(step.name, func(t *testing.T) {
			c.t = t
			step.do()
		}) {
			c.t = t
			c.explain()
			break // the next step goes on from here
		}
		c.t = t
		t.Logf("%s: done in %.1f s", step.name, time.Since(began).Seconds())
	}
}

// explain shows what a failed step leaves.
func (c *cluster) explain() {
	for _, ask := range [][]string{
		{"get", "pods", "-A", "-o", "wide"},
		{"get", "events", "-A", "--sort-by=.lastTimestamp"},
		{"-n", "penstock", "logs", "--all-containers", "--prefix", "--tail=20", "-l", "app.kubernetes.io/name"},
		{"-n", "edge", "logs", "--all-containers", "--prefix", "--tail=20", "-l", "app.kubernetes.io/name"},
	} {
		out, err := c.tryKubectl(ask...)
		c.t.Logf("kubectl %s (%v):\n%s", strings.Join(ask, " "), err, lastLines(out, 60))
	}
}

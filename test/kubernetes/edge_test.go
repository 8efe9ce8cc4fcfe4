//go:build linux

package kubernetes

import (
	"context"
	"fmt"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func (s *session) installEdge() {
	s.namespace("edge", "privileged")
	s.install("edge", "edge")
	captured := s.captured()
	s.t.Logf("download of %d MiB that the edge captures: %.2f s, hash right", len(body)>>20,
		s.download(s.inside, len(body))())
	s.await("the flow's line", time.Minute, func() error { return s.capturedSince(captured) })
	for _, pod := range s.pods("edge", "penstock-edge") {
		assert.Equal(s.t, 1, s.logged("edge", pod, `"msg":"datapath".*"envelope":"ebpf"`), "the kernel holds the windows")
	}
	s.t.Logf("through both, the proxy and the edge: %.2f s", s.download(s.inside, len(body), s.socks)())
}

func (s *session) capturedSince(before int) error {
	if n := s.captured(); n <= before {
		return fmt.Errorf("the edges have relayed %d connections, as before", n)
	}
	return nil
}

// captured counts the connections that the edges have relayed.
func (s *session) captured() (flows int) {
	s.t.Helper()
	for _, pod := range s.pods("edge", "penstock-edge") {
		flows += s.logged("edge", pod, `"flow closed".*"listener":"pods"`)
	}
	return flows
}

func (s *session) rollOutEdge() {
	before := s.pods("edge", "penstock-edge")
	none := s.knock("from a pod", s.inside)
	whole := s.download(s.inside, 40<<20, "-rate=2000000")
	began := time.Now()
	s.kubectl("-n", "edge", "rollout", "restart", "daemonset/penstock-edge")
	s.kubectl("-n", "edge", "rollout", "status", "daemonset/penstock-edge", "--timeout=180s")
	s.gone("edge", before)
	s.t.Logf("roll-out of the edge: %.1f s", time.Since(began).Seconds())
	none()
	s.t.Logf("a download that began before: whole after %.1f s", whole())
	for _, pod := range s.pods("edge", "penstock-edge") {
		assert.Equal(s.t, 1, s.logged("edge", pod, `"msg":"taken over"`), "from the pod before it on its node")
	}
	again := s.captured()
	s.download(s.inside, 1<<20)()
	s.await("the flow's line", time.Minute, func() error { return s.capturedSince(again) })
}

func (s *session) remove() {
	for release, namespace := range map[string]string{"proxy": "penstock", "gateway": "penstock", "edge": "edge"} {
		s.helm("uninstall", release, "--namespace", namespace, "--wait")
	}
	for _, n := range s.nodes {
		tables := func() string {
			out, err := n.Command(context.Background(), "nft", "list", "tables").CombinedOutput()
			require.NoError(s.t, err, "%s", out)
			return string(out)
		}
		assert.Contains(s.t, tables(), "table inet penstock\n", "rules stay until they are removed")
		require.NoError(s.t, n.Command(context.Background(), place+"/bin/penstock", "rules", "remove").Run())
		assert.NotContains(s.t, tables(), "table inet penstock\n")
	}
	s.download(s.inside, 1<<20)()
}

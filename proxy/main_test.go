package proxy_test

import (
	"fmt"
	"iter"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(peerEnv); role != "" {
		if err := runPeer(strings.Fields(role)); err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			os.Exit(1)
		}
		return
	}
	need.ResolveLoopbackName()
	os.Exit(need.Run(m))
}

// flowsOf returns the live connections, oldest first.
func flowsOf(s interface {
	Flows() (int, iter.Seq[*proxy.FlowInfo])
},
) (flows []proxy.FlowInfo) {
	_, each := s.Flows()
	for f := range each {
		f := *f
		f.Down.Control, f.Up.Control = slices.Clone(f.Down.Control), slices.Clone(f.Up.Control)
		flows = append(flows, f)
	}
	return flows
}

package proxy_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/penstock-net/penstock/internal/need"
)

func TestMain(m *testing.M) {
	if role := os.Getenv(peerEnv); role != "" {
		if err := runPeer(strings.Fields(role)); err != nil {
			fmt.Fprintln(os.Stderr, "peer:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(need.Run(m))
}

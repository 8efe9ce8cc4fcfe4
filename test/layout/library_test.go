package layout

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// TestTheLibraryBringsNoDaemon lists all that a program gets with package alcc, and a phone with alcc/mobile.
func TestTheLibraryBringsNoDaemon(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", module+"/alcc", module+"/alcc/mobile",
		module+"/cmd/penstock-relay").Output()
	require.NoError(t, err)
	banned := []string{
		module + "/proxy", module + "/proxy/config", module + "/proxy/policy", module + "/proxy/capture",
		module + "/proxy/ingress", module + "/proxy/tunnel/...", module + "/telemetry/...",
		"github.com/prometheus/...", "github.com/spf13/...", "github.com/goccy/...", "gvisor.dev/...",
		"github.com/quic-go/...", "github.com/vishvananda/...", "github.com/google/nftables/...",
	}
	for dep := range strings.FieldsSeq(string(out)) {
		assert.False(t, matchesAny(banned, dep), dep)
	}
}

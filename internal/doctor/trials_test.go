package doctor

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/internal/need"
)

// Rules that can neither be applied nor removed, as where the kernel has no nftables, are
// a failure of theirs: devices are tried all the same, and nobody hears that there are no
// namespaces.
func TestATrialThatFailsLeavesTheOthers(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	trials, err := tryInNamespace(ended)
	if errors.Is(err, unix.EPERM) {
		need.Namespaces(t, err)
	}
	require.NoError(t, err)
	assert.Len(t, trials, 7)
	assert.Equal(t, "capture: context canceled", trials["tproxy_rules_ipv4"].Failed)
	assert.Contains(t, trials, "tun")

	rules := facts{trials: trials}.judgeRules("tproxy", false)
	assert.Equal(t, Missing, rules.State)
	assert.Contains(t, rules.Fix, "nft_tproxy")
}

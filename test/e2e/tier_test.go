//go:build linux

package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// tier is who keeps the windows of the kernel datapath. All tests run
// once over each.
type tier struct {
	name     string
	about    string
	envelope string
	command  []string     // put in front of the program
	missing  func() error // why it cannot be had here; nil: it can always
	holder   string       // of the windows, as the program names it
	shipped  bool         // the program as it is shipped, which drops its privileges
}

var tiers = []tier{
	{
		name: "ebpf", about: "the kernel enforces the windows", envelope: kernel.EBPF,
		missing: bpf.Check, holder: "kernel", shipped: true,
	},
	{
		name: "bbr", about: "the relay keeps the windows, above bbr's", envelope: "bbr",
		holder: "relay",
	},
	{
		name: "unprivileged", about: "an ordinary user's program chooses by itself", envelope: "auto",
		command: []string{
			"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all",
			"--inh-caps=-all",
		},
		missing: need.OtherUsers, holder: "relay",
	},
}

// present is the tier that the tests run over now, and turn how many have had
// theirs before.
var (
	present tier
	turn    int
)

// onlyTier is the variable that picks one tier by its name.
const onlyTier = "PENSTOCK_E2E_TIER"

// eachTier runs all tests over one tier after the other.
func eachTier(run func() int) (code int) {
	only := os.Getenv(onlyTier)
	found := false
	for _, present = range tiers {
		if only != "" && only != present.name {
			continue
		}
		found = true
		if present.missing != nil {
			if err := present.missing(); err != nil {
				fmt.Printf("SKIPPED: all tests of tier %s (%s): %v\n", present.name, present.about, err)
				continue
			}
		}
		executable = racing
		if present.shipped {
			executable = released
		}
		fmt.Printf("=== TIER  %s: %s\n", present.name, present.about)
		code = max(code, run())
		turn++
	}
	if !found {
		fmt.Printf("%s=%q: there is no such tier\n", onlyTier, only)
		return 1
	}
	return code
}

// privileged tells whether the program may do all that root may.
func (t tier) privileged() bool { return t.command == nil }

// way is one that the tier has.
func (t tier) way() way {
	if t.privileged() {
		return ways[0]
	}
	return ways[9]
}

// check checks that a program has found the tier that it was to find.
func (t tier) check(p *program) {
	p.t.Helper()
	require.Equal(p.t, t.holder, p.announced("windows_held_by"))
	if !t.privileged() {
		require.Contains(p.t, p.announced("why"), "CAP_BPF", "whoever may load nothing is told what is missing")
	}
}

// configure adds the tier to a configuration that leaves it open.
func (t tier) configure(config string) string {
	if strings.Contains(config, "envelope:") {
		return config
	}
	return config + "envelope: " + t.envelope + "\n"
}

// onceIsEnough skips a test that has nothing to do with windows from the second
// tier on.
func onceIsEnough(t *testing.T) {
	t.Helper()
	if turn > 0 {
		t.Skip("has nothing to do with windows, and ran over the tier before")
	}
}

// needsHeld skips a test of what the kernel does with our windows elsewhere, and
// has the race detector watch it.
func needsHeld(t *testing.T) {
	t.Helper()
	if present.envelope != kernel.EBPF {
		t.Skip("is about windows that the kernel enforces: tier ebpf")
	}
	use(t, racing)
}

// needsPrivilege skips what an ordinary user's program cannot do.
func needsPrivilege(t *testing.T) {
	t.Helper()
	if !present.privileged() {
		t.Skip("needs CAP_NET_ADMIN, which the program does not have in this tier")
	}
}

// leg is one leg of a connection, out of /flows.
func leg(t *testing.T, flow map[string]any, side string) map[string]any {
	t.Helper()
	l, ok := flow[side+"_leg"].(map[string]any)
	require.True(t, ok, "no %s leg in %v", side, flow)
	return l
}

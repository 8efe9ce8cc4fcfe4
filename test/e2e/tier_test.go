//go:build linux

package e2e

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/need"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/proxy/datapath/kernel/bpf"
)

// tier is who keeps the windows of the kernel datapath. All tests run over the first that this machine has; over the
// others those in smoke do.
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

// smoke are the tests of every tier: what differs between tiers is who keeps the windows and with what privileges.
var smoke = []string{
	"TestBytesArriveIntactBothWaysAtOnce", // every way
	"TestHalfCloseByTheClientAndTheServerGoesOn",
	"TestAResetByTheServerArrivesAsOneAfterWhatItHadSent",
	"TestShutdownLetsTransfersFinish",
	"TestASleepingReaderCostsBoundedMemory",
	"TestAMaximumRateBindsAllConnectionsOfAHost",
	"TestBothDirectionsAndAPingPongKeepGoingBesideAnUpload",
	"TestManyFlowsAtOnce",
	"TestCopaKeepsAnEmulatedCellularQueueShort", // by the relay's window
	"TestEveryAlgorithmCrossesACellularLink",
	"TestUnmodifiedAgentsDriveConnections",
	"TestHintsAreReadWithoutAnyPrivilege", // which tier ebpf has
}

// present is the tier that the tests run over now.
var present tier

// onlyTier is the variable that picks one tier by its name.
const onlyTier = "PENSTOCK_E2E_TIER"

// eachTier runs the tests over one tier after the other.
func eachTier(run func() int) (code int) {
	flag.Parse()
	only, asked := os.Getenv(onlyTier), flag.Lookup("test.run").Value
	found, full := false, true
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
		if !full {
			if err := asked.Set(smokeTests(asked.String())); err != nil {
				fmt.Println(err)
				return 1
			}
		}
		fmt.Printf("=== TIER  %s: %s\n", present.name, present.about)
		code = max(code, run())
		full = false
	}
	if !found {
		fmt.Printf("%s=%q: there is no such tier\n", onlyTier, only)
		return 1
	}
	return code
}

// smokeTests returns the -run pattern of those tests in smoke that the pattern asked has, too.
func smokeTests(asked string) (pattern string) {
	test, rest, nested := strings.Cut(asked, "/")
	var names []string
	for _, name := range smoke {
		if match, err := regexp.MatchString(test, name); match || err != nil { // run reports the error
			names = append(names, name)
		}
	}
	pattern = "^(" + strings.Join(names, "|") + ")$"
	if nested {
		pattern += "/" + rest
	}
	return pattern
}

func TestOtherTiersHaveASmokeSet(t *testing.T) {
	assert.Equal(t, "^(TestManyFlowsAtOnce)$", smokeTests("Many"))
	assert.Equal(t, "^(TestManyFlowsAtOnce)$/^x$", smokeTests("^TestManyFlowsAtOnce$/^x$"))
	assert.Equal(t, "^()$", smokeTests("TestRefusedServers"))
	assert.Equal(t, len(smoke), strings.Count(smokeTests(""), "Test"))
}

// privileged reports whether the program may do all that root may.
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
		require.Contains(p.t, p.announced("why"), "CAP_BPF", "the program says what is missing")
	}
}

// configure adds the tier to a configuration that leaves it open.
func (t tier) configure(config string) string {
	if strings.Contains(config, "envelope:") {
		return config
	}
	return config + "envelope: " + t.envelope + "\n"
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

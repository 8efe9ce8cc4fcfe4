//go:build linux

package e2e

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/proxy/datapath/kernel"
)

// assertFilled checks that a window was obeyed and made use of.
func assertFilled(t *testing.T, s Sending, window int) {
	t.Helper()
	assert.Zero(t, excess(s, window))
	_, pipe := s.Levels()
	assert.GreaterOrEqual(t, packets(pipe.P50), window-1)
}

// enforced checks that the kernel enforces the windows of all of a program's flows.
func (p *program) enforced(flows int) {
	p.t.Helper()
	for _, f := range p.relaying(flows) {
		assert.Equal(p.t, kernel.EBPF, leg(p.t, f, "client")["envelope"])
	}
	assert.Equal(p.t, float64(flows), p.metric("penstock_datapath_enforced_legs"))
}

func TestAnUpgradeLetsTheOldFlowsFinishUnderTheirOwnControl(t *testing.T) {
	needsHeld(t)
	const before, after = 12, 9
	w := ways[0]
	s, path := newCellular(t, slow(100))
	// On a link this slow a transfer takes its time.
	patiently := func(window int) string {
		return strings.Replace(w.yaml(fixed(window)), "drain: 10s", "drain: "+
			"60s", 1)
	}
	first := s.start(patiently(before))
	s.capture(w)
	record := s.record(path).answered()
	path.Start()
	a := w.download(s, 1, 2*megabyte)
	b := w.download(s, 2, 2*megabyte)
	a.reaches(100_000)
	b.reaches(100_000)
	first.enforced(2)

	first.signal(syscall.SIGTERM)
	first.awaitSaid("draining")
	second := s.startSecond(patiently(after))
	c := w.download(s, 3, megabyte)
	c.reaches(100_000)
	second.enforced(1)
	first.enforced(2)
	assert.True(t, registered(t, first.announced("control")))
	assert.True(t, registered(t, second.announced("control")))

	for _, d := range []*transfer{a, b, c} {
		d.arrives()
	}
	first.wait()
	assert.Zero(t, first.cmd.ProcessState.ExitCode(), first.said.String())
	second.stop()
	require.Eventually(t, func() bool {
		return !registered(t, first.announced("control")) && !registered(t, second.announced("control"))
	}, patience, time.Millisecond)

	assertFilled(t, record.sending(a), before)
	assertFilled(t, record.sending(b), before)
	assertFilled(t, record.sending(c), after)
}

// TestTwoProxiesAtOnceHoldTheirOwnWindows also has both be process 1 of their own
// namespace, as in two containers, which is what they name their control after.
func TestTwoProxiesAtOnceHoldTheirOwnWindows(t *testing.T) {
	needsHeld(t)
	for name, flags := range map[string]uintptr{"side by side": 0, "both of them process 1": unix.CLONE_NEWPID} {
		t.Run(name, func(t *testing.T) {
			w := ways[9]
			s, path := newCellular(t, slow(100))
			s.cloneflags = flags
			free := !registered(t, "penstock1") // by whatever else runs on this machine
			record := s.record(path).answered()
			path.Start()
			first := s.start(w.yaml(fixed(12)))
			a := w.download(s, 1, megabyte)
			elsewhere := w
			elsewhere.dial = dialSecond
			second := s.startSecond(strings.ReplaceAll(w.yaml(fixed(9)), fmt.Sprint(port), fmt.Sprint(secondPort)))
			b := elsewhere.download(s, 2, megabyte)
			a.reaches(100_000)
			b.reaches(100_000)
			first.enforced(1)
			second.enforced(1)
			names := []string{first.announced("control"), second.announced("control")}
			assert.NotEqual(t, names[0], names[1])
			if flags != 0 && free {
				assert.Contains(t, names, "penstock1")
			}
			for _, n := range names {
				assert.True(t, registered(t, n), n)
			}
			a.arrives()
			b.arrives()
			first.stop()
			assert.True(t, registered(t, names[1]), "each takes its own name off the list")
			second.stop()
			require.Eventually(t, func() bool { return !registered(t, names[0]) && !registered(t, names[1]) }, patience, time.Millisecond)

			assertFilled(t, record.sending(a), 12)
			assertFilled(t, record.sending(b), 9)
		})
	}
}

// TestAfterPrivilegesAreDroppedNothingIsMissing has the program that is shipped,
// which gives up what it does not need any more, carry flows that come later.
func TestAfterPrivilegesAreDroppedNothingIsMissing(t *testing.T) {
	needsPrivilege(t)
	use(t, released)
	for _, i := range []int{0, 2, 3, 4, 6, 8} {
		w := ways[i]
		t.Run(w.name, func(t *testing.T) {
			s := w.open(t, "")
			s.proxy.hasLess(unix.CAP_SYS_ADMIN, unix.CAP_BPF, unix.CAP_PERFMON, unix.CAP_NET_RAW)
			client, server := w.pair(s)
			warm(t, client, server)
			flow := s.proxy.relaying(1)[0]
			for _, side := range []string{"client", "server"} {
				assert.Equal(t, s.proxy.announced("envelope"), leg(t, flow, side)["envelope"], side)
				assert.Zero(t, leg(t, flow, side)["signal_errors"], side)
				assert.NotContains(t, leg(t, flow, side), "missing", side)
			}
			if present.envelope == kernel.EBPF {
				assert.Equal(t, 2.0, s.proxy.metric("penstock_datapath_enforced_legs"))
			}
			exchange(t, client, server, 10*megabyte)
		})
	}
}

// hasLess checks that the program has lost capabilities for good.
func (p *program) hasLess(lost ...uint) {
	p.t.Helper()
	p.awaitSaid(`"msg":"privileges"`)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	require.NoError(p.t, err)
	for _, set := range []string{"CapInh", "CapPrm", "CapEff", "CapAmb"} {
		_, rest, ok := strings.Cut(string(status), set+":")
		require.True(p.t, ok)
		var bits uint64
		_, err := fmt.Sscanf(rest, "%x", &bits)
		require.NoError(p.t, err)
		for _, c := range lost {
			assert.Zero(p.t, bits&(1<<c), "%s has capability %d", set, c)
		}
	}
}

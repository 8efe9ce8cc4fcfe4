//go:build linux

package kernel

import (
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// asTheSystemSets returns legs whose sockets were born with a congestion control, as
// by a namespace's setting or by a route.
func (d *Datapath) asTheSystemSets(t *testing.T, name string) (dialled, accepted *Conn) {
	t.Helper()
	set := func(_, _ string, raw syscall.RawConn) error {
		return datapath.Control(raw, func(fd int) error {
			return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
		})
	}
	lc := net.ListenConfig{Control: set}
	ln, err := lc.Listen(t.Context(), "tcp", loopback4)
	require.NoError(t, err)
	defer ln.Close() //nolint:errcheck // it only listened
	dialler := net.Dialer{Control: set, Timeout: 10 * time.Second}
	near, err := dialler.DialContext(t.Context(), "tcp", ln.Addr().String())
	require.NoError(t, err)
	far, err := ln.Accept()
	require.NoError(t, err)
	dialled, err = d.adoptConn(near.(*net.TCPConn), d.loops.Least(), true)
	require.NoError(t, err)
	accepted, err = d.adoptConn(far.(*net.TCPConn), d.loops.Least(), false)
	require.NoError(t, err)
	t.Cleanup(func() { _, _ = dialled.Close(), accepted.Close() })
	return dialled, accepted
}

// settings are what management changes on a socket, as the kernel has them.
type settings struct {
	control string
	unsent  int
	rate    uint64
}

func (c *Conn) settings(t *testing.T) (s settings) {
	t.Helper()
	s.control = c.congestionName()
	s.unsent = c.option(t, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT)
	if s.unsent == systemUnsent {
		s.unsent = -1 // what the system has set, which bounds nothing unless somebody changed it
	}
	require.NoError(t, c.raw.Visit(func(fd int) (err error) {
		s.rate, err = unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
		return err
	}))
	return s
}

func TestALegIsTheSystemsUnlessItIsManaged(t *testing.T) {
	const system = "reno"
	for _, envelope := range []string{EBPF, "bbr", "cubic"} {
		t.Run(envelope, func(t *testing.T) {
			if envelope == EBPF {
				needsEBPF(t)
			}
			d := still(t, Config{Envelope: envelope, Cells: 4})
			if d.Envelope() != envelope {
				t.Skip(d.Missing())
			}
			managed, unmanaged := d.asTheSystemSets(t, system)
			pass(t, managed, unmanaged, 100_000)
			before := managed.settings(t)
			require.Equal(t, system, before.control)
			untouched := func() {
				t.Helper()
				assert.Equal(t, before, unmanaged.settings(t))
				assert.Equal(t, system, unmanaged.Info().Envelope)
				assert.Zero(t, unmanaged.Info().Holds&datapath.HoldWindow)
			}
			untouched()
			assert.Equal(t, system, managed.Info().Envelope)

			limit := flow.Limit{Cwnd: 64 << 10, PacingRate: 800_000_000}
			observe := func(want datapath.Hold) *flow.Report {
				var last flow.Report
				managed.Enforce(want, 0)
				managed.Apply(limit)
				managed.Observe(func(r flow.Report) { last = r })
				return &last
			}
			for range 2 { // as often as rules change
				observe(datapath.HoldAll)
				assert.Equal(t, envelope, managed.Info().Envelope)
				if envelope == EBPF {
					assert.Equal(t, d.Control(), managed.congestionName())
					assert.Equal(t, 1, d.Status().Enforced.Legs)
				} else {
					assert.Equal(t, envelope, managed.congestionName())
				}
				assert.NotEqual(t, before.unsent, managed.settings(t).unsent)
				pass(t, managed, unmanaged, 1<<20)
				d.drain(t, managed, 1<<20)
				untouched()

				managed.Observe(nil)
				assert.Equal(t, before, managed.settings(t), "all is as it was")
				assert.Equal(t, system, managed.Info().Envelope)
				if envelope == EBPF {
					assert.Zero(t, d.Status().Enforced.Legs)
				}
				pass(t, managed, unmanaged, 1<<20)

				// A rate alone leaves the window, and what answers losses, to the system.
				last := observe(datapath.HoldRate)
				after := managed.settings(t)
				assert.Equal(t, system, after.control)
				assert.EqualValues(t, 100_000_000, after.rate)
				pass(t, managed, unmanaged, 1<<20)
				d.drain(t, managed, 1<<20)
				assert.EqualValues(t, 1<<20, last.Acked, "what was written before is not reported")
			}
			assert.Zero(t, managed.Info().SignalErrors)
		})
	}
}

func TestTheEnvelopeIsSetOnEachManagedSocket(t *testing.T) {
	available, allowed, err := Envelopes()
	require.NoError(t, err)
	require.NotEmpty(t, available)
	require.NotEmpty(t, allowed)
	for _, name := range allowed {
		if !slices.Contains(available, name) || strings.HasPrefix(name, "penstock") { // another process's comes and goes
			continue
		}
		t.Run(name, func(t *testing.T) {
			d := still(t, Config{Envelope: name})
			assert.Equal(t, name, d.Envelope())
			assert.Contains(t, d.String(), "envelope "+name)
			assert.Empty(t, d.Missing())
			a, b := d.pair(t, loopback4)
			for _, c := range []*Conn{a, b} {
				watched(c)
				assert.Equal(t, name, c.Info().Envelope)
			}
		})
	}
}

func TestTheEnvelopeIsBBRWhereThereIsOne(t *testing.T) {
	_, allowed, err := Envelopes()
	require.NoError(t, err)
	if !slices.Contains(allowed, "bbr") {
		t.Skip("needs the tcp_bbr module, allowed for all")
	}
	unprivileged(t, func() { assert.Equal(t, "bbr", start(t, Config{}).Envelope()) })
}

func TestAnUnknownEnvelopeLeavesTheDefault(t *testing.T) {
	d := still(t, Config{Envelope: "nonesuch"})
	require.Len(t, d.Missing(), 1)
	assert.Contains(t, d.Missing()[0], "modprobe tcp_nonesuch")
	a, _ := d.pair(t, loopback4)
	info := a.Info()
	assert.Equal(t, d.Envelope(), info.Envelope)
	assert.Equal(t, d.Missing(), info.Missing)
	assert.NotEmpty(t, info.Envelope)
}

func TestAForbiddenEnvelopeNamesTheSysctl(t *testing.T) {
	available, allowed, err := Envelopes()
	require.NoError(t, err)
	i := slices.IndexFunc(available, func(name string) bool { return !slices.Contains(allowed, name) })
	if i < 0 {
		assert.Contains(t, envelopeRefused("dctcp", unix.EPERM), "tcp_allowed_congestion_control")
		t.Skip("needs a congestion control that is available and not allowed for all")
	}
	unprivileged(t, func() {
		d := still(t, Config{Envelope: available[i]})
		if assert.Len(t, d.Missing(), 1) {
			assert.Contains(t, d.Missing()[0], "sysctl -w net.ipv4.tcp_allowed_congestion_control=")
			assert.Contains(t, d.Missing()[0], available[i])
		}
	})
}

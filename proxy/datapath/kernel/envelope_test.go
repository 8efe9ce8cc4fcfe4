//go:build linux

package kernel

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestTheEnvelopeIsSetOnEachSocket(t *testing.T) {
	available, allowed, err := Envelopes()
	require.NoError(t, err)
	require.NotEmpty(t, available)
	require.NotEmpty(t, allowed)
	for _, name := range allowed {
		if !slices.Contains(available, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			d := still(t, Config{Envelope: name})
			assert.Equal(t, name, d.Envelope())
			assert.Contains(t, d.String(), "envelope "+name)
			assert.Empty(t, d.Missing())
			a, b := d.pair(t, loopback4)
			assert.Equal(t, name, a.Info().Envelope)
			assert.Equal(t, name, b.Info().Envelope)
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

package bench

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/internal/lab/record"
)

// onLink makes up a run over the link of that seed.
func onLink(r record.Run, seed uint64) record.Run {
	r.Seed = seed
	return r
}

// compared are copa's runs over three links, and vegas' over one: +10, -10 and +30 %
// of throughput, and p95 doubled each time.
func compared() []record.Run {
	discarded := onLink(proxied("copa", 1, 1, 1, 1.25), 4)
	discarded.Discarded = "the emulator lost 3 packets and could not deliver 0"
	return []record.Run{
		onLink(proxied("copa", 1, 11, 20, 1.25), 1), onLink(virtual("copa", 10, 10), 1),
		onLink(proxied("copa", 1, 9, 40, 1.25), 2), onLink(virtual("copa", 10, 20), 2),
		onLink(proxied("copa", 1, 26, 60, 1.25), 3), onLink(virtual("copa", 20, 30), 3),
		discarded, onLink(virtual("copa", 10, 10), 4),
		onLink(proxied("vegas", 1, 6, 5, 1.25), 1), onLink(virtual("vegas", 8, 0), 1),
		onLink(proxied("copa", 1, 9, 40, 1.25), 5), // its run in virtual time is not there
		result("cubic", "cubic", 1, 9.9, 3000),
	}
}

func TestFidelityIsJudgedLinkByLink(t *testing.T) {
	all := Fidelities(compared(), EnvelopeSim)
	require.Len(t, all, 2)
	copa, vegas := all[0], all[1]

	assert.Equal(t, "copa", copa.Sender)
	d := copa.Throughput
	assert.Equal(t, 3, d.Links)
	assert.InDelta(t, 46./3, d.Found, 1e-9)
	assert.InDelta(t, 40./3, d.Reference, 1e-9)
	assert.InDelta(t, 10, d.Mean, 1e-9, "of the differences, not the difference of the means")
	assert.InDelta(t, 20, d.Deviation, 1e-9)
	assert.InDelta(t, 11.547, d.Error, 1e-3)
	assert.InDelta(t, 100, copa.P95.Mean, 1e-9)
	assert.InDelta(t, 0, copa.P95.Deviation, 1e-9)

	assert.InDelta(t, -25, vegas.Throughput.Mean, 1e-9)
	assert.Equal(t, []string{"8", "6", "-25.0", "-25.0", "-", "-"}, vegas.Throughput.cells(), "one link has no spread")
	assert.Zero(t, vegas.P95.Links, "there is nothing that it could be a part of")
	assert.Equal(t, []string{"-", "-", "-", "-", "-", "-"}, vegas.P95.cells())
}

func TestFidelityIsPrinted(t *testing.T) {
	var b strings.Builder
	require.NoError(t, WriteFidelities(&b, compared(), EnvelopeSim))
	golden(t, "fidelity.golden", b.String())
}

func TestFidelityAgainstNativeSenders(t *testing.T) {
	native := func(mbps, p95 float64, seed uint64) record.Run {
		r := onLink(proxied("copa", 1, mbps, p95, 1.25), seed)
		r.Name, r.Native = "copa@native", true
		return r
	}
	results := append(compared(), native(10, 10, 1), native(10, 20, 2), native(20, 30, 3))
	all := Fidelities(results, EnvelopeNative)
	require.Len(t, all, 2, "copa, and vegas without a reference")
	assert.Equal(t, "copa", all[0].Sender)
	assert.Equal(t, 3, all[0].Throughput.Links)
	assert.InDelta(t, 10, all[0].Throughput.Mean, 1e-9)
	assert.InDelta(t, 10, all[0].Throughput.Median, 1e-9)
	assert.Zero(t, all[1].Throughput.Links)
}

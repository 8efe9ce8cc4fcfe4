package telemetry

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// closedDownload is a connection that is over: it lived 12 s and was idle for the last two.
func closedDownload(host, rule string, bytes cc.Bytes, srtt, minRTT time.Duration) *proxy.FlowInfo {
	return &proxy.FlowInfo{
		Rule: rule, State: proxy.StateClosing, Age: 12 * time.Second, Idle: 2 * time.Second,
		Source: netip.AddrPortFrom(netip.MustParseAddr(host), 4000),
		Down:   proxy.DirectionInfo{Written: bytes}, Client: datapath.Info{SRTT: srtt, MinRTT: minRTT},
	}
}

func TestDownloadsAreCountedByRuleAndSize(t *testing.T) {
	src, options := busyProxy(), busyOptions(&handClock{t: 1})
	options.Downloads = NewDownloads()
	registry, now := NewRegistry(src, options), time.Unix(1_800_000_000, 0)
	observe := func(host, rule string, bytes cc.Bytes, srtt, minRTT time.Duration) {
		options.Downloads.ObserveClosed(now, closedDownload(host, rule, bytes, srtt, minRTT))
	}
	observe("192.0.2.1", "all", 100e3, 50*time.Millisecond, 40*time.Millisecond)
	observe("192.0.2.1", "all", 5e6, 0, 0)
	// This one began behind a full queue, so that it never saw the round trip of the path itself.
	observe("192.0.2.1", "all", 20e6, 300*time.Millisecond, 280*time.Millisecond)
	observe("192.0.2.2", "", 0, time.Second, time.Second) // no download

	histogram := func(of, size string) *dto.Histogram {
		for _, m := range gather(t, registry)["penstock_download_"+of].GetMetric() {
			if m.GetLabel()[0].GetValue() == "all" && m.GetLabel()[1].GetValue() == size {
				return m.GetHistogram()
			}
		}
		return nil
	}
	for _, c := range []struct {
		of, size string
		want     float64 // of the only download in the class
	}{
		{"seconds", "up_to_100kB", 10},
		{"rate_bytes_per_second", "up_to_10MB", 5e5},
		{"queueing_delay_seconds", "up_to_100kB", .01},
		{"queueing_delay_seconds", "larger", .26},
	} {
		assert.EqualValues(t, 1, histogram(c.of, c.size).GetSampleCount(), c)
		assert.InDelta(t, c.want, histogram(c.of, c.size).GetSampleSum(), 1e-9, c)
	}
	assert.Nil(t, histogram("queueing_delay_seconds", "up_to_10MB"), "no round trip was measured")
	native := histogram("seconds", "larger")
	assert.Equal(t, int32(3), native.GetSchema(), "eight buckets for each doubling")
	assert.NotEmpty(t, native.GetPositiveSpan())

	src.counters.Routes[0].Rule = "another" // as a reload has it
	assert.Nil(t, gather(t, registry)["penstock_download_seconds"])
}

func TestDownloadsOfManyRulesAndHostsAreBounded(t *testing.T) {
	d, now := NewDownloads(), time.Unix(1_800_000_000, 0)
	for i := range 3 * maxObservedHosts {
		host := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}).String()
		d.ObserveClosed(now, closedDownload(host, fmt.Sprint("rule ", i%400), 1e6, 2, 1))
		require.LessOrEqual(t, len(d.bases), maxObservedHosts)
	}
	assert.Len(t, d.rules, maxDownloadRules+1)
	assert.True(t, d.rules[otherRules])
}

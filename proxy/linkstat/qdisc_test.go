package linkstat

import (
	"encoding/binary"
	"testing"

	"github.com/mdlayher/netlink"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// message is a queueing discipline as the kernel describes it: its kind, its
// counters, what it adds to them, and its settings.
func message(t testing.TB, kind string, app, options func(*netlink.AttributeEncoder) error) []byte {
	t.Helper()
	ae := netlink.NewAttributeEncoder()
	ae.String(unix.TCA_KIND, kind)
	if options != nil {
		ae.Nested(unix.TCA_OPTIONS, options)
	}
	ae.Nested(unix.TCA_STATS2, func(ae *netlink.AttributeEncoder) error {
		if app != nil {
			ae.Nested(nl.TCA_STATS_APP, app)
		}
		basic := binary.NativeEndian.AppendUint64(nil, 1_000_000)
		ae.Bytes(nl.TCA_STATS_BASIC, binary.NativeEndian.AppendUint32(basic, 700))
		queue := binary.NativeEndian.AppendUint32(nil, 20)
		queue = binary.NativeEndian.AppendUint32(queue, 30_280)
		ae.Bytes(nl.TCA_STATS_QUEUE, append(binary.NativeEndian.AppendUint32(queue, 5), make([]byte, 8)...))
		return nil
	})
	b, err := ae.Encode()
	require.NoError(t, err)
	return b
}

func u32(typ uint16, v uint32) func(*netlink.AttributeEncoder) error {
	return func(ae *netlink.AttributeEncoder) error { ae.Uint32(typ, v); return nil }
}

// These kinds are not in every kernel: their messages are put together here.
func TestEachKindTellsItsRateAndItsLimit(t *testing.T) {
	for _, tt := range []struct {
		kind         string
		app, options func(*netlink.AttributeEncoder) error
		rate         cc.Rate
		limit        limit
	}{
		{kind: "fq_codel", options: u32(nl.TCA_FQ_CODEL_LIMIT, 10240), limit: limit{packets: 10240}},
		{kind: "fq", options: u32(nl.TCA_FQ_PLIMIT, 10000), limit: limit{packets: 10000}},
		{kind: "codel", options: u32(tcaCodelLimit, 1000), limit: limit{packets: 1000}},
		{
			kind: "cake", app: u32(tcaCakeStatsMemoryLimit, 4<<20),
			options: func(ae *netlink.AttributeEncoder) error { ae.Uint64(tcaCakeBaseRate64, 2_500_000); return nil },
			rate:    20_000_000, limit: limit{bytes: 4 << 20 * 1514 / 2304},
		},
		{kind: "something new", options: u32(1, 1)},
	} {
		var q qdisc
		require.NoError(t, q.decodeAttributes(message(t, tt.kind, tt.app, tt.options)), tt.kind)
		assert.Equal(t, tt.kind, q.kind)
		assert.Equal(t, tt.rate, q.rate, tt.kind)
		assert.Equal(t, tt.limit, q.limit, tt.kind)
		assert.Equal(t, reading{sent: 1_000_000, packets: 700, backlog: 30_280, waiting: 20, dropped: 5}, q.reading,
			tt.kind)
	}
}

func TestTheQueueThatIsFullFirstIsTheLimit(t *testing.T) {
	shaper := qdisc{kind: "tbf", under: limit{bytes: 100_000}}
	for _, tt := range []struct {
		name string
		qs   []qdisc
		want limit
	}{
		{"nothing is known of it", []qdisc{{kind: kindNone}}, limit{}},
		{"a shaper on its own, as old kernels tell", []qdisc{shaper}, limit{bytes: 100_000}},
		{
			"what is in the shaper counts",
			[]qdisc{shaper, {kind: "fq_codel", limit: limit{packets: 600}}},
			limit{packets: 600},
		},
		{
			"of queues side by side the smallest",
			[]qdisc{{kind: "mq"}, {kind: "fq", limit: limit{packets: 900}}, {kind: "fq", limit: limit{packets: 800}}},
			limit{packets: 800},
		},
		{"pfifo_fast has the interface's", []qdisc{{kind: "pfifo_fast"}}, limit{packets: 1000}},
		{"what comes in does not wait", []qdisc{
			{kind: "ingress", limit: limit{packets: 1}},
			{kind: "clsact"},
			{kind: "pfifo_fast"},
		}, limit{packets: 1000}},
	} {
		assert.Equal(t, tt.want, limitOf(tt.qs, 1000), tt.name)
	}
}

// FuzzQdisc has no message make it fail otherwise than by an error.
func FuzzQdisc(f *testing.F) {
	for _, kind := range []string{"tbf", "cake", "fq_codel", "pfifo", "bfifo"} {
		f.Add(message(f, kind, u32(tcaCakeStatsMemoryLimit, 1), u32(1, 1)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q qdisc
		if q.decodeAttributes(b) == nil {
			assert.GreaterOrEqual(t, q.rate, cc.Rate(0))
			assert.GreaterOrEqual(t, q.limit.bytes, cc.Bytes(0))
		}
	})
}

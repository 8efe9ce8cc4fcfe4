package linkstat

import (
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// nest, number and attributesOf put netlink messages together.
func nest(kind int, inner ...*nl.RtAttr) *nl.RtAttr {
	a := nl.NewRtAttr(kind|unix.NLA_F_NESTED, nil)
	for _, i := range inner {
		a.AddChild(i)
	}
	return a
}

func number(kind int, v uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(v)) }

func attributesOf(attrs ...*nl.RtAttr) attributes {
	var b []byte
	for _, a := range attrs {
		b = append(b, a.Serialize()...)
	}
	parsed, err := parseAttributes(b)
	if err != nil {
		panic(err)
	}
	return parsed
}

// message is a queueing discipline as the kernel describes it: its kind, its counters, what it adds to
// them, and its settings. nil: it has none.
func message(kind string, app, options *nl.RtAttr) []byte {
	stats := nest(unix.TCA_STATS2)
	if app != nil {
		stats.AddChild(nest(nl.TCA_STATS_APP, app))
	}
	basic := binary.NativeEndian.AppendUint64(nil, 1_000_000)
	stats.AddRtAttr(nl.TCA_STATS_BASIC, binary.NativeEndian.AppendUint32(basic, 700))
	queue := binary.NativeEndian.AppendUint32(nil, 20)
	queue = binary.NativeEndian.AppendUint32(queue, 30_280)
	stats.AddRtAttr(nl.TCA_STATS_QUEUE, append(binary.NativeEndian.AppendUint32(queue, 5), make([]byte, 8)...))

	b := nl.NewRtAttr(unix.TCA_KIND, nl.ZeroTerminated(kind)).Serialize()
	if options != nil {
		b = append(b, nest(unix.TCA_OPTIONS, options).Serialize()...)
	}
	return append(b, stats.Serialize()...)
}

// These kinds are not in every kernel: their messages are put together here.
func TestEachKindTellsItsRateAndItsLimit(t *testing.T) {
	for _, tt := range []struct {
		kind         string
		app, options *nl.RtAttr
		rate         cc.Rate
		limit        limit
	}{
		{kind: "fq_codel", options: number(nl.TCA_FQ_CODEL_LIMIT, 10240), limit: limit{packets: 10240}},
		{kind: "fq", options: number(nl.TCA_FQ_PLIMIT, 10000), limit: limit{packets: 10000}},
		{kind: "codel", options: number(tcaCodelLimit, 1000), limit: limit{packets: 1000}},
		{
			kind: "cake", app: number(tcaCakeStatsMemoryLimit, 4<<20),
			options: nl.NewRtAttr(tcaCakeBaseRate64, nl.Uint64Attr(2_500_000)),
			rate:    20_000_000, limit: limit{bytes: 4 << 20 * 1514 / 2304},
		},
		{kind: "something new", options: number(1, 1)},
	} {
		var q qdisc
		require.NoError(t, q.decodeAttributes(message(tt.kind, tt.app, tt.options)), tt.kind)
		assert.Equal(t, tt.kind, q.kind)
		assert.Equal(t, tt.rate, q.rate, tt.kind)
		assert.Equal(t, tt.limit, q.limit, tt.kind)
		assert.Equal(t, reading{sent: 1_000_000, packets: 700, backlog: 30_280, waiting: 20, dropped: 5}, q.reading,
			tt.kind)
	}
}

func TestTheQueueThatIsFullFirstIsTheLimit(t *testing.T) {
	shaper := qdisc{kind: "tbf", childLimit: limit{bytes: 100_000}}
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
		f.Add(message(kind, number(tcaCakeStatsMemoryLimit, 1), number(1, 1)))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q qdisc
		if q.decodeAttributes(b) == nil {
			assert.GreaterOrEqual(t, q.rate, cc.Rate(0))
			assert.GreaterOrEqual(t, q.limit.bytes, cc.Bytes(0))
		}
	})
}

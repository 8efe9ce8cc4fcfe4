package linkstat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/nldump"
)

// Attributes of linux/pkt_sched.h that the library has no name for.
const (
	tcaCodelLimit           = 2
	tcaCakeBaseRate64       = 2
	tcaCakeStatsMemoryLimit = 3
)

// kindNone is the qdisc of interfaces that have no queue, or one that only the driver knows.
const kindNone = "noqueue"

// cakeOverhead is the memory that a full frame of 1514 bytes takes in cake, in bytes.
const cakeOverhead = 2304

// qdisc is a queueing discipline as the kernel describes it.
type qdisc struct {
	handle, parent uint32
	kind           string
	reading
	rate  cc.Rate // the most that it lets pass; 0: it has no bound
	limit limit   // of packets that wait in the qdisc itself
	// childLimit is the limit of its child, unless the child has a limit of its own.
	childLimit limit
}

// isQueue reports whether packets wait in q to be sent. ingress and clsact have only filters.
func (q qdisc) isQueue() bool { return q.kind != "ingress" && q.kind != "clsact" }

// listQdiscs reads the queueing disciplines of an interface that "tc qdisc show" lists. With hidden it also reads
// those that the kernel has added by itself. It dumps those of all interfaces, because a dump has no filter, and
// because the kernel multicasts the answer to a request for a single one.
func (m *machine) listQdiscs(index int, hidden bool) ([]qdisc, error) {
	replies, err := nldump.Retry(func() ([][]byte, error) {
		req := nl.NewNetlinkRequest(unix.RTM_GETQDISC, unix.NLM_F_DUMP)
		req.Sockets = m.sockets
		req.AddData(&nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(index)})
		if hidden {
			req.AddData(nl.NewRtAttr(unix.TCA_DUMP_INVISIBLE, nil))
		}
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWQDISC)
	})
	if err != nil {
		return nil, fmt.Errorf("linkstat: read queueing disciplines: %w", err)
	}
	var out []qdisc
	for _, b := range replies {
		if len(b) < nl.SizeofTcMsg {
			continue
		}
		tc := nl.DeserializeTcMsg(b)
		if int(tc.Ifindex) != index {
			continue
		}
		q := qdisc{handle: tc.Handle, parent: tc.Parent}
		if err := q.decodeAttributes(b[nl.SizeofTcMsg:]); err != nil {
			return nil, fmt.Errorf("linkstat: queueing discipline %x of interface %d: %w", tc.Handle, index, err)
		}
		q.queue = queueID{link: index, handle: q.handle, kind: q.kind}
		out = append(out, q)
	}
	return out, nil
}

// rootQdisc returns the root qdisc of an interface.
func rootQdisc(qs []qdisc) (qdisc, error) {
	for _, q := range qs {
		if q.parent == rootHandle {
			return q, nil
		}
	}
	return qdisc{}, errNoQueue
}

// errNoQueue is the error for an interface that is not there, or is being made.
var errNoQueue = errors.New("linkstat: the interface has no queueing discipline")

// rootHandle is the parent of an interface's first qdisc, and of a qdisc's first classes.
const rootHandle = 0xffffffff

// decodeAttributes reads a qdisc's kind, and then its counters and its settings, which depend on the kind.
func (q *qdisc) decodeAttributes(b []byte) error {
	attrs, err := parseAttributes(b)
	if err != nil {
		return err
	}
	q.kind = unix.ByteSliceToString(attrs[unix.TCA_KIND])
	q.decodeStats(attrs.nested(unix.TCA_STATS2))
	return q.decodeSettings(attrs[unix.TCA_OPTIONS])
}

// decodeStats reads counters (linux/gen_stats.h).
func (q *qdisc) decodeStats(stats attributes) {
	if b := stats[nl.TCA_STATS_BASIC]; len(b) >= 12 {
		q.sent = cc.Bytes(binary.NativeEndian.Uint64(b))
		q.packets = binary.NativeEndian.Uint32(b[8:])
	}
	if b := stats[nl.TCA_STATS_QUEUE]; len(b) >= 12 {
		q.waiting = int(binary.NativeEndian.Uint32(b))
		q.backlog = cc.Bytes(binary.NativeEndian.Uint32(b[4:]))
		q.dropped = binary.NativeEndian.Uint32(b[8:])
	}
	if q.kind == "cake" {
		memory := cc.Bytes(uint32(stats.nested(nl.TCA_STATS_APP).number(tcaCakeStatsMemoryLimit)))
		q.limit.bytes = memory * (cc.DefaultMSS + packetHeaders + frameHeader) / cakeOverhead
	}
}

// decodeSettings reads the options that bound a rate or a queue.
func (q *qdisc) decodeSettings(options []byte) error {
	if q.kind == "pfifo" || q.kind == "bfifo" {
		if len(options) < 4 { // the limit is inherited
			return nil
		}
		n := binary.NativeEndian.Uint32(options)
		if q.kind == "bfifo" {
			q.limit.bytes = cc.Bytes(n)
		} else {
			q.limit.packets = int(n)
		}
		return nil
	}
	packetLimit := map[string]uint16{
		"fq_codel": nl.TCA_FQ_CODEL_LIMIT, "fq": nl.TCA_FQ_PLIMIT, "codel": tcaCodelLimit,
	}[q.kind]
	if packetLimit == 0 && q.kind != "tbf" && q.kind != "cake" {
		return nil
	}
	attrs, err := parseAttributes(options)
	if err != nil {
		return err
	}
	switch q.kind {
	case "tbf":
		if b := attrs[nl.TCA_TBF_PARMS]; len(b) >= nl.SizeofTcTbfQopt {
			opt := nl.DeserializeTcTbfQopt(b)
			q.childLimit.bytes, q.rate = cc.Bytes(opt.Limit), rateOfBytes(uint64(opt.Rate.Rate))
		}
		if rate := attrs.number(nl.TCA_TBF_RATE64); rate > 0 { // the other one has only 32 bits
			q.rate = rateOfBytes(rate)
		}
	case "cake":
		q.rate = rateOfBytes(attrs.number(tcaCakeBaseRate64))
	default:
		q.limit.packets = int(uint32(attrs.number(packetLimit)))
	}
	return nil
}

// rateOfBytes makes a rate of bytes per second.
func rateOfBytes(bytes uint64) cc.Rate { return cc.RateOf(cc.Bytes(min(bytes, 1<<60)), time.Second) }

// limitOf returns the smallest limit of an interface's qdiscs, because all traffic may go through that one.
func limitOf(qs []qdisc, txQueue int) limit {
	var own, child limit
	for _, q := range qs {
		if !q.isQueue() {
			continue
		}
		if q.kind == "pfifo_fast" { // each of its bands has this limit
			q.limit.packets = txQueue
		}
		own, child = own.smallerOf(q.limit), child.smallerOf(q.childLimit)
	}
	if own == (limit{}) {
		return child
	}
	return own
}

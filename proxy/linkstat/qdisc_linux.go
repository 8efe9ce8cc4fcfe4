package linkstat

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/penstock-net/penstock/cc"
)

// Attributes of linux/pkt_sched.h for which no library has a name.
const (
	tcaCodelLimit           = 2
	tcaCakeBaseRate64       = 2
	tcaCakeStatsMemoryLimit = 3
)

// kindNone is the qdisc of interfaces that have no queue, or one elsewhere.
const kindNone = "noqueue"

// cakeOverhead is how many bytes of memory a full frame of 1514 bytes takes.
const cakeOverhead = 2304

// qdisc is a queueing discipline as the kernel describes it.
type qdisc struct {
	handle, parent uint32
	kind           string
	reading
	rate  cc.Rate // that it lets pass at most; 0: it has no bound
	limit limit   // of what waits in itself
	under limit   // of what waits in its child, unless the child has a limit of its own
}

// isQueue tells whether packets that are sent wait in it: ingress and clsact only hold filters.
func (q qdisc) isQueue() bool { return q.kind != "ingress" && q.kind != "clsact" }

// listQdiscs reads the queueing disciplines of an interface: those that "tc qdisc show" lists, and with
// hidden those that the kernel put into them by itself. It reads those of all interfaces, because a
// dump has no filter, and because the kernel multicasts the answer to a request for a single one.
func listQdiscs(conn *netlink.Conn, index int, hidden bool) ([]qdisc, error) {
	msg := nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(index)}
	req := netlink.Message{
		Header: netlink.Header{Type: unix.RTM_GETQDISC, Flags: netlink.Request | netlink.Dump},
		Data:   msg.Serialize(),
	}
	if hidden {
		flag, err := netlink.MarshalAttributes([]netlink.Attribute{{Type: unix.TCA_DUMP_INVISIBLE}})
		if err != nil {
			return nil, fmt.Errorf("linkstat: %w", err)
		}
		req.Data = append(req.Data, flag...)
	}
	replies, err := conn.Execute(req)
	if err != nil {
		return nil, fmt.Errorf("linkstat: read queueing disciplines: %w", err)
	}
	var out []qdisc
	for _, m := range replies {
		if m.Header.Type != unix.RTM_NEWQDISC || len(m.Data) < nl.SizeofTcMsg {
			continue
		}
		tc := nl.DeserializeTcMsg(m.Data)
		if int(tc.Ifindex) != index {
			continue
		}
		q := qdisc{handle: tc.Handle, parent: tc.Parent}
		if err := q.decodeAttributes(m.Data[nl.SizeofTcMsg:]); err != nil {
			return nil, fmt.Errorf("linkstat: queueing discipline %x of interface %d: %w", tc.Handle, index, err)
		}
		q.queue = queueID{link: index, handle: q.handle, kind: q.kind}
		out = append(out, q)
	}
	return out, nil
}

// rootQdisc is the qdisc that all others of an interface are below.
func rootQdisc(qs []qdisc) (qdisc, error) {
	for _, q := range qs {
		if q.parent == rootHandle {
			return q, nil
		}
	}
	return qdisc{}, errNoQueue
}

// errNoQueue says that an interface is not there, or not yet.
var errNoQueue = errors.New("linkstat: the interface has no queueing discipline")

// rootHandle is where an interface's first qdisc and a qdisc's first classes are.
const rootHandle = 0xffffffff

func (q *qdisc) decodeAttributes(attrs []byte) error {
	ad, err := netlink.NewAttributeDecoder(attrs)
	if err != nil {
		return err
	}
	var options []byte
	for ad.Next() {
		switch ad.Type() {
		case unix.TCA_KIND:
			q.kind = ad.String()
		case unix.TCA_OPTIONS:
			options = ad.Bytes()
		case unix.TCA_STATS2:
			ad.Nested(q.decodeStats)
		}
	}
	if err := ad.Err(); err != nil {
		return err
	}
	return q.decodeSettings(options)
}

// decodeStats reads counters (linux/gen_stats.h).
func (q *qdisc) decodeStats(ad *netlink.AttributeDecoder) error {
	for ad.Next() {
		switch ad.Type() {
		case nl.TCA_STATS_BASIC:
			if b := ad.Bytes(); len(b) >= 12 {
				q.sent = cc.Bytes(binary.NativeEndian.Uint64(b))
				q.packets = binary.NativeEndian.Uint32(b[8:])
			}
		case nl.TCA_STATS_QUEUE:
			if b := ad.Bytes(); len(b) >= 12 {
				q.waiting = int(binary.NativeEndian.Uint32(b))
				q.backlog = cc.Bytes(binary.NativeEndian.Uint32(b[4:]))
				q.dropped = binary.NativeEndian.Uint32(b[8:])
			}
		case nl.TCA_STATS_APP:
			if q.kind == "cake" { // its kind comes first
				ad.Nested(q.decodeCakeStats)
			}
		}
	}
	return nil // Nested asks ad itself
}

func (q *qdisc) decodeCakeStats(ad *netlink.AttributeDecoder) error {
	for ad.Next() {
		if ad.Type() == tcaCakeStatsMemoryLimit {
			q.limit.bytes = cc.Bytes(ad.Uint32()) * (cc.DefaultMSS + packetHeaders + frameHeader) / cakeOverhead
		}
	}
	return nil
}

// decodeSettings reads those of its options that bound a rate or a queue.
func (q *qdisc) decodeSettings(options []byte) error {
	switch q.kind {
	case "pfifo", "bfifo":
		if len(options) < 4 { // what it has inherited
			return nil
		}
		n := binary.NativeEndian.Uint32(options)
		if q.kind == "bfifo" {
			q.limit.bytes = cc.Bytes(n)
		} else {
			q.limit.packets = int(n)
		}
		return nil
	case "tbf", "fq_codel", "codel", "fq", "cake":
	default:
		return nil
	}
	ad, err := netlink.NewAttributeDecoder(options)
	if err != nil {
		return err
	}
	for ad.Next() {
		switch kind := q.kind; {
		case kind == "tbf" && ad.Type() == nl.TCA_TBF_PARMS:
			if b := ad.Bytes(); len(b) >= nl.SizeofTcTbfQopt {
				opt := nl.DeserializeTcTbfQopt(b)
				q.under.bytes = cc.Bytes(opt.Limit)
				if q.rate == 0 { // a rate of 64 bits says more
					q.rate = bitsOf(uint64(opt.Rate.Rate))
				}
			}
		case kind == "tbf" && ad.Type() == nl.TCA_TBF_RATE64:
			q.rate = bitsOf(ad.Uint64())
		case kind == "cake" && ad.Type() == tcaCakeBaseRate64:
			q.rate = bitsOf(ad.Uint64())
		case kind == "fq_codel" && ad.Type() == nl.TCA_FQ_CODEL_LIMIT,
			kind == "fq" && ad.Type() == nl.TCA_FQ_PLIMIT,
			kind == "codel" && ad.Type() == tcaCodelLimit:
			q.limit.packets = int(ad.Uint32())
		}
	}
	return ad.Err()
}

// bitsOf makes a rate of bytes per second.
func bitsOf(bytes uint64) cc.Rate { return cc.RateOf(cc.Bytes(min(bytes, 1<<60)), time.Second) }

// limitOf is how much an interface's qdiscs hold: the smallest limit of any, as all traffic may go
// through that one.
func limitOf(qs []qdisc, txQueue int) limit {
	var own, under limit
	for _, q := range qs {
		if !q.isQueue() {
			continue
		}
		if q.kind == "pfifo_fast" { // in each of its bands
			q.limit.packets = txQueue
		}
		own, under = own.smallerOf(q.limit), under.smallerOf(q.under)
	}
	if own == (limit{}) {
		return under
	}
	return own
}

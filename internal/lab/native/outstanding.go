package native

import (
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/cc/sim"
)

// ahead is what the application has written and the sender not sent: there is always more.
const ahead = 16 * payload

// segment is a piece of the stream, as long as one packet.
type segment struct {
	state   state
	resent  bool
	givenUp bool   // lost only by the timer's word, which may prove wrong
	tx      uint64 // its latest transmission
	sentAt  cc.Time
}

type state uint8

const (
	onWire state = iota
	lost         // and waiting to be sent again
	arrived
)

// outstanding is what was sent and has not all arrived: it takes in acknowledgements,
// finds what was lost and says so in a report. It is pure: time comes in with each call.
type outstanding struct {
	segs []segment // from base on
	base int64     // number of segs[0]; segment n ends at stream offset (n+1)·payload

	txs     []int64 // segments by transmission, from txBase on
	txBase  uint64
	highest uint64 // the latest transmission that has arrived
	checked uint64 // transmissions before this one have arrived or are lost
	repairs []int64
	owed    bool // the next of repairs does not wait for the window

	// After a timeout the first retransmission is a probe (RFC 5682), as in cc/sim.
	probing bool
	probeTx uint64 // the last probe's transmission; 0: there was none

	timer  sim.Timer
	report flow.Report
}

func newOutstanding() outstanding {
	return outstanding{txBase: 1, checked: 1, report: flow.Report{MSS: payload, Written: ahead, Unsent: ahead}}
}

// next says which segment is to be sent: one that was lost, or a new one.
func (o *outstanding) next() (n int64, again bool) {
	for len(o.repairs) > 0 {
		if n = o.repairs[0]; n >= o.base && o.segs[n-o.base].state == lost {
			return n, true
		}
		o.repairs = o.repairs[1:]
	}
	return o.base + int64(len(o.segs)), false
}

// nextTx returns the number that the next transmission will have.
func (o *outstanding) nextTx() uint64 { return o.txBase + uint64(len(o.txs)) }

// allows reports whether the segment that next names may leave.
func (o *outstanding) allows(window cc.Bytes) bool {
	if _, again := o.next(); again && o.owed {
		return true
	}
	return !o.probing && o.report.Pipe+payload <= max(window, payload)
}

// send notes that the segment that next named leaves now, and returns its number.
func (o *outstanding) send(now cc.Time) (tx uint64) {
	n, again := o.next()
	if again {
		o.repairs = o.repairs[1:]
		o.report.Lost += payload
	} else {
		o.segs = append(o.segs, segment{})
		o.report.Written += payload
	}
	if o.report.Pipe == 0 {
		o.timer.Start(now)
	}
	o.report.Pipe += payload
	tx = o.nextTx()
	o.txs = append(o.txs, n)
	o.owed = false
	o.segs[n-o.base] = segment{state: onWire, resent: again || o.segs[n-o.base].resent, tx: tx, sentAt: now}
	return tx
}

// take takes in an acknowledgement and reports whether it told anything new; if so,
// losses are to be detected.
func (o *outstanding) take(now cc.Time, a ack, window cc.Bytes) (news bool) {
	o.report.RTT = 0
	if a.highest >= o.nextTx() {
		return false // of something that was never sent
	}
	spurious := false
	a.each(func(tx uint64) {
		if o.arrive(tx) {
			news = true
			if tx < o.probeTx { // its round trip is not measured: it waited out a timeout
				spurious = true
			} else if seg := o.segs[o.txs[tx-o.txBase]-o.base]; tx == a.tx && seg.tx == tx {
				o.report.RTT = now.Sub(seg.sentAt)
				o.timer.Measure(o.report.RTT)
			}
		}
	})
	if !news {
		return false
	}
	o.timer.Start(now)
	o.highest = max(o.highest, a.highest)
	if o.probing {
		o.settleProbe(spurious, window)
	}
	o.trim()
	o.report.Sacked = o.report.Acked - cc.Bytes(o.base)*payload
	return true
}

// arrive notes a transmission and reports whether its segment was not known to have arrived.
func (o *outstanding) arrive(tx uint64) bool {
	if tx < o.txBase {
		return false
	}
	n := o.txs[tx-o.txBase]
	if n < o.base {
		return false
	}
	seg := &o.segs[n-o.base]
	if seg.state == arrived {
		return false
	}
	if seg.state == onWire {
		o.report.Pipe -= payload
	}
	seg.state = arrived
	o.report.Acked += payload
	if !seg.resent {
		o.report.Newest = max(o.report.Newest, cc.Bytes(n+1)*payload)
	}
	return true
}

// trim forgets what has arrived without a hole.
func (o *outstanding) trim() {
	k := 0
	for k < len(o.segs) && o.segs[k].state == arrived {
		k++
	}
	o.segs = o.segs[k:]
	o.base += int64(k)
}

// detect finds what must be lost, since later packets have arrived: three of them, or one
// a while ago (RFC 9002 §6.1). It returns when to look again; 0: with the next arrival.
func (o *outstanding) detect(now cc.Time) (again cc.Time) {
	for ; o.checked < o.highest; o.checked++ {
		n := o.txs[o.checked-o.txBase]
		if n < o.base {
			continue
		}
		seg := &o.segs[n-o.base]
		if seg.tx != o.checked || seg.state != onWire {
			continue
		}
		due := seg.sentAt.Add(o.timer.Patience())
		if o.highest-o.checked < sim.ReorderPackets && now < due {
			again = due
			break
		}
		o.lose(n)
	}
	forget := min(o.checked-o.txBase, uint64(len(o.txs)))
	if forget > maskBits { // later acknowledgements may still tell of the last ones
		o.txs = o.txs[forget-maskBits:]
		o.txBase += forget - maskBits
	}
	return again
}

func (o *outstanding) lose(n int64) {
	o.segs[n-o.base].state = lost
	o.report.Pipe -= payload
	o.repairs = append(o.repairs, n)
	o.owed = true // the flow learns of a loss from what is sent again
}

// timeout is when the retransmission timer fires; cc.Never: nothing is on the wire.
func (o *outstanding) timeout() cc.Time {
	if o.report.Pipe == 0 {
		return cc.Never
	}
	return o.timer.Due()
}

// settleProbe ends the wait for the news after a timeout. If that is of something sent before the
// timeout, only time was lost: what had been given up is on the wire again.
func (o *outstanding) settleProbe(spurious bool, window cc.Bytes) {
	o.probing = false
	newest := int64(-1)
	for i := range o.segs {
		seg := &o.segs[i]
		if spurious && seg.givenUp && seg.state == lost {
			seg.state = onWire
			o.report.Pipe += payload
			o.checked = min(o.checked, seg.tx)
		}
		if seg.givenUp = false; seg.state == onWire {
			newest = o.base + int64(i)
		}
	}
	if spurious && newest >= 0 && o.report.Pipe >= window {
		// Part of it may be lost, and fill the window until the timer fires again: the arrival of
		// what is sent again shows that (RFC 8985 §7.3).
		o.lose(newest)
	}
}

// expire has the timer fire: all that is on the wire is given up.
func (o *outstanding) expire(now cc.Time) {
	o.report.Timeouts++
	o.report.RTT = 0
	o.timer.Fire(now)
	o.repairs = o.repairs[:0]
	for i := range o.segs {
		switch o.segs[i].state {
		case onWire:
			o.segs[i].givenUp = true
			o.lose(o.base + int64(i))
		case lost:
			o.repairs = append(o.repairs, o.base+int64(i))
		case arrived:
		}
	}
	o.probing, o.probeTx = true, o.nextTx()
}

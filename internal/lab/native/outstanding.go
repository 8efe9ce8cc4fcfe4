package native

import (
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/cc/sim"
)

// ahead is what the application has written and the sender not sent: there is always more.
const ahead = 16 * payload

// outstanding is what was sent and has not all arrived: it takes in acknowledgements, has the scoreboard of virtual
// time find what was lost, and says so in a report. It is pure: time comes in with each call.
type outstanding struct {
	sim.Scoreboard
	txs    []int64 // segments by transmission, from txBase on
	txBase uint64
	owed   bool // the next repair does not wait for the window: the flow learns of a loss from what is sent again
	report flow.Report
}

func newOutstanding() outstanding {
	return outstanding{txBase: 1, report: flow.Report{MSS: payload, Written: ahead, Unsent: ahead}}
}

// next says which segment is to be sent: one that was lost, or a new one.
func (o *outstanding) next() (n int64, again bool) {
	if n, again = o.Repair(); again {
		return n, true
	}
	return o.End(), false
}

// nextTx returns the number that the next transmission will have.
func (o *outstanding) nextTx() uint64 { return o.txBase + uint64(len(o.txs)) }

// allows reports whether the segment that next names may leave.
func (o *outstanding) allows(window cc.Bytes) bool {
	if _, again := o.next(); again && o.owed {
		return true
	}
	return !o.Probing && o.Pipe+payload <= max(window, payload)
}

// send notes that the segment that next named leaves now, and returns the transmission's number.
func (o *outstanding) send(now cc.Time) (tx uint64) {
	n, again := o.next()
	if again {
		o.report.Lost += payload
	} else {
		o.Extend(cc.Bytes(n+1)*payload, payload, false)
		o.report.Written += payload
	}
	tx = uint64(o.Transmit(now, n)) //nolint:gosec // a count
	o.txs = append(o.txs, n)
	o.owed = false
	o.Describe(&o.report)
	return tx
}

// take takes in an acknowledgement and reports whether it told anything new.
func (o *outstanding) take(now cc.Time, a ack, window cc.Bytes) (news bool) {
	o.report.RTT = 0
	if a.highest >= o.nextTx() {
		return false // of something that was never sent
	}
	a.each(func(tx uint64) {
		if tx < o.txBase {
			return
		}
		rtt, arrived := o.Arrive(now, o.txs[tx-o.txBase], int64(tx)) //nolint:gosec // a count
		if news = news || arrived; arrived && tx == a.tx {
			o.report.RTT = rtt
		}
	})
	if !news {
		return false
	}
	if o.Heard(now, o.report.RTT) && o.Pipe >= window && o.LoseNewest() {
		o.owed = true // else part of it may be lost, and fill the window until the timer fires again
	}
	o.owed = o.Detect(now) || o.owed
	if forget := int(a.highest) - int(o.txBase) - 2*maskBits; forget > 0 { //nolint:gosec // later ones tell of no earlier
		o.txs, o.txBase = o.txs[forget:], o.txBase+uint64(forget)
	}
	o.Describe(&o.report)
	return true
}

// look does what is due by the clock, and reports whether anything was.
func (o *outstanding) look(now cc.Time) bool {
	switch {
	case o.Expired(now):
		o.report.Timeouts++
	case !o.Detect(now):
		return false
	}
	o.owed, o.report.RTT = true, 0
	o.Describe(&o.report)
	return true
}

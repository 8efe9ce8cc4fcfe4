package proxy

import (
	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/proxy/datapath"
)

// calmInflow is what a source's side takes in where its path needs no more, in bytes: should the destination stall, all
// of it waits here.
const calmInflow = 1 << 20

// inflow bounds what a leg takes in before it is read.
type inflow struct {
	from    datapath.Receiver
	most    int64   // that much
	lookAt  cc.Time // when it was last seen whether that is too little
	written int64   // to the other leg until then
}

// boundInflow bounds what d's source takes in from now on.
func (d *direction) boundInflow() {
	d.unbound = false
	from, ok := d.src.conn.(datapath.Receiver)
	if !ok {
		return
	}
	in := &inflow{from: from, most: int64(d.conn.srv.currentSettings().cfg.Limits.ReceiveBuffer)}
	if from.LimitReceive(cc.Bytes(in.most)) {
		d.inflow = in
	}
}

// grow has the source's side take in more once written bytes in all have been passed on, and reports whether it is
// bounded still. Up to calmInflow that is two to four times as much, half of which may be overhead: a sender in slow
// start has no more in flight than has arrived before. Beyond, it doubles where the path from the source needs it.
func (in *inflow) grow(clock func() cc.Time, written int64) (bounded bool) {
	if written < in.written+in.most/2 {
		return true
	}
	now, before := clock(), in.most
	if in.most >= calmInflow && in.isOutgrown(now, written) {
		in.most *= 2
	}
	for in.most < calmInflow && in.most <= 2*written {
		in.most *= 2
	}
	in.lookAt, in.written = now, written
	return in.most == before || in.from.LimitReceive(cc.Bytes(in.most))
}

// isOutgrown reports whether twice what was passed on in a round trip of the source's path since the last look, with as
// much overhead, is more than the source's side takes in.
func (in *inflow) isOutgrown(now cc.Time, written int64) bool {
	passed := now.Sub(in.lookAt).Seconds()
	return 4*float64(written-in.written)*in.from.LeastRTT().Seconds() > float64(in.most)*passed
}

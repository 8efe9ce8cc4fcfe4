package flow

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// LimitedBy names what holds a flow back at the moment.
type LimitedBy string

// The reasons a flow is not sending more.
const (
	LimitedByApplication LimitedBy = "application" // nothing to send
	LimitedByCwnd        LimitedBy = "cwnd"        // the algorithm's window, or this flow's share of it
	LimitedByPacing      LimitedBy = "pacing"      // the algorithm's pacing rate or the policy's maximum rate
	LimitedByTransport   LimitedBy = "transport"   // the transport below holds bytes back: its own window or pacing
	LimitedByReceiver    LimitedBy = "receiver"    // the peer's receive window
)

// Snapshot is the state of one flow at one moment.
type Snapshot struct {
	ID        uint64
	Group     string
	Algorithm string
	Phase     string
	Members   int // flows in the macroflow

	Cwnd       cc.Bytes // the macroflow's window
	Share      cc.Bytes // this flow's part of it
	PacingRate cc.Rate  // 0: not paced
	Inflight   cc.Bytes // this flow's
	Unsent     cc.Bytes // of those, still in the transport's own queue

	SRTT, MinRTT, LatestRTT time.Duration // 0: no sample yet
	QueueingDelay           time.Duration // LatestRTT − MinRTT
	DeliveryRate            cc.Rate       // newest sample

	Taken, Delivered, Lost, Marked cc.Bytes
	Timeouts                       int
	LossEvents                     int // OnLoss calls
	LimitedBy                      LimitedBy
	Limited                        map[LimitedBy]time.Duration // time spent in each state so far
}

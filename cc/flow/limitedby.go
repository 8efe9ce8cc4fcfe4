package flow

import "time"

// LimitedBy names what holds a flow back at the moment.
type LimitedBy uint8

// The reasons a flow is not sending more.
const (
	LimitedByApplication LimitedBy = iota // nothing to send
	LimitedByCwnd                         // the algorithm's window, or this flow's share of it
	LimitedByPacing                       // the algorithm's pacing rate or the policy's maximum rate
	LimitedByTransport                    // the transport below holds bytes back: its own window or pacing
	LimitedByReceiver                     // the peer's receive window
	numLimits
)

// LimitedTime is the time that was spent limited by each cause.
type LimitedTime [numLimits]time.Duration

// String returns the name used in metrics, logs and JSON.
func (l LimitedBy) String() string {
	return [...]string{"application", "cwnd", "pacing", "transport", "receiver"}[l]
}

// MarshalText returns String.
func (l LimitedBy) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

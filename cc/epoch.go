package cc

// epoch limits a sender's reactions to congestion to one per round trip. A loss of bytes that left before
// the last reaction belongs to the same event.
type epoch struct{ reacted Time }

// beginEpoch reports whether a loss opens a new event, and if so closes it for
// everything that left until now.
func (e *epoch) beginEpoch(l Loss) bool {
	if e.covers(l.SentAt) {
		return false
	}
	e.reacted = l.Now
	return true
}

// covers reports whether a byte that left then belongs to the last event: while
// such bytes are being acknowledged the sender is in recovery.
func (e *epoch) covers(left Time) bool { return e.reacted != 0 && left <= e.reacted }

// sentTime returns when the newest acknowledged byte left. Without a record it is a smoothed round trip ago.
func (a Ack) sentTime() Time {
	if a.Sent.At != 0 {
		return a.Sent.At
	}
	return a.Now.Add(-a.SRTT)
}

// round divides time into round trips: one ends when a byte that left after its
// start is acknowledged. The first acknowledgement of all ends an empty one.
type round struct{ start Time }

// endsWith reports whether a ends the round, and if so starts the next.
func (r *round) endsWith(a Ack) bool {
	if a.sentTime() < r.start {
		return false
	}
	r.start = a.Now
	return true
}

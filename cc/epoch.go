package cc

// epoch lets a sender react to congestion once per round trip: losses among
// bytes that left before the last reaction belong to the same event.
type epoch struct{ reacted Time }

// begin reports whether a loss opens a new event, and if so closes it for
// everything that left until now.
func (e *epoch) begin(l Loss) bool {
	if e.reacted != 0 && l.SentAt <= e.reacted {
		return false
	}
	e.reacted = l.Now
	return true
}

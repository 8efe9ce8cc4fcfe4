package kernel

// Splicing reports whether the stored bytes are in a pipe, so that the next
// Drain moves them without a copy of ours.
func (s *splicer) Splicing() bool { return s.pipe != nil }

package proxy

import "slices"

// connectionList keeps the live connections in the order of their numbers, so that to copy them all
// takes microseconds of the lock that its owner holds. The zero value is empty.
type connectionList struct {
	ids   []uint64
	conns []*connection // by the same index; nil: gone
	gone  int
}

// minGone is how many must be gone before the rest move up: with fewer there is nothing to gain.
const minGone = 64

// addConnection appends c, whose number is greater than all before.
func (r *connectionList) addConnection(c *connection) {
	r.ids, r.conns = append(r.ids, c.id), append(r.conns, c)
}

// removeConnection takes c out, if it is there.
func (r *connectionList) removeConnection(c *connection) {
	i, there := slices.BinarySearch(r.ids, c.id)
	if !there || r.conns[i] == nil {
		return
	}
	r.conns[i] = nil
	if r.gone++; r.gone >= minGone && 2*r.gone > len(r.conns) {
		r.compactLists()
	}
}

// compactLists moves the rest into slices that have room for as many again.
func (r *connectionList) compactLists() {
	n := len(r.conns) - r.gone
	kept := connectionList{ids: make([]uint64, 0, 2*n), conns: make([]*connection, 0, 2*n)}
	for _, c := range r.conns {
		if c != nil {
			kept.addConnection(c)
		}
	}
	*r = kept
}

// liveConnections returns the connections, oldest first.
func (s *Server) liveConnections() []*connection {
	conns := s.emptyRoster()
	s.mu.Lock()
	conns = append(conns, s.conns.conns...)
	s.mu.Unlock()
	return dropGone(conns)
}

// emptyRoster has place for all connections, so that memory is not allocated while s.mu is held.
func (s *Server) emptyRoster() []*connection {
	s.mu.Lock()
	n := len(s.conns.conns)
	s.mu.Unlock()
	return make([]*connection, 0, n+n/8)
}

// dropGone drops those that are gone.
func dropGone(conns []*connection) []*connection {
	return slices.DeleteFunc(conns, func(c *connection) bool { return c == nil })
}

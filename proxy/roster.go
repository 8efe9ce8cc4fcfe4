package proxy

import "slices"

// roster keeps the live connections in the order of their numbers, so that to copy them all
// takes microseconds of the lock that its owner holds. The zero value is empty.
type roster struct {
	ids   []uint64
	conns []*connection // by the same index; nil: gone
	gone  int
}

// minGone is how many must be gone before the rest move up: with fewer there is nothing to gain.
const minGone = 64

// add appends c, whose number is greater than all before.
func (r *roster) add(c *connection) {
	r.ids, r.conns = append(r.ids, c.id), append(r.conns, c)
}

// remove takes c out, if it is there.
func (r *roster) remove(c *connection) {
	i, there := slices.BinarySearch(r.ids, c.id)
	if !there || r.conns[i] == nil {
		return
	}
	r.conns[i] = nil
	if r.gone++; r.gone >= minGone && 2*r.gone > len(r.conns) {
		r.compact()
	}
}

// compact moves the rest into slices that have room for as many again.
func (r *roster) compact() {
	n := len(r.conns) - r.gone
	kept := roster{ids: make([]uint64, 0, 2*n), conns: make([]*connection, 0, 2*n)}
	for _, c := range r.conns {
		if c != nil {
			kept.add(c)
		}
	}
	*r = kept
}

// live returns the connections, oldest first.
func (s *Server) live() []*connection {
	conns := s.room()
	s.mu.Lock()
	conns = append(conns, s.conns.conns...)
	s.mu.Unlock()
	return present(conns)
}

// room has place for all connections, so that memory is not allocated while s.mu is held.
func (s *Server) room() []*connection {
	s.mu.Lock()
	n := len(s.conns.conns)
	s.mu.Unlock()
	return make([]*connection, 0, n+n/8)
}

// present drops those that are gone.
func present(conns []*connection) []*connection {
	return slices.DeleteFunc(conns, func(c *connection) bool { return c == nil })
}

package netstack

import (
	"maps"
	"slices"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip/stack"
)

// table finds connections by addresses and ports, for every packet: a sync.Map would put
// each key that is looked up on the heap.
type table struct {
	mu    sync.RWMutex
	conns map[stack.TransportEndpointID]*Conn
}

// findConn returns the connection; nil: there is none.
func (t *table) findConn(id stack.TransportEndpointID) *Conn {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return t.conns[id]
}

func (t *table) addConn(c *Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.conns[c.id] = c
}

// removeConn takes c out, unless another has its addresses and ports by now.
func (t *table) removeConn(c *Conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conns[c.id] == c {
		delete(t.conns, c.id)
	}
}

func (t *table) allConns() []*Conn {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return slices.Collect(maps.Values(t.conns))
}

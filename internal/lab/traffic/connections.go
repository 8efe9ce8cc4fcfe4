package traffic

import (
	"net"
	"sync"
)

// connections are those that end with whoever serves them, if they do not end before.
type connections struct {
	mu   sync.Mutex
	open map[net.Conn]struct{}
	shut bool
}

// keep has close end a connection; false: it came too late, and is closed.
func (c *connections) keep(conn net.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shut {
		_ = conn.Close() // nothing was sent
		return false
	}
	if c.open == nil {
		c.open = map[net.Conn]struct{}{}
	}
	c.open[conn] = struct{}{}
	return true
}

// end closes a connection.
func (c *connections) end(conn net.Conn) {
	c.mu.Lock()
	delete(c.open, conn)
	c.mu.Unlock()
	_ = conn.Close() // its peer hung up already, or it has datagrams, which have no end to lose
}

// close ends all connections.
func (c *connections) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shut = true
	for conn := range c.open {
		_ = conn.Close()
	}
}

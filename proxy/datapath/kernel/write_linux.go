package kernel

import "golang.org/x/sys/unix"

// begin and end frame everything that hands bytes to the socket.
func (c *Conn) begin() {
	if c.observed.Load() {
		c.writing.Add(1)
		c.activate() // already now: a write may block half-way for long
	}
}

func (c *Conn) end() {
	if c.observed.Load() {
		c.writes.Add(1)
		c.writing.Add(-1)
		c.activate()
		if h := c.held.Load(); h != nil { // its cell may have to be told
			h.cell.Mark()
		}
	}
}

// activate has the tick poll the conn until it is drained.
func (c *Conn) activate() {
	if !c.active.Load() && c.active.CompareAndSwap(false, true) {
		c.dp.join(c)
	}
}

// leave ends polling unless a writer came in between. Either the writer sees
// active unset and sets it, or its write is seen here.
func (c *Conn) leave() (left bool) {
	if c.writing.Load() != 0 || c.writes.Load() != c.seen {
		return false
	}
	c.active.Store(false)
	if c.writing.Load() == 0 && c.writes.Load() == c.seen {
		return true
	}
	return !c.active.CompareAndSwap(false, true)
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.begin()
	defer c.end()
	for {
		if err := c.await(); err != nil {
			return n, err
		}
		wrote, err := c.tcp.Write(b[n:c.upTo(n, len(b))])
		c.wrote.Add(int64(wrote))
		if n += wrote; err != nil || n == len(b) {
			return n, err
		}
	}
}

// upTo is how far a write of what lies between n and end goes at once, await
// waits until it may. The kernel checks what it may park only when it begins a
// buffer of up to 64 KiB, whether writes are small or large.
func (c *Conn) upTo(n, end int) int {
	if piece := int(c.piece.Load()); piece > 0 {
		return min(end, n+piece)
	}
	return end
}

func (c *Conn) await() error {
	if c.piece.Load() == 0 {
		return nil
	}
	return c.raw.Write(c.roomy)
}

// hasRoom runs inside RawConn.Write. Asking has the kernel wake us when there is.
func (c *Conn) hasRoom(fd uintptr) bool {
	c.asked[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
	n, err := unix.Poll(c.asked[:], 0)
	return n > 0 || err != nil // the write then says what is wrong
}

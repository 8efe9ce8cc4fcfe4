package netstack

import (
	"sync"
	"time"
)

// deadline is the read or the write deadline of a connection.
type deadline struct {
	mu      sync.Mutex
	timer   *time.Timer
	expired chan struct{} // closed once the moment has come
}

func newDeadline() *deadline { return &deadline{expired: make(chan struct{})} }

// wait returns a channel that is closed when the present deadline has come.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// set moves the deadline; the zero time is never.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.expired // the timer's function has run, or is about to
	}
	d.timer = nil
	select {
	case <-d.expired:
		d.expired = make(chan struct{})
	default:
	}
	if t.IsZero() {
		return
	}
	expired := d.expired
	in := time.Until(t) //nolint:forbidigo // net.Conn's deadlines are of the real clock
	if in <= 0 {
		close(expired)
		return
	}
	d.timer = time.AfterFunc(in, func() { close(expired) })
}

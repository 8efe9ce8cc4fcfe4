package datapath

import (
	"sync"
	"time"
)

// Deadline is the read or the write deadline of a connection.
type Deadline struct {
	mu      sync.Mutex
	timer   *time.Timer
	expired chan struct{} // closed once the moment has come
}

// Expired is a moment in the past. As a deadline it ends a call that waits.
var Expired = time.Unix(1, 0)

// NewDeadline returns one that never comes.
func NewDeadline() *Deadline { return &Deadline{expired: make(chan struct{})} }

// Wait returns a channel that is closed when the present deadline has come.
func (d *Deadline) Wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// Set moves the deadline; the zero time is never.
func (d *Deadline) Set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.expired // the timer's function has run, or is about to
	}
	d.timer = nil
	if IsClosed(d.expired) {
		d.expired = make(chan struct{})
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

// Pending reports whether there is one, be it over or not.
func (d *Deadline) Pending() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.timer != nil || IsClosed(d.expired)
}

// HasCome reports whether the present deadline is over.
func (d *Deadline) HasCome() bool { return IsClosed(d.Wait()) }

package proxy

import (
	"sync"
	"time"

	"github.com/penstock-net/penstock/proxy/datapath"
	"github.com/penstock-net/penstock/proxy/policy"
)

// firstBytes lends memory for looking at what clients send first.
var firstBytes = sync.Pool{New: func() any { return new([policy.MaxFirstBytes]byte) }}

// expired is a deadline in the past.
var expired = time.Unix(1, 0)

// awaitServerName looks for a server name in the client's first bytes, which
// stay where they are for the relay. It waits while they are not complete, for
// the configured time, and no longer than until the server speaks: then the
// client is not the first, and bytes would be held up. Both legs are there by
// now, since a client that asked speaks only once it is answered.
func (c *connection) awaitServerName() string {
	if c.chosen.Exchange != nil {
		return policy.HostName(c.decidedOn.Host) // of the URL, in whatever form the request has
	}
	early := c.up.early
	if name, more := policy.ServerName(early); !more {
		return name
	}
	client, ok := c.client.conn.(datapath.Peeker)
	if !ok {
		return ""
	}
	stop := c.boundPeek()
	defer stop()

	// No memory is held for a client that says nothing.
	var first [1]byte
	spoke := false
	if err := client.Peek(first[:], func([]byte) bool { spoke = true; return true }); err != nil || !spoke {
		return ""
	}
	buf := firstBytes.Get().(*[policy.MaxFirstBytes]byte)
	defer firstBytes.Put(buf)
	n := copy(buf[:], early)
	name := ""
	_ = client.Peek(buf[n:], func(b []byte) bool {
		var more bool
		name, more = policy.ServerName(buf[:n+len(b)])
		return !more
	}) // without the rest there is no name, and the relay meets the error
	return name
}

// boundPeek has a Peek at the client's leg fail once the server speaks or ends, or
// the time is over. stop undoes it.
func (c *connection) boundPeek() (stop func()) {
	client, server := c.client.conn, c.server.conn
	fired := make(chan struct{})
	timer := time.AfterFunc(c.decidedBy.cfg.Limits.ServerNameWait, func() {
		_ = client.SetReadDeadline(expired)
		close(fired)
	})
	heard := make(chan struct{})
	go func() {
		defer close(heard)
		p, ok := server.(datapath.Peeker)
		if !ok {
			return
		}
		var first [1]byte
		_ = p.Peek(first[:], func([]byte) bool { return true })
		_ = client.SetReadDeadline(expired)
	}()
	return func() {
		_ = server.SetReadDeadline(expired)
		<-heard
		if !timer.Stop() {
			<-fired
		}
		_ = server.SetReadDeadline(time.Time{})
		_ = client.SetReadDeadline(time.Time{})
	}
}

// applyNameVerdict gives the verdict now that the server name is known, or known to be
// missing. Not a byte has moved yet.
func (c *connection) applyNameVerdict() *rejection {
	verdict := c.decidedBy.policy.Decide(c.decidedOn)
	c.verdict = &verdict
	c.srv.log.Debug("looked for a server name", "id", c.id, "listener", c.listener.cfg.Name, "client", c.clientAddress(),
		"target", c.decidedOn.Target, "server_name", c.decidedOn.ServerName, "rule", verdict.Rule)
	if verdict.Refuse == "" {
		return nil
	}
	return c.giveUp(RejectedRule, refusedBy(verdict))
}

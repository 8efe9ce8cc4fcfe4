package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Client is an application that asks for one thing after the other: objects of a size, or the chunks of a video. Who
// plays it tells it what has happened, in virtual time or over real sockets. Times count from the run's start.
type Client struct {
	Size    cc.Bytes      // of what it asks for at once
	Every   time.Duration // from one request to the next, which waits for what was asked for before
	Objects []Object      // that it has asked for
	player  *Player       // nil: these are no chunks of a video
}

// Object is one thing that a client asked for.
type Object struct {
	At   time.Duration // when, from the run's start
	Took time.Duration // from the request to its last byte; 0: it has not come
}

// NewClient returns a client that asks for objects of a size, or for the chunks of a video where there is one.
func NewClient(size cc.Bytes, every time.Duration, v Video) Client {
	if v.Rate > 0 {
		return Client{Size: v.Rate.BytesIn(v.Chunk), player: &Player{Video: v}}
	}
	return Client{Size: size, Every: every}
}

// Ask notes that it asks for the next.
func (c *Client) Ask(now time.Duration) { c.Objects = append(c.Objects, Object{At: now}) }

// Take notes that all has come of what it was due to ask for at a moment, and how long that took. It returns when the
// next request is due.
func (c *Client) Take(due, now, took time.Duration) (next time.Duration) {
	c.Objects[len(c.Objects)-1].Took = took
	if c.player == nil {
		return max(now, due+c.Every)
	}
	began := c.Objects[0].At
	c.player.Arrived(now - began)
	return began + c.player.Room(now-began)
}

// Playback tells how its video went up to now; nil: it has none, or has not begun.
func (c *Client) Playback(now time.Duration) *Playback {
	if c.player == nil || len(c.Objects) == 0 {
		return nil
	}
	p := c.player.Playback(now - c.Objects[0].At)
	return &p
}

// client plays a Client over a flow. A request takes the way up, as a small packet, and again where it is lost.
type client struct {
	Client
	s       *sender
	awaits  cc.Bytes
	waiting bool  // one is under way
	silent  bool  // nothing of it has come
	timer   Timer // goes by the time from a request to its first byte
}

// now is the time since the run's start.
func (c *client) now() time.Duration { return c.s.w.now.Sub(c.s.w.origin) }

// ask asks for the next.
func (c *client) ask() {
	if c.s.closed {
		return
	}
	c.waiting, c.silent = true, true
	c.awaits += c.Size
	c.Ask(c.now())
	c.request()
}

// request sends a request.
func (c *client) request() {
	s := c.s
	c.timer.Start(s.w.now)
	s.w.carry(true, s.host, ackBytes, s.number, NotECT, func(v Verdict) {
		if v.Dropped != DropNone {
			s.w.at(c.timer.Due(), func() {
				c.timer.Fire(s.w.now)
				c.request()
			})
			return
		}
		s.w.at(v.Arrives.Add(s.cfg.Delay), func() {
			s.src.asked += c.Size
			s.pump()
		})
	})
}

// took looks at what has arrived without a hole.
func (c *client) took(upTo cc.Bytes) {
	now := c.s.w.now
	if c.silent && upTo > c.awaits-c.Size {
		c.silent = false
		c.timer.Measure(now.Sub(c.timer.from)) // since the last time that it was sent: no other arrived
	}
	if !c.waiting || upTo < c.awaits {
		return
	}
	c.waiting = false
	asked := c.Objects[len(c.Objects)-1].At
	next := c.s.w.origin.Add(c.Take(asked, c.now(), c.now()-asked))
	if next == now {
		c.ask()
		return
	}
	c.s.w.at(next, c.ask)
}

func (f FlowConfig) hasClient() bool { return f.Every > 0 || f.Video.Rate > 0 }

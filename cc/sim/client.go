package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// client is an application at the receiving end that asks for one thing after
// the other on the same flow: objects, or the chunks of a video. A request takes the
// way up, as a small packet, and again where it is lost.
type client struct {
	s       *sender
	started cc.Time // when it asked for the first
	begun   cc.Time // when it asked for the one under way
	awaits  cc.Bytes
	waiting bool  // one is under way
	silent  bool  // nothing of it has come
	timer   Timer // goes by the time from a request to its first byte
	objects []Object
	player  Player
}

// Object is one thing that a client asked for.
type Object struct {
	At   time.Duration // when, from the run's start
	Took time.Duration // from the request to its last byte; 0: it has not come
}

// ask asks for the next.
func (c *client) ask() {
	s := c.s
	if s.closed {
		return
	}
	if s.cfg.Video.Rate > 0 && len(c.objects) == 0 {
		c.started = s.w.now
	}
	c.begun, c.waiting, c.silent = s.w.now, true, true
	size := s.cfg.request()
	c.awaits += size
	c.objects = append(c.objects, Object{At: c.begun.Sub(s.w.origin)})
	c.request(size)
}

// request sends a request for size bytes.
func (c *client) request(size cc.Bytes) {
	s := c.s
	c.timer.Start(s.w.now)
	s.w.carry(true, s.to, ackBytes, s.number, NotECT, func(v Verdict) {
		if v.Dropped != DropNone {
			s.w.at(c.timer.Due(), func() {
				c.timer.Fire(s.w.now)
				c.request(size)
			})
			return
		}
		s.w.at(v.Arrives.Add(s.cfg.Delay), func() {
			s.src.asked += size
			s.pump()
		})
	})
}

// took looks at what has arrived without a hole.
func (c *client) took(upTo cc.Bytes) {
	now := c.s.w.now
	if c.silent && upTo > c.awaits-c.s.cfg.request() {
		c.silent = false
		c.timer.Measure(now.Sub(c.timer.from)) // since the last time that it was sent: no other arrived
	}
	if !c.waiting || upTo < c.awaits {
		return
	}
	c.waiting = false
	c.objects[len(c.objects)-1].Took = now.Sub(c.begun)
	next := max(now, c.begun.Add(c.s.cfg.Every))
	if c.s.cfg.Video.Rate > 0 {
		c.player.Arrived(now.Sub(c.started))
		next = c.started.Add(c.player.Room(now.Sub(c.started)))
	}
	if next == now {
		c.ask()
		return
	}
	c.s.w.at(next, c.ask)
}

// request is the size of what a client asks for at once.
func (f FlowConfig) request() cc.Bytes {
	if f.Video.Rate > 0 {
		return f.Video.Rate.BytesIn(f.Video.Chunk)
	}
	return f.Bytes
}

func (f FlowConfig) hasClient() bool { return f.Every > 0 || f.Video.Rate > 0 }

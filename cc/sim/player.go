package sim

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// Video is what a player at the receiving end asks for; see Player.
type Video struct {
	Rate   cc.Rate       // of the encoding; 0: there is none
	Chunk  time.Duration // length of what it asks for at once
	Buffer time.Duration // played ahead at most
}

// Player is a video player that asks for one chunk after the other as long as
// its buffer has room for one more. It plays what it has from the first whole
// chunk on; when it has run dry it waits for the next. Times count from when it
// asked for the first.
type Player struct {
	Video
	arrived  time.Duration // of video
	playing  time.Duration // when it last began to, after a wait
	before   time.Duration // of video, played until then
	startUp  time.Duration // 0: it has not begun
	waited   time.Duration
	rebuffer int
}

// Playback is how a video played.
type Playback struct {
	StartUp   time.Duration // until the first frame; 0: there was none
	Rebuffers int           // times that it stopped for want of video
	Rebuffer  time.Duration // spent so, start-up aside
	Played    time.Duration
}

// Arrived says that a whole chunk has come.
func (p *Player) Arrived(now time.Duration) {
	switch dry := p.dry(); {
	case p.arrived == 0:
		p.startUp, p.playing = now, now
	case now > dry:
		p.rebuffer++
		p.waited += now - dry
		p.before, p.playing = p.arrived, now
	}
	p.arrived += p.Chunk
}

// dry is when it has played all that has arrived.
func (p *Player) dry() time.Duration { return p.playing + p.arrived - p.before }

// Room returns when the buffer has room for one more chunk.
func (p *Player) Room(now time.Duration) time.Duration {
	return max(now, p.dry()+p.Chunk-p.Buffer)
}

// Playback tells how it went up to now.
func (p *Player) Playback(now time.Duration) Playback {
	r := Playback{StartUp: p.startUp, Rebuffers: p.rebuffer, Rebuffer: p.waited, Played: p.before}
	if p.arrived == 0 {
		return r
	}
	r.Played += min(now, p.dry()) - p.playing
	if now > p.dry() {
		r.Rebuffers++
		r.Rebuffer += now - p.dry()
	}
	return r
}

package stage

import (
	"time"

	"github.com/penstock-net/penstock/cc"
)

// defaultBuffer is how far a player downloads ahead that is not told.
const defaultBuffer = 30 * time.Second

// player is a video player without adaptation: it starts with the first chunk,
// plays at the pace of the clock, and when nothing is left it stops until it has
// another chunk. Times are any clock's, and never go back.
type player struct {
	chunk, most time.Duration // a chunk's length; downloaded ahead at most
	began       time.Duration // when it was asked to play
	seen        time.Duration // up to which all is accounted for
	ahead       time.Duration // downloaded and not played
	playing     bool          // or waiting for the next chunk
	VideoRecord
}

func newPlayer(a Actor, now time.Duration) *player {
	most := a.Buffer
	if most == 0 {
		most = defaultBuffer
	}
	return &player{chunk: a.Every, most: max(most, a.Every), began: now, seen: now}
}

// size is a chunk's.
func (a Actor) chunkSize() cc.Bytes { return a.Rate.BytesIn(a.Every) }

// at brings the account up to now.
func (p *player) at(now time.Duration) {
	span := max(0, now-p.seen)
	p.seen = max(p.seen, now)
	if p.playing {
		played := min(span, p.ahead)
		p.Played += played
		p.ahead -= played
		span -= played
		if p.ahead == 0 && span > 0 {
			p.playing = false
			p.Rebuffers++
		}
	}
	if !p.playing && p.Rebuffers > 0 {
		p.Rebuffer += span
	}
}

// got takes in a chunk that is complete.
func (p *player) got(now time.Duration) {
	p.at(now)
	if !p.playing && p.Rebuffers == 0 {
		p.StartUp = now - p.began
	}
	p.ahead += p.chunk
	p.playing = true
}

// next is when there is room for another chunk.
func (p *player) next(now time.Duration) time.Duration {
	p.at(now)
	return p.seen + max(0, p.ahead+p.chunk-p.most)
}

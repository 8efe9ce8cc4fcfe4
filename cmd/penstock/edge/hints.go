package edge

import (
	"context"
	"fmt"
	"time"
)

// LeastHints is the shortest period of hints: a subframe of a cellular link.
const LeastHints = time.Millisecond

// Feeder brings what the emulated link says of itself to the proxy, as a
// monitor of the radio would: by HTTP, and as late as a report on the way back.
type Feeder struct {
	cancel context.CancelFunc
	ended  chan error
}

// saying is a word on its way.
type saying struct {
	Word
	made time.Time
}

// Feed asks the link each period what it has to say, and tells the proxy delay
// later. look is called by one goroutine, until Stop.
func (p *Proxy) Feed(ctx context.Context, look func() []Word, period, delay time.Duration) *Feeder {
	ctx, cancel := context.WithCancel(ctx)
	f := &Feeder{cancel: cancel, ended: make(chan error, 1)}
	go func() { f.ended <- p.feed(ctx, look, period, delay) }()
	return f
}

func (p *Proxy) feed(ctx context.Context, look func() []Word, period, delay time.Duration) error {
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	arrive := time.NewTimer(0)
	defer arrive.Stop()
	var way []saying // the oldest first; as many as fit into the delay
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-ticker.C:
			for _, w := range look() {
				way = append(way, saying{w, now})
			}
		case <-arrive.C:
		}
		for len(way) > 0 && time.Since(way[0].made) >= delay {
			if err := p.Hint(ctx, way[0].Word, way[0].made); err != nil {
				if ctx.Err() != nil {
					return nil
				}
				return fmt.Errorf("tell the proxy of the link: %w", err)
			}
			way = way[1:]
		}
		if len(way) > 0 {
			arrive.Reset(delay - time.Since(way[0].made))
		}
	}
}

// Stop ends the feeding and returns what went wrong with it.
func (f *Feeder) Stop() error {
	f.cancel()
	return <-f.ended
}

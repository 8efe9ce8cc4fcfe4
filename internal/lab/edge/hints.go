package edge

import (
	"context"
	"fmt"
	"time"
)

// LeastHints is the shortest period of hints: a subframe of a cellular link.
const LeastHints = time.Millisecond

// delayedHint is a hint on its way.
type delayedHint struct {
	HostHint
	made time.Time
}

// Feed brings what the emulated link says of itself to the proxy until ctx ends,
// as a monitor of the radio would: by HTTP, and delay late, as a report on the
// way back is. look is asked each period.
func (p *Proxy) Feed(ctx context.Context, look func() []HostHint, period, delay time.Duration) error {
	ticker := time.NewTicker(period)
	defer ticker.Stop()
	arrive := time.NewTimer(0)
	defer arrive.Stop()
	var way []delayedHint // the oldest first; as many as fit into the delay
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-ticker.C:
			for _, w := range look() {
				way = append(way, delayedHint{w, now})
			}
		case <-arrive.C:
		}
		for len(way) > 0 && time.Since(way[0].made) >= delay {
			if err := p.Hint(ctx, way[0].HostHint, way[0].made); err != nil {
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

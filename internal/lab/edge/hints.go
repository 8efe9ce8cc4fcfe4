package edge

import (
	"context"
	"fmt"
	"iter"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
)

// LeastHints is the shortest period of hints: a subframe of a cellular link.
const LeastHints = time.Millisecond

// delayedHint is a hint on its way.
type delayedHint struct {
	cc.Hint
	host netip.Addr
	made time.Time
}

// Feed brings what the emulated link says of itself to the proxy until ctx ends,
// as a monitor of the radio would: by HTTP, and delay late, as a report on the
// way back is. look is asked each period.
func (p *Proxy) Feed(ctx context.Context, look iter.Seq2[netip.Addr, cc.Hint], period, delay time.Duration) error {
	tick := time.Tick(period)
	var arrive <-chan time.Time
	var way []delayedHint // the oldest first; as many as fit into the delay
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-tick:
			for host, hint := range look {
				way = append(way, delayedHint{hint, host, now})
			}
		case <-arrive:
		}
		for len(way) > 0 && time.Since(way[0].made) >= delay {
			if err := p.tellHint(ctx, way[0]); err != nil {
				return fmt.Errorf("tell the proxy of the link: %w", err)
			}
			way = way[1:]
		}
		if len(way) > 0 {
			arrive = time.After(delay - time.Since(way[0].made))
		}
	}
}

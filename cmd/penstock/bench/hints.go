package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/telemetry"
)

// leastHints is the shortest period of hints: a subframe of a cellular link.
const leastHints = time.Millisecond

// feeder brings what the emulated link says of itself to the proxy, as a
// monitor of the radio would: by HTTP, and as late as a report on the way back.
type feeder struct {
	cancel context.CancelFunc
	ended  chan error
}

// saying is a hint on its way.
type saying struct {
	cc.Hint
	made time.Time
}

// feed sends the proxy a hint about host each period, each delay late.
func feed(ctx context.Context, p *proxy, m *netlab.Monitor, host netip.Addr, period, delay time.Duration) *feeder {
	ctx, cancel := context.WithCancel(ctx)
	f := &feeder{cancel: cancel, ended: make(chan error, 1)}
	go func() { f.ended <- run(ctx, p, m, host, period, delay) }()
	return f
}

func run(ctx context.Context, p *proxy, m *netlab.Monitor, host netip.Addr, period, delay time.Duration) error {
	look := time.NewTicker(period)
	defer look.Stop()
	arrive := time.NewTimer(0)
	defer arrive.Stop()
	var way []saying // the oldest first; as many as fit into the delay
	for {
		select {
		case <-ctx.Done():
			return nil
		case now := <-look.C:
			if h, ok := m.Hint(); ok {
				way = append(way, saying{h, now})
			}
		case <-arrive.C:
		}
		for len(way) > 0 && time.Since(way[0].made) >= delay {
			if err := p.hint(ctx, host, way[0]); err != nil {
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

// stop ends the feeding and returns what went wrong with it.
func (f *feeder) stop() error {
	f.cancel()
	return <-f.ended
}

// hint tells the proxy what the link says about the path to host.
func (p *proxy) hint(ctx context.Context, host netip.Addr, s saying) error {
	body, err := json.Marshal(telemetry.Hint{
		Host: host.String(), Age: millis(time.Since(s.made)),
		Capacity: float64(s.Capacity), FairShare: float64(s.FairShare),
		LinkRate: float64(s.LinkRate), ArrivalRate: float64(s.ArrivalRate),
		QueueRoom: float64(s.QueueRoom), Flows: float64(s.Flows), RadioLost: float64(s.RadioLost), Share: s.Share,
	})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+telemetryAddr+"/v1/hints", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	said, err := io.ReadAll(io.LimitReader(resp.Body, tailBytes))
	if resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(said))
	}
	return errors.Join(err, resp.Body.Close())
}

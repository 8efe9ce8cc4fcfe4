package edge

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

	"github.com/penstock-net/penstock/telemetry"
)

// Get reads one of the proxy's telemetry pages; read may be nil.
func (p *Proxy) Get(ctx context.Context, page string, read func(io.Reader) error) error {
	status, err := p.ask(ctx, http.MethodGet, page, nil, func(resp *http.Response) error {
		if resp.StatusCode != http.StatusOK || read == nil {
			return nil
		}
		return read(resp.Body)
	})
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%s: %d %s", page, status, http.StatusText(status))
	}
	return err
}

func (p *Proxy) ask(ctx context.Context, method, page string, body []byte,
	read func(*http.Response) error,
) (status int, err error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+telemetryAddr+page, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, errors.Join(read(resp), resp.Body.Close())
}

// post sends body and returns what the proxy refused it with, if it did.
func (p *Proxy) post(ctx context.Context, page string, body []byte) (refused string, err error) {
	var said []byte
	status, err := p.ask(ctx, http.MethodPost, page, body, func(resp *http.Response) (err error) {
		said, err = io.ReadAll(io.LimitReader(resp.Body, tailBytes))
		return err
	})
	if err == nil && status != http.StatusOK {
		refused = fmt.Sprintf("%d %s: %s", status, http.StatusText(status), bytes.TrimSpace(said))
	}
	return refused, err
}

// Reload has the proxy reread its configuration; refused says why it keeps the old one.
func (p *Proxy) Reload(ctx context.Context) (refused string, err error) {
	refused, err = p.post(ctx, "/-/reload", nil)
	if err != nil {
		err = fmt.Errorf("have the proxy reread its configuration: %w", err)
	}
	return refused, err
}

// Flows are the connections that pass through the proxy, all of them.
func (p *Proxy) Flows(ctx context.Context) (flows []telemetry.Flow, err error) {
	err = p.Get(ctx, "/flows?limit=0", func(r io.Reader) error { return json.NewDecoder(r).Decode(&flows) })
	if err != nil {
		return nil, fmt.Errorf("ask the proxy for its flows: %w", err)
	}
	return flows, nil
}

// Client is the client's end of a flow.
func Client(f telemetry.Flow) netip.AddrPort {
	addr, err := netip.ParseAddrPort(f.Client)
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(addr.Addr().Unmap(), addr.Port())
}

// tellHint tells the proxy what the link said of a host when the hint was made.
func (p *Proxy) tellHint(ctx context.Context, w delayedHint) error {
	body, err := json.Marshal(telemetry.Hint{
		Host: w.host.String(), Age: float64(time.Since(w.made).Round(time.Microsecond)) / 1e6,
		Capacity: float64(w.Capacity), FairShare: float64(w.FairShare),
		LinkRate: float64(w.LinkRate), ArrivalRate: float64(w.ArrivalRate),
		QueueRoom: float64(w.QueueRoom), Flows: float64(w.Flows), RadioLost: float64(w.RadioLost), Share: w.Share,
	})
	if err != nil {
		return err
	}
	refused, err := p.post(ctx, "/v1/hints", body)
	if err == nil && refused != "" {
		err = errors.New(refused)
	}
	return err
}

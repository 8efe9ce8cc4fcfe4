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

// Get reads one of the proxy's telemetry pages.
func (p *Proxy) Get(ctx context.Context, page string) ([]byte, error) {
	status, said, err := p.ask(ctx, http.MethodGet, page, nil)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%s: %d %s", page, status, http.StatusText(status))
	}
	return said, err
}

func (p *Proxy) ask(ctx context.Context, method, page string, body []byte) (status int, said []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+telemetryAddr+page, bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	said, err = io.ReadAll(resp.Body)
	return resp.StatusCode, said, errors.Join(err, resp.Body.Close())
}

// post sends body and returns what the proxy refused it with, if it did.
func (p *Proxy) post(ctx context.Context, page string, body []byte) (refused string, err error) {
	status, said, err := p.ask(ctx, http.MethodPost, page, body)
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
	page, err := p.Get(ctx, "/flows?limit=0")
	if err == nil {
		err = json.Unmarshal(page, &flows)
	}
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

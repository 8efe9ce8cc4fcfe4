// Package otlp sends metrics to a collector by OTLP over HTTP, as JSON. It does not use the SDK of OpenTelemetry,
// which would make the program a third larger.
//
// The files, from what calls to what is called: exporter.go, encode.go.
package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// maxQueued and maxQueuedBytes bound the exports that wait for a collector that does not answer. The oldest are
	// dropped.
	maxQueued      = 64
	maxQueuedBytes = 4 << 20
	// sendTimeout bounds a request, and lastTimeout the one at the end of the process.
	sendTimeout = 10 * time.Second
	lastTimeout = 2 * time.Second
	// firstRetry is the time until a failed request is sent again. It doubles up to lastRetry, and a collector may
	// ask for more by Retry-After, up to maxRetryAfter.
	firstRetry    = time.Second
	lastRetry     = time.Minute
	maxRetryAfter = 5 * time.Minute
	// maxAnswer is how much of an answer is read, in bytes, and maxWords how much of its message is logged.
	maxAnswer = 64 << 10
	maxWords  = 500
)

// Exporter sends all metrics at an interval. Its exported fields are set before ExportMetrics. SetHeaders and Counts
// may be called at any time.
type Exporter struct {
	Endpoint  string // whole URL
	Interval  time.Duration
	Metrics   prometheus.Gatherer
	Version   string
	Start     time.Time // when counts began
	Wall      func() time.Time
	Transport http.RoundTripper // nil: TCP or TLS to the endpoint itself
	Log       *slog.Logger

	headers                atomic.Pointer[map[string]string] // secret
	sent, refused, dropped atomic.Uint64

	// failing is true if the last request failed. partial is true if the collector left metrics out of the last export
	// that it took. Only ExportMetrics uses them.
	failing, partial bool
}

// SetHeaders replaces the headers of requests. They are not logged, because they may have a token.
func (e *Exporter) SetHeaders(h map[string]string) { e.headers.Store(&h) }

// Counts returns how many exports were taken by the collector, were refused by it, and were dropped because it did not
// answer.
func (e *Exporter) Counts() (sent, refused, dropped uint64) {
	return e.sent.Load(), e.refused.Load(), e.dropped.Load()
}

// ExportMetrics sends all metrics at each interval until ctx ends, and then one last time.
func (e *Exporter) ExportMetrics(ctx context.Context) {
	client := &http.Client{
		Transport: e.Transport,
		// A redirect could carry the headers to another host.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	if client.Transport == nil {
		direct := http.DefaultTransport.(*http.Transport).Clone()
		direct.Proxy = nil // HTTP_PROXY of the environment may name this process
		client.Transport = direct
	}
	defer client.CloseIdleConnections()
	tick := time.NewTicker(e.Interval)
	defer tick.Stop()
	var queue [][]byte // the oldest first
	var retry <-chan time.Time
	pause := firstRetry
	random := rand.New(rand.NewPCG(uint64(e.Start.UnixNano()), 0)) //nolint:gosec // only for pauses
	for {
		select {
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastTimeout)
			_, _ = e.sendExport(last, client, e.encodeMetrics())
			cancel()
			return
		case <-tick.C:
			queue = e.enqueueExport(queue, e.encodeMetrics())
		case <-retry:
			retry = nil
		}
		for retry == nil && len(queue) > 0 && ctx.Err() == nil {
			again, after := e.sendExport(ctx, client, queue[0])
			if !again {
				queue, pause = queue[1:], firstRetry
				continue
			}
			// The pause is random, so that proxies that failed together do not retry together.
			retry = time.After(max(after, pause/2+time.Duration(random.Int64N(int64(pause/2)))))
			pause = min(2*pause, lastRetry)
		}
	}
}

// enqueueExport adds an export and drops the oldest ones beyond the bounds.
func (e *Exporter) enqueueExport(queue [][]byte, body []byte) [][]byte {
	queue = append(queue, body)
	size := 0
	for _, b := range queue {
		size += len(b)
	}
	for len(queue) > 1 && (len(queue) > maxQueued || size > maxQueuedBytes) {
		size -= len(queue[0])
		queue = queue[1:]
		e.dropped.Add(1)
	}
	return queue
}

// encodeMetrics returns all metrics as they are now, encoded and compressed.
func (e *Exporter) encodeMetrics() []byte {
	families, err := e.Metrics.Gather()
	if err != nil { // the other families are there
		e.Log.Warn("otlp: some metrics cannot be collected", "err", err)
	}
	host, _ := os.Hostname()
	about := attributesOf("service.name", "penstock", "service.version", e.Version, "service.instance.id", host,
		"host.name", host)
	var body bytes.Buffer
	z := gzip.NewWriter(&body)
	err = json.NewEncoder(z).Encode(newRequest(families, e.Start, e.Wall(), e.Version, about))
	if err = errors.Join(err, z.Close()); err != nil {
		e.Log.Error("otlp: metrics cannot be encoded", "err", err)
	}
	return body.Bytes()
}

// sendExport sends one export. again reports whether it should be sent again, and not before after has passed.
func (e *Exporter) sendExport(
	ctx context.Context, client *http.Client, body []byte,
) (again bool, after time.Duration) {
	within, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	answer, after, err := e.postExport(within, client, body)
	var refused *refusal
	switch {
	case err == nil:
		e.sent.Add(1)
		if e.failing {
			e.Log.Info("otlp: metrics are sent again", "endpoint", e.Endpoint)
		}
		e.failing = false
		words := answer.PartialSuccess.ErrorMessage
		if words != "" && !e.partial {
			e.Log.Warn("otlp: the collector did not take all metrics; this is told once until it does", "endpoint", e.Endpoint,
				"err", words[:min(len(words), maxWords)])
		}
		e.partial = words != ""
		return false, 0
	case ctx.Err() != nil: // the process ends
		return false, 0
	case errors.As(err, &refused):
		e.refused.Add(1)
	default:
		again = true
	}
	if !e.failing {
		e.Log.Warn("otlp: metrics cannot be sent; this is told once until it works", "endpoint", e.Endpoint, "err", err)
	}
	e.failing = true
	return again, after
}

// refusal is an answer after which an export is not sent again.
type refusal struct{ status string }

// Error implements error.
func (r *refusal) Error() string {
	return "the collector answers " + r.status + "; telemetry.otlp.endpoint and headers_file say where to and as whom"
}

// answer is the collector's answer to an export that it takes.
type answer struct {
	PartialSuccess struct {
		ErrorMessage string `json:"errorMessage"`
	} `json:"partialSuccess"`
}

// postExport makes one request. An error is *refusal if another attempt would fail in the same way.
func (e *Exporter) postExport(
	ctx context.Context, client *http.Client, body []byte,
) (said answer, after time.Duration, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.Endpoint, bytes.NewReader(body))
	if err != nil {
		return said, 0, err
	}
	if h := e.headers.Load(); h != nil {
		for name, value := range *h {
			r.Header.Set(name, value)
		}
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Content-Encoding", "gzip")
	r.Header.Set("User-Agent", "OTel-OTLP-Exporter-penstock/"+e.Version)
	resp, err := client.Do(r)
	if err != nil {
		return said, 0, err
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch resp.StatusCode {
	case http.StatusOK, http.StatusAccepted, http.StatusNoContent: // OTLP asks for 200, but gateways answer the others
		_ = json.Unmarshal(text, &said) // it has been taken, whatever the words
		return said, 0, nil
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
			after = min(time.Duration(s)*time.Second, maxRetryAfter)
		}
		return said, after, fmt.Errorf("the collector answers %s", resp.Status)
	}
	return said, 0, &refusal{resp.Status}
}

package otlp

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// answers is a collector that answers with one after the other, and the last one from then on: a status, with a space
// and Retry-After, or an error.
type answers struct {
	all []string
	at  []time.Duration // of requests, since the begin
	// begin is when the first export is collected.
	begin time.Time
}

// RoundTrip implements http.RoundTripper.
func (a *answers) RoundTrip(r *http.Request) (*http.Response, error) {
	_, _ = io.Copy(io.Discard, r.Body)
	a.at = append(a.at, time.Since(a.begin))
	now := a.all[0]
	if len(a.all) > 1 {
		a.all = a.all[1:]
	}
	code, after, _ := strings.Cut(now, " ")
	resp := &http.Response{
		Header: http.Header{"Retry-After": {after}}, Body: io.NopCloser(strings.NewReader(
			`{"partialSuccess": {"rejectedDataPoints": "2", "errorMessage": "two are too old` +
				strings.Repeat(".", 9000) + `"}}`)),
		Request: r,
	}
	switch code {
	case "200":
		resp.StatusCode = http.StatusOK
	case "202", "204": // a gateway queues the export
		resp.StatusCode, _ = strconv.Atoi(code)
		resp.Body = http.NoBody
	case "503":
		resp.StatusCode = http.StatusServiceUnavailable
	case "401":
		resp.StatusCode = http.StatusUnauthorized
	case "307":
		resp.StatusCode = http.StatusTemporaryRedirect
		resp.Header.Set("Location", "https://elsewhere.example/")
	default:
		return nil, errors.New(code)
	}
	return resp, nil
}

// runExporter exports each minute to a collector with these answers, in virtual time, and returns what became of it.
func runExporter(t *testing.T, last time.Duration, all ...string) (e *Exporter, a *answers, log string) {
	t.Helper()
	var lines strings.Builder
	synctest.Test(t, func(t *testing.T) {
		a = &answers{all: all, begin: time.Now().Add(time.Minute)}
		e = &Exporter{
			Endpoint: "https://collector.example/v1/metrics", Interval: time.Minute, Metrics: prometheus.NewRegistry(),
			Transport: a, Wall: time.Now, Log: slog.New(slog.NewTextHandler(&lines, nil)),
		}
		e.SetHeaders(map[string]string{"api-key": "sesame"})
		ctx, cancel := context.WithTimeout(t.Context(), last)
		defer cancel()
		e.ExportMetrics(ctx)
	})
	assert.NotContains(t, lines.String(), "sesame")
	return e, a, lines.String()
}

func TestExportsThatFailAreSentAgain(t *testing.T) {
	e, a, log := runExporter(t, 150*time.Second, "connection-refused", "503", "503 20", "200")
	sent, refused, dropped := e.Counts()
	assert.EqualValues(t, []uint64{3, 0, 0}, []uint64{sent, refused, dropped}, "two, and one at the end")
	require.Len(t, a.at, 6)
	for i, within := range [][2]time.Duration{
		{0, 0},
		{500 * time.Millisecond, time.Second},
		{1500 * time.Millisecond, 3 * time.Second},
		{21500 * time.Millisecond, 23 * time.Second},
		{time.Minute, time.Minute},
		{90 * time.Second, 90 * time.Second},
	} {
		assert.True(t, within[0] <= a.at[i] && a.at[i] <= within[1], "request %d at %v, not within %v", i, a.at[i], within)
	}
	assert.Equal(t, 1, strings.Count(log, "cannot be sent"), log)
	assert.Equal(t, 1, strings.Count(log, "sent again"), log)
	assert.Contains(t, log, "two are too old")
}

func TestAnswersThatTakeAnExportAreLoggedOnce(t *testing.T) {
	e, _, log := runExporter(t, 6*time.Minute+time.Second, "200", "200", "204", "202", "200")
	sent, refused, _ := e.Counts()
	assert.EqualValues(t, []uint64{7, 0}, []uint64{sent, refused})
	assert.Equal(t, 2, strings.Count(log, "two are too old"), "once before all are taken, and once after: %.2000s", log)
	assert.Less(t, len(log), 4*maxWords)
}

func TestExportsThatAreRefusedAreNotSentAgain(t *testing.T) {
	for _, answer := range []string{"401", "307"} {
		e, a, log := runExporter(t, 90*time.Second, answer)
		_, refused, _ := e.Counts()
		assert.EqualValues(t, 2, refused)
		assert.Len(t, a.at, 2, "one after a minute, and one at the end")
		assert.Contains(t, log, "telemetry.otlp.endpoint and headers_file say where to and as whom")
	}
}

func TestWhatWaitsForACollectorIsBounded(t *testing.T) {
	e, a, _ := runExporter(t, 100*time.Minute+time.Second, "503")
	_, _, dropped := e.Counts()
	assert.EqualValues(t, 100-maxQueued, dropped)
	assert.Less(t, len(a.at), 100*60/int(lastRetry.Seconds()/2)+10, "requests become rare")
}

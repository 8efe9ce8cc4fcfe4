//go:build linux

package e2e

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/penstock-net/penstock/alcc"
	"github.com/penstock-net/penstock/cc/sim"
)

// serveForEver has the server send bytes over HTTP to whoever asks, under a controller unless opts is nil.
func (s *scene) serveForEver(opts *alcc.Options) (url string) {
	s.t.Helper()
	ln, err := s.Server.Listen("tcp4", net.JoinHostPort(s.ServerAddr.V4.String(), "8080"))
	require.NoError(s.t, err)
	if opts != nil {
		ln, err = alcc.NewListener(ln, *opts)
		require.NoError(s.t, err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		for piece := make([]byte, 32<<10); ; {
			if _, err := w.Write(piece); err != nil {
				return
			}
		}
	})}
	go func() { _ = server.Serve(ln) }()
	s.t.Cleanup(func() { _ = server.Close() })
	return "http://" + ln.Addr().String()
}

// libraryCourse is a course of downloads from an HTTP server.
type libraryCourse struct {
	link      sim.LinkConfig
	downloads int
	opts      *alcc.Options // of the server, and of the client where both ends acknowledge; nil: there is no controller
	proxied   bool          // the proxy at the edge holds the downloads
}

// measure returns the rate in Mbit/s, its Jain index, and the queue's 95th percentile, from begin to end.
func (c libraryCourse) measure(
	t *testing.T, what string, begin, end time.Duration,
) (mbit, jain float64, queue time.Duration) {
	t.Helper()
	t.Run(what, func(t *testing.T) { // connections end with it, so that the next finds no members of its group
		s, path := newCellular(t, c.link)
		if c.proxied {
			w := named("tproxy over IPv4")
			s.start(w.yaml(""))
			s.capture(w)
		}
		url := s.serveForEver(c.opts)
		path.StartOnData()
		counts := make([]*atomic.Int64, c.downloads)
		dial := func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := s.Client.DialContext(ctx, network, address)
			if err != nil || c.opts == nil || !c.opts.OwnAcks {
				return conn, err
			}
			return alcc.Wrap(conn, *c.opts)
		}
		transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
		var wg sync.WaitGroup
		for i := range counts {
			wg.Go(func() {
				r, err := (&http.Client{Transport: transport}).Get(url)
				if assert.NoError(t, err) {
					t.Cleanup(func() { _ = r.Body.Close() })
					counts[i] = countBytes(r.Body)
				}
			})
		}
		wg.Wait()
		time.Sleep(begin) //nolint:forbidigo // the course of downloads is measured
		first := make([]int64, c.downloads)
		for i, n := range counts {
			first[i] = n.Load()
		}
		from := path.Elapsed()
		time.Sleep(end - begin) //nolint:forbidigo // as above
		sum, squares := 0., 0.
		for i, n := range counts {
			rate := float64(n.Load()-first[i]) * 8 / 1e6 / (end - begin).Seconds()
			sum, squares = sum+rate, squares+rate*rate
		}
		report := path.Report(from, path.Elapsed()).Down
		jain = sum * sum / squares / float64(c.downloads)
		t.Logf("%d: %s: %.2f Mbit/s, Jain %.3f, queue p95 %v", c.downloads, what, sum, jain,
			report.DataQueueing.P95)
		mbit, queue = sum, report.DataQueueing.P95
	})
	return mbit, jain, queue
}

// TestTheLibraryHoldsAnHTTPServersDownloadsToOneWindow compares eight downloads of one client with one, with two ends
// that acknowledge by themselves, and with a server that has no controller.
func TestTheLibraryHoldsAnHTTPServersDownloadsToOneWindow(t *testing.T) {
	measure := func(what string, downloads int, opts *alcc.Options) (mbit, jain float64, queue time.Duration) {
		c := libraryCourse{link: homeLink, downloads: downloads, opts: opts}
		return c.measure(t, what, 3*time.Second, 11*time.Second)
	}
	rate, _, alone := measure("one over the kernel's signals", 1, &alcc.Options{})
	all, jain, queue := measure("eight over the kernel's signals", 8, &alcc.Options{})
	both, _, bothQueue := measure("with acknowledgements of their own", 1, &alcc.Options{OwnAcks: true})
	_, _, unmanaged := measure("without a controller", 8, nil)
	assert.GreaterOrEqual(t, all, 0.97*rate)
	assert.GreaterOrEqual(t, jain, 0.95)
	assert.LessOrEqual(t, queue, 3*alone/2+slack)
	assert.GreaterOrEqual(t, both, 0.9*rate)
	assert.LessOrEqual(t, bothQueue, 3*alone/2+slack)
	assert.Less(t, 2*queue, unmanaged)
}

// TestTheLibraryHoldsDownloadsAsTheProxyDoes compares the server's controller with that of a proxy behind it, over a
// generated LTE link.
func TestTheLibraryHoldsDownloadsAsTheProxyDoes(t *testing.T) {
	needsPrivilege(t)
	trace, err := sim.Generate("lte", 1, time.Minute)
	require.NoError(t, err)
	link := sim.LinkConfig{Trace: trace, Delay: 20 * time.Millisecond, QueuePackets: 2000}
	measure := func(what string, c libraryCourse) (mbit float64, queue time.Duration) {
		c.link = link
		mbit, _, queue = c.measure(t, what, 2*time.Second, 14*time.Second)
		return mbit, queue
	}
	proxyRate, proxyQueue := measure("eight by the proxy", libraryCourse{downloads: 8, proxied: true})
	_, one := measure("one by the library", libraryCourse{downloads: 1, opts: &alcc.Options{}})
	rate, eight := measure("eight by the library", libraryCourse{downloads: 8, opts: &alcc.Options{}})
	assert.GreaterOrEqual(t, rate, 0.97*proxyRate)
	assert.LessOrEqual(t, eight, 25*proxyQueue/20+slack)
	assert.LessOrEqual(t, eight, 25*one/20+slack)
}

// TestSproutFillsALinkFromItsReceiversForecasts holds Sprout between two ends to what its authors' program does on a
// link at the ceiling of its model: 99.7 % of it, with 45 ms of queue at p95. TCP repairs the losses below it.
func TestSproutFillsALinkFromItsReceiversForecasts(t *testing.T) {
	for _, loss := range []float64{0, 0.01} {
		t.Run(fmt.Sprintf("loss %v", loss), func(t *testing.T) {
			s, path := newCellular(t, sim.LinkConfig{
				Rate: 12e6, Delay: 20 * time.Millisecond, QueuePackets: 2000, Loss: loss,
			})
			opts := alcc.Options{Algorithm: "sprout:drain=cumulative", OwnAcks: true}
			url := s.serveForEver(&opts)
			path.StartOnData()
			dial := func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := s.Client.DialContext(ctx, network, address)
				if err != nil {
					return nil, err
				}
				return alcc.Wrap(conn, opts)
			}
			transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
			r, err := (&http.Client{Transport: transport}).Get(url)
			require.NoError(t, err)
			t.Cleanup(func() { _ = r.Body.Close() })
			countBytes(r.Body)
			time.Sleep(10 * time.Second) //nolint:forbidigo // the course of a download is measured
			report := path.Report(2*time.Second, 10*time.Second).Down
			t.Logf("%.1f %%, queue p95 %v", 100*report.Utilisation, report.DataQueueing.P95)
			assert.GreaterOrEqual(t, report.Utilisation, 0.94)
			assert.LessOrEqual(t, report.DataQueueing.P95, 52*time.Millisecond+slack)
		})
	}
}

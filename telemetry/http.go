package telemetry

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math"
	"mime"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/penstock-net/penstock/cc/flow"
	"github.com/penstock-net/penstock/telemetry/page"
)

const (
	// defaultLimit is how many lines a list has unless asked for more.
	defaultLimit = 1000
	// headerTimeout bounds the time in which a client sends its request.
	headerTimeout = 5 * time.Second
	// answerTimeout bounds the time in which a client takes our answer. A CPU profile alone runs for 30 s by default.
	answerTimeout = 2 * time.Minute
	// maxScrapes bounds the scrapes at a time. A scrape goes on after its scraper has given up, and such scrapes must not
	// pile up.
	maxScrapes = 4
	// shutdownTimeout is how long answers underway may go on once the server is to end.
	shutdownTimeout = 2 * time.Second
)

// Pages is what the HTTP server shows. The zero value of a field that may be nil leaves its page out. Handlers run on
// many goroutines at once.
type Pages struct {
	Source  Source
	Metrics prometheus.Gatherer
	// Page is served at /; nil: there is none.
	Page *page.Page
	// Ready says what keeps the proxy from serving new connections; nil: it serves.
	Ready func() error
	// Profile adds /debug/pprof, which lets whoever reaches it read the
	// program's memory and slow it down.
	Profile bool
	// Hints takes what the network says about paths; nil: there is no /v1/hints.
	Hints *HintReceiver
	// Changes takes other algorithms; nil: there is no /v1/rules and no /v1/algorithm.
	Changes *Changer
	// Observer compares rules, and managed with unmanaged connections of one host; nil: there is no /v1/compare and no
	// /v1/proof.
	Observer *Observer
	// Links opens a reader of the interfaces; nil: there is no /v1/signals.
	Links func() (LinkReader, error)
	// Wall returns the date; only /v1/signals needs it.
	Wall func() time.Time
	// Reload rereads the configuration and says in words what it changed. An error is ErrNoFile, or says what is wrong
	// with the new configuration; the old one stays then. nil: there is no /-/reload.
	Reload func() (string, error)
	// Fleet returns what /v1/fleet shows; nil: the proxy is in no fleet.
	Fleet func() any
	// Dialled reports whether a connection, as it arrives, is one that the proxy opened for a client; nil: none is.
	Dialled func(from, to netip.AddrPort) bool
	Log     *slog.Logger

	ending <-chan struct{} // closed when the server ends, so that followers of signals end; nil: it never does
}

// Handler returns the pages. Pass local for a listener on loopback. Requests that name another host are then refused,
// so that a web page in a browser on this machine cannot read them through a name that resolves to loopback.
func (p Pages) Handler(local bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", p.metricsHandler())
	p.addHealthPages(mux)
	mux.HandleFunc("GET /flows", p.serveFlows)
	mux.HandleFunc("GET /hosts", p.serveHosts)
	mux.HandleFunc("GET /held", p.serveHeld)
	mux.HandleFunc("GET /v1/peers", p.servePeers)
	mux.HandleFunc("GET /v1/fleet", p.serveFleet)
	if p.Page != nil {
		p.Page.Register(mux)
	}
	if p.Reload != nil {
		mux.HandleFunc("POST /-/reload", p.serveReload)
	}
	if p.Changes != nil {
		p.Changes.registerPages(mux)
	}
	if p.Observer != nil {
		p.Observer.registerPages(mux, p.fromHere)
	}
	if p.Links != nil {
		readers := make(chan struct{}, maxSignalReaders)
		mux.HandleFunc("GET /v1/signals", func(w http.ResponseWriter, r *http.Request) { p.serveSignals(w, r, readers) })
	}
	if p.Hints != nil {
		mux.HandleFunc("POST /v1/hints", func(w http.ResponseWriter, r *http.Request) {
			p.Hints.answerHints(w, r, p.Hints.permitTCP(r, local && p.fromHere(r)))
		})
	}
	if p.Profile {
		mux.HandleFunc("GET /debug/pprof/", pprof.Index)
		mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if local && !namesThisHost(r.Host) {
			http.Error(w, "this server answers to localhost and to addresses only", http.StatusMisdirectedRequest)
			return
		}
		w.Header().Set("Cache-Control", "no-store")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		mux.ServeHTTP(w, r)
	})
}

// namesThisHost reports whether a Host header is an address or localhost. Any other name could be of a web page's
// owner, who lets it resolve to this machine (DNS rebinding).
func namesThisHost(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if host == "localhost" {
		return true
	}
	if len(host) > 1 && host[0] == '[' {
		host = host[1 : len(host)-1]
	}
	_, err := netip.ParseAddr(host)
	return err == nil
}

// addHealthPages adds the pages for probes: /healthz answers while the process lives, /readyz while it takes
// connections.
func (p Pages) addHealthPages(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", p.serveReady)
}

// ServeHealth is Serve with only the pages for probes, which anybody may see.
func (p Pages) ServeHealth(ctx context.Context, ln net.Listener) error {
	mux := http.NewServeMux()
	p.addHealthPages(mux)
	return serveHTTP(ctx, ln, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Connection", "close") // or anybody could keep thousands open
		mux.ServeHTTP(w, r)
	}), p.Log)
}

// serveReady answers 503 with the reason while the proxy takes no new connections.
func (p Pages) serveReady(w http.ResponseWriter, _ *http.Request) {
	if p.Ready != nil {
		if err := p.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
	}
	fmt.Fprintln(w, "ready")
}

// metricsHandler returns a handler that answers scrapes in the format and the compression that the client asks for. It
// puts an answer together before it sends any of it, so a client that is slow to read takes none of the maxScrapes
// places.
func (p Pages) metricsHandler() http.HandlerFunc {
	o := promhttp.HandlerOpts{
		ErrorHandling:       promhttp.ContinueOnError, // a faulty sample hides no other
		MaxRequestsInFlight: maxScrapes,
		EnableOpenMetrics:   true,
	}
	if p.Log != nil {
		o.ErrorLog = slog.NewLogLogger(p.Log.Handler(), slog.LevelWarn)
	}
	scrape := promhttp.HandlerFor(p.Metrics, o)
	return func(w http.ResponseWriter, r *http.Request) {
		answer := bufferedAnswer{ResponseWriter: w, code: http.StatusOK}
		scrape.ServeHTTP(&answer, r)
		w.WriteHeader(answer.code)
		_, err := answer.body.WriteTo(w)
		p.logUnsent(r, err)
	}
}

// bufferedAnswer is an http.ResponseWriter that keeps status and body for later.
type bufferedAnswer struct {
	http.ResponseWriter
	code int
	body bytes.Buffer
}

// WriteHeader implements http.ResponseWriter.
func (a *bufferedAnswer) WriteHeader(code int) { a.code = code }

// Write implements http.ResponseWriter.
func (a *bufferedAnswer) Write(text []byte) (int, error) { return a.body.Write(text) }

// logUnsent logs that an answer could not be sent, at debug: a client may close at any time.
func (p Pages) logUnsent(r *http.Request, err error) {
	if err != nil && p.Log != nil {
		p.Log.Debug("telemetry: answer not sent", "page", r.URL.Path, "client", r.RemoteAddr, "err", err)
	}
}

// serveFlows answers with the open connections, the oldest first.
func (p Pages) serveFlows(w http.ResponseWriter, r *http.Request) {
	n, flows := p.Source.Flows()
	p.serveList(w, r, n, func(yield func(any) bool) {
		for f := range flows {
			if !yield(describeFlow(f)) {
				return
			}
		}
	})
}

// serveHosts answers with the groups, by name.
func (p Pages) serveHosts(w http.ResponseWriter, r *http.Request) {
	groups, now := p.Source.Groups()
	held := page.SumHeld(p.Source.Held())
	p.serveList(w, r, len(groups), eachOf(groups, func(g *flow.Group) any {
		out := describeGroup(g, now)
		if u, ok := held[g.Name]; ok {
			out.UDP = &u
		}
		return out
	}))
}

// eachOf yields describe of each item. It describes one when it is asked for, so not those beyond the limit of a list.
func eachOf[T any](all []T, describe func(*T) any) iter.Seq[any] {
	return func(yield func(any) bool) {
		for i := range all {
			if !yield(describe(&all[i])) {
				return
			}
		}
	}
}

// serveList answers with the first of n items, as many as the request wants. It does not ask for the others.
func (p Pages) serveList(w http.ResponseWriter, r *http.Request, n int, items iter.Seq[any]) {
	limit := defaultLimit
	if text := r.URL.Query().Get("limit"); text != "" {
		var err error
		if limit, err = strconv.Atoi(text); err != nil || limit < 0 {
			http.Error(w, fmt.Sprintf("limit is %q, but must be a number of lines; 0 lists all", text),
				http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Total-Count", strconv.Itoa(n))
	if limit == 0 {
		limit = math.MaxInt
	}
	p.logUnsent(r, writeList(w, limit, items))
}

// listChunk is how many bytes of a list are sent at once, so that a list of all flows is never in memory as a whole.
const listChunk = 32 << 10

// writeList writes an array with one item a line, limit at most, for people and for jq.
func writeList(w io.Writer, limit int, items iter.Seq[any]) error {
	out := bufio.NewWriterSize(w, listChunk) // keeps the first error for Flush
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	before, after := "[\n", "[]\n"
	n := 0
	for item := range items {
		line.Reset()
		if err := encoder.Encode(item); err != nil {
			return err
		}
		_, _ = out.WriteString(before)
		if _, err := out.Write(bytes.TrimSuffix(line.Bytes(), []byte("\n"))); err != nil {
			return err
		}
		before, after = ",\n", "\n]\n"
		if n++; n == limit {
			break
		}
	}
	_, _ = out.WriteString(after)
	return out.Flush()
}

// Serve serves the pages on ln until ctx ends. As long as it runs it observes flows for them.
func (p Pages) Serve(ctx context.Context, ln net.Listener) error {
	local := false
	if tcp, ok := ln.Addr().(*net.TCPAddr); ok {
		local = tcp.IP.IsLoopback()
	}
	p.ending = ctx.Done()
	serving, stop := context.WithCancel(ctx)
	var observers sync.WaitGroup
	defer observers.Wait()
	defer stop()
	if p.Page != nil {
		observers.Go(func() { p.Page.Run(serving) })
	}
	if p.Observer != nil {
		observers.Go(func() { p.Observer.ObserveFlows(serving) })
	}
	return serveHTTP(ctx, ln, p.Handler(local), p.Log)
}

// serveHTTP answers on ln until ctx ends, then lets answers underway finish within shutdownTimeout.
func serveHTTP(ctx context.Context, ln net.Listener, h http.Handler, log *slog.Logger) error {
	srv := &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
		WriteTimeout:      answerTimeout,
		IdleTimeout:       answerTimeout,
		MaxHeaderBytes:    16 << 10,
	}
	if log != nil {
		srv.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err := <-served:
		return fmt.Errorf("telemetry: serve: %w", err)
	case <-ctx.Done():
	}
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
	defer cancel()
	if err := srv.Shutdown(wait); err != nil {
		_ = srv.Close() // whoever is still reading has had time enough
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("telemetry: serve: %w", err)
	}
	return nil
}

// fromHere reports whether a request comes from this machine.
func (p Pages) fromHere(r *http.Request) bool {
	peer, err := netip.ParseAddrPort(r.RemoteAddr)
	own, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	if err != nil || !ok {
		return false
	}
	return ofThisMachine(peer, own.AddrPort(), p.Dialled)
}

// ofThisMachine reports whether a connection comes from this machine: from the address that it leads to, or from
// loopback. One that the proxy has dialled for a client does not.
func ofThisMachine(peer, own netip.AddrPort, dialled func(from, to netip.AddrPort) bool) bool {
	from, to := peer.Addr().Unmap().WithZone(""), own.Addr().Unmap().WithZone("")
	return (from.IsLoopback() || from == to) && (dialled == nil || !dialled(peer, own))
}

// ErrNoFile is what Pages.Reload returns where there is nothing to reread.
var ErrNoFile = errors.New("the proxy runs without --config: there is no file to reread")

// fromWebPage reports whether a page in a browser sends the request. Our own page counts, because it sends none here.
func fromWebPage(r *http.Request) bool {
	site := r.Header.Get("Sec-Fetch-Site")
	return r.Header.Get("Origin") != "" || site != "" && site != "none"
}

// isJSON reports whether a request says that its body is JSON. A web page cannot send this type to another site before
// the browser has asked that site.
func isJSON(r *http.Request) bool {
	kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	return err == nil && kind == "application/json"
}

// checkEnd returns an error unless d has read all of its input.
func checkEnd(d *json.Decoder) error {
	switch _, err := d.Token(); {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return err
	}
	return errors.New("something follows it")
}

// serveReload rereads the configuration. It takes requests from this machine only, and none that a web page in a
// browser there sends.
func (p Pages) serveReload(w http.ResponseWriter, r *http.Request) {
	if !p.fromHere(r) || !namesThisHost(r.Host) {
		http.Error(w, "reloads are taken from this machine only, by a loopback address or its own; or send SIGHUP",
			http.StatusForbidden)
		return
	}
	if fromWebPage(r) {
		http.Error(w, "reloads are not taken from web pages", http.StatusForbidden)
		return
	}
	words, err := p.Reload()
	switch {
	case errors.Is(err, ErrNoFile):
		http.Error(w, err.Error(), http.StatusBadRequest)
	case err != nil:
		http.Error(w, err.Error(), http.StatusUnprocessableEntity)
	default:
		fmt.Fprintln(w, words)
	}
}

// Package mobile uploads from a phone under a congestion controller, and needs nothing of the phone's kernel (ALCC,
// §4.3). gomobile bind makes its exported names available to Java and Objective-C.
//
//	Settings s = new Settings();
//	s.setServer("relay.example:8443");
//	s.setToken(token);
//	Proxy proxy = Mobile.start(s);              // apps use proxy.address(), SOCKS5 or CONNECT
//	proxy.uploadFile(file, "https://example.org/upload", watcher);
//	proxy.close();
//
// A Proxy listens on the phone itself. It carries each connection to a relay (package alcc/relay) over a connection of
// package alcc with acknowledgements of its own, so that an algorithm decides what the phone has in flight. All of
// them share one window. Any app of the phone can use the proxy.
package mobile

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/penstock-net/penstock/alcc"
	"github.com/penstock-net/penstock/alcc/relay"
	"github.com/penstock-net/penstock/cc"
)

// Defaults of Settings.
const (
	DefaultAlgorithm      = "mdi" // Verus by a table, as in ALCC §4.3
	DefaultListen         = "127.0.0.1:0"
	DefaultMaxConnections = 128
)

const (
	greetTime   = 10 * time.Second // bounds the request of an app
	connectTime = 20 * time.Second // bounds the connection to the relay, and its answer
	idleTime    = 30 * time.Second // how long the connection of an upload stays open for the next
)

// Settings say how a Proxy works. Server and Token have no default.
type Settings struct {
	// Server is the relay, HOST:PORT.
	Server string
	// Token is what the relay demands.
	Token string
	// Certificate has the authorities that may have signed the relay's certificate, in PEM; empty: the system's.
	Certificate string
	// Plain connects to the relay without TLS, so that anybody on the path can read the token.
	Plain bool
	// Algorithm is a name of ListAlgorithms, with settings where wanted: "copa:delta=0.1". Empty: DefaultAlgorithm.
	Algorithm string
	// Listen is the proxy's address, port 0: one that is free. Empty: DefaultListen.
	Listen string
	// Shared lets Listen be an address that other devices reach.
	Shared bool
	// MaxConnections bounds the connections of apps at once; 0: DefaultMaxConnections. Others are closed at once.
	MaxConnections int
}

// Proxy carries what apps ask for to a relay. Its methods may be called from any thread.
//
//	field    guarded by        written
//	conns    mu                as connections to the relay begin and end
//	stats    mu                with each read and write of them
//	others   -                 by Start alone
type Proxy struct {
	settings Settings
	tls      *tls.Config // nil: no TLS
	options  alcc.Options
	listener net.Listener
	places   chan struct{}   // has a value for each connection of an app
	ctx      context.Context // ends with Close
	cancel   context.CancelFunc
	served   sync.WaitGroup // acceptLoop, and connections of apps
	uploader *http.Client   // for UploadFile; its connections go through the relay

	mu    sync.Mutex
	conns map[*alcc.Conn]bool // to the relay
	stats Stats               // counts, and the newest error
}

// ListAlgorithms returns the names that Settings.Algorithm may have, in lines.
func ListAlgorithms() string {
	var names []string
	for _, s := range cc.Specs() {
		names = append(names, s.Name)
	}
	return strings.Join(names, "\n")
}

// Start starts a proxy. It does not wait for the relay. Errors name the setting and the cure.
func Start(s *Settings) (*Proxy, error) {
	if s == nil {
		return nil, errors.New("mobile: Start needs Settings")
	}
	p := &Proxy{settings: *s, conns: map[*alcc.Conn]bool{}}
	p.settings.Algorithm = cmp.Or(s.Algorithm, DefaultAlgorithm)
	p.options = alcc.Options{Algorithm: p.settings.Algorithm, OwnAcks: true}
	if err := p.checkSettings(); err != nil {
		return nil, err
	}
	var err error
	if p.listener, err = net.Listen("tcp", cmp.Or(s.Listen, DefaultListen)); err != nil {
		return nil, fmt.Errorf("mobile: Settings.Listen: %w", err)
	}
	if at, err := netip.ParseAddrPort(p.listener.Addr().String()); err == nil && !at.Addr().IsLoopback() && !s.Shared {
		_ = p.listener.Close()
		return nil, fmt.Errorf("mobile: Settings.Listen: other devices reach %s: choose %s, or set Shared", s.Listen,
			DefaultListen)
	}
	p.places = make(chan struct{}, cmp.Or(s.MaxConnections, DefaultMaxConnections))
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.uploader = &http.Client{Transport: &http.Transport{
		IdleConnTimeout: idleTime,
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			return p.dialRelay(ctx, address)
		},
	}}
	p.served.Go(p.acceptLoop)
	return p, nil
}

// checkSettings returns what is wrong with the settings, and reads the certificates.
func (p *Proxy) checkSettings() error {
	s := p.settings
	host, _, err := net.SplitHostPort(s.Server)
	switch {
	case err != nil || host == "":
		return fmt.Errorf("mobile: Settings.Server is %q, but must be HOST:PORT of a relay", s.Server)
	case len(s.Token) < relay.MinToken || strings.ContainsAny(s.Token, "\r\n"):
		return fmt.Errorf("mobile: Settings.Token must be one line of at least %d bytes", relay.MinToken)
	case s.MaxConnections < 0:
		return fmt.Errorf("mobile: Settings.MaxConnections is %d, but must be above 0, or 0 for %d", s.MaxConnections,
			DefaultMaxConnections)
	case s.Plain && s.Certificate != "":
		return errors.New("mobile: Settings.Certificate is for TLS: leave it out, or Plain")
	case !s.Plain:
		p.tls = &tls.Config{ServerName: host, MinVersion: tls.VersionTLS13}
		if s.Certificate != "" {
			p.tls.RootCAs = x509.NewCertPool()
			if !p.tls.RootCAs.AppendCertsFromPEM([]byte(s.Certificate)) {
				return errors.New("mobile: Settings.Certificate holds no certificate in PEM")
			}
		}
	}
	if err := p.options.Validate(); err != nil { // only the algorithm can be wrong
		return fmt.Errorf("mobile: Settings.Algorithm: %w", err)
	}
	return nil
}

// Address returns where the proxy listens, HOST:PORT.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Close ends all connections and uploads, and waits for the end of the connections of apps.
func (p *Proxy) Close() error {
	p.cancel()
	err := p.listener.Close()
	p.served.Wait()
	p.uploader.CloseIdleConnections()
	return err
}

// acceptLoop serves apps until Close. It closes connections above the bound at once, so that no app waits for an
// answer.
func (p *Proxy) acceptLoop() {
	for {
		app, err := p.listener.Accept()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil: // of one connection, or descriptors are short
			select {
			case <-time.After(10 * time.Millisecond): //nolint:forbidigo // until others have closed theirs
			case <-p.ctx.Done():
			}
			continue
		}
		select {
		case p.places <- struct{}{}:
			p.served.Go(func() {
				defer func() { <-p.places }()
				p.serveApp(app)
			})
		default:
			p.mu.Lock()
			p.stats.Refused++ // before the app sees that it is refused
			p.mu.Unlock()
			_ = app.Close()
		}
	}
}

// serveApp serves one connection of an app until it ends. Only the request has a deadline. After it the connection may
// be idle for any time.
func (p *Proxy) serveApp(app net.Conn) {
	defer app.Close()
	defer context.AfterFunc(p.ctx, func() { _ = app.Close() })()
	_ = app.SetDeadline(time.Now().Add(greetTime)) //nolint:forbidigo // deadlines of net.Conn are of the real clock
	g, err := readGreeting(app)
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(p.ctx, connectTime)
	defer cancel()
	_ = app.SetDeadline(time.Time{})
	tunnel, err := p.dialRelay(ctx, g.destination)
	if g.answerApp(app, err) != nil || err != nil {
		if tunnel != nil {
			_ = tunnel.Close()
		}
		return
	}
	defer tunnel.Close()
	defer context.AfterFunc(p.ctx, func() { _ = tunnel.Close() })()
	relay.CopyBoth(&resumed{Conn: app, early: g.early}, tunnel)
}

// dialRelay returns a connection through the relay to a destination, HOST:PORT. It counts failures, and stores the
// newest error.
func (p *Proxy) dialRelay(ctx context.Context, destination string) (net.Conn, error) {
	c, err := p.connectRelay(ctx, destination)
	if err != nil {
		p.mu.Lock()
		p.stats.LastError = err.Error()
		p.stats.Failed++
		p.mu.Unlock()
		return nil, err
	}
	return c, nil
}

// connectRelay connects to the relay and asks it for a destination.
func (p *Proxy) connectRelay(ctx context.Context, destination string) (net.Conn, error) {
	below, err := new(net.Dialer).DialContext(ctx, "tcp", p.settings.Server)
	if err != nil {
		return nil, fmt.Errorf("mobile: relay: %w", err)
	}
	if p.tls != nil {
		secured := tls.Client(below, p.tls)
		if err := secured.HandshakeContext(ctx); err != nil {
			_ = below.Close()
			return nil, fmt.Errorf("mobile: relay: %w", err)
		}
		below = secured
	}
	conn, err := alcc.Wrap(below, p.options)
	if err != nil { // the options were checked
		_ = below.Close()
		return nil, err
	}
	// Reset, because Close would wait until the relay has acknowledged all data.
	stop := context.AfterFunc(ctx, func() { _ = conn.Reset() })
	err = relay.Connect(conn, destination, p.settings.Token)
	if !stop() || err != nil {
		_ = conn.Reset()
		return nil, cmp.Or(err, ctx.Err())
	}
	p.mu.Lock()
	p.conns[conn] = true
	p.stats.Connections++
	p.mu.Unlock()
	return &tunnel{Conn: conn, proxy: p}, nil
}

// tunnel is a connection to a destination. The proxy counts its bytes as they pass, so that Stats shows an upload
// while it is under way.
type tunnel struct {
	*alcc.Conn
	proxy *Proxy
	once  sync.Once // Close may come from the app's end, the relay's, and the proxy's
}

// Read implements net.Conn.
func (t *tunnel) Read(b []byte) (int, error) {
	n, err := t.Conn.Read(b)
	t.proxy.mu.Lock()
	t.proxy.stats.Received += int64(n)
	t.proxy.mu.Unlock()
	return n, err
}

// Write implements net.Conn.
func (t *tunnel) Write(b []byte) (int, error) {
	n, err := t.Conn.Write(b)
	t.proxy.mu.Lock()
	t.proxy.stats.Sent += int64(n)
	t.proxy.mu.Unlock()
	return n, err
}

// ReadFrom implements io.ReaderFrom, in pieces that Write counts.
func (t *tunnel) ReadFrom(r io.Reader) (int64, error) { return io.Copy(struct{ io.Writer }{t}, r) }

// Close implements net.Conn.
func (t *tunnel) Close() error {
	t.once.Do(func() {
		t.proxy.mu.Lock()
		delete(t.proxy.conns, t.Conn)
		t.proxy.mu.Unlock()
	})
	return t.Conn.Close()
}

// UploadWatcher follows an upload.
type UploadWatcher interface {
	// OnProgress is called as bytes are taken, on the thread of UploadFile, which waits for it. sent and total are in
	// bytes. false ends the upload.
	OnProgress(sent, total int64) bool
}

// UploadFile sends a file through the relay to a URL of HTTP or HTTPS, by PUT, and returns once the answer has come.
// It blocks, so do not call it on a phone's main thread. watcher may be nil. An answer other than 2xx is an error.
func (p *Proxy) UploadFile(path, url string, watcher UploadWatcher) error {
	file, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("mobile: upload: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("mobile: upload: %w", err)
	}
	body := &watched{file: file, total: info.Size(), watcher: watcher}
	r, err := http.NewRequestWithContext(p.ctx, http.MethodPut, url, body)
	if err != nil {
		return fmt.Errorf("mobile: upload: %w", err)
	}
	r.ContentLength = body.total // many servers refuse a PUT without a length
	answer, err := p.uploader.Do(r)
	if err != nil {
		return fmt.Errorf("mobile: upload: %w", err)
	}
	_ = answer.Body.Close()
	if answer.StatusCode/100 != 2 {
		return fmt.Errorf("mobile: upload: %s answers %s", r.URL.Redacted(), answer.Status)
	}
	return nil
}

// watched is a file that calls its watcher with how much was read.
type watched struct {
	file        io.Reader
	sent, total int64         // bytes
	watcher     UploadWatcher // nil: none
}

// Read implements io.Reader.
func (w *watched) Read(b []byte) (int, error) {
	n, err := w.file.Read(b)
	w.sent += int64(n)
	if w.watcher != nil && n > 0 && !w.watcher.OnProgress(w.sent, w.total) {
		return n, errors.New("ended by its watcher")
	}
	return n, err
}

// Stats are counts since the start of a Proxy, and the state of its window.
type Stats struct {
	Open        int    `json:"open"`           // connections to destinations now
	Connections int    `json:"connections"`    // all of them
	Failed      int    `json:"failed"`         // connections that could not be made
	Refused     int    `json:"refused"`        // connections of apps above Settings.MaxConnections
	Sent        int64  `json:"sent_bytes"`     // by apps and uploads, without requests to the relay
	Received    int64  `json:"received_bytes"` // by apps and uploads
	LastError   string `json:"last_error"`     // empty: none
	Algorithm   string `json:"algorithm"`
	// The rest is 0 while no connection is open, or nothing is measured.
	CwndBytes    int64   `json:"cwnd_bytes"` // of all connections together
	SRTTMillis   float64 `json:"srtt_ms"`
	MinRTTMillis float64 `json:"min_rtt_ms"`
	QueueMillis  float64 `json:"queueing_ms"` // the newest round trip above the least
	RateMbit     float64 `json:"rate_mbit"`   // newest delivery rate, in Mbit/s
}

// Stats returns the state of the proxy at this moment.
func (p *Proxy) Stats() *Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Open, s.Algorithm = len(p.conns), p.settings.Algorithm
	for c := range p.conns { // they share a window; each that has round trips shows the path's state
		now := c.Stats()
		if now.SRTT == 0 {
			continue
		}
		s.CwndBytes, s.RateMbit = int64(now.Cwnd), max(s.RateMbit, now.DeliveryRate.Mbps())
		s.SRTTMillis, s.MinRTTMillis = inMillis(now.SRTT), inMillis(now.MinRTT)
		s.QueueMillis = max(s.QueueMillis, inMillis(now.QueueingDelay))
	}
	return &s
}

// inMillis returns a duration in milliseconds.
func inMillis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// ToJSON returns the statistics as an object of JSON.
func (s *Stats) ToJSON() string {
	text, _ := json.Marshal(s) // of numbers and text
	return string(text)
}

// Package edge runs a real Penstock, a process of its own, at the edge of an
// emulated network, and talks to it as an operator would.
package edge

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
)

const (
	capturePort   = 7000
	telemetryAddr = "127.0.0.1:9464"

	startTime = 10 * time.Second // for the proxy to become ready
	stopTime  = 3 * time.Second  // for it to end when asked
)

// Options describe a proxy.
type Options struct {
	Executable string   // penstock
	Args       []string // beside the configuration's

	// Config is its configuration as a user would write it, in YAML, without
	// listeners, telemetry, log and shutdown.
	Config string

	// Connections to these ports of the server are captured on their way from the
	// client.
	Server netip.Addr
	Ports  []uint16
	// Listener is a listener in YAML, in place of capturing; empty: none.
	Listener string
	// Hold holds all UDP towards the clients; not with Listener.
	Hold bool
	// Everything captures all connections that come from the client, wherever they go, in place of Server and Ports.
	Everything bool
}

// file is the whole configuration.
func (o Options) file(config string) string {
	listener, held := o.Listener, ""
	if o.Hold {
		held = fmt.Sprintf(", udp: {queue: %d}", capture.DefaultHoldQueue)
	}
	if listener == "" {
		listener = fmt.Sprintf("{name: edge, mode: tproxy, address: \"[::]:%d\"%s}", capturePort, held)
	}
	return strings.TrimRight(config, "\n") + `
listeners:
  - ` + listener + `
telemetry:
  address: "` + telemetryAddr + `"
log:
  level: warn
  format: text
  flows: false
shutdown:
  drain: 1ms
`
}

// Proxy is a running one.
type Proxy struct {
	opts   Options
	cmd    *netlab.Cmd
	client *http.Client
	dir    string
	said   *Tail
	ended  chan struct{}
	err    error // of the process; read after ended
}

// Start starts a proxy at the node and returns once it is ready for connections.
func Start(ctx context.Context, node *netlab.Node, o Options) (*Proxy, error) {
	dir, err := os.MkdirTemp("", "penstock-edge-")
	if err != nil {
		return nil, fmt.Errorf("make a place for the proxy's configuration: %w", err)
	}
	p := &Proxy{opts: o, dir: dir, said: &Tail{Most: tailBytes}, ended: make(chan struct{})}
	p.client = &http.Client{
		Transport: &http.Transport{DialContext: node.DialContext, MaxIdleConnsPerHost: 4},
		Timeout:   10 * time.Second,
	}
	if err := p.Rewrite(o.Config); err != nil {
		return nil, errors.Join(err, p.Stop())
	}
	p.cmd = node.Command(ctx, o.Executable, append([]string{"run", "--config", p.path()}, o.Args...)...)
	p.cmd.Stdout, p.cmd.Stderr = p.said, p.said
	p.cmd.SysProcAttr.Setpgid = true // the terminal's Ctrl-C is for us, who end it in its turn
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = stopTime
	if err := p.cmd.Start(); err != nil {
		p.cmd = nil
		return nil, errors.Join(fmt.Errorf("start the proxy: %w", err), p.Stop())
	}
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	err = p.awaitReady(ctx)
	if err == nil && (len(o.Ports) > 0 || o.Hold || o.Everything) && o.Listener == "" {
		err = o.capture(ctx, node)
	}
	if err != nil {
		return nil, errors.Join(p.Explain(err), p.Stop())
	}
	return p, nil
}

// capture brings what is for the server into the proxy. It is undone with the
// edge's namespace.
func (o Options) capture(ctx context.Context, node *netlab.Node) error {
	rules := capture.Rules{
		Mode: capture.TPROXY, Port: capturePort,
		Interfaces: []string{netlab.NearDevice},
		Connected:  capture.ConnectedCapture, // the server is next to the edge
	}
	if !o.Everything {
		rules.IPv4 = true
		rules.Destinations.Include = []netip.Prefix{netip.PrefixFrom(o.Server, o.Server.BitLen())}
	}
	rules.Hold.All = o.Hold
	for _, port := range o.Ports {
		rules.Ports = append(rules.Ports, capture.PortRange{First: port, Last: port})
	}
	return node.Do(func() error { return rules.Apply(ctx) })
}

func (p *Proxy) path() string { return filepath.Join(p.dir, "penstock.yaml") }

// Rewrite changes the configuration file, which the proxy reads again at a reload.
func (p *Proxy) Rewrite(config string) error {
	if err := os.WriteFile(p.path(), []byte(p.opts.file(config)), 0o600); err != nil {
		return fmt.Errorf("write the proxy's configuration: %w", err)
	}
	return nil
}

// RewriteListener changes the listener in the configuration file.
func (p *Proxy) RewriteListener(listener string) error {
	p.opts.Listener = listener
	return p.Rewrite(p.opts.Config)
}

// awaitReady asks the proxy whether it is ready until it is.
func (p *Proxy) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startTime, fmt.Errorf("the proxy is not ready after %s", startTime))
	defer cancel()
	poll := time.Tick(10 * time.Millisecond)
	for {
		if _, err := p.Get(ctx, "/readyz"); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-p.ended:
			return fmt.Errorf("the proxy ended before it was ready: %w", p.err)
		case <-poll:
		}
	}
}

// Ended is closed when the process is no more; Explain has its last words.
func (p *Proxy) Ended() <-chan struct{} { return p.ended }

// Stop ends the proxy, kindly first, and removes what was made for it.
func (p *Proxy) Stop() error {
	p.client.CloseIdleConnections()
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended just now
		kill := time.AfterFunc(stopTime, func() { _ = p.cmd.Process.Kill() })
		<-p.ended // how does not matter any more
		kill.Stop()
	}
	return os.RemoveAll(p.dir)
}

// Kill ends the proxy as a crash does.
func (p *Proxy) Kill() {
	_ = p.cmd.Process.Kill() // it may have ended just now
	<-p.ended
}

// Explain adds what the proxy said last.
func (p *Proxy) Explain(err error) error {
	if said := p.said.String(); said != "" {
		return fmt.Errorf("%w\nThe proxy said:\n%s", err, said)
	}
	return err
}

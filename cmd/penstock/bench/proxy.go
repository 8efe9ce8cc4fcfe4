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
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"text/template"
	"time"

	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/capture"
	"github.com/penstock-net/penstock/telemetry"
)

const (
	capturePort   = 7000 // of the edge, with IngressTPROXY
	telemetryAddr = "127.0.0.1:9464"

	proxyStart = 10 * time.Second // for the proxy to become ready
	proxyStop  = 3 * time.Second  // for it to end when asked
)

// proxyConfig is the configuration of the proxy under test. It shows nothing
// that a user's would not.
var proxyConfig = template.Must(template.New("config").Parse(`envelope: {{.Envelope}}
listeners:
  - name: bench
{{- if eq .Ingress "tproxy"}}
    mode: tproxy
    address: "[::]:{{.CapturePort}}"
{{- else}}
    mode: forward
    address: "{{.ForwardAddr}}"
    target: "{{.Target}}"
{{- end}}
defaults:
  algorithm: "{{.Algorithm}}"
telemetry:
  address: "{{.TelemetryAddr}}"
log:
  level: warn
  format: text
  flows: false
shutdown:
  drain: 0s
`))

// proxy is a real Penstock in a process of its own at the edge.
type proxy struct {
	cmd    *netlab.Cmd
	edge   *netlab.Node
	client *http.Client
	dir    string
	said   *tail
	ended  chan error // closed after its one value
}

// startProxy starts the proxy and returns once it is ready for connections.
func startProxy(ctx context.Context, executable string, lab *netlab.Cellular, sender Sender, plan Plan, target netip.AddrPort) (*proxy, error) {
	dir, err := os.MkdirTemp("", "penstock-bench-")
	if err != nil {
		return nil, fmt.Errorf("make a place for the proxy's configuration: %w", err)
	}
	p := &proxy{edge: lab.Edge, dir: dir, said: &tail{}, ended: make(chan error, 1)}
	p.client = &http.Client{
		Transport: &http.Transport{DialContext: lab.Edge.DialContext, MaxIdleConns: 2},
		Timeout:   2 * time.Second,
	}
	config := filepath.Join(dir, "penstock.yaml")
	if err := writeProxyConfig(config, lab, sender, plan.Ingress, target); err != nil {
		return nil, errors.Join(err, p.stop())
	}
	args := []string{"run", "--config", config}
	for _, m := range plan.Models {
		args = append(args, "--mdi-model", m)
	}
	p.cmd = lab.Edge.Command(ctx, executable, args...)
	p.cmd.Stdout, p.cmd.Stderr = p.said, p.said
	p.cmd.SysProcAttr.Setpgid = true // the terminal's Ctrl-C is for us, who end it in its turn
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = proxyStop
	if err := p.cmd.Start(); err != nil {
		p.cmd = nil
		return nil, errors.Join(fmt.Errorf("start the proxy: %w", err), p.stop())
	}
	go func() {
		p.ended <- p.cmd.Wait()
		close(p.ended)
	}()
	err = p.awaitReady(ctx)
	if err == nil && plan.Ingress == IngressTPROXY {
		err = captureDownload(ctx, lab.Edge, target)
	}
	if err != nil {
		return nil, errors.Join(p.explain(err), p.stop())
	}
	return p, nil
}

// captureDownload brings what is for the server into the proxy. It is undone
// with the edge's namespace.
func captureDownload(ctx context.Context, edge *netlab.Node, target netip.AddrPort) error {
	rules := capture.Rules{
		Mode: capture.TPROXY, Port: capturePort, IPv4: true,
		Interfaces:   []string{netlab.NearDevice},
		Ports:        []capture.PortRange{{First: target.Port(), Last: target.Port()}},
		Destinations: capture.Match{Include: []netip.Prefix{netip.PrefixFrom(target.Addr(), 32)}},
	}
	return edge.Do(func() error { return rules.Apply(ctx) })
}

func writeProxyConfig(path string, lab *netlab.Cellular, sender Sender, ingress Ingress, target netip.AddrPort) error {
	envelope := sender.Envelope
	if envelope == "" {
		envelope = "auto"
	}
	var b bytes.Buffer
	err := proxyConfig.Execute(&b, map[string]any{
		"Envelope": envelope, "Ingress": string(ingress), "CapturePort": capturePort,
		"ForwardAddr": netip.AddrPortFrom(lab.EdgeNear.V4, forwardPort), "Target": target,
		"Algorithm": sender.Algorithm, "TelemetryAddr": telemetryAddr,
	})
	if err == nil {
		err = os.WriteFile(path, b.Bytes(), 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the proxy's configuration: %w", err)
	}
	return nil
}

// awaitReady asks the proxy whether it is ready until it is.
func (p *proxy) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, proxyStart, fmt.Errorf("the proxy is not ready after %s", proxyStart))
	defer cancel()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		if p.get(ctx, "/readyz", nil) == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case err := <-p.ended:
			return fmt.Errorf("the proxy ended before it was ready: %w", err)
		case <-poll.C:
		}
	}
}

// get reads one of the proxy's telemetry pages; read may be nil.
func (p *proxy) get(ctx context.Context, page string, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+telemetryAddr+page, nil)
	if err != nil {
		return err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", page, resp.Status)
	} else if read != nil {
		err = read(resp.Body)
	}
	return errors.Join(err, resp.Body.Close())
}

// flow asks the proxy about the client's connection.
func (p *proxy) flow(ctx context.Context, client netip.AddrPort) (telemetry.Flow, error) {
	var flows []telemetry.Flow
	decode := func(r io.Reader) error { return json.NewDecoder(r).Decode(&flows) }
	if err := p.get(ctx, "/flows", decode); err != nil {
		return telemetry.Flow{}, fmt.Errorf("ask the proxy for its flows: %w", err)
	}
	for _, f := range flows {
		addr, err := netip.ParseAddrPort(f.Client)
		if err == nil && addr.Addr().Unmap() == client.Addr() && addr.Port() == client.Port() && f.Down != nil && f.ClientLeg != nil {
			return f, nil
		}
	}
	return telemetry.Flow{}, fmt.Errorf("the proxy knows no flow of %s", client)
}

// answer asks the proxy how soon its windows came into force; nil: it does not say.
func (p *proxy) answer(ctx context.Context) (a *Answer, err error) {
	err = p.get(ctx, "/metrics", func(r io.Reader) error {
		a, err = readAnswer(r)
		return err
	})
	return a, err
}

// cpuTime is what the proxy has used so far, in seconds.
func (p *proxy) cpuTime() (float64, error) { return cpuTime(p.cmd.Process.Pid) }

// stop ends the proxy, kindly first, and removes what was made for it.
func (p *proxy) stop() error {
	var errs []error
	p.client.CloseIdleConnections()
	if p.cmd != nil {
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended just now
		kill := time.AfterFunc(proxyStop, func() { _ = p.cmd.Process.Kill() })
		for range p.ended { // how it ended does not matter any more
		}
		kill.Stop()
	}
	return errors.Join(append(errs, os.RemoveAll(p.dir))...)
}

// explain adds what the proxy said last.
func (p *proxy) explain(err error) error {
	if said := p.said.String(); said != "" {
		return fmt.Errorf("%w\nThe proxy said:\n%s", err, said)
	}
	return err
}

// tail keeps the end of what is written to it.
type tail struct {
	mu  sync.Mutex
	buf []byte
}

// tailBytes is enough for the last dozen lines of a log.
const tailBytes = 4 << 10

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, p...)
	if extra := len(t.buf) - tailBytes; extra > 0 {
		t.buf = append(t.buf[:0], t.buf[extra:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.buf))
}

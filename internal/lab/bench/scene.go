package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/lab/traffic"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/telemetry"
)

const (
	serverPort  = 80
	forwardPort = 8080 // of the edge, with IngressForward

	firstData     = 15 * time.Second // for the first data packet to show up
	progressEvery = 500 * time.Millisecond
)

// scene is one run's network, with a bulk download through it:
//
//	client ════ emulated link ════ edge ──── veth ──── server
//	 reads                    routes, or is the         writes
//	                          proxy that sends
type scene struct {
	lab      *netlab.Cellular
	server   *traffic.Server
	proxy    *edge.Proxy  // nil: the server sends directly
	tunnel   *edge.Tunnel // around the download; nil: there is none
	download *download
	native   *nativeDownload // in place of server and download; nil: there is none
	sniffer  *netlab.Sniffer // nil: packets are not recorded
	feeder   *feeder         // nil: the link says nothing

	pacing  cc.Rate        // that the sender was told to keep; 0: none
	remote  netip.AddrPort // the client's end of the connection across the link
	samples []windowSample
	last    socket        // the transport that sends into the link, at the end
	cpu     time.Duration // that the proxy used during the run
	leg     telemetry.Leg // the proxy's, towards the client, at the end
	managed bool          // that leg has a window of ours

	answer     *Answer
	departures *Departures
}

func newScene(ctx context.Context, executable string, plan Plan, t Trial) (*scene, error) {
	down, up, err := plan.directions(t)
	if err != nil {
		return nil, err
	}
	s := &scene{pacing: t.Sender.pacing()}
	if s.lab, err = netlab.NewCellular(netlab.CellularConfig{Down: down, Up: up}); err != nil {
		return nil, err
	}
	if err := s.set(ctx, executable, plan, t); err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// set puts server, proxy and download in place; data may flow when it returns.
func (s *scene) set(ctx context.Context, executable string, plan Plan, t Trial) (err error) {
	if err := traffic.Loosen(s.lab.Client, s.lab.Edge, s.lab.Server); err != nil {
		return err
	}
	if plan.AQM != sim.DropTail { // which may mark what otherwise it drops
		if err := s.lab.Client.Sysctl("net.ipv4.tcp_ecn", "1"); err != nil {
			return err
		}
	}
	if t.Sender.Native() {
		s.lab.Path.StartOnData()
		s.native, err = startNative(s.lab, t.Sender.Algorithm)
		return err
	}
	// What the server runs towards a proxy does not matter: that leg has no
	// bottleneck.
	algorithm := t.Sender.Kernel
	if algorithm == "" {
		algorithm = "cubic"
	}
	if s.server, err = traffic.Serve(s.lab.Server, portText(serverPort), algorithm, pour); err != nil {
		return err
	}
	target := netip.AddrPortFrom(s.lab.ServerAddr.V4, serverPort)
	if t.Sender.Proxied() {
		if t.Sender.Tunnelled() {
			if s.tunnel, err = edge.NewTunnel(); err != nil {
				return err
			}
		}
		if s.proxy, err = startProxy(ctx, executable, s.lab, t.Sender, plan, target, s.tunnel); err != nil {
			return err
		}
		switch {
		case s.tunnel != nil:
			if err := s.tunnel.Join(s.lab); err != nil {
				return err
			}
		case plan.Ingress == IngressForward:
			target = netip.AddrPortFrom(s.lab.EdgeNear.V4, forwardPort)
		}
	}
	if plan.Packets {
		// The edge's device, whoever sends: there each packet is one by itself,
		// where the server's own hands over what is yet to be segmented.
		if s.sniffer, err = s.lab.Edge.Sniff(netlab.NearDevice); err != nil {
			return err
		}
	}
	s.lab.Path.StartOnData()
	if s.download, err = startDownload(ctx, s.lab.Client, target); err != nil {
		return s.explain(err)
	}
	s.remote = s.download.local
	if plan.Hints > 0 && s.proxy != nil {
		s.feeder = feed(ctx, s.proxy, s.lab.Path.Monitor(0), s.remote.Addr(), plan.Hints, plan.Delay)
	}
	return nil
}

// explain adds what the proxy said last.
func (s *scene) explain(err error) error {
	if s.proxy == nil {
		return err
	}
	return s.proxy.Explain(err)
}

// play waits until the run is over, looks at the sockets and tells how it goes.
func (s *scene) play(ctx context.Context, plan Plan, tell func(elapsed time.Duration)) error {
	var before time.Duration
	if s.proxy != nil {
		var err error
		if before, err = s.proxy.CPUTime(); err != nil {
			return err
		}
	}
	if err := s.awaitData(ctx); err != nil {
		return s.explain(err)
	}
	end := time.NewTimer(plan.Duration - s.lab.Path.Elapsed())
	defer end.Stop()
	progress := time.NewTicker(progressEvery)
	defer progress.Stop()
	var sample <-chan time.Time
	if s.proxy != nil && plan.Sample > 0 {
		ticker := time.NewTicker(plan.Sample)
		defer ticker.Stop()
		sample = ticker.C
	}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-s.ended():
			return s.explain(fmt.Errorf("the download ended after %s: %w",
				s.lab.Path.Elapsed().Round(time.Millisecond), err))
		case <-progress.C:
			tell(s.lab.Path.Elapsed())
		case <-sample:
			if err := s.look(ctx); err != nil {
				return s.explain(err)
			}
		case <-end.C:
			return s.finish(ctx, plan, before)
		}
	}
}

// ended tells when the download ends by itself, which it should not.
func (s *scene) ended() <-chan error {
	if s.native != nil {
		return s.native.failed
	}
	return s.download.ended
}

func (s *scene) awaitData(ctx context.Context) error {
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	late := time.NewTimer(firstData)
	defer late.Stop()
	for s.lab.Path.Elapsed() == 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-s.ended():
			return fmt.Errorf("the download ended before any data came: %w", err)
		case <-late.C:
			return fmt.Errorf("no data came within %s", firstData)
		case <-poll.C:
		}
	}
	return nil
}

// look takes one sample of our window and the kernel's.
func (s *scene) look(ctx context.Context) error {
	f, err := flowOf(ctx, s.proxy, s.remote)
	if err != nil {
		return err
	}
	c := f.Down.Control
	if c == nil || c.Cwnd >= cc.MaxCwnd { // no window of ours
		return nil
	}
	if s.tunnel != nil { // no socket sends: the transport is the proxy's own
		mss := float64(edge.TunnelMSS)
		k := socket{cwnd: float64(f.ClientLeg.Cwnd) / mss, pipe: float64(c.Inflight) / mss, mss: edge.TunnelMSS}
		s.samples = append(s.samples, windowSample{ours: c.Cwnd, kernel: k})
		return nil
	}
	k, err := readSocket(s.lab.Edge, s.remote)
	if err != nil {
		return err
	}
	s.samples = append(s.samples, windowSample{ours: c.Cwnd, kernel: k})
	return nil
}

// finish takes the figures that are gone once the connections are.
func (s *scene) finish(ctx context.Context, plan Plan, cpuBefore time.Duration) (err error) {
	if s.native != nil {
		s.last, err = s.native.close()
		s.native = nil
		return err
	}
	sender := s.lab.Server
	if s.feeder != nil {
		err := s.feeder.stop()
		if s.feeder = nil; err != nil {
			return s.explain(err)
		}
	}
	if s.proxy != nil {
		sender = s.lab.Edge
		now, err := s.proxy.CPUTime()
		if err != nil {
			return err
		}
		s.cpu = now - cpuBefore
		f, err := flowOf(ctx, s.proxy, s.remote)
		if err != nil {
			return err
		}
		s.leg, s.managed = *f.ClientLeg, f.Down.Control != nil
		if s.answer, err = answer(ctx, s.proxy); err != nil {
			return err
		}
	}
	if s.sniffer != nil {
		capture, err := s.sniffer.Stop()
		if err != nil {
			return err
		}
		sending := netlab.SendingTo(capture.Packets, netip.AddrPort{}, s.remote)
		s.departures = departures(sending, capture.Missed, plan.Duration, s.pacing)
	}
	if s.tunnel != nil { // no socket sends into the link
		s.last = socket{sent: s.lab.Path.Report(0, plan.Duration).Down.Bytes, resent: s.leg.Retransmitted}
		return nil
	}
	s.last, err = readSocket(sender, s.remote)
	return err
}

// close ends everything, the client first, so that nobody sees an error that
// the end of the run itself made.
func (s *scene) close() error {
	var errs []error
	if s.feeder != nil {
		errs = append(errs, s.feeder.stop())
	}
	if s.sniffer != nil {
		_, err := s.sniffer.Stop()
		errs = append(errs, err)
	}
	if s.download != nil {
		errs = append(errs, s.download.close())
	}
	if s.native != nil {
		_, err := s.native.close()
		errs = append(errs, err)
	}
	if s.proxy != nil {
		errs = append(errs, s.proxy.Stop())
	}
	if s.tunnel != nil {
		s.tunnel.Close()
	}
	if s.server != nil {
		errs = append(errs, s.server.Close())
	}
	return errors.Join(append(errs, s.lab.Close())...)
}

func portText(port int) string { return net.JoinHostPort("", strconv.Itoa(port)) }

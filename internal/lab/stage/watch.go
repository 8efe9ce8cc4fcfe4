package stage

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"time"

	"github.com/penstock-net/penstock/cc"
	"github.com/penstock-net/penstock/cc/sim"
	"github.com/penstock-net/penstock/internal/lab/edge"
	"github.com/penstock-net/penstock/internal/netlab"
	"github.com/penstock-net/penstock/proxy/datapath/kernel"
	"github.com/penstock-net/penstock/telemetry"
)

const (
	// flowsPerLook is how many flows are looked at in each Step: a proxy that
	// shows hundreds ten times a second does little else.
	flowsPerLook = 50
	memoryEvery  = time.Second
)

// watch is what goes on beside the actors.
type watch struct {
	*run
	ctx    context.Context
	stop   context.CancelFunc
	cpu    time.Duration // as usedTime had it when the run began
	theirs time.Duration // that the agents had
	looked []*actor      // their windows are looked at
	next   int           // step that has no sample yet
}

// accompany starts what the stage has beside its actors: changes, hints, and the
// look at the proxy.
func (r *run) accompany(ctx context.Context) (*watch, error) {
	w := &watch{run: r}
	w.ctx, w.stop = context.WithCancel(ctx)
	w.apart(w.change)
	if r.stage.Warmup > 0 {
		w.apart(w.countEarly)
	}
	var err error
	if w.cpu, err = r.usedTime(); err == nil && r.proxy != nil {
		w.theirs, err = r.agents.CPUTime()
	}
	if err != nil {
		w.stop()
		return nil, err
	}
	if r.stage.Native {
		return w, nil
	}
	for _, a := range r.actors {
		if r.stage.windowed(a.Actor) {
			a.record.Cwnd, a.record.Share = make([]cc.Bytes, r.stage.steps()), make([]cc.Bytes, r.stage.steps())
			w.looked = append(w.looked, a)
		}
	}
	if r.stage.Hints > 0 && r.proxy != nil {
		hints := w.hints()
		w.apart(func() error { return r.proxy.Feed(w.ctx, hints, r.stage.Hints, r.stage.Up.Delay) })
	}
	if !r.env.Blind {
		w.apart(w.look)
	}
	return w, nil
}

// apart runs f in a goroutine that the run waits for. An error of f ends the run, unless that is over.
func (w *watch) apart(f func() error) {
	w.others.Go(func() {
		if err := f(); err != nil && w.ctx.Err() == nil {
			w.fail(err)
		}
	})
}

// change alters the stage, each time in its turn.
func (w *watch) change() error {
	for _, c := range w.stage.Changes {
		if err := w.wait(w.ctx, c.At); err != nil {
			return err
		}
		if c.Delay > 0 {
			if err := w.lab.Path.SetDelay(c.Delay); err != nil {
				return err
			}
		}
		if c.Edge == "" {
			continue
		}
		at := w.now()
		err := w.proxy.Rewrite(w.agents.YAML() + c.Edge)
		refused := ""
		if err == nil {
			refused, err = w.proxy.Reload(w.ctx)
		}
		if err = errors.Join(err, w.ctx.Err()); err != nil {
			return err
		}
		w.record.Reloads = append(w.record.Reloads, Reload{At: at, Error: refused})
	}
	return nil
}

// look keeps looking at the proxy until the run is over.
func (w *watch) look() error {
	period := Step * time.Duration(1+len(w.looked)/flowsPerLook)
	for at, memory := w.now(), time.Duration(0); ; at += period {
		if err := w.wait(w.ctx, at); err != nil {
			return err
		}
		if w.now() >= memory {
			if err := w.noteMemory(); err != nil {
				return err
			}
			memory += memoryEvery
		}
		if err := w.sample(); err != nil {
			return err
		}
		at = max(at, w.now()-period) // behind: no use in catching up
	}
}

// noteMemory notes what the proxy takes, and whether the kernel's TCP is short of memory: then all
// connections have small windows.
func (w *watch) noteMemory() error {
	if used, bound, err := kernel.TCPMemory(); err == nil && used > bound {
		w.record.Discarded = fmt.Sprintf("TCP had %d pages of memory, and above %d every connection "+
			"has a small window (net.ipv4.tcp_mem): close other programs", used, bound)
	}
	if w.proxy == nil {
		return nil
	}
	m, err := w.proxy.Memory()
	if err == nil {
		w.record.Memory = append(w.record.Memory, m)
	}
	return err
}

// sample notes the windows as they are now. Where there were none of this step's
// before, the last ones stand.
func (w *watch) sample() error {
	step := min(int(w.now()/Step), w.stage.steps()-1)
	windows, err := w.windows()
	if err != nil {
		return err
	}
	for _, a := range w.looked {
		var now held
		if at := a.at.Load(); at != nil {
			now = windows[*at]
		}
		for i := w.next; i <= step; i++ {
			if i > 0 && i < step {
				a.record.Cwnd[i], a.record.Share[i] = a.record.Cwnd[i-1], a.record.Share[i-1]
			} else {
				a.record.Cwnd[i], a.record.Share[i] = now.cwnd, now.share
			}
		}
	}
	w.next = max(w.next, step+1)
	return nil
}

// held is a window, and a flow's part of it.
type held struct{ cwnd, share cc.Bytes }

// windows are those of now by their clients: the proxy's or, where there is none, the servers'.
func (w *watch) windows() (map[netip.AddrPort]held, error) {
	windows := map[netip.AddrPort]held{}
	if w.proxy == nil {
		all, err := sockets(w.lab.Server, false)
		for client, s := range all {
			cwnd := cc.Bytes(s.cwnd) * s.mss
			windows[client] = held{cwnd, cwnd}
		}
		return windows, err
	}
	flows, err := w.proxy.Flows(w.ctx)
	if err == nil {
		err = w.lookBelow(flows)
	}
	for _, f := range flows {
		if f.Down != nil && f.Down.Control != nil && f.Down.Control.Cwnd < cc.MaxCwnd {
			windows[edge.Client(f)] = held{f.Down.Control.Cwnd, f.Down.Control.Share}
		}
	}
	return windows, err
}

// lookBelow takes a sample of our window and of what is below it, where one download has all.
func (w *watch) lookBelow(flows []telemetry.Flow) error {
	if len(w.actors) > 1 || len(w.looked) == 0 {
		return nil
	}
	at := w.looked[0].at.Load()
	f := flowOf(flows, at)
	if f == nil || f.Down == nil || f.Down.Control == nil || f.Down.Control.Cwnd >= cc.MaxCwnd {
		return nil
	}
	s := windowSample{ours: f.Down.Control.Cwnd}
	if w.tunnel != nil { // no socket sends: the transport is the proxy's own
		mss := float64(edge.TunnelMSS)
		s.kernel = socket{
			cwnd: float64(f.ClientLeg.Cwnd) / mss, pipe: float64(f.Down.Control.Inflight) / mss, mss: edge.TunnelMSS,
		}
	} else {
		all, err := sockets(w.lab.Edge, false)
		if err != nil {
			return err
		}
		s.kernel = all[*at]
	}
	w.below = append(w.below, s)
	return nil
}

// flowOf is the flow of the client at that address; nil: there is none.
func flowOf(flows []telemetry.Flow, at *netip.AddrPort) *telemetry.Flow {
	for i, f := range flows {
		if at != nil && edge.Client(f) == *at && f.ClientLeg != nil {
			return &flows[i]
		}
	}
	return nil
}

// finish takes the figures that are gone once the proxy and the connections are.
func (w *watch) finish() error {
	defer w.stop()
	late, err := w.counts(w.ctx)
	if err != nil {
		return err
	}
	for a, c := range late {
		a.late = c
	}
	used, err := w.usedTime()
	if err != nil {
		return err
	}
	w.record.CPU = used - w.cpu
	if w.proxy == nil {
		return nil
	}
	flows, err := w.proxy.Flows(w.ctx)
	if err != nil {
		return err
	}
	for _, a := range w.looked {
		f := flowOf(flows, a.at.Load())
		if f != nil && f.Down != nil && f.Down.Control != nil {
			a.record.Limited = f.Down.Control.Limited
		}
		if f != nil && w.record.Envelope == "" {
			w.record.Envelope, w.record.Missing = f.ClientLeg.Envelope, f.ClientLeg.Missing
			asked := w.stage.Envelope
			if f.Down != nil && f.Down.Control != nil && w.tunnel == nil && asked != "" && asked != "auto" &&
				w.record.Envelope != "" && asked != w.record.Envelope {
				w.record.Discarded = fmt.Sprintf("it went over %s and not over %s", w.record.Envelope, asked)
			}
			if w.tunnel != nil {
				w.record.Envelope = string(w.stage.Tunnel)
			}
		}
	}
	if len(w.agents) == 0 {
		return nil
	}
	metrics, err := w.proxy.Metrics(w.ctx)
	if err != nil {
		return err
	}
	theirs, err := w.agents.CPUTime()
	if err != nil {
		return err
	}
	d := &w.record.Decided
	d.CPU, d.Fallbacks = theirs-w.theirs, metrics.Count("penstock_agent_fallbacks_total")
	d.Took = metrics.Histogram("penstock_agent_decision_seconds")
	return nil
}

// hints returns what the last hop says of the hosts that the proxy serves, each time it is asked.
func (w *watch) hints() iter.Seq2[netip.Addr, cc.Hint] {
	monitors := map[netip.Addr]*netlab.Monitor{}
	for _, a := range w.looked {
		if monitors[a.host] == nil {
			monitors[a.host] = w.lab.Path.Monitor(a.Host)
		}
	}
	return func(yield func(netip.Addr, cc.Hint) bool) {
		for host, m := range monitors {
			if h, ok := m.Hint(); ok && !yield(host, h) {
				return
			}
		}
	}
}

// account takes the figures out of the path's record, when all is quiet.
func (r *run) account() error {
	r.record.Window = window(r.below)
	missed, err := r.lab.Path.Missed()
	if err != nil {
		return err
	}
	hosts := map[int]sim.Delays{}
	r.record.passed(r.stage, r.lab.Path)
	for i, a := range r.actors {
		if _, known := hosts[a.Host]; !known && r.stage.HostHasQueueing(i) {
			hosts[a.Host] = r.lab.Path.HostReport(a.Host, r.stage.Warmup, r.stage.Duration).Down.DataQueueing.Delays
		}
		a.record.Queueing = hosts[a.Host]
		if a.Kind == Upload {
			a.record.Queueing = r.record.Path.Up.DataQueueing.Delays
		}
		r.record.Actors = append(r.record.Actors, a.record)
	}
	r.record.Resent = r.resent()
	whole := r.lab.Path.Report(0, r.stage.Duration)
	if d, u := whole.Down.Drops, whole.Up.Drops; missed > 0 || d.Held+d.Failed+u.Held+u.Failed > 0 {
		r.record.Discarded = fmt.Sprintf("the emulator lost %d packets and could not deliver %d", missed,
			d.Held+d.Failed+u.Held+u.Failed)
	}
	return nil
}

// passed takes in what passed the last hop, emulated or simulated.
func (r *Record) passed(s Stage, hop interface {
	Report(from, to time.Duration) netlab.Report
	Series(dir netlab.Direction, to, step time.Duration) []netlab.Point
},
) {
	r.Path = hop.Report(s.Warmup, s.Duration)
	r.Lateness = max(r.Path.Down.Lateness.P99, r.Path.Up.Lateness.P99)
	dir, way := netlab.Down, r.Path.Down
	if s.UploadsAlone() {
		dir, way = netlab.Up, r.Path.Up
	}
	r.Points = hop.Series(dir, s.Duration, Step)
	for _, pt := range hop.Series(netlab.Down, s.Duration, FineStep) {
		r.Left = append(r.Left, pt.Throughput.BytesIn(FineStep))
	}
	r.Throughput, r.Utilisation, r.Queueing = way.Throughput, way.Utilisation, way.DataQueueing.Delays
}
